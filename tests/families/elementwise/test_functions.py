"""The functions of the tables against torch: hostile values, strides, promotion, expressions of one's own, modules.

torch's own samples of each function are in tests/contracts/functional/test_opinfo.py.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from cases.functional import DEVICES
from replaying import replays_on_cpu
from samples import same

import triplan as tp
import triplan.functional as F  # noqa: N812
from triplan import nn
from triplan.descriptors.elementwise.problems import NAMED
from triplan.descriptors.expressions.expression import FUNCTIONS, flattened
from triplan.facade.check import may_overlap
from triplan.functional import _autocast
from triplan.functional.elementwise import activations, docs, engine, maths, packed, table
from triplan.functional.elementwise.engine import BY_RESULT
from triplan.functional.elementwise.table import TABLE

Tensor = torch.Tensor
HOSTILE = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.3,
    -0.3,
    2.5,
    -2.5,
    30.0,
    -30.0,
    1e-30,
    1e30,
    float("inf"),
    -float("inf"),
    float("nan"),
]
#: The operands of functions that take more than numbers of one kind.
OPERANDS: dict[str, Any] = {
    "where": lambda x, y, z: (x > 0, y, z),
    **dict.fromkeys(("lerp", "addcmul", "addcdiv", "clamp"), lambda *operands: operands),
    "threshold": lambda x, y, z: (x, 0.5, -2.0),
    "prelu": lambda x, y, z: (x, y[:1]),
}
#: torch's gelu(inf) on the CPU is NaN in some widths.
NOT_THERE = {"gelu": float("inf")}
ONE = sorted({n.removesuffix("_") for n in (*maths.__all__, *activations.__all__)})
ONE = [n for n in ONE if hasattr(torch, n) or hasattr(torch.nn.functional, n)]
BITS = [n for n in ONE if n.startswith("bitwise")]


def arguments(name: str, x: Tensor, y: Tensor, z: Tensor) -> tuple[Any, ...]:
    if name in OPERANDS:
        found: tuple[Any, ...] = OPERANDS[name](x, y, z)
        return found
    schema = getattr(F, name).__signature__.parameters.values()
    return (x, y)[: sum(p.default is p.empty for p in schema)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16], ids=str)
@pytest.mark.parametrize("name", [n for n in ONE if n != "glu"])
def test_hostile_values(name: str, dtype: torch.dtype, device: str) -> None:
    x = torch.tensor([v for v in HOSTILE if v != NOT_THERE.get(name)], dtype=torch.float64)
    x = (x if dtype.is_floating_point else x.nan_to_num(7).clamp(-9, 9)).to(dtype)
    args = arguments(name, x, x.flip(0).roll(3), x.roll(5))
    theirs = getattr(torch.nn.functional if name in activations.__all__ else torch, name)
    try:
        expected = theirs(*args)
    except RuntimeError:
        return  # OpInfo has what torch takes
    got = getattr(F, name)(*(a.to(device) if isinstance(a, Tensor) else a for a in args)).cpu()
    torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize("name", sorted(TABLE))
def test_repeated_calls_are_replayed(name: str) -> None:
    bare = name.removesuffix("_")
    x, y, z = (torch.arange(1.0, 7).roll(i) / 8 for i in range(3))
    if bare in BITS:
        x, y = x.mul(8).int(), y.mul(8).int()
    args = arguments(bare, x, y, z)
    with replays_on_cpu() as answers:
        first, *_, last = ([answers.clear(), getattr(F, name)(args[0].clone(), *args[1:])][1] for _ in range(4))
    assert answers == [True]
    torch.testing.assert_close(last, first, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "operands",
    [
        pytest.param(lambda x: (x.t(), x.t()), id="permuted"),
        pytest.param(lambda x: (x.t(), x[:, 0]), id="permuted-row"),
        pytest.param(lambda x: (x[0].expand(5, -1), x[0].expand(5, -1)), id="expanded"),
        pytest.param(lambda x: (x.t(), x.t().contiguous()), id="two-orders"),
        pytest.param(lambda x: (x[:, ::2], 2.5), id="gaps"),
        pytest.param(lambda x: (x[None, :, None, None, None, None, None, None, :], x[0]), id="nine-axes"),
    ],
)
def test_results_are_strided_as_torchs(operands: Any) -> None:
    args = operands(torch.randn(5, 6))
    got, expected = F.add(*args), torch.add(*args)
    torch.testing.assert_close(got, expected)
    assert got.stride() == expected.stride()


@pytest.mark.parametrize("other", [2, 2.5, True, torch.tensor(2.5, dtype=torch.float64), torch.tensor(3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64], ids=str)
def test_promotion(dtype: torch.dtype, other: Any) -> None:
    x = torch.arange(4).to(dtype)
    for ours, theirs in ((F.mul, torch.mul), (F.div, torch.div), (F.lt, torch.lt)):
        got, expected = ours(x, other), theirs(x, other)
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected)


#: These promote bools with other dtypes, or compute them, where torch wants one dtype or its kernels lack bool.
TAKE_BOOLS = ("addcdiv", "addcmul", "clamp", "lerp")


@pytest.mark.parametrize("name", [n for n in ONE if n != "glu"])
def test_bools_are_refused_where_torch_refuses_them(name: str) -> None:
    given = [torch.ones(3, dtype=d) for d in (torch.bool, torch.int64, torch.float32)]
    theirs = getattr(torch.nn.functional if name in activations.__all__ else torch, name)

    def refuses(function: Any, args: tuple[Any, ...]) -> bool:
        try:
            function(*args)
        except RuntimeError:
            return True
        return False

    for x, y, z in itertools.product(given, [*given, True] if name == "sub" else given, given):
        args = arguments(name, x, y, z)
        if any(a is True or (isinstance(a, Tensor) and a.dtype is torch.bool) for a in args):
            is_refused = refuses(theirs, args)
            assert refuses(getattr(F, name), args) == is_refused or (is_refused and name in TAKE_BOOLS)


@pytest.mark.parametrize(
    "number", [np.float32(2.5), np.float64(2.5), np.int64(3), np.uint8(3), np.bool_(True)], ids=repr
)
def test_numbers_of_numpy_are_numbers(number: Any) -> None:
    with replays_on_cpu() as answers:
        for x in (torch.arange(4), torch.arange(4.0)):
            for _ in range(3):
                for n in (number, type(number)(0), number):
                    same(F.mul(x, n), torch.mul(x, n))
                    same(F.pow(x, n), torch.pow(x, n))
                    same(F.mul_(x * 1.0, n), torch.mul(x * 1.0, n))
                    same(F.add(x * 1.0, 1, alpha=n), torch.add(x * 1.0, 1, alpha=n))
                    same(F.expression(lambda a, b: a * b, x, n), torch.mul(x, n))
    assert any(answers)
    with pytest.raises(RuntimeError, match="negative integer powers"):
        F.pow(torch.arange(4), np.int64(-1))
    with pytest.raises(TypeError, match="a Tensor or a number, not ndarray"):
        F.mul(torch.arange(4), np.ones(4))


@pytest.mark.parametrize("alpha", [0, 2, 0.5])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float16], ids=str)
def test_alpha_promotes_nothing(dtype: torch.dtype, alpha: float) -> None:
    x = torch.ones(3, dtype=dtype)
    for other in (True, 1, *(torch.ones(n, dtype=d) for n in ((), 3) for d in (torch.bool, torch.int8, torch.int64))):
        for a in (x, x[0]):
            if isinstance(alpha, float) and not dtype.is_floating_point:
                with pytest.raises(RuntimeError, match="alpha must not be a floating point number"):
                    F.add(a, other, alpha=alpha)
            else:
                same(F.add(a, other, alpha=alpha), torch.add(a, other, alpha=alpha))
    compiled = torch.compile(lambda x, y: F.add(x, y, alpha=alpha), backend="eager", fullgraph=True)
    if dtype.is_floating_point or isinstance(alpha, int):
        y = torch.ones(3, dtype=torch.bool)
        same(compiled(x, y), torch.add(x, y, alpha=alpha))


MIXED = (torch.bool, torch.uint8, torch.int8, torch.int64, torch.float16, torch.float64)


@pytest.mark.parametrize("name", ["add", "sub", "addcmul", "addcdiv"])
def test_products_have_the_dtype_of_the_sum(name: str) -> None:
    """That of their own factors would be too narrow, or another."""
    given: list[Any] = [torch.tensor([1, 0, 3, 100]).to(d) for d in MIXED] + [
        torch.tensor(3).to(d) for d in MIXED[2::3]
    ]
    count, option = (1, "alpha") if name in ("add", "sub") else (2, "value")
    given += [True, 100, 2.5] if count == 1 else []
    for operands in itertools.product(given, repeat=1 + count):
        for scale in (-3, 100, 0.5) if any(isinstance(o, Tensor) for o in operands) else ():
            options = {option: scale}
            try:
                expected = getattr(torch, name)(*operands, **options)
            except (RuntimeError, TypeError, NotImplementedError):
                continue
            if isinstance(scale, float) and not expected.is_floating_point():
                continue  # torch truncates value
            torch.testing.assert_close(getattr(F, name)(*operands, **options), expected, equal_nan=True)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_products_added_to_a_number_have_the_default_dtype(default: torch.dtype) -> None:
    x, before = torch.tensor([3, 100], dtype=torch.uint8), torch.get_default_dtype()
    with replays_on_cpu() as replays:
        for wanted in (before, before, before, default):
            torch.set_default_dtype(wanted)
            try:
                same(F.add(2.5, x, alpha=-3), torch.add(2.5, x, alpha=-3))
            finally:
                torch.set_default_dtype(before)
    assert any(replays)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_the_default_dtype_of_the_moment_counts(default: torch.dtype) -> None:
    x, large = torch.arange(4), torch.tensor([2**24 + 1])
    calls: dict[str, tuple[Any, ...]] = {
        "mul": (x, 2.5),
        "sqrt": (x,),
        "div": (x, x + 1),
        "where": (x > 1, x, 0.3),
        "lt": (large, 2.0**24 + 0.5),
        "pow": (1.5, x),
        "add": (x, 2),
    }
    before = torch.get_default_dtype()
    with replays_on_cpu() as answers:
        try:
            for _ in range(3):
                for dtype in (before, before, before, default):
                    torch.set_default_dtype(dtype)
                    for name, args in calls.items():
                        got, expected = getattr(F, name)(*args), getattr(torch, name)(*args)
                        torch.testing.assert_close(got, expected, msg=name)
        finally:
            torch.set_default_dtype(before)
    assert any(answers)


def test_in_place_follows_torch() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    with pytest.raises(RuntimeError, match="can't be cast"):
        F.mul_(torch.arange(3), 2.5)
    with pytest.raises(RuntimeError, match="broadcast shape"):
        F.add_(x[0], x)
    overlapping = torch.arange(6.0)
    expected = overlapping[1:] + overlapping[:-1]
    assert torch.equal(F.add_(overlapping[1:], overlapping[:-1]), expected)  # as if all were read first
    leaf = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: F.silu(F.exp_(t * 1.0), inplace=True), leaf)
    with pytest.raises(RuntimeError, match="leaf"):
        F.exp_(leaf)


@pytest.mark.parametrize("device", DEVICES)
def test_elements_of_a_tensor_may_lie_at_any_address(device: str) -> None:
    """A tensor without axes promises an alignment as others do."""
    for at in range(4):
        x, y = torch.arange(1.0, 5.0, device=device), torch.arange(1.0, 5.0, device=device)
        F.add_(x[at], 2)
        F.mul(x[at], x[0], out=x[at])
        F.lerp_(x[at], x[3 - at], 0.5)
        y[at].add_(2).mul_(y[0]).lerp_(y[3 - at], 0.5)
        assert torch.equal(x, y)
        assert torch.equal(F.expression(lambda a, b: a * b + a, x[at], x), y[at] * y + y[at])
        assert torch.equal(F.reduce_expression("amax", lambda a, b: a - b, x[at], x), (y[at] - y).amax())


@pytest.mark.parametrize("device", DEVICES)
def test_a_result_may_lie_over_any_operand(device: str) -> None:
    x, y = torch.randn(2, 5, 7, device=device)
    for over in (lambda t: t, lambda t: t.view(t.shape)):
        a, b = x.clone(), x.clone()
        assert torch.equal(F.mul_(a, over(a)), b.mul_(b))
        assert torch.equal(F.sub(y, a, out=over(a)), torch.sub(y, b, out=b))
        assert torch.equal(F.where(y > 0, y, a, out=over(a)), y.where(y > 0, b))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", sorted(text.split()[0] for text in BY_RESULT))
def test_in_place_keeps_the_result_alone(name: str, device: str) -> None:
    """Gradients as torch's, also beyond the kinks, through views, and twice; none is filled, copied or turned."""
    # At NaN torch's relu6 has the derivative 1, and ours 0.
    ends = [0.0, -0.0, 6.0, 5.5, 7.0, -1.0, torch.inf, -torch.inf, torch.nan if name == "relu" else 1.0]
    x = torch.tensor(ends * 8, dtype=torch.float64, device=device).view(2, 4, 3, 3)
    x = x.to(memory_format=torch.channels_last)
    ours, its = x.clone().requires_grad_(), x.clone().requires_grad_()
    function = partial(getattr(F, name), inplace=True)
    middle = ours * 1.0
    at = middle.data_ptr()
    found = function(middle)
    assert found is middle
    assert found.data_ptr() == at
    (kept,) = found.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert kept.data_ptr() == at
    expected = getattr(torch.nn.functional, name)(its * 1.0, inplace=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    g = torch.randn_like(x)
    (to_ours,), (to_its,) = torch.autograd.grad(found, ours, g), torch.autograd.grad(expected, its, g)
    torch.testing.assert_close(to_ours, to_its, rtol=0, atol=0)
    assert to_ours.stride() == x.stride()

    def through_a_view(t: torch.Tensor) -> torch.Tensor:
        y = t * 1.0
        function(y[1:])
        return y * y

    leaf = (torch.randn(3, 4, dtype=torch.float64, device=device) * 6).requires_grad_()
    assert torch.autograd.gradcheck(through_a_view, leaf)
    assert torch.autograd.gradgradcheck(through_a_view, leaf)
    with pytest.raises(RuntimeError, match="leaf"):
        function(leaf)
    written = leaf * 1.0
    result = function(written)
    written.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def gate(a: Any, b: Any, c: Any) -> Any:
    return tp.expr.silu(a) * b + c, a * b


@pytest.mark.parametrize("device", DEVICES)
def test_an_expression_of_ones_own(device: str) -> None:
    a, b = (torch.randn(s, dtype=torch.float64, device=device, requires_grad=True) for s in ((3, 4), (4,)))
    first, second = F.expression(gate, a, b, 0.7)
    torch.testing.assert_close((first, second), (torch.nn.functional.silu(a) * b + 0.7, a * b))
    assert torch.autograd.gradcheck(lambda a, b: F.expression(gate, a, b, 0.7), (a, b))
    assert torch.autograd.gradgradcheck(lambda a, b: F.expression(gate, a, b, 0.7), (a, b))
    compiled = torch.compile(lambda a, b: F.expression(gate, a, b, 0.7)[0], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(a, b), first)
    p = tp.expr.operand("p")
    torch.testing.assert_close(F.expression(p * tp.expr.operand("q"), q=b, p=a), a * b)
    with pytest.raises(TypeError, match="no operand is a tensor"):
        F.expression(gate, 1.0, 2.0, 3.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_out_of_another_float_is_rounded_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the launch that computes it, if that computes in f32 and ``out`` is narrower."""
    written: list[torch.dtype] = []
    fill = table.fill
    monkeypatch.setattr(table, "fill", lambda outs, *args: (written.append(outs[0].dtype), fill(outs, *args)))
    x, y, out = torch.randn(5, 300) * 100, torch.rand(5, 1), torch.empty(5, 300, dtype=dtype)
    assert F.div(x, y, out=out) is out
    assert torch.equal(out, (x / y).to(dtype))
    assert written == ([] if dtype is torch.float64 else [dtype])


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("eps", [None, 0.0, 0.1])
def test_the_gradient_of_logit_is_torchs_everywhere(eps: float | None, scaled: bool) -> None:
    """Its domain is [0, 1]: the gradient is infinite at the ends, and NaN beyond. Between other ops it is the same."""

    def wanted(x: Tensor) -> Tensor:
        return torch.logit(2 * x, eps) * x if scaled else torch.logit(x, eps)

    def tree(x: Any) -> Any:
        p = 2 * x if scaled else x
        found = tp.expr.logit(p) if eps is None else tp.expr.logit_clamped(p, eps)
        return found * x if scaled else found

    points = (-torch.inf, -0.5, 0.0, 0.05, 0.1, 0.15, 0.3, 0.5, 0.95, 1.0, 1.5, torch.inf, torch.nan)
    given = torch.tensor(points, dtype=torch.float64)
    found = []
    for function in (wanted, lambda x: F.expression(tree, x), *(() if scaled else (lambda x: F.logit(x, eps),))):
        x = given.clone().requires_grad_()
        found += torch.autograd.grad(function(x).sum(), x)
    for gradient in found[1:]:
        torch.testing.assert_close(gradient, found[0], equal_nan=True)


@pytest.mark.parametrize("eps", [0.7, 1.0, 0.5, -0.1, -1e-30])
def test_the_limits_of_logit_are_torchs(eps: float) -> None:
    """The lower one first, where they cross; none if eps is negative."""
    points = (-torch.inf, -0.5, -0.05, 0.0, 0.2, 0.3, 0.5, 0.8, 1.0, 1.05, 2.0, torch.inf, torch.nan)
    given = torch.tensor(points, dtype=torch.float64)
    with replays_on_cpu() as replays:
        for e in (0.1, 0.1, 0.1, eps):
            x, y = given.clone().requires_grad_(), given.clone().requires_grad_()
            found, expected = F.logit(x, e), torch.logit(y, e)
            torch.testing.assert_close(found, expected, equal_nan=True)
            gradients = (torch.autograd.grad(of.sum(), at)[0] for of, at in ((found, x), (expected, y)))
            torch.testing.assert_close(*gradients, equal_nan=True)
    assert any(replays)


def test_gradients_are_one_launch_of_those_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[int] = []
    fill = engine.fill
    monkeypatch.setattr(engine, "fill", lambda outs, *args: (launches.append(len(outs)), fill(outs, *args)))
    for y in (torch.rand(3), torch.rand(3, requires_grad=True)):
        F.pow(torch.rand(3, requires_grad=True), y).sum().backward()
    assert launches == [1, 1, 1, 2]  # forward, x; forward, x and y
    assert not F.lt(torch.rand(3, requires_grad=True), 1).requires_grad


def test_a_gradient_that_is_passed_on_needs_no_tensor_and_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(2, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    grad = torch.randn(2, 3)
    launches: list[Any] = []
    out = F.add(x, y)
    assert out.grad_fn.saved_tensors == (None, None)
    with monkeypatch.context() as patch:
        patch.setattr(tp.Plan, "run", lambda *args: launches.append(args))
        dx, dy = torch.autograd.grad(out, (x, y), grad)
    assert dx is grad
    assert not launches
    torch.testing.assert_close(dy, grad.sum(0))
    with replays_on_cpu() as answers:
        for _ in range(6):
            del answers[:]
            (dx,) = torch.autograd.grad(F.sub(x, y), x, grad)
        assert dx is grad
        assert answers == [True, True]
    # What a gradient does not read is not kept: of a choice the mask alone, of a product both factors.
    assert F.where(x > 0, x, y).grad_fn.saved_tensors[1:] == (None, None)
    assert None not in F.mul(x, y).grad_fn.saved_tensors


@pytest.mark.parametrize("op", [op for op in NAMED if op not in (*FUNCTIONS, "nan_to_num", "selu")])  # == and * 1.0
def test_formulas_of_docstrings_are_the_trees(op: str) -> None:
    named = NAMED[op]
    operands = {n: tp.expr.operand(n) for n in (*"xyz"[: named.operands], *named.parameters)}
    built = named.build(*operands.values())
    scope = {**FUNCTIONS, **vars(tp.expr), **operands}  # some functions are no named ops
    assert flattened([eval(docs.written(built), scope)]) == flattened([built])


def test_docstrings_say_the_formula_the_domain_and_the_gradient() -> None:
    assert "``out = where(input <= 0, 0, input)``" in F.relu.__doc__
    assert "``dinput = where(input <= 0, 0, g)``" in F.relu.__doc__  # 0 at the kink
    assert "where(input == other, 0.5 * g, g)" in F.maximum.__doc__
    assert "Domain: -1 <= input <= 1" in F.asin.__doc__
    assert "``dother = g * alpha``" in F.add.__doc__


@pytest.mark.parametrize("name", ["swiglu", "geglu", "reglu", "glu"])
def test_gradients_of_a_packed_gate_are_one_launch_into_one_tensor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, written = getattr(F, name), list[tuple[int, int]]()
    fill = packed.fill
    monkeypatch.setattr(
        packed, "fill", lambda outs, *args: (written.append((len(outs), outs[0].stride(0))), fill(outs, *args))
    )
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    gate(x).sum().backward()
    assert written == [(1, 4), (2, 8)]
    assert torch.autograd.gradcheck(gate, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(gate, x)
    compiled = torch.compile(gate, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x), (x.grad,))


def test_halves_of_one_column_each_have_gradients() -> None:
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert not may_overlap(x[:, :1], x[:, 1:])
    assert may_overlap(x[:, :1], x[1:, :1])
    assert torch.autograd.gradcheck(F.glu, x)


@pytest.mark.parametrize("op", ["packed_gate", "packed_gate_backward"])
def test_packed_gates_pass_opcheck(op: str) -> None:
    args = (torch.randn(5, 8, requires_grad=True), 1, "swiglu tt")
    grad = (torch.randn(5, 4, requires_grad=True),) * op.endswith("backward")
    torch.library.opcheck(getattr(torch.ops.triplan, op).default, (*grad, *args))


def test_packed_gates_along_another_axis_are_replayed() -> None:
    with replays_on_cpu() as answers:
        for _ in range(4):
            x = torch.randn(3, 6, 4, requires_grad=True)
            got, expected = F.glu(x, 1), torch.nn.functional.glu(x, 1)
            g = torch.randn_like(got)
            torch.testing.assert_close(torch.autograd.grad(got, x, g), torch.autograd.grad(expected, x, g))
    assert answers[-2:] == [True, True]


@pytest.mark.parametrize("name", [n for n in nn.elementwise.__all__ if hasattr(torch.nn, n)])
def test_modules(name: str) -> None:
    args = (0.5, -1.0) if name == "Threshold" else ()
    ours, theirs = getattr(nn, name)(*args), getattr(torch.nn, name)(*args)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(4, 6)
    torch.testing.assert_close(ours(x), theirs(x))
    assert repr(ours) == repr(theirs)


@pytest.mark.parametrize(("name", "expected"), [("prelu", torch.bfloat16), ("exp", torch.float32)])
def test_autocast_as_where_torch_converts(name: str, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_autocast.CONVERTED, "cpu", _autocast.CONVERTED["cuda"] | {name})
    x = torch.randn(4, 3, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert getattr(F, name)(*((x, torch.ones(3)) if name == "prelu" else (x,))).dtype == expected
