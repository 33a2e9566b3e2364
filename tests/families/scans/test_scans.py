"""Cumulative sums and products: torch's rules for dtypes and layouts, zeros, reversed scans, long rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import H200, WHERE
from cases.rows import PLACES
from proofs import target
from samples import SetConstant

import triplan as tp
import triplan.functional as F  # noqa: N812
from triplan.backends.triton.scans import rows, shared, split
from triplan.testing import check_plan

FUNCTIONS = ("cumsum", "cumprod")
LAYOUTS = {
    "packed": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "every other": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(4, -1, -1),
    "scalar": lambda x: x[0, 0, 0],
    "empty": lambda x: x[:, :0],
    "nine axes": lambda x: x[(None,) * 6],
}
#: (of the input, asked for)
DTYPES = [(d, None) for d in (torch.float16, torch.bfloat16, torch.float64, torch.bool, torch.uint8, torch.int32)]
DTYPES += [(torch.float16, torch.float32), (torch.float64, torch.int16), (torch.int64, torch.int8)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_layout_and_axis(name: str, layout: str) -> None:
    x = LAYOUTS[layout](torch.linspace(-1.5, 1.5, 4 * 5 * 6, dtype=torch.float64).reshape(4, 5, 6))
    for dim in range(-max(x.dim(), 1), max(x.dim(), 1)):
        torch.testing.assert_close(getattr(F, name)(x, dim), getattr(torch, name)(x, dim))


@pytest.mark.parametrize(("dtype", "wanted"), DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_dtypes(name: str, dtype: torch.dtype, wanted: torch.dtype | None) -> None:
    x = torch.tensor([[3, 1, -2, 1, 0, 2], [1, 2, 3, 1, 2, 1]]).abs().to(dtype)
    got, expected = (getattr(module, name)(x, 1, dtype=wanted) for module in (F, torch))
    torch.testing.assert_close(got, expected)
    out = torch.empty_like(expected)
    assert getattr(F, name)(x, 1, out=out) is out
    torch.testing.assert_close(out, expected)


def test_integers_wrap() -> None:
    x = torch.full((3,), 2**62)
    assert torch.equal(F.cumsum(x, 0), torch.cumsum(x, 0))


@pytest.mark.parametrize("zeros", [[], [2], [0], [5], [1, 4], [0, 1, 2, 3, 4, 5]])
def test_gradients_of_products_with_zeros(zeros: list[int]) -> None:
    x = torch.tensor([1.5, -2.0, 0.5, 3.0, -1.0, 0.25], dtype=torch.float64)
    x[zeros] = 0
    g = torch.linspace(1, 2, 6, dtype=torch.float64)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    F.cumprod(ours, 0).backward(g)
    torch.cumprod(theirs, 0).backward(g)
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize(("name", "args"), [("cumsum", (1, True)), ("cumprod", (1,)), ("cumprod_backward", (1,))])
def test_opcheck(name: str, args: tuple[Any, ...]) -> None:
    tensors = [torch.randn(3, 4, requires_grad=True) for _ in range(3 if name == "cumprod_backward" else 1)]
    torch.library.opcheck(getattr(torch.ops.triplan, name).default, (*tensors, *args))


@pytest.mark.parametrize(
    ("x", "options", "error"),
    [
        (torch.zeros(2, 3), {"dim": 2}, IndexError),
        (torch.zeros(2, 3, dtype=torch.complex64), {"dim": 0}, RuntimeError),
        (torch.zeros(2, 3), {"dim": 0, "out": torch.zeros(2, 3, requires_grad=True)}, RuntimeError),
    ],
)
def test_refusals(x: torch.Tensor, options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        F.cumsum(x, **options)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("where", "kernel"), PLACES)
def test_kernels(where: str, kernel: str | None, axis: int) -> None:
    """Rows of several blocks, along both axes and from both ends, of any strides. (The proofs have packed rows.)"""
    lengths = {None: 100, "rows": 100, "looped": 5000, "split": 13_000}
    cases = [("cumsum", True, "packed"), ("cumsum", False, "strided"), ("cumprod_backward", False, "packed")]
    for op, reverse, layout in cases:
        n = min(lengths[kernel], 2200 if op == "cumprod_backward" else 13_000)
        options: dict[str, Any] = {"reverse": True} if reverse else {}
        shape = (n, 3) if axis == 0 else (3, n)
        desc = tp.descriptor_types()[op](op=op, input_shape=shape, scan_axis=axis, element="f32", **options)
        desc = desc.replace(layouts={o.name: layout for o in desc.operands()})
        plan = tp.plan(desc, target=target(where), preference=tp.PlanPreference(kernel=kernel))
        assert check_plan(plan, runs=1, passes=("unit",)).compared


@pytest.mark.parametrize("element", ["f32", "bf16", "f64"])
@pytest.mark.parametrize(("where", "kernel"), PLACES)
def test_rows_that_begin_anywhere(where: str, kernel: str | None, element: str) -> None:
    """A thread has neighbours of such a row, one by one; also where the results of neighbouring rows are adjacent."""
    shapes = {None: (3, 301), "rows": (3, 301), "looped": (3, 5001), "split": (2, 9001)}
    desc = tp.ScanDescriptor(op="cumsum", input_shape=shapes[kernel], scan_axis=1, element=element)
    crossed = desc.replace(input_shape=(2100, 301), layouts={"out": tp.Layout.strided(unit_axis=0)})
    few = {"f32": 9, "bf16": 17, "f64": 8}[element]  # of which a tile has 16, 32 or 8
    pages = desc.replace(input_shape=(128, few, 301), scan_axis=2, layouts={"out": tp.Layout.strided(unit_axis=1)})
    for one in (desc, desc.replace(reverse=True), *([crossed, pages] if kernel == "looped" else [])):
        plan = tp.plan(one, target=target(where), preference=tp.PlanPreference(kernel=kernel))
        if kernel == "looped":
            constants = plan.launches[0].constexprs
            assert constants["GROUP"] == (2 if element == "f64" else 4)
            assert constants["ROWS"] > 1 or one is not pages
        assert check_plan(plan, runs=1, passes=("unit",)).compared


@pytest.mark.parametrize(("element", "lanes"), [("f16", 40), ("bf16", 37), ("f32", 2), ("f64", 8), ("i64", 5)])
@pytest.mark.parametrize(("op", "reverse"), [("cumsum", True), ("cumprod", False)])
@pytest.mark.parametrize("where", WHERE)
def test_rows_side_by_side_are_scanned_in_runs(where: str, op: Any, reverse: bool, element: Any, lanes: int) -> None:
    """Of one block, of which runs or the last run are not whole, and of several, the next of which is loaded ahead."""
    desc = tp.ScanDescriptor(op=op, input_shape=(2, 5, lanes), scan_axis=1, element=element, reverse=reverse)
    block = tp.plan(desc.replace(input_shape=(2, 8193, lanes)), target=target(where), kernel="looped").launches[0]
    for n in (5, 2 * block.constexprs["RUNS"] * block.constexprs["RUN"] + 9):
        plan = tp.plan(desc.replace(input_shape=(2, n, lanes)), target=target(where), kernel="looped")
        assert plan.launches[0].constexprs["AHEAD"] == (n > 5)
        assert check_plan(plan, runs=1, passes=("unit",)).compared


@pytest.mark.parametrize(("element", "n"), [("bf16", 9), ("f32", 3), ("f64", 8), ("i64", 5)])
@pytest.mark.parametrize("where", WHERE)
def test_many_short_rows_side_by_side(where: str, element: str, n: int, constant: SetConstant) -> None:
    """Tiles of 128 rows, at two outer points; longer rows, or fewer, have as many a tile as sectors have elements."""
    constant(rows, "ENOUGH", 4)
    desc = tp.ScanDescriptor(op="cumprod", input_shape=(2, n, 259), scan_axis=1, element=element, reverse=n == 3)
    plan = tp.plan(desc, target=target(where), kernel="rows")
    assert plan.launches[0].constexprs["ROWS"] == 128
    assert check_plan(plan, runs=1, passes=("unit",)).compared
    for shape in ((2, n, 255), (2, 33, 259)):
        fewer = tp.plan(desc.replace(input_shape=shape), target=target(where), kernel="rows")
        assert fewer.launches[0].constexprs["ROWS"] < 128


@pytest.mark.parametrize("n", [1, 32, 33, 1101])
@pytest.mark.parametrize("where", WHERE)
def test_gradients_of_products_are_carried_in_several_steps(where: str, n: int, constant: SetConstant) -> None:
    """From block to block of a divided row, also where a factor is 0; and rows of one block."""
    constant(shared, "MOST", 64)
    x = torch.linspace(0.9, 1.1, 2 * n).reshape(2, n)
    x[0, n // 2] = x[0, -1] = x[1, 0] = 0
    desc = tp.CumprodBackwardDescriptor(input_shape=(2, n), scan_axis=1, element="f32")
    plan = tp.plan(desc, target=target(where), kernel="split")
    tile, carried = (plan.launches[i].constexprs["BLOCK"] for i in (0, 1))
    assert -(-n // tile) > carried or n < 1101
    assert check_plan(plan, runs=1, given={"x": x, "out": x.cumprod(1)}, passes=("unit",)).compared


@pytest.mark.parametrize("n", [5000, 5001, 5004])
@pytest.mark.parametrize("where", WHERE)
def test_rows_that_begin_between_vectors_of_results(where: str, n: int) -> None:
    """Results that are stored in whole vectors decide which thread has what; those in parts of vectors decide nothing,
    as each element is stored by itself."""
    desc = tp.ScanDescriptor(op="cumprod", input_shape=(3, n), scan_axis=1, element="f16")
    aligned = tp.Layout.strided(unit_axis=1, alignment=16, stride_multiple=8)
    desc = desc.replace(layouts={"x": tp.Layout(alignment=2), "out": aligned})
    plan = tp.plan(desc, target=target(where), kernel="looped")
    launch = plan.launches[0]
    assert (launch.constexprs["GROUP"], launch.args["out"].alignment) == ((1, 16) if n == 5000 else (4, 2))
    assert check_plan(plan, runs=1, passes=("unit",)).compared


@pytest.mark.parametrize(("x", "out"), [("unit", "strided"), ("strided", "unit")])
@pytest.mark.parametrize("where", WHERE)
def test_gaps_beside_adjacent_rows(where: str, x: str, out: str) -> None:
    """Of rows that are adjacent in one operand alone: consecutive threads access a row's elements in the other."""
    kinds: dict[str, Any] = {"unit": tp.Layout.strided(unit_axis=0), "strided": "strided"}
    for op, reverse in (("cumsum", False), ("cumprod", True)):
        desc = tp.ScanDescriptor(op=op, input_shape=(2100, 301), scan_axis=1, element="f32", reverse=reverse)
        desc = desc.replace(layouts={"x": kinds[x], "out": kinds[out]})
        plan = tp.plan(desc, target=target(where), kernel="looped")
        assert plan.launches[0].constexprs["ROWS"] > 1
        strides = plan.launches[0].args["out_strides" if out == "strided" else "x_strides"]
        assert strides[3] is not None
        assert check_plan(plan, runs=1, passes=("unit",)).compared


