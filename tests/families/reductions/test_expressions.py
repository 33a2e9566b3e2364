"""Reductions of expressions: torch's results and gradients, every layout of the kernels, errors at hostile values."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from cases import H200
from proofs import target

import triplan as tp
import triplan.functional as F  # noqa: N812
from triplan import expr
from triplan.functional.elementwise.expressions import resolved
from triplan.testing import check_plan, magnitudes

Tensor = torch.Tensor
OPS = ("sum", "mean", "amax", "amin")
AXES = (None, 0, (0, 2), (-1,), (1, 2), ())
WHERE = [pytest.param("interpret", marks=pytest.mark.interpret), pytest.param("gpu", marks=pytest.mark.gpu)]


def ours(a: Any, b: Any, c: Any) -> Any:
    return expr.square(a - b) * expr.exp(c * a)


def torchs(a: Tensor, b: Tensor, c: float) -> Tensor:
    return (a - b) ** 2 * torch.exp(c * a)


def product_of(a: Any, b: Any) -> Any:
    return a * b


def is_larger(a: Any, b: Any) -> Any:
    return a > b


def pair_of(a: Any, b: Any) -> Any:
    return a, b


def drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x * 2).round().abs().to(dtype) if not dtype.is_floating_point else x.to(dtype)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "packed": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "every other": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "expanded": lambda x: x[:1].expand(4, -1, -1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_results_and_gradients_are_torchs(op: str, layout: str) -> None:
    x, y = LAYOUTS[layout](drawn(4, 5, 6)).requires_grad_(), drawn(5, 1, seed=1).requires_grad_()
    for dim, keepdim in product(AXES, (False, True)):
        got = F.reduce_expression(op, ours, x, y, 0.3, dim=dim, keepdim=keepdim)
        expected = getattr(torch, op)(torchs(x, y, 0.3), dim=(0, 1, 2) if dim in (None, ()) else dim, keepdim=keepdim)
        torch.testing.assert_close(got, expected)
        up = drawn(*got.shape, seed=2)
        torch.testing.assert_close(*(torch.autograd.grad(out, (x, y), up) for out in (got, expected)))


@pytest.mark.parametrize("op", OPS)
def test_derivatives(op: str) -> None:
    x, y = drawn(3, 4).requires_grad_(), drawn(4, seed=1).requires_grad_()

    def call(a: Tensor, b: Tensor) -> Tensor:
        return F.reduce_expression(op, ours, a, b, 0.3, dim=1)

    assert torch.autograd.gradcheck(call, (x, y))
    assert torch.autograd.gradgradcheck(call, (x, y))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_equal_values_share_the_gradient_of_an_extremum(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, -2.0, 2.0, 0.5], [1.0, 1.0, -1.0, 1.0]], dtype=dtype, requires_grad=True)
    found = [F.reduce_expression("amax", expr.square(expr.operand("x")), dim=1, x=x), torch.amax(x * x, 1)]
    torch.testing.assert_close(*found)
    torch.testing.assert_close(*(torch.autograd.grad(out.sum(), x)[0] for out in found))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.bool, torch.uint8])
def test_dtypes(dtype: torch.dtype) -> None:
    x, y = drawn(3, 7, dtype=dtype), drawn(7, dtype=dtype, seed=1)
    for op in OPS:
        if op == "mean" and not dtype.is_floating_point:
            continue
        value = x.double() * y.double() if dtype.is_floating_point else x * y
        expected = getattr(torch, op)(value, 1)
        got = F.reduce_expression(op, product_of, x, y, dim=1)
        torch.testing.assert_close(got, expected.to(dtype) if dtype.is_floating_point else expected)
    counted = F.reduce_expression("sum", is_larger, x, y, dim=0)
    assert counted.dtype is torch.int64
    assert torch.equal(counted, (x > y).sum(0))


def test_values_are_not_rounded_before_they_are_reduced() -> None:
    """1 + 2**-8 is no number of bf16, and 65504**2 none of f16."""
    x = torch.full((1, 64), 1.0, dtype=torch.bfloat16)
    got = F.reduce_expression("sum", lambda a, b: a + b, x, x * 2**-8, dtype=torch.float32, dim=1)
    assert got.tolist() == [64.25]
    big = torch.tensor([65504.0, -65504.0], dtype=torch.float16)
    assert F.reduce_expression("sum", lambda a: a * a, big, dtype=torch.float32).item() == 2 * 65504.0**2


@pytest.mark.parametrize("shapes", [((0, 3), (3,)), ((3, 0), (1,)), ((), ()), ((1,), ())])
def test_empty_and_scalar(shapes: Any) -> None:
    x, y = (drawn(*shape) for shape in shapes)
    for op in ("sum", "mean"):
        torch.testing.assert_close(F.reduce_expression(op, product_of, x, y), getattr(torch, op)(x * y), equal_nan=True)
    if 0 in x.shape:
        with pytest.raises(IndexError):
            F.reduce_expression("amax", product_of, x, y)


def test_more_than_eight_axes() -> None:
    x, y = drawn(2, 1, 2, 1, 2, 1, 2, 1, 2, 2), drawn(2, 2, seed=1)
    torch.testing.assert_close(F.reduce_expression("mean", product_of, x, y, dim=(0, 3, 9)), (x * y).mean((0, 3, 9)))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda x: F.reduce_expression("prod", product_of, x, x), ValueError),
        (lambda x: F.reduce_expression("sum", pair_of, x, x), ValueError),
        (lambda x: F.reduce_expression("sum", product_of, x, x, dim=2), IndexError),
        (lambda x: F.reduce_expression("sum", product_of, x, x, dim=(0, 0)), RuntimeError),
        (lambda x: F.reduce_expression("mean", product_of, x.long(), 2), RuntimeError),
        (lambda x: F.reduce_expression("amax", product_of, x, x, dtype=torch.float32), RuntimeError),
        (lambda x: F.reduce_expression("sum", product_of, x.long(), 2, dtype=torch.float32), RuntimeError),
        (lambda x: F.reduce_expression("sum", product_of, 2.0, 3.0), TypeError),
        (lambda x: tp.ExpressionReductionDescriptor.of("sum_expression", expr.operand("y"), (0,)), tp.InvalidProblem),
        (lambda x: tp.ExpressionReductionDescriptor.of("sum_expression", 2, (0,), x=("f32", (3,))), tp.InvalidProblem),
        (
            lambda x: tp.ExpressionReductionDescriptor.of(
                "sum_expression", expr.operand("x") + expr.operand("y"), (0,), x=("f32", (3,)), y=("f32", (2,))
            ),
            tp.InvalidProblem,
        ),
        (
            lambda x: tp.ExpressionReductionDescriptor.of("sum_expression", expr.operand("x"), (1,), x=("f32", (3,))),
            tp.InvalidProblem,
        ),
    ],
)
def test_refusals(call: Callable[[Tensor], Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        call(drawn(2, 3))


def test_opcheck() -> None:
    x, y = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    text = resolved(product_of, ("x0", "x1"), "tt")[0]
    for op in ("mean", "amax"):
        torch.library.opcheck(torch.ops.triplan.reduced_expression_2.default, (x, y, text, [], op, [1], False, None))


def test_compiled_and_transformed() -> None:
    x, y = drawn(3, 4), drawn(4, seed=1)

    def call(a: Tensor) -> Tensor:
        return F.reduce_expression("mean", ours, a, y, 0.3, dim=0)

    expected = torchs(x, y, 0.3).mean(0)
    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(x), expected)
    torch.testing.assert_close(torch.func.vmap(lambda a: call(a[None]), 0)(x), torchs(x, y, 0.3))
    functions: list[Any] = [call, lambda a: torchs(a, y, 0.3).mean(0)]
    torch.testing.assert_close(*(torch.func.jvp(f, (x,), (torch.ones_like(x),)) for f in functions))


# --- plans ---

X, Y, Z = map(expr.operand, "xyz")
#: By name: the expression, and the elements of its operands.
ROOTS: dict[str, tuple[tp.Expr, dict[str, str]]] = {
    "squares": (expr.square(X - Y), {"x": "bf16", "y": "bf16"}),
    "cancelling": (expr.exp(X) - expr.exp(Y), {"x": "f32", "y": "bf16"}),
    "a number": (expr.where(X > Y, X, Z * expr.silu(X)), {"x": "f16", "y": "f32", "z": "f32"}),
    "counted": (expr.exp(X) > Y, {"x": "f32", "y": "f32"}),
    "in f64": (expr.abs(X - Y) / (Y + 3.0), {"x": "f64", "y": "f32"}),
}
#: (shape, axes, shape of y): rows and columns of one and of several chunks, axes apart, broadcast operands.
GEOMETRIES: tuple[Any, ...] = (
    ((5, 300), (1,), (5, 300)),
    ((5, 300), (1,), (300,)),
    ((5, 300), (1,), (5, 1)),
    ((300, 40), (0,), (300, 1)),
    ((300, 40), (0,), (40,)),
    ((3, 5, 7), (0, 2), (5, 1)),
    ((3, 700, 17), (1,), (3, 700, 17)),
    ((7, 12, 18), (1,), (12, 18)),
    ((1, 40_000), (1,), (1, 40_000)),
    ((300, 200), (0, 1), (200,)),
    ((6000, 9), (0,), ()),
    ((4, 6), (), (4, 6)),
)


def described(op: str, root: str, shape: Any, axes: Any, other: Any, **layouts: Any) -> Any:
    tree, elements = ROOTS[root]
    shapes = {"x": shape, "y": other, "z": None}
    specs = {name: (element, shapes[name]) for name, element in elements.items()}
    return tp.ExpressionReductionDescriptor.of(op, tree, axes, **specs).replace(layouts=layouts)


def reduced(root: str) -> tuple[str, ...]:
    return ("sum_expression", "amax_expression") if root == "counted" else tp.ExpressionReductionDescriptor.ops()


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("where", WHERE)
def test_every_geometry(where: str, geometry: Any, root: str) -> None:
    """Within the tolerance at values of every kind: cancelling, of the whole range, special ones."""
    if where == "interpret" and math.prod(geometry[0]) > 10_000 and root not in ("squares", "counted"):
        pytest.skip("the interpreter is slow")
    for op in reduced(root):
        desc = described(op, root, *geometry)
        assert check_plan(tp.plan(desc, target=target(where)), runs=1).compared


@pytest.mark.parametrize("where", WHERE)
def test_short_lines_of_several_points(where: str) -> None:
    for layouts in ({}, {"out": "strided"}):
        desc = described("sum_expression", "squares", (4101, 3, 8), (1,), (3, 8), **layouts)
        assert check_plan(tp.plan(desc, target=target(where)), runs=1).compared


@pytest.mark.parametrize("where", WHERE)
def test_operands_with_gaps(where: str) -> None:
    for shape, axes in (((6, 7), (0, 1)), ((9, 1, 3), (1,)), ((40, 30), (0,)), ((40, 30), (1,))):
        for layouts in ({"x": "strided"}, {"y": "strided", "out": "strided"}, {"x": tp.Layout.strided(unit_axis=0)}):
            desc = described("sum_expression", "squares", shape, axes, shape, **layouts)
            assert check_plan(tp.plan(desc, target=target(where)), runs=1).compared


@pytest.mark.parametrize("root", ROOTS)
def test_the_reference_is_within_its_own_tolerance(root: str) -> None:
    for op, geometry in product(reduced(root), GEOMETRIES[:6]):
        assert check_plan(tp.plan(described(op, root, *geometry), target=target("cpu")), runs=1).compared


def test_a_tolerance_tells_a_missing_element_apart() -> None:
    """What the running errors add to a tolerance is small beside the elements."""
    x = torch.linspace(1, 2, 300)[None]
    y = torch.zeros(1, 300)
    desc = tp.ExpressionReductionDescriptor.of(
        "sum_expression", ROOTS["cancelling"][0], (1,), x=("f32", (1, 300)), y=("f32", (1, 300))
    )
    terms = magnitudes(desc, tp.ExpressionReductionArgs(x=x, y=y, out=torch.empty(1)))["out"]
    tolerance = tp.plan(desc, target=H200).precision_guarantee().tolerance
    assert float(terms * tolerance.ctol) < 1e-4 * float((x.exp() - y.exp()).sum())


def test_the_length_of_a_line_decides_its_bits() -> None:
    for n in (100, 10_000, 100_000):
        plans = [
            tp.plan(described("sum_expression", "squares", (rows, n), (1,), (rows, n)), target=H200)
            for rows in (1, 40_000)
        ]
        few, many = (plan.sku() for plan in plans)
        assert (few.kernel, few.numerics_id) == (many.kernel, many.numerics_id)
        assert all(plan.precision_guarantee().batch_invariant for plan in plans)
    shared = tp.plan(described("sum_expression", "squares", (8, 300), (1,), (300,)), target=H200)
    assert not shared.precision_guarantee().batch_invariant


@pytest.mark.parametrize("op", ["sum", "sum_expression"])
def test_equal_numerics_are_one_binary(op: str) -> None:
    """Which elements a thread loads together decides the order of sums."""
    binaries: dict[str, set[Any]] = {}
    unit = tp.Layout.strided(unit_axis=1, alignment=16)
    layouts = [tp.Layout(alignment=a) for a in (16, 4)] + [unit, unit.model_copy(update={"stride_multiple": 4})]
    for layout, n, entry in product(layouts, (200, 30_001), tp.TABLE.rows(op)):
        found = set()
        for lanes in (1, 62, 63, 64):
            desc: tp.Descriptor = tp.ReduceDescriptor(
                op="sum", element="f32", input_shape=(lanes, n), reduce_axes=(1,), layouts={"x": layout}
            )
            if op == "sum_expression":
                desc = described(op, "squares", (lanes, n), (1,), (lanes, n), x=layout)
            if entry.backend is tp.BackendKind.TRITON and entry.supports(desc, H200):
                numerics = entry.numerics(desc)
                assert numerics is not None
                found.add(numerics)
                sources = tuple(launch.source() for launch in entry.launches(desc, H200))
                binaries.setdefault(numerics, set()).add(sources)
        assert len(found) <= 1
    assert len(binaries) >= 6
    assert all(len(sources) == 1 for sources in binaries.values())


def test_a_loss_is_one_pass() -> None:
    """Two operands of 2**28 elements: the only memory besides them is one sum of each chunk."""
    desc = described("mean_expression", "squares", (2**14, 2**14), (0, 1), (2**14, 2**14))
    plan = tp.plan(desc, target=H200)
    assert (plan.sku().kernel, plan.workspace_size()) == ("split", 4 * 16_384)
