"""Every op of the maths table: values, dtypes and gradients as torch's, and every kernel's guarantee."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from cases import H200, WHERE, compiles, required
from cases.elementwise import ELEMENTS, INF, NAN, SPECIAL, TAME, expression, problem, torchs
from proofs import target

import triplan as tp
from triplan import functional
from triplan.backends.triton.common import bounds, maths_kernels as maths
from triplan.backends.triton.common.accuracy import SHORT, function_error, lost
from triplan.backends.triton.common.expressions import text
from triplan.backends.triton.elementwise.entries import OPS, VERSIONS
from triplan.descriptors.elementwise.problems import NAMED, _expression, _gradient
from triplan.descriptors.expressions.expression import FUNCTIONS, call, flattened
from triplan.descriptors.expressions.tree import spelled_out
from triplan.testing import check_plan

Tensor = torch.Tensor
CPU = tp.Target.cpu()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what the hardware does silently
#: torch leaves these results open, or they are undefined: division of integers by 0, shifts beyond the width.
POSITIVE = {"floor_divide", "truncate_divide", "remainder", "fmod", "pow", "bitwise_left_shift", "bitwise_right_shift"}

#: Of Python's integers, whose quotients are exact and rounded down.
DIVISIONS: dict[str, Callable[[int, int], int]] = {
    "floor_divide": lambda x, y: x // y,
    "remainder": lambda x, y: x % y,
    "truncate_divide": lambda x, y: -(-x // y) if (x < 0) != (y < 0) else x // y,
    "fmod": lambda x, y: x % y - (y if x % y and (x < 0) != (y < 0) else 0),
}

#: Integers that torch returns as they are, which the functional calls do, and a square that is no product in torch.
ODD = {("square", "bool"), *((op, e) for op in ("nan_to_num", "round_decimals") for e in ("i32", "u8", "bool"))}


def operands(op: str, element: str, tame: bool = False) -> list[Tensor]:
    """All pairs and triples of special values; small integers, positive where others are undefined."""
    n = NAMED[op].operands
    dtype = tp.ElementKind.of(element).torch
    if dtype.is_floating_point:
        points = torch.tensor(SPECIAL[: TAME if n > 1 and (tame or n > 2) else None], dtype=torch.float64)
    else:
        low = 1 if op in POSITIVE else 0 if element == "u8" else -5
        points = torch.arange(low, 6)
    grid = list(torch.meshgrid(*[points] * n, indexing="ij"))
    if op == "where":
        grid[0] = grid[0] > 0
    dtypes = [torch.bool if op == "where" and i == 0 else dtype for i in range(n)]
    return [g.reshape(-1).contiguous().to(d) for g, d in zip(grid, dtypes, strict=True)]


@pytest.mark.parametrize("op", NAMED)
def test_values_and_dtypes_are_torchs(op: str) -> None:
    compared = 0
    for element in ("f64", "f32", "i32", "u8", "bool"):
        given = operands(op, element)
        if (op, element) in ODD:
            continue
        try:
            wanted = torchs(op)(*given)
        except (RuntimeError, NotImplementedError):
            continue  # torch takes no such operands
        desc = problem(op, element, given[0].shape)
        assert desc.tree.results[0][1].torch == wanted.dtype, element
        got = torch.empty_like(wanted)
        names = ("x", "y", "z")
        plan = tp.plan(desc, target=CPU)
        plan.run(plan.args_type(**dict(zip(names, given, strict=False)), out=got))
        if element != "f32":  # whose rounding some functions amplify; of f32 the dtype is compared
            near = {"rtol": 2e-3, "atol": 1e-5} if wanted.dtype is torch.float32 else {}
            torch.testing.assert_close(got, wanted, equal_nan=True, **near)
        compared += got.numel()
    assert compared


@pytest.mark.parametrize("op", ["sub", "sub_scaled"])
@pytest.mark.parametrize("elements", [("bool", "f32"), ("f32", "bool"), ("bool", "bool")])
def test_differences_take_no_bool(op: str, elements: tuple[str, str]) -> None:
    """Neither does torch's subtraction, nor the functional call."""
    with pytest.raises(tp.InvalidProblem, match=f"{op} does not take bool"):
        tp.BinaryDescriptor(op=op, element=elements[0], y_element=elements[1], input_shape=(8,))
    x, y = (torch.ones(8).to(tp.ElementKind.of(e).torch) for e in elements)
    with pytest.raises(NotImplementedError, match="sub does not take bool"):
        functional.sub(x, y, alpha=1 if op == "sub" else 2)