@pytest.mark.parametrize(("op", "element", "reverse"), [("cumsum", "i64", False), ("cumprod", "f32", True)])
@pytest.mark.parametrize("where", WHERE)
def test_few_long_rows_whose_results_lie_across(where: str, op: Any, element: Any, reverse: bool) -> None:
    for shape in ((2, 11, 8301), (1, 9, 8448)):
        desc = tp.ScanDescriptor(op=op, input_shape=shape, scan_axis=2, element=element, reverse=reverse)
        desc = desc.replace(layouts={"out": tp.Layout.strided(unit_axis=1)})
        plan = tp.plan(desc, target=target(where), kernel="split")
        assert plan.launches[0].constexprs["ROWS"] == plan.launches[-1].constexprs["ROWS"] > 1
        assert check_plan(plan, runs=1, passes=("unit",)).compared


@pytest.mark.parametrize(("op", "element", "reverse"), [("cumsum", "f32", True), ("cumprod", "i64", False)])
@pytest.mark.parametrize("where", WHERE)
def test_many_totals_are_scanned_by_a_launch(
    where: str, op: Any, element: Any, reverse: bool, constant: SetConstant
) -> None:
    for most, launches in ((split.MERGED, 2), (0, 3)):
        constant(split, "MERGED", most)
        desc = tp.ScanDescriptor(op=op, input_shape=(2, 13000), scan_axis=1, element=element, reverse=reverse)
        plan = tp.plan(desc, target=target(where), kernel="split")
        assert len(plan.launches) == launches
        assert check_plan(plan, runs=1, passes=("unit",)).compared


