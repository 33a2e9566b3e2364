"""Reductions: torch's rules for axes, dtypes, ties and NaN; gradients; every layout of the kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import H200, compiles
from proofs import target
from samples import SetConstant

import triplan as tp
import triplan.functional as F  # noqa: N812
from triplan.backends.triton.reductions import tiling, waves
from triplan.backends.triton.reductions.limits import ODD_BUSY, SCATTERED_REGISTERS, WAVE_GROUP
from triplan.backends.triton.reductions.shared import plan_of
from triplan.testing import check_plan

Tensor = torch.Tensor
AXES = ((0,), (1,), (2,), (0, 2), (0, 1), (1, 2), (0, 1, 2), (-1,), (), None)
#: Functions of any axes, beside torch's.
OF_AXES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    name: (getattr(F, name), getattr(torch, name))
    for name in ("sum", "mean", "amax", "amin", "any", "all", "logsumexp", "var", "std", "count_nonzero")
}
OF_AXES["vector_norm"] = (
    lambda x, dim, keepdim: F.vector_norm(x, dim=dim, keepdim=keepdim),
    lambda x, dim, keepdim: torch.linalg.vector_norm(x, dim=dim, keepdim=keepdim),
)
#: Of one axis, or all.
OF_ONE = ("prod", "max", "min", "argmax", "argmin")
for _name in ("var_mean", "std_mean"):
    OF_AXES[_name] = getattr(F, _name), getattr(torch, _name)
LAYOUTS = {
    "packed": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "every other": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(4, -1, -1),
}


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (x * 2).round().abs().to(dtype) if not dtype.is_floating_point else x.to(dtype)


def pairs(got: Any, expected: Any) -> list[tuple[Tensor, Tensor]]:
    return list(zip(got, expected, strict=True)) if isinstance(got, tuple) else [(got, expected)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OF_AXES)
def test_any_axes_and_layout(name: str, layout: str) -> None:
    ours, theirs = OF_AXES[name]
    x = LAYOUTS[layout](drawn(4, 5, 6))
    for dim in AXES:
        if dim in ((), None) and name == "logsumexp":
            continue
        if name == "count_nonzero":
            torch.testing.assert_close(ours(x, dim), theirs(x, dim))
            continue
        for keepdim in (False, True):
            given = dim if dim or name not in ("amax", "amin") else ()
            for a, b in pairs(ours(x, given, keepdim=keepdim), theirs(x, given, keepdim=keepdim)):
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OF_ONE)
def test_one_axis_or_all(name: str, layout: str) -> None:
    x = LAYOUTS[layout](drawn(4, 5, 6).round())  # ties: the first
    torch.testing.assert_close(getattr(F, name)(x), getattr(torch, name)(x))
    for dim in range(-3, 3):
        for got, expected in pairs(*(getattr(m, name)(x, dim, keepdim=True) for m in (F, torch))):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.bool, torch.uint8])
@pytest.mark.parametrize("name", ["sum", "prod", "amax", "any", "all", "count_nonzero", "max", "aminmax"])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    x = drawn(3, 7, dtype=dtype)
    got, expected = (getattr(m, name)(x, dim=1) for m in (F, torch))
    for a, b in pairs(got, expected):
        torch.testing.assert_close(a, b)
    if name in ("sum", "prod"):
        for wanted in (torch.float64, torch.int16, torch.float16):
            torch.testing.assert_close(getattr(F, name)(x, 1, dtype=wanted), getattr(torch, name)(x, 1, dtype=wanted))


def test_a_result_in_f64_is_accumulated_in_f64() -> None:
    x = torch.tensor([[1.0, 1e-10, 3.3]])
    for name in ("sum", "mean", "prod"):
        got, expected = (getattr(m, name)(x, 1, dtype=torch.float64) for m in (F, torch))
        torch.testing.assert_close(got, expected, rtol=1e-15, atol=0)


def test_nan_and_ties_and_infinities() -> None:
    x = torch.tensor(
        [[1.0, math.nan, 5.0, math.nan], [-math.inf] * 4, [2.0, 7.0, 7.0, 1.0], [math.inf, 1, 1, -math.inf]]
    )
    for name in ("max", "min", "aminmax"):
        for got, expected in zip(getattr(F, name)(x, dim=1), getattr(torch, name)(x, dim=1), strict=True):
            assert torch.equal(got.nan_to_num(9.5), expected.nan_to_num(9.5))
    for name in ("amax", "amin", "logsumexp", "argmax"):
        torch.testing.assert_close(getattr(F, name)(x, 1), getattr(torch, name)(x, 1), equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,), ()])
def test_empty_and_scalar(shape: tuple[int, ...]) -> None:
    x = drawn(*shape)
    for name in ("sum", "prod", "mean", "any", "all", "count_nonzero"):
        torch.testing.assert_close(getattr(F, name)(x), getattr(torch, name)(x), equal_nan=True)
    if x.dim():
        torch.testing.assert_close(F.logsumexp(x, 0), torch.logsumexp(x, 0))
        if x.dim() == 2 and x.shape[0] == 0:
            with pytest.raises(IndexError):
                F.amax(x, 0)
            with pytest.raises(IndexError):
                F.max(x, 0)


@pytest.mark.parametrize("correction", [0, 1, 2.5, 7])
def test_variances(correction: float) -> None:
    x = drawn(3, 7) + 1000
    for name in ("var", "std"):
        got, expected = (getattr(m, name)(x, 1, correction=correction) for m in (F, torch))
        torch.testing.assert_close(got, expected)
    for name in ("var_mean", "std_mean"):
        for got, expected in zip(*(getattr(m, name)(x, 1, correction=correction) for m in (F, torch)), strict=True):
            torch.testing.assert_close(got, expected)
    torch.testing.assert_close(F.std(x, False), torch.std(x, False))
    torch.testing.assert_close(F.aminmax(x, dim=1), torch.aminmax(x, dim=1))


@pytest.mark.parametrize("order", [0, 1, 2, 0.5, 3, -1, math.inf, -math.inf])
def test_norms(order: float) -> None:
    x = drawn(3, 7)
    for dim in (None, 0, 1, (0, 1)):
        torch.testing.assert_close(F.vector_norm(x, order, dim), torch.linalg.vector_norm(x, order, dim))


#: Differentiable functions, with zeros, ties or constants where their gradients are torch's by decision.
GRADIENTS: dict[str, tuple[Callable[[Any, Tensor], Any], Tensor]] = {
    "sum": (lambda m, x: m.sum(x, (0, 2)), drawn(2, 3, 2)),
    "mean": (lambda m, x: m.mean(x, 1, True), drawn(2, 3)),
    "prod": (lambda m, x: m.prod(x, 1), drawn(2, 4)),
    "prod of one zero": (lambda m, x: m.prod(x, 1), drawn(1, 4) * torch.tensor([1, 0, 1, 1])),
    "prod of two zeros": (lambda m, x: m.prod(x), drawn(1, 4) * torch.tensor([1, 0, 0, 1])),
    "amax": (lambda m, x: m.amax(x, (0, 1)), drawn(2, 3, 2)),
    "amax ties": (lambda m, x: m.amax(x, 1), torch.ones(2, 3, dtype=torch.float64)),
    "max": (lambda m, x: m.max(x, 1)[0], drawn(2, 3)),
    "max of all": (lambda m, x: m.max(x), torch.ones(2, 3, dtype=torch.float64)),
    "var": (lambda m, x: m.var(x, 1), drawn(2, 4)),
    "std": (lambda m, x: m.std(x, (0, 1), correction=0), drawn(2, 4)),
    "var_mean": (lambda m, x: sum(t * (i + 2) for i, t in enumerate(m.var_mean(x, 1))), drawn(2, 4)),
    "one of var_mean": (lambda m, x: m.var_mean(x, 1, keepdim=True)[1], drawn(2, 4)),
    "std_mean": (lambda m, x: sum(m.std_mean(x, (0, 1), correction=0)), drawn(2, 4)),
    "aminmax": (lambda m, x: sum(t * (i + 2) for i, t in enumerate(m.aminmax(x, dim=1))), drawn(2, 4)),
    "logsumexp": (lambda m, x: m.logsumexp(x, 1), drawn(2, 4)),
    "norm": (lambda m, x: getattr(m, "vector_norm", torch.linalg.vector_norm)(x, 2, 1), drawn(2, 4)),
    "norm of zeros": (
        lambda m, x: getattr(m, "vector_norm", torch.linalg.vector_norm)(x, 2, 1),
        torch.zeros(2, 3, dtype=torch.float64),
    ),
    "norm 3": (lambda m, x: getattr(m, "vector_norm", torch.linalg.vector_norm)(x, 3, 0), drawn(2, 4)),
}
SMOOTH = ("sum", "mean", "prod", "var", "std", "logsumexp", "norm", "norm 3", "max", "amax", "prod of one zero",
          "var_mean", "one of var_mean", "std_mean", "aminmax")  # fmt: skip


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str) -> None:
    function, x = GRADIENTS[name]
    found = []
    for module in (F, torch):
        leaf = x.clone().requires_grad_()
        out = function(module, leaf)
        (grad,) = torch.autograd.grad(out, leaf, torch.linspace(1, 2, out.numel(), dtype=x.dtype).reshape(out.shape))
        found.append(grad)
    torch.testing.assert_close(*found)
    if name in SMOOTH:
        torch.autograd.gradcheck(lambda t: function(F, t), x.clone().requires_grad_())
        torch.autograd.gradgradcheck(lambda t: function(F, t), x.clone().requires_grad_())


def norm(order: float) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: getattr(m, "vector_norm", torch.linalg.vector_norm)(x, order, dtype=torch.float64)


#: (function, x of f32, gradient of the result) at the ends of the range, and without degrees of freedom.
ENDS: dict[str, tuple[Callable[[Any, Tensor], Tensor], list[float], float]] = {
    "max, infinite": (lambda m, x: m.max(x, 0)[0], [1, 3, 2], math.inf),
    "product in f64": (lambda m, x: m.prod(x, 0, dtype=torch.float64), [1e10] * 8, 1e-80),
    "norm in f64": (norm(2), [1e30, 2e30], 1),
    "norm 1.5": (norm(1.5), [1e-30, 1e20], 1),
    "norm 0.5": (norm(0.5), [1e-20, 1e7], 1),
    "var of none": (lambda m, x: m.var(x, 0, correction=2), [1, 3], 1),
    "var of fewer": (lambda m, x: m.var(x, 0, correction=3), [1, 3], 1),
    "std of fewer": (lambda m, x: m.std(x, 0, correction=3), [1, 3], 1),
}


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("name", ENDS)
def test_gradients_at_the_ends_of_the_range(name: str) -> None:
    function, values, up = ENDS[name]
    found = []
    for module in (F, torch):
        x = torch.tensor(values, dtype=torch.float32, requires_grad=True)
        out = function(module, x)
        found += torch.autograd.grad(out, x, torch.full_like(out, up))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(("name", "launches"), [("amax", 2), ("prod", 3), ("var", 2), ("logsumexp", 1)])
def test_gradients_are_few_launches(name: str, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(4, 3).float().requires_grad_()
    out, count, run = getattr(F, name)(x, 1).sum(), [], tp.Plan.run
    monkeypatch.setattr(tp.Plan, "run", lambda *args: (count.append(args), run(*args)))
    out.backward()
    assert len(count) == launches


def test_gradients_of_a_line_with_nan() -> None:
    for name in ("amax", "amin"):
        x = torch.tensor([[1.0, math.nan, 3.0], [2.0, 1.0, 2.0]], requires_grad=True)
        got, expected = (torch.autograd.grad(getattr(m, name)(x, 1).sum(), x) for m in (F, torch))
        torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.interpret
def test_variances_of_numbers_whose_sum_overflows() -> None:
    desc = tp.ReduceDescriptor(op="var", input_shape=(2, 5), reduce_axes=(1,), element="f32")
    plan, out = tp.plan(desc, target=target("interpret")), torch.empty(2)
    plan.run(tp.ReduceArgs(torch.full((2, 5), 3e38), out))
    assert out.tolist() == [0.0, 0.0]
    both = tp.ReducePairDescriptor(op="var_mean", input_shape=(2, 5), reduce_axes=(1,), element="f32")
    tp.plan(both, target=target("interpret")).run(tp.ReducePairArgs(torch.full((2, 5), 3e38), out, mean := out + 1))
    torch.testing.assert_close((out, mean), (torch.zeros(2), torch.full((2,), 3e38)))


def test_forward_mode_with_positions() -> None:
    x, tangent = drawn(3, 4), drawn(4, 3).t()
    functions: list[Any] = [lambda t: F.max(t, 1)[0], lambda t: torch.max(t, 1)[0]]
    got, expected = (torch.func.jvp(f, (x,), (tangent,)) for f in functions)
    torch.testing.assert_close(got, expected)


def test_deviations_whose_squares_underflow() -> None:
    x = 1e-24 * torch.tensor([[1.0, 2.0, 4.0]])
    plan = tp.plan(
        tp.ReduceDescriptor(op="std", element="f32", input_shape=(1, 3), reduce_axes=(1,)), target=target("cpu")
    )
    assert check_plan(plan, given={"x": x}, runs=1).compared


def test_opcheck() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.triplan.reduce.default, ("logsumexp", x, [1], False, None, 1.0, 2.0))
    torch.library.opcheck(torch.ops.triplan.extremum.default, ("max", x, [-2], True, None, 1.0, 2.0))
    torch.library.opcheck(torch.ops.triplan.reduce_pair.default, ("std_mean", x, [-2], True, None, 1.0, 2.0))


def test_out() -> None:
    x, out = drawn(3, 4), torch.empty(3, dtype=torch.float64)
    assert F.sum(x, 1, out=out) is out
    torch.testing.assert_close(out, x.sum(1))
    values, indices = torch.empty(3, dtype=torch.float64), torch.empty(3, dtype=torch.int64)
    F.max(x, 1, out=(values, indices))
    torch.testing.assert_close((values, indices), tuple(torch.max(x, 1)))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda x: F.sum(x, 2), IndexError),
        (lambda x: F.sum(x, (0, 0)), RuntimeError),
        (lambda x: F.sum(x.to(torch.complex64)), RuntimeError),
        (lambda x: F.mean(x.long()), RuntimeError),
        (lambda x: F.var(x.long()), RuntimeError),
        (lambda x: F.vector_norm(x, dtype=torch.float32), RuntimeError),
        (lambda x: F.argmax(x[:, :0], 1), IndexError),
    ],
)
def test_refusals(call: Callable[[Tensor], Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        call(drawn(2, 3))


#: (shape, axes, layouts): rows and columns of one and of several chunks, axes apart, operands with gaps.
GEOMETRIES: tuple[Any, ...] = (
    ((5, 300), (1,), {}),
    ((300, 40), (0,), {}),
    ((3, 5, 7), (0, 2), {}),
    ((3, 700, 17), (1,), {}),
    ((7, 12, 18), (1,), {}),
    ((5, 9, 4, 11), (1,), {"x": "strided"}),
    ((1, 40_000), (1,), {}),
    ((6000, 9), (0,), {}),
    ((6, 7), (0, 1), {"x": "strided"}),
    ((9, 1, 3), (1,), {"x": "strided", "out": "strided"}),
    ((3, 690, 17), (1,), {"x": "strided"}),
    ((4, 6), (), {}),
    # Short lines of several points side by side.
    ((261, 3, 8), (1,), {}),
    ((261, 2, 8), (1,), {"out": "strided"}),
    # One block, which lines fill or not, of lines that are held whole.
    ((3, 2048), (1,), {}),
    ((3, 1544), (1,), {}),
)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: f"{g[0]}-{g[1]}")
@pytest.mark.parametrize(
    "where", [pytest.param("interpret", marks=pytest.mark.interpret), pytest.param("gpu", marks=pytest.mark.gpu)]
)
def test_every_geometry(where: str, geometry: Any, constant: SetConstant) -> None:
    shape, axes, layouts = geometry
    constant(tiling, "FLAT_POINTS", 256)
    elements = {"mean": "bf16", "amin": "f32", "max": "bf16", "argmin": "i32", "std": "f32", "logsumexp": "f32"}
    elements |= {"all": "bool", "count_nonzero": "f16", "aminmax": "bf16", "std_mean": "f32"}
    for op, element in elements.items():
        cls: Any = tp.descriptor_types()[op]
        desc = cls(op=op, element=element, input_shape=shape, reduce_axes=axes, layouts=layouts)
        assert plan_of(desc).flat or shape[0] != 261 or op == "all"
        assert check_plan(tp.plan(desc, target=target(where)), runs=1).compared


@pytest.mark.parametrize(
    "where", [pytest.param("interpret", marks=pytest.mark.interpret), pytest.param("gpu", marks=pytest.mark.gpu)]
)
def test_variances_far_from_zero(where: str) -> None:
    """Of lines in one block and in several: their elements are apart by little beside their mean."""
    for n in (2048, 16_384, 20_480):
        desc = tp.ReduceDescriptor(op="var", element="f32", input_shape=(3, n), reduce_axes=(1,))
        plan = tp.plan(desc, target=target(where))
        device = plan.target.device_type
        x, out = (drawn(3, n) + 30_000).float().to(device), torch.empty(3, device=device)
        plan.run(tp.ReduceArgs(x, out), tp.Workspace.allocate(plan))
        torch.testing.assert_close(out.double(), x.double().var(1), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "where", [pytest.param("interpret", marks=pytest.mark.interpret), pytest.param("gpu", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(
    ("op", "element", "n"), [("sum", "bf16", 132_003), ("argmax", "f32", 40_003), ("std", "f32", 40_003)]
)
def test_many_chunks_are_merged_at_once(op: str, element: str, n: int, where: str, constant: SetConstant) -> None:
    for name in ("WARPS", "CHUNK_TILES"):
        constant(tiling, name, 1)
    desc = tp.ReduceDescriptor(op=op, element=element, input_shape=(2, n), reduce_axes=(1,))
    plan = tp.plan(desc, target=target(where))
    assert plan.launches[1].constexprs["BLOCK"] > 256
    assert check_plan(plan, runs=1).compared


@pytest.mark.parametrize(
    "where", [pytest.param("interpret", marks=pytest.mark.interpret), pytest.param("gpu", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(
    ("op", "element", "n", "chunks"), [("sum", "bf16", 8200, 1), ("amax", "f32", 20_488, 2), ("mean", "f32", 36_868, 3)]
)
def test_long_lines_have_more_threads(op: str, element: str, n: int, chunks: int, where: str) -> None:
    """As many for one line as for a thousand: its bits do not depend on the others."""
    desc = tp.ReduceDescriptor(op=op, element=element, input_shape=(2, n), reduce_axes=(1,))
    one, many = plan_of(desc), plan_of(desc.replace(input_shape=(1000, n)))
    assert (one.tile, one.chunk) == (many.tile, many.chunk)
    assert (one.tile.block, one.tile.warps, one.chunks) == (4096, 8 if element == "bf16" else 16, chunks)
    assert check_plan(tp.plan(desc, target=target(where)), runs=1).compared
    for change in ({"op": "var"}, {"element": "f64"}, {"input_shape": (2, n - 1)}):
        assert plan_of(desc.replace(**change)).tile.block < 4096


def test_chunks_of_columns_are_not_far_apart_by_a_power_of_two() -> None:
    far, near = (
        plan_of(tp.ReduceDescriptor(op="argmax", element="f32", input_shape=(16_384, n), reduce_axes=(0,)))
        for n in (16_384, 16_383)
    )
    assert far.chunks > 1
    assert far.chunks % 2 == 1
    assert near.chunks % 2 == 0


@pytest.mark.parametrize(
    "where", [pytest.param("interpret", marks=pytest.mark.interpret), pytest.param("gpu", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(("sms", "chunks"), [(2, 1), (4, 2)])
def test_long_columns_are_read_in_whole_waves(sms: int, chunks: int, where: str, constant: SetConstant) -> None:
    """Of few multiprocessors: the last group of blocks of a chunk is not whole."""
    for name, value in {"SMS": sms, "WAVE_BYTES": 1024, "WAVE_WARPS": 2, "OVERLAPPED_LAUNCH_US": 0}.items():
        for module in (tiling, waves):
            if hasattr(module, name):
                constant(module, name, value)
    elements = {"sum": "i16", "mean": "bf16", "prod": "f32", "amin": "f32", "std": "bf16", "logsumexp": "f32"}
    for op, element in (elements | {"aminmax": "f16", "std_mean": "f32", "vector_norm": "f64"}).items():
        columns = 2 * waves.tile_of(tp.ElementKind(element).itemsize)[0]
        cls: Any = tp.descriptor_types()[op]
        desc = cls(op=op, element=element, input_shape=(605, columns), reduce_axes=(0,))
        plan = tp.plan(desc, target=target(where))
        assert plan_of(desc).chunks == len(plan.launches) == chunks
        assert plan.launches[0].constexprs["GROUP"] == WAVE_GROUP
        assert check_plan(plan, runs=1).compared


@compiles
@pytest.mark.parametrize("arch", ["sm80", "sm90a"])
@pytest.mark.parametrize(("element", "shape"), [("f64", (4099, 4001)), ("f32", (200_003, 33))])
def test_powers_of_narrow_columns_do_not_spill(element: str, shape: tuple[int, ...], arch: str) -> None:
    where = tp.Target.sm80() if arch == "sm80" else tp.Target.sm90a()
    desc = tp.ReduceDescriptor(op="vector_norm", element=element, input_shape=shape, reduce_axes=(0,), order=3.0)
    assert [x.spill_bytes for x in tp.plan(desc, target=where).compile()] == [0, 0]


#: (op, element, elements of a line): of more than a block, in one chunk and in several, beside a multiple of 16 bytes.
ODD_LINES = (
    *(("sum", "bf16", n) for n in (2049, 2055, 6143, 40_001)),
    *(("prod", "f32", 1027), ("amax", "f16", 4101), ("amin", "i8", 4097), ("logsumexp", "f32", 1539)),
    *(
        ("aminmax", "f16", 4101),
        ("aminmax", "i8", 40_001),
        ("any", "bool", 2051),
        ("mean", "f64", 1025),
        ("vector_norm", "bf16", 17_001),
    ),
    # Read at once, in whole vectors.
    *(("amax", "bool", 293), ("argmin", "bf16", 511), ("argmax", "u8", 37), ("sum", "i8", 1001), ("prod", "u8", 301)),
    *(("count_nonzero", "f16", 333), ("aminmax", "i16", 1999), ("any", "bool", 33), ("amin", "f16", 18)),
)


@pytest.mark.parametrize(
    "where", [pytest.param("interpret", marks=pytest.mark.interpret), pytest.param("gpu", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(("op", "element", "n"), ODD_LINES)
def test_lines_that_begin_anywhere(op: str, element: str, n: int, where: str) -> None:
    """Right; and equal lines have equal bits, at whatever address they begin, that of x included."""
    cls: Any = tp.descriptor_types()[op]
    desc = cls(op=op, element=element, input_shape=(9, n), reduce_axes=(1,))
    line = (drawn(n) / 8 + (op == "prod")).to(desc.element.torch)
    found = []
    for start, layouts in ((0, {}), (1, {"x": tp.Layout(alignment=line.element_size())})):
        plan = tp.plan(desc.replace(layouts=layouts), target=target(where))
        assert check_plan(plan, runs=1).compared
        device = plan.target.device_type
        x = torch.empty(9 * n + 1, dtype=line.dtype, device=device)[start : start + 9 * n].view(9, n).copy_(line)
        results = {
            o.name: torch.empty(o.shape, dtype=o.element.torch, device=device) for o in desc.operands() if o.is_written
        }
        plan.run(plan.args_type(x=x, **results), tp.Workspace.allocate(plan))
        found.append(results["out"])
    assert torch.equal(torch.cat(found), found[0][:1].expand(18))


@pytest.mark.parametrize(
    "where", [pytest.param("interpret", marks=pytest.mark.interpret), pytest.param("gpu", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("shape", [(2, 131, 101), (300, 194)], ids=str)
@pytest.mark.parametrize(("op", "element"), [("sum", "bf16"), ("amax", "f16"), ("logsumexp", "bf16"), ("prod", "i16")])
def test_columns_that_begin_between_vectors(
    op: str, element: str, shape: tuple[int, ...], where: str, constant: SetConstant
) -> None:
    """Whatever the address of x is. NaN and infinities stay in their column."""
    constant(tiling, "TURNED_LINE", 128)
    constant(tiling, "TURNED_SIDE", 64)
    constant(tiling, "TURNED_FROM", 0)
    desc = tp.ReduceDescriptor(op=op, element=element, input_shape=shape, reduce_axes=(len(shape) - 2,))
    assert plan_of(desc).turns > 1
    x = drawn(*shape).to(desc.element.torch)
    if x.is_floating_point():
        x[..., 3, 8], x[..., 5, 16], x[..., 7, -1] = math.nan, math.inf, -math.inf
    wanted = getattr(torch, op)(x.double() if x.is_floating_point() else x, len(shape) - 2)
    for start, layouts in ((0, {}), (1, {"x": tp.Layout(alignment=2)})):
        plan = tp.plan(desc.replace(layouts=layouts), target=target(where))
        assert check_plan(plan, runs=1).compared
        device = plan.target.device_type
        own = torch.empty(x.numel() + 1, dtype=x.dtype, device=device)[start : start + x.numel()].view(shape).copy_(x)
        out = torch.empty(wanted.shape, dtype=desc.result.torch, device=device)
        plan.run(plan.args_type(x=own, out=out), tp.Workspace.allocate(plan))
        torch.testing.assert_close(out.cpu(), wanted.to(out.dtype), equal_nan=True, rtol=2**-7, atol=0.1)


@pytest.mark.parametrize(
    "where", [pytest.param("interpret", marks=pytest.mark.interpret), pytest.param("gpu", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(
    ("shape", "axes", "layout"),
    [
        ((3, 2, 2049), (0, 1, 2), tp.Layout.strided()),
        ((5, 2, 4100), (0, 2), tp.Layout.strided()),
        ((2, 4, 2104), (1, 2), tp.Layout.strided(unit_axis=2, stride_multiple=8)),
        ((2, 3, 2049), (0, 2), tp.Layout()),
    ],
    ids=str,
)
@pytest.mark.parametrize(("op", "element"), [("sum", "bf16"), ("argmax", "f16"), ("var", "f32"), ("logsumexp", "bf16")])
def test_blocks_of_two_rows(op: str, element: str, shape: Any, axes: Any, layout: tp.Layout, where: str) -> None:
    """Blocks of lines that have several dimensions begin anywhere in a row, and end in the next one."""
    desc = tp.ReduceDescriptor(op=op, element=element, input_shape=shape, reduce_axes=axes, layouts={"x": layout})
    found = plan_of(desc)
    assert found._pieces(found.tile) == 2
    assert check_plan(tp.plan(desc, target=target(where)), runs=1).compared


@pytest.mark.parametrize(
    "where", [pytest.param("interpret", marks=pytest.mark.interpret), pytest.param("gpu", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(("op", "element"), [("sum", "bf16"), ("all", "f16"), ("amax", "bf16")])
def test_few_odd_columns(op: str, element: str, where: str, constant: SetConstant) -> None:
    """They are not read in turns: one program has all elements of a chunk, and the last chunk is shorter."""
    constant(tiling, "TURNED_LINE", 128)
    desc = tp.ReduceDescriptor(op=op, element=element, input_shape=(301, 1023), reduce_axes=(0,))
    found = plan_of(desc)
    assert (found.turns, found.groups()) == (1, 2)
    assert 2 < found.chunks <= ODD_BUSY // 2
    assert found.n % found.chunk
    assert check_plan(tp.plan(desc, target=target(where)), runs=1).compared


@pytest.mark.parametrize(
    "where", [pytest.param("interpret", marks=pytest.mark.interpret), pytest.param("gpu", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((3, 5, 1056), (1,)), ((515, 64), (0,)), ((4, 2, 64, 64), (0, 2, 3)), ((3, 3, 2048), (0, 2)), ((3, 5381), (1,))],
    ids=str,
)
@pytest.mark.parametrize(("op", "element"), [("sum", "bf16"), ("var", "f32"), ("logsumexp", "f16"), ("argmin", "bf16")])
def test_blocks_that_are_loaded_together(op: str, element: str, shape: Any, axes: Any, where: str) -> None:
    """Whole short columns, groups of blocks of long ones and a rest, pieces of lines, and rows of an odd length."""
    axes = axes[-1:] if op == "argmin" else axes
    desc = tp.ReduceDescriptor(op=op, element=element, input_shape=shape, reduce_axes=axes)
    assert check_plan(tp.plan(desc, target=target(where)), runs=1).compared


@pytest.mark.parametrize(
    "where", [pytest.param("interpret", marks=pytest.mark.interpret), pytest.param("gpu", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("gap", [1, 9, 16], ids="gap={}".format)
def test_what_lies_beside_a_short_line_is_ignored(gap: int, where: str) -> None:
    """Also where all of the line equals the identity, and of NaN beside it and within it."""
    n = 31
    layout = tp.Layout.strided(unit_axis=1, alignment=2, stride_multiple=8 if (n + gap) % 8 == 0 else 1)
    x = torch.full((5, n + gap), -math.inf, dtype=torch.bfloat16)
    x[:, :n] = drawn(5, n)
    x[1, :n], x[2, n:], x[3, 7], x[3, 20], x[4, n - 1] = math.inf, math.nan, math.nan, -math.inf, -math.inf
    for alignment in (2, 16) if (n + gap) % 8 == 0 else (2,):
        desc = tp.ExtremumDescriptor(
            op="min",
            element="bf16",
            input_shape=(5, n),
            reduce_axes=(1,),
            layouts={"x": layout.model_copy(update={"alignment": alignment})},
        )
        plan = tp.plan(desc, target=target(where))
        device = plan.target.device_type
        values, indices = torch.empty(5, dtype=x.dtype, device=device), torch.empty(5, dtype=torch.int64, device=device)
        plan.run(tp.ExtremumArgs(x.to(device)[:, :n], values, indices), tp.Workspace.allocate(plan))
        expected = torch.min(x[:, :n], 1)
        assert torch.equal(indices.cpu(), expected.indices)
        torch.testing.assert_close(values.cpu(), expected.values, equal_nan=True)


@pytest.mark.parametrize(
    "where", [pytest.param("interpret", marks=pytest.mark.interpret), pytest.param("gpu", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(("op", "element", "n"), [("sum", "f64", 257), ("aminmax", "f32", 515)])
def test_lines_of_long_rows(op: str, element: str, n: int, where: str) -> None:
    cls: Any = tp.descriptor_types()[op]
    layout = tp.Layout.strided(unit_axis=2, alignment=16)
    desc = cls(op=op, element=element, input_shape=(2, 132, n), reduce_axes=(0, 1, 2), layouts={"x": layout})
    plan = tp.plan(desc, target=target(where))
    assert plan.launches[0].args["rows"] is not None
    assert check_plan(plan, runs=1).compared


@pytest.mark.parametrize(
    "where", [pytest.param("interpret", marks=pytest.mark.interpret), pytest.param("gpu", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("axis", [0, 1])
def test_what_is_not_zero(axis: int, where: str) -> None:
    """Any bit of a number counts but the sign of a zero, in any element."""
    numbers: dict[str, list[float]] = {
        **{e: [0, -0.0, math.nan, 6e-8, -1, math.inf] for e in ("f16", "bf16", "f32", "f64")},
        **{e: [0, 1 << 8, -1 << 15] for e in ("i16", "i32")},
        "i8": [0, -128, 1],
        "u8": [0, 128, 255],
        "i64": [0, 1 << 40],
        "bool": [0, 1],
    }
    for element, listed in numbers.items():
        dtype = tp.ElementKind(element).torch
        line = torch.tensor(listed, dtype=torch.float64).to(dtype)
        x = torch.cat([line.repeat(3, 1), line[:, None].expand(-1, len(line))])  # the last lines have one number
        x = torch.cat([x, x.roll(1, 1)], 1).repeat(1, 5)
        x = (x.t() if axis == 0 else x).contiguous()
        for op in ("any", "all"):
            desc = tp.ReduceDescriptor(op=op, element=element, input_shape=tuple(x.shape), reduce_axes=(axis,))
            plan = tp.plan(desc, target=target(where))
            device = plan.target.device_type
            out = torch.empty(x.shape[1 - axis], dtype=torch.bool, device=device)
            plan.run(tp.ReduceArgs(x.to(device), out), tp.Workspace.allocate(plan))
            assert torch.equal(out.cpu(), getattr(torch, op)(x != 0, axis)), (op, element)


def test_the_length_of_a_line_decides_its_bits() -> None:
    for n in (100, 10_000, 100_000):
        plans = [
            tp.plan(tp.ReduceDescriptor(op="sum", element="bf16", input_shape=(rows, n), reduce_axes=(1,)), target=H200)
            for rows in (1, 40_000)
        ]
        few, many = (plan.sku() for plan in plans)
        assert (few.kernel, few.numerics_id) == (many.kernel, many.numerics_id)
        assert all(plan.precision_guarantee().batch_invariant for plan in plans)


def test_few_long_lines_are_divided() -> None:
    """(1, 2**28): the workspace is one sum of each of 16384 chunks."""
    plan = tp.plan(tp.ReduceDescriptor(op="sum", input_shape=(1, 2**28), reduce_axes=(1,), element="f32"), target=H200)
    assert (plan.sku().kernel, plan.workspace_size()) == ("split", 4 * 16_384)


SLICED = {"x": tp.Layout.strided(alignment=16, stride_multiple=2)}


@pytest.mark.parametrize(
    "where", [pytest.param("interpret", marks=pytest.mark.interpret), pytest.param("gpu", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(("op", "element"), [("sum", "f64"), ("argmax", "f64"), ("var", "f32"), ("logsumexp", "f32")])
@pytest.mark.parametrize("n", [201, 1025])
def test_slices_have_several_loads_a_thread(op: str, element: str, n: int, where: str) -> None:
    cls: Any = tp.descriptor_types()[op]
    desc = cls(op=op, element=element, input_shape=(9, n), reduce_axes=(1,), layouts=SLICED)
    tile = plan_of(desc).tile
    assert (tile.rows, tile.block) == ((4, 256) if n == 201 else (1, 1024))
    assert check_plan(tp.plan(desc, target=target(where)), runs=1).compared


@compiles
@pytest.mark.parametrize("arch", ["sm80", "sm90a"])
@pytest.mark.parametrize(("op", "element"), [("sum", "bf16"), ("vector_norm", "f16"), ("var", "f32"), ("prod", "f32")])
def test_loads_of_long_slices_wait_together(op: str, element: str, arch: str) -> None:
    """A block's elements are loaded before any of them is accumulated: ptxas has registers for all addresses."""
    cls: Any = tp.descriptor_types()[op]
    order = {"order": 3.0} if op == "vector_norm" else {}
    desc = cls(op=op, element=element, input_shape=(10_000, 20_480), reduce_axes=(1,), layouts=SLICED, **order)
    plan = tp.plan(desc, target=tp.Target.sm80() if arch == "sm80" else tp.Target.sm90a())
    assert plan.launches[0].max_registers == SCATTERED_REGISTERS
    assert [x.spill_bytes for x in plan.compile()] == [0, 0]