@pytest.mark.parametrize("op", [op for op in NAMED if op not in FUNCTIONS or FUNCTIONS[op].gradient])
def test_gradients_are_torchs(op: str) -> None:
    root, names = expression(op)
    given = [t.requires_grad_(t.is_floating_point()) for t in operands(op, "f64", True)]
    out = torchs(op)(*given)
    wrt = [n for n, t in zip(names, given, strict=True) if t.requires_grad]
    dout = torch.linspace(1, 2, out.numel(), dtype=torch.float64)
    wanted = torch.autograd.grad(out, [t for t in given if t.requires_grad], dout)
    specs = {n: (t.dtype, t.shape) for n, t in zip(names, given, strict=True)}
    plan = tp.plan(tp.ExpressionDescriptor.of(root, **specs).backward(wrt), target=CPU)
    found = {f"d{n}": torch.empty_like(given[0], dtype=torch.float64) for n in wrt}
    values = {n: t.detach() for n, t in zip(names, given, strict=True)}
    read = {o.name: {**values, "dout": dout}[o.name] for o in plan.descriptor.operands() if not o.is_written}
    plan.run(tp.ExpressionArgs(**read, **found))
    for name, right in zip(wrt, wanted, strict=True):
        # Where torch's own formula overflows or cancels infinities, ours may have the limit instead.
        known = right.isfinite() if op in LIMITS else torch.ones_like(right, dtype=torch.bool)
        for t in given:
            known &= ~t.isnan()  # torch's kernels for one element and for vectors differ
        torch.testing.assert_close(found[f"d{name}"][known], right[known], equal_nan=True)


#: Ops of whose gradients torch's formulas are infinite or NaN at some special values where ours are not, or reversely.
LIMITS = {"logit"}


@pytest.mark.interpret
@pytest.mark.parametrize("op", NAMED)
def test_the_guarantee_holds_interpreted(op: str) -> None:
    """One float, one integer, and f16 for short forms: what other elements run are the same lines."""
    assert _checked(op, ("f32", "i32", *(("f16",) if op in SHORT else ())), "interpret") > 0


@pytest.mark.parametrize("op", NAMED)
def test_the_references_guarantee_holds(op: str) -> None:
    assert _checked(op, ("bf16", "i64"), "cpu") > 0


@pytest.mark.gpu
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("op", NAMED)
def test_the_guarantee_holds_for_every_element(op: str, element: str) -> None:
    _checked(op, (element,), "gpu")


@pytest.mark.interpret
def test_every_exponent_of_u8() -> None:
    """All eight bits of it count."""
    desc = problem("pow", "u8", (256,))
    base, out = torch.full((256,), 2, dtype=torch.uint8), torch.empty(256, dtype=torch.uint8)
    plan = tp.plan(desc, target=target("interpret"))
    plan.run(plan.args_type(x=base, y=torch.arange(256, dtype=torch.uint8), out=out))
    assert out.tolist() == [pow(2, n, 256) for n in range(256)]