def test_the_same_element_of_the_same_row_whatever_the_batch() -> None:
    strict = tp.PlanPreference(batch_invariant=True)
    for n in (100, 10_000, 100_000):
        of = [
            tp.ScanDescriptor(op="cumsum", input_shape=(rows, n), scan_axis=1, element="bf16") for rows in (1, 40_000)
        ]
        few, many = (tp.plan(desc, target=H200, preference=strict).sku() for desc in of)
        assert few.kernel == many.kernel
        assert few.numerics_id == many.numerics_id


def test_few_long_rows_are_divided() -> None:
    """(1, 2**28): a program for each block; the workspace is one element a block."""
    plan = tp.plan(tp.ScanDescriptor(op="cumsum", input_shape=(1, 2**28), scan_axis=1, element="f32"), target=H200)
    assert plan.sku().kernel == "split"
    assert plan.workspace_size() == 4 * 2**28 // 4096
    assert [launch.grid for launch in plan.launches] == [2**16, 1, 2**16]


def test_rows_whose_elements_lie_in_sectors_of_their_own_are_scanned_beside_each_other() -> None:
    """Of an operand with gaps in all directions, too, neighbours along the last axis share a sector."""
    desc = tp.ScanDescriptor(op="cumsum", input_shape=(2048, 64, 7551), scan_axis=0, element="bf16")
    desc = desc.replace(layouts={"out": tp.Layout.strided(stride_multiple=2)})
    assert tp.plan(desc, target=H200).sku().kernel == "looped"
