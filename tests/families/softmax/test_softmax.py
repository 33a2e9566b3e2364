"""softmax and log_softmax: special values, long rows. (Functional calls compare the reference with torch.)"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from cases import H200, WHERE, compiles
from cases.rows import PLACES, SPECIAL, build, reads_within_operands, run
from proofs import target
from proofs.softmax import OPS

import triplan as tp
from triplan.backends.runtime.launch import Int
from triplan.backends.triton.common import rows_entries
from triplan.descriptors import Layout
from triplan.testing import check_plan

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what the hardware does silently


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize(("where", "kernel"), PLACES)
def test_infinities_and_nan_as_in_torch(where: str, kernel: str | None, op: str, name: str) -> None:
    plan = tp.plan(build(op, (2, 4)), target=target(where), preference=tp.PlanPreference(kernel=kernel))
    x = torch.tensor([SPECIAL[name], [0.0, 1.0, 2.0, 3.0]], device=plan.target.device_type)
    args: Any = plan.args_type(x=x, out=torch.empty_like(x))
    run(plan, args)
    torch.testing.assert_close(args.out, getattr(torch, op)(x, 1), equal_nan=True)


@pytest.mark.parametrize("n", [9, 33, 65, 127, 129, 705])
@pytest.mark.parametrize("op", ["softmax", "log_softmax", "softmax_backward", "log_softmax_backward"])
@pytest.mark.parametrize("where", WHERE)
def test_parts_of_rows_that_begin_anywhere(where: str, op: str, n: int) -> None:
    """Five to eight parts of a power of two, of which the last one is not whole."""
    plan = tp.plan(build(op, (9, n)), target=target(where), preference=tp.PlanPreference(kernel="rows"))
    assert check_plan(plan, runs=1 if where == "interpret" else 2).compared


@pytest.mark.parametrize(
    ("element", "n", "gaps", "part"),
    [
        ("f16", 9, True, 4),
        ("f16", 13, False, 8),
        ("f16", 21, True, 8),
        ("f16", 25, False, 16),
        ("f16", 33, True, 8),
        ("f16", 63, False, 16),
        ("bf16", 23, False, 8),
        ("f32", 9, False, 4),
        ("f32", 19, True, 8),
        ("f32", 31, False, 16),
        ("f32", 129, False, 32),
        ("f64", 9, False, 4),
        ("f64", 31, False, 8),
        ("f64", 63, True, 8),
        ("f64", 65, False, 16),
    ],
)
@pytest.mark.parametrize("op", ["softmax", "log_softmax_backward"])
@pytest.mark.parametrize("where", WHERE)
def test_parts_of_short_rows(where: str, op: str, element: str, n: int, gaps: bool, part: int) -> None:
    """Parts are as long as they may be while few lanes are idle."""
    desc = build(op, (9, n), element=element)
    if gaps:
        desc = desc.replace(layouts={o.name: Layout.strided(unit_axis=1) for o in desc.operands()})
    plan = tp.plan(desc, target=target(where), kernel="rows")
    assert plan.launches[0].constexprs["BLOCK"] == part
    assert check_plan(plan, runs=1 if where == "interpret" else 2).compared


def test_odd_rows_that_are_not_read_by_vectors_are_split() -> None:
    """By ``bench/results``: where ``x`` is not aligned, a loop is bound by the loads of its elements."""
    desc = build("softmax", (2862, 50257), element="bf16").replace(layouts={"x": Layout(alignment=2)})
    assert tp.plan(desc, target=tp.Target.preset("h200")).sku().kernel == "split"


@pytest.mark.parametrize(
    ("op", "element", "shape", "axis", "across", "kernel"),
    [
        ("softmax_backward", "bf16", (18567, 4608), 1, "", "rows"),  # few lanes idle
        ("log_softmax_backward", "f32", (23, 12288), 1, "", "rows"),  # programs alone
        ("log_softmax", "f64", (1023, 8192), 1, "", "split"),  # exponentials
        ("softmax_backward", "f64", (1600, 12091), 0, "", "looped"),  # none
        ("softmax", "f16", (524272, 1024), 1, "out", "looped"),  # by vectors
    ],
)
def test_choices(op: str, element: str, shape: tuple[int, int], axis: int, across: str, kernel: str) -> None:
    """By measurements of ``bench/results``."""
    desc = build(op, shape, element=element).replace(softmax_axis=axis)
    if across:
        desc = desc.replace(layouts={across: Layout.strided(unit_axis=0, stride_multiple=8, alignment=16)})
    assert tp.plan(desc, target=tp.Target.preset("h200")).sku().kernel == kernel


@pytest.mark.parametrize(("rows", "kernel"), [(4, "looped"), (3000, "rows")])
def test_few_rows_are_not_exchanged_in_a_tile_of_many(rows: int, kernel: str) -> None:
    desc = build("softmax_backward", (rows, 118), element="f32")
    desc = desc.replace(layouts={"dx": Layout.strided(unit_axis=0)})
    assert tp.plan(desc, target=tp.Target.preset("h200")).sku().kernel == kernel


@pytest.mark.parametrize("n", [8193, 16383, 17002])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("where", WHERE)
def test_long_rows_between_vectors_are_read_by_vectors(where: str, op: str, n: int) -> None:
    """From each of a vector's elements on; with elements of the first and last vector alone, and with neither."""
    plan = tp.plan(build(op, (9, n), element="f16"), target=target(where), kernel="looped")
    assert "shifted" in plan.launches[0].kernel.__name__
    assert check_plan(plan, runs=1 if where == "interpret" else 2).compared