@pytest.mark.parametrize("element", ["f16", "bf16"])
@pytest.mark.parametrize("where", WHERE)
def test_powers_of_16_bits(where: str, element: str) -> None:
    """Every pair of special values, even and odd exponents, bases near 1 with exponents that nearly overflow."""
    dtype = tp.ElementKind.of(element).torch
    info, device = torch.finfo(dtype), target(where).device_type
    integers = [2.0, 3.0, 4.0, 7.0, 255.0, 256.0]
    sizes = [0.0, 1.0, *integers, 0.5, 2.5, 0.1, info.max, info.smallest_normal, torch.inf]
    points = torch.tensor([*sizes, *(-v for v in sizes), torch.nan], dtype=dtype)
    x, y = (grid.reshape(-1) for grid in torch.meshgrid(points, points, indexing="ij"))
    g = torch.Generator().manual_seed(0)
    base = torch.cat([1 + torch.arange(-400, 401) * info.eps / 2, 2 ** (8 * torch.rand(2000, generator=g) - 4)]).to(
        dtype
    )
    base = base[(base != 1) & (base > 0)]
    exponent = (2 * torch.rand(base.shape, generator=g, dtype=torch.float64) - 1) * -math.log2(info.smallest_normal)
    exponent = (exponent / base.double().log2()).clamp(info.min, info.max)
    x, y = torch.cat([x, base]), torch.cat([y, exponent.to(dtype)])
    desc = problem("pow", element, x.shape)
    plan, out = tp.plan(desc, target=target(where)), torch.empty_like(x, device=device)
    plan.run(plan.args_type(x=x.to(device), y=y.to(device), out=out))
    exact = x.double() ** y.double()
    wanted, got = exact.to(dtype), out.cpu()
    assert torch.equal(got.isnan(), wanted.isnan())
    real = ~wanted.isnan()
    assert torch.equal(got[real].signbit(), wanted[real].signbit())
    # Beyond the finite numbers, and where results are subnormal, one that is rounded twice may be the neighbour.
    size = exact.abs()
    assert torch.equal(
        got[real & (size >= 2 * info.max)].double(), exact[real & (size >= 2 * info.max)].sign() * torch.inf
    )
    assert (got[real & (size < info.smallest_normal)].abs() <= info.smallest_normal).all()
    normal = real & (size >= info.smallest_normal) & (size <= info.max)
    error = ((got.double() - exact).abs() / size)[normal]
    assert normal.sum() > 2000
    assert error.max() <= info.eps / 2 + SHORT["pow"] * 2.0**-23


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("op", ["fmod", "remainder", "floor_divide"])
def test_remainders_are_exact_for_every_quotient(op: str, where: str) -> None:
    """Of f32: quotients near integers and near 2**20, from where on another way is taken; divisors of any exponent."""
    g = torch.Generator().manual_seed(0)
    device = target(where).device_type

    def drawn(low: int, high: int) -> Tensor:
        mantissa = 1 + torch.rand(1 << 14, generator=g, dtype=torch.float64)
        return mantissa * 2.0 ** torch.randint(low, high, mantissa.shape, generator=g)

    y = torch.cat([drawn(-10, 10), drawn(-149, 128), drawn(-104, -96), drawn(96, 104)]).float()
    times = torch.cat([drawn(0, 8), drawn(16, 24), drawn(-30, 40), drawn(0, 20)]).float()
    x = torch.where(torch.rand(y.shape, generator=g) < 0.5, times.round(), times) * y
    x = torch.cat([x.nextafter(torch.tensor(torch.inf)), x, x.nextafter(torch.tensor(0.0))])
    y = torch.cat([y, -y, y])
    desc = problem(op, "f32", x.shape)
    plan, out = tp.plan(desc, target=target(where)), torch.empty_like(x, device=device)
    plan.run(plan.args_type(x=x.to(device), y=y.to(device), out=out))
    wanted = torch.fmod(x.double(), y.double()).float()
    if op == "remainder":
        wanted = torch.where((wanted != 0) & ((wanted < 0) != (y < 0)), wanted + y, wanted)
    elif op == "floor_divide":  # (f32 holds all smaller integers.)
        small = (x / y).abs() < 1 << 22
        wanted, out = torch.floor_divide(x.double(), y.double()).float()[small], out.cpu()[small]
    assert torch.equal(out.cpu().nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert torch.equal(out.cpu().signbit()[~wanted.isnan()], wanted.signbit()[~wanted.isnan()])


def _checked(op: str, elements: tuple[str, ...], where: str) -> int:
    compared = 0
    for element in elements:
        descs: list[Any] = []
        try:
            descs.append(problem(op, element, (7, 111)))
            descs.append(tp.UnaryBackwardDescriptor(op=f"{op}_backward", element=element, input_shape=(7, 111)))
        except tp.InvalidProblem:
            pass  # no such elements, or no gradient
        for desc in descs:
            compared += check_plan(tp.plan(desc, target=target(where)), runs=1 if where == "interpret" else 2).compared
    return compared


#: The functions that are no named ops, from their definitions.
UNNAMED: dict[str, Callable[[Tensor], Tensor]] = {
    "sech2": lambda x: 4 * torch.exp(-2 * x.abs()) / (1 + torch.exp(-2 * x.abs())) ** 2,
    "tanh_log1pexp": lambda x: torch.tanh(torch.where(x > 50, x, torch.log1p(torch.exp(x)))),
}


def test_every_function_without_an_op_has_a_definition() -> None:
    assert FUNCTIONS.keys() - NAMED.keys() == UNNAMED.keys()


@pytest.mark.parametrize("element", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("name", UNNAMED)
@pytest.mark.parametrize("where", WHERE)
def test_functions_without_an_op_are_as_exact_as_said(where: str, name: str, element: str) -> None:
    """Near 0, where results are subnormal, and beyond."""
    kind, device = tp.ElementKind.of(element), target(where).device_type
    small = 10.0 ** -torch.arange(0, 8, 0.25)
    points = torch.cat([torch.linspace(-120, 120, 12001), small, -small, torch.tensor([0.0, INF, -INF, NAN])])
    x = points.double().to(kind.torch)
    exact, out = UNNAMED[name](x.double()), torch.empty_like(x, device=device)
    desc = tp.ExpressionDescriptor.of(call(name, tp.expr.operand("x")), x=(element, x.shape))
    tp.plan(desc, target=target(where)).run(tp.ExpressionArgs(x=x.to(device), out=out))
    got = out.cpu().double()
    assert torch.equal(got.isnan(), exact.isnan())
    found = (got - exact).abs().nan_to_num()
    relative = function_error(name, kind) * (2 if element == "f64" else 1)
    narrowed = kind.unit_roundoff if kind.itemsize == 2 else 0.0
    near = (relative + narrowed) * exact.abs() + lost(kind.compute) + bounds.smallest_subnormal(kind)
    assert (found <= near.nan_to_num()).all()


def test_higher_derivatives_of_tanh_at_0() -> None:
    """Those of sech2 are no expressions of abs, whose derivative at 0 would be wrong from the third one on."""
    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    y, found = functional.tanh(x), []
    for _ in range(5):
        (y,) = torch.autograd.grad(y, x, create_graph=True)
        found.append(y.item())
    assert found == [1, 0, -2, 0, 16]


@pytest.mark.parametrize("op", ["truncate_divide", "floor_divide", "remainder", "fmod"])
@pytest.mark.parametrize("where", WHERE)
def test_integers_of_64_bits_are_divided(where: str, op: str) -> None:
    """In 32 bits where they fit; also where one integer of a program does not, at both ends of what does."""
    device = target(where).device_type
    short = [0, 1, -1, 2, -3, 7, 65537, -99991, 2**31 - 1, 1 - 2**31]
    for more in ([], [2**31], [-(2**31)], [2**32 + 1, -(2**40)], [2**63 - 1, -(2**63)]):
        points = torch.tensor([*short, *more])
        x, y = (g.reshape(-1) for g in torch.meshgrid(points, points, indexing="ij"))
        defined = (y != 0) & ~((x == -(2**63)) & (y == -1))
        x, y = x[defined], y[defined]
        wanted = torch.tensor([DIVISIONS[op](a, b) for a, b in zip(x.tolist(), y.tolist(), strict=True)])
        args = tp.BinaryArgs(x=x.to(device), y=y.to(device), out=torch.empty_like(x, device=device))
        tp.plan(tp.BinaryDescriptor.from_args(args, op=op), target=target(where)).run(args)
        assert torch.equal(args.out.cpu(), wanted), more


def test_the_version_tells_which_ops_got_new_bits() -> None:
    """Of trees with functions that got a short form (five had one from the beginning), or other bits after that, and
    with functions that took the place of others; and gradients of trees with expm1, which got another gradient."""
    begun = {"sech2", "tanh_log1pexp"}
    new = SHORT.keys() - {"exp", "sigmoid", "normal_cdf"} - begun
    found = {"expression": 6, "logit_backward": 2, "logit_clamped": 3, "logit_clamped_backward": 2, "softcap_tanh": 3}
    found |= dict.fromkeys(("celu_backward", "elu_backward", "selu_backward"), 3)
    for op in OPS.keys() - found.keys():
        name = op.removesuffix("_backward")
        nodes, _ = spelled_out(*flattened([_expression(op) if name == op else _gradient(name)]))
        names = {str(node[0]) for node in nodes}
        if name != op and "expm1" in {str(node[0]) for node in spelled_out(*flattened([_expression(name)]))[0]}:
            names |= new - maths.VERSIONS.keys()
        if version := 3 if (maths.VERSIONS.keys() | begun) & names else 2 if new & names else 0:
            found[op] = version
    assert found == VERSIONS


@pytest.mark.parametrize(("op", "is_new"), [("rsqrt", True), ("asinh_backward", True), ("sqrt", False)])
def test_numerics_ids_tell_new_bits_of_a_function(op: str, is_new: bool) -> None:
    """The text of a function with other bits is what it was; its version is what tells."""
    desc: Any = tp.descriptor_types()[op](op=op, element="f32", input_shape=(8,))
    first = hashlib.sha256(text(desc).encode()).hexdigest()[:16]
    assert (first not in str(tp.plan(desc, target="h200").sku().numerics_id)) == is_new


@compiles
@pytest.mark.parametrize("element", ["f32", "bf16", "i32"])
def test_every_function_compiles(element: str) -> None:
    """Functions are inlined into kernels of many results; none spills. Of bf16, those that have a shorter form."""
    x, y = tp.expr.operand("x"), tp.expr.operand("y")
    inputs = {"x": (element, (4096,)), "y": (element, (4096,))}
    results = {}
    for name, f in sorted(FUNCTIONS.items()):
        args = [x, y, x][: f.arity] if f.result != "select" else (tp.expr.lt(x, y), x, y)
        if element != "bf16" or name in SHORT:
            with suppress(tp.InvalidProblem):  # of other elements
                tp.ExpressionDescriptor.of(f(*args), **inputs)
                results[f"r_{name}"] = f(*args)
    assert len(results) >= len(SHORT)
    for names in batched(results, 20):
        desc = tp.ExpressionDescriptor.of({n: results[n] for n in names}, **inputs)
        (record,) = required(desc, "strided", H200).compile()
        assert record.spill_bytes == 0
        assert "call.uni" not in record.ptx


def batched(items: Iterable[str], n: int) -> Iterator[list[str]]:
    found = list(items)
    return (found[i : i + n] for i in range(0, len(found), n))