@pytest.mark.interpret
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("op", OPS)
def test_vectors_do_not_reach_behind_the_last_row(op: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tp.plan(build(op, (rows, 8193), element="f16"), target=target("interpret"), kernel="looped")
    assert "shifted" in plan.launches[0].kernel.__name__
    assert reads_within_operands(plan, monkeypatch)


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("where", WHERE)
def test_bits_do_not_depend_on_where_a_row_begins(where: str, op: str) -> None:
    """Equal rows, that begin at each element of a vector."""
    n = 8193
    plan = tp.plan(build(op, (9, n), element="f16"), target=target(where), kernel="looped")
    assert "shifted" in plan.launches[0].kernel.__name__
    x = torch.randn(1, n, generator=torch.Generator().manual_seed(0)).half().expand(9, n)
    x = x.contiguous().to(plan.target.device_type)
    out = torch.empty_like(x)
    run(plan, tp.plan_type(op).args_type(x=x, out=out))
    assert torch.equal(out, out[:1].expand(9, n))


@pytest.mark.parametrize("shape", [(41, 7, 6), (11, 7, 200), (9, 7, 600)])
@pytest.mark.parametrize("op", ["softmax", "log_softmax_backward"])
@pytest.mark.parametrize("where", WHERE)
def test_rows_among_others_are_numbered_row_major(where: str, op: str, shape: tuple[int, int, int]) -> None:
    """Programs of 128 rows at many outer points, of four rows, and of one."""
    desc = build(op, shape, element="f16")
    layouts = {o.name: Layout.strided(unit_axis=1 if o.name == "out" else 2) for o in desc.operands()}
    plan = tp.plan(desc.replace(layouts=layouts), target=target(where), kernel="rows")
    launch, rows = plan.launches[0], shape[0] * shape[1]
    assert launch.args["blocks"] is None
    assert launch.grid == -(-rows // launch.constexprs["ROWS"])
    assert check_plan(plan, runs=1 if where == "interpret" else 2).compared


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("op", ["softmax", "log_softmax_backward"])
@pytest.mark.parametrize("where", WHERE)
def test_short_rows_of_few_neighbours_are_numbered_row_major(where: str, op: str, turned: bool) -> None:
    """Three programs of rows that are adjacent in all operands, or not in the result."""
    desc = build(op, (41, 16, 3) if turned else (41, 3, 16), axis=2 if turned else 1, element="f16")
    if turned:
        written = desc.operands()[-1].name
        layouts = {o.name: Layout.strided(unit_axis=2 if o.name == written else 1) for o in desc.operands()}
        desc = desc.replace(layouts=layouts)
    plan = tp.plan(desc, target=target(where), kernel="rows")
    assert plan.launches[0].args["blocks"] is None
    assert plan.launches[0].grid == 3
    assert check_plan(plan, runs=1 if where == "interpret" else 2).compared


@pytest.mark.parametrize("kernel", ["rows", "looped"])
@pytest.mark.parametrize("op", ["softmax", "log_softmax_backward"])
@pytest.mark.parametrize("where", WHERE)
def test_few_neighbours_have_a_small_tile(where: str, op: str, kernel: str) -> None:
    desc = build(op, (3, 700, 5), axis=1, element="f16")
    plan = tp.plan(desc, target=target(where), preference=tp.PlanPreference(kernel=kernel))
    assert plan.launches[0].constexprs["ROWS"] == 8
    assert check_plan(plan, runs=1 if where == "interpret" else 2).compared


@pytest.mark.parametrize(("lanes", "rows"), [(5, 8), (3, 1)])
@pytest.mark.parametrize("op", ["softmax", "log_softmax_backward"])
@pytest.mark.parametrize("where", WHERE)
def test_few_long_neighbours_are_divided_together(where: str, op: str, lanes: int, rows: int) -> None:
    """If they fill half a sector where one operand has them side by side."""
    desc = build(op, (2, lanes, 4099), axis=2, element="f32")
    (written,) = (o.name for o in desc.operands() if o.is_written)
    desc = desc.replace(layouts={written: Layout.strided(unit_axis=1)})
    plan = tp.plan(desc, target=target(where), preference=tp.PlanPreference(kernel="split"))
    assert plan.launches[-1].constexprs["ROWS"] == rows
    assert check_plan(plan, runs=1 if where == "interpret" else 2).compared


@pytest.mark.parametrize(("n", "lanes", "rows", "warps"), [(2, 1400, 1024, 4), (8, 704, 256, 1), (8, 701, 256, 4)])
@pytest.mark.parametrize("op", ["softmax", "log_softmax_backward"])
@pytest.mark.parametrize("where", WHERE)
def test_threads_have_whole_short_rows_side_by_side(
    where: str, op: str, n: int, lanes: int, rows: int, warps: int
) -> None:
    """A vector of neighbours each, or where no vectors are loaded rows by themselves."""
    plan = tp.plan(
        build(op, (2, n, lanes), 1, "f16"), target=target(where), preference=tp.PlanPreference(kernel="rows")
    )
    launch = plan.launches[0]
    assert (launch.constexprs["ROWS"], launch.num_warps) == (rows, warps)
    assert check_plan(plan, runs=1 if where == "interpret" else 2).compared


def test_rows_of_one_element_are_not_known_adjacent_where_no_vectors_are_loaded() -> None:
    """Threads would have eight neighbours each, and load them one by one."""

    def step(count: int) -> object:
        desc = build("softmax", (1, count), 0, "f16")
        return rows_entries.rows_of(desc).strides(desc.operands()[0], turns=False)[1]

    assert step(4096) is None
    assert step(4097) == Int(1)


def test_rows_of_a_program_lie_where_most_neighbours_are_adjacent() -> None:
    shape = (300, 64, 20, 5)
    inner, outer = Layout.strided(unit_axis=3), Layout.strided(unit_axis=0)

    def lanes(x: Layout, out: Layout) -> int:
        return rows_entries.rows_of(build("softmax", shape, 1).replace(layouts={"x": x, "out": out})).lanes

    assert lanes(inner, inner) == 5  # few, but adjacent in all operands
    assert lanes(inner, Layout.strided()) == 300  # in one alone: the longest
    assert lanes(Layout.strided(unit_axis=2), Layout.strided()) == 20
    assert lanes(inner, outer) == 300


def test_long_rows_have_the_same_bits_in_few_and_many() -> None:
    strict = tp.PlanPreference(batch_invariant=True)
    few, many = (tp.plan(build("softmax", (n, 65536)), target=H200, preference=strict) for n in (2, 65536))
    assert few.sku().numerics_id == many.sku().numerics_id


@pytest.mark.parametrize("kernel", ["looped", "split"])
def test_rows_of_no_elements_need_no_grid(kernel: str) -> None:
    preference = tp.PlanPreference(kernel=kernel)
    assert tp.plan(build("softmax", (2**40, 0)), target=H200, preference=preference).launches == ()


@pytest.mark.gpu
def test_rows_past_two_to_the_31st() -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    x = torch.zeros(2**17 + 3, 2**14 + 8, dtype=torch.bfloat16, device="cuda")
    x[-1, 5] = 8.0
    out = torch.empty_like(x)
    plan = tp.plan(tp.SoftmaxDescriptor.from_args(tp.SoftmaxArgs(x, out), softmax_axis=1))
    run(plan, tp.SoftmaxArgs(x, out))
    torch.testing.assert_close(out[-2:], torch.softmax(x[-2:], 1))


@compiles
@pytest.mark.parametrize(("n", "kernel"), [(128, "rows"), (8192, "looped")])
@pytest.mark.parametrize(("op", "turned"), [("softmax", "x"), ("softmax_backward", "dout")])
def test_operands_that_lie_in_two_ways_have_vectors(op: str, turned: str, n: int, kernel: str) -> None:
    """Also of an odd number of rows."""
    desc = build(op, (7709, n)).replace(layouts={turned: tp.Layout(kind="strided", alignment=16, unit_axis=0)})
    (record,) = tp.plan(desc, target=H200, preference=tp.PlanPreference(kernel=kernel)).compile()
    assert re.search(r"st\.global\S*\.v[24]\.b32", record.ptx)
