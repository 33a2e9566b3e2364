"""Operands with a contiguous axis that are not packed: which dimensions tiles have, what they compute, and pairs."""

from __future__ import annotations

import re
from typing import Any

import proofs
import pytest
import torch
from cases import H200, INTERPRETER, WHERE, compiles, pinned
from cases.indexing import build
from proofs import target

import triplan as tp
from triplan.backends.triton.indexing import geometry as geometries, tiles, traversals, traversals_kernels as kernels
from triplan.backends.triton.indexing.geometry import geometry
from triplan.backends.triton.indexing.points import ADD, GATHER, JOINED
from triplan.backends.triton.indexing.tiles import Plane, plane
from triplan.testing import check_plan

#: Op, the kernel that walks its points, element, shape of the dense side, axis, extent.
CASES: list[tuple[str, str, str, tuple[int, ...], int, int]] = [
    ("gather", "elements", "i16", (30, 30), 0, 5),
    ("gather", "elements", "f32", (2, 30, 30), 1, 5),
    ("index_select", "elements", "u8", (30, 30), 1, 20),
    ("scatter", "elements", "f32", (30, 30), 1, 20),
    ("index_put", "elements", "f16", (30, 30), 1, 5),
    ("scatter_add", "atomic_elements", "f16", (30, 30), 1, 19),
    ("gather_backward", "atomic_elements", "f32", (2, 30, 30), 2, 19),
    ("index_add", "atomic_elements", "f16", (30, 30), 0, 17),
    ("index_add", "fixed_scaled", "f32", (30, 30), 0, 5),
    ("embedding_backward", "atomic_elements", "f16", (3, 10, 30), 1, 19),
    ("scatter_prod", "atomic_reduce", "i32", (30, 30), 0, 31),  # more places than factors: few meet
    ("scatter_amax", "atomic_reduce", "f16", (30, 30), 1, 3),
    ("scatter_amin", "atomic_reduce", "f64", (30, 30), 1, 3),
]
#: Contributions to rows of the table that are shorter than a vector, as above; they lie across these.
SHORT: list[tuple[str, str, str, tuple[int, ...], int, int]] = [
    ("index_add", "atomic_elements", "f16", (50, 12), 0, 7),
    ("index_add", "atomic_elements", "f16", (50, 5), 0, 7),
    ("embedding_backward", "atomic_elements", "f32", (50, 6), 0, 7),
    ("index_add", "atomic_elements", "i64", (3, 50, 4), 1, 7),
]


def with_units(desc: Any, dense: int, table: int) -> Any:
    """``desc`` with operands that are contiguous along these of their axes, counted from the last, and nothing else."""
    g = geometry(desc)
    units = {g.dense.name: len(g.dense.shape) - 1 - dense, g.table.name: len(g.table.shape) - 1 - table}
    return desc.replace(layouts={name: tp.Layout.strided(unit_axis=max(axis, 0)) for name, axis in units.items()})


def problem(case: int, dense: int, table: int) -> Any:
    op, _, element, shape, axis, extent = CASES[case]
    # index_put stores; gather_backward fills the table with zeros first.
    options = {"accumulate": False} if op in ("index_put", "gather_backward") else {}
    return with_units(build(op, shape, axis, extent, element=element, **options), dense, table)


def check(case: int, dense: int, table: int, target: tp.Target) -> None:
    plan = pinned(problem(case, dense, table), CASES[case][1], target)
    assert plan is not None
    assert any(launch.kernel is kernels.tiles_kernel for launch in plan.launches)
    check_plan(plan, seed=case)


UNITS = [(0, 0), (0, 1), (1, 0)]


@pytest.mark.interpret
@pytest.mark.parametrize(("dense", "table"), UNITS)
@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_tiles_in_the_interpreter(case: int, dense: int, table: int) -> None:
    check(case, dense, table, INTERPRETER)


@pytest.mark.gpu
@pytest.mark.parametrize(("dense", "table"), UNITS)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_tiles_on_the_gpu(case: int, dense: int, table: int) -> None:
    check(case, dense, table, tp.Target.current())


@pytest.mark.parametrize("where", [pytest.param(w, marks=getattr(pytest.mark, w)) for w in ("interpret", "gpu")])
@pytest.mark.parametrize("case", range(len(SHORT)))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_tiles_are_turned_for_short_rows_of_the_table(case: int, where: str) -> None:
    """Additions to one row meet in a sector."""
    op, entry, element, shape, axis, extent = SHORT[case]
    desc = build(op, shape, axis, extent, element=element)
    across = tp.Layout.strided(unit_axis=axis)
    plan = pinned(desc.replace(layouts={geometry(desc).dense.name: across}), entry, proofs.target(where))
    assert plan is not None
    assert plane(geometry(plan.descriptor), ADD) == Plane(axis, len(shape) - 1, turned=True)
    assert plan.launches[-1].kernel is kernels.tiles_kernel
    check_plan(plan, seed=case)


@pytest.mark.interpret
@pytest.mark.parametrize(("op", "entry"), [("index_add", "atomic_elements"), ("index_put", "elements")])
def test_tiles_are_turned_for_rows_of_every_second_column(op: str, entry: str) -> None:
    """The table is contiguous along no axis: a row still lies in few sectors."""
    desc = build(op, (50, 12), 0, 7, element="f32")
    g = geometry(desc)
    layouts = {g.dense.name: tp.Layout.strided(unit_axis=0), g.table.name: tp.Layout.strided(stride_multiple=2)}
    plan = pinned(desc.replace(layouts=layouts), entry, INTERPRETER)
    assert plan is not None
    assert plane(geometry(plan.descriptor), ADD) == Plane(0, len(g.sizes) - 1, turned=True)
    check_plan(plan, seed=1)


def test_one_column_turns_no_tile() -> None:
    desc = build("index_add", (50, 3), 0, 7, element="f32")
    assert plane(geometry(desc.replace(layouts={"src": tp.Layout.strided(unit_axis=0)})), ADD) == Plane(1, 0, False)


STRIPES = [i for i, (op, *_, axis, _) in enumerate(CASES) if op == "gather" or (op == "scatter_prod" and axis == 0)]


def stripes(plan: tp.Plan[Any, Any]) -> set[bool]:
    return {launch.constexprs["STRIPED"] for launch in plan.launches if launch.kernel is kernels.tiles_kernel}


@pytest.mark.interpret
@pytest.mark.parametrize(("dense", "table"), [(0, 0), (0, 1)])
@pytest.mark.parametrize("case", STRIPES)
def test_stripes_in_the_interpreter(case: int, dense: int, table: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a table that is larger than the cache."""
    monkeypatch.setattr(tiles, "L2_SHARE", 0)
    plan = pinned(problem(case, dense, table), CASES[case][1], INTERPRETER)
    assert plan is not None
    assert stripes(plan) == {True}
    check_plan(plan, seed=case)


@pytest.mark.interpret
@pytest.mark.parametrize("share", [0, tiles.L2_SHARE])
def test_rows_of_a_stripe_share_indices_that_the_cache_does_not_hold(
    share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a table whose rows are one row in memory: no tile is turned to read it."""
    monkeypatch.setattr(tiles, "L2_SHARE", share)
    table = tp.Layout.strided(unit_axis=1, zero_axes=(0,))
    desc = build("index_select", (700, 3), 0, 7, element="f16")
    plan = pinned(desc.replace(layouts={"out": tp.Layout.strided(unit_axis=0), "src": table}), "elements", INTERPRETER)
    assert plan is not None
    assert plane(geometry(plan.descriptor), GATHER) == Plane(1, 0, turned=False)
    assert stripes(plan) == {share == 0}
    check_plan(plan, seed=1)


@pytest.mark.parametrize("where", [pytest.param(w, marks=getattr(pytest.mark, w)) for w in ("interpret", "gpu")])
@pytest.mark.parametrize(("op", "entry"), [("gather", "rows"), ("scatter", "rows"), ("scatter_add", "atomic_rows")])
@pytest.mark.parametrize("share", [0, tiles.L2_SHARE])
def test_rows_are_striped_where_the_cache_does_not_hold_the_table(
    op: str, entry: str, share: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(geometries, "L2_SHARE", share)
    plan = pinned(build(op, (2, 7, 600), 1, 5, element="i32"), entry, proofs.target(where))
    assert plan is not None
    assert plan.launches[-1].constexprs["STRIPED"] is (share == 0)
    assert plan.launches[-1].constexprs["BLOCK_COLS"] < 600  # several stripes
    check_plan(plan, seed=1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "entry"), [("gather", "elements"), ("scatter", "atomic_last"), ("scatter_add", "atomic_elements")]
)
@pytest.mark.parametrize(("dense", "table"), UNITS)
def test_stripes_on_the_gpu(op: str, entry: str, dense: int, table: int) -> None:
    desc = with_units(build(op, (3, 50, 999), 1, 1500, element="f32"), dense, table)
    plan = pinned(desc, entry, tp.Target.current())
    assert plan is not None
    assert stripes(plan) == {True}
    check_plan(plan, seed=1)


@pytest.mark.parametrize(
    ("op", "dense", "table", "found"),
    [
        ("gather", 0, 0, Plane(0, 1, turned=False)),
        ("gather", 1, 0, Plane(0, 1, turned=True)),  # as the index, which is packed
        ("gather", 0, 1, Plane(0, 1, turned=False)),  # indices point along the table's contiguous axis
        ("index_select", 1, 0, Plane(1, 0, turned=True)),  # dense is written
        ("index_add", 1, 0, Plane(0, 1, turned=True)),  # the table is
        ("index_add", 1, 1, Plane(1, 0, turned=False)),
        ("scatter_add", 1, 0, Plane(0, 1, turned=True)),
    ],
)
def test_columns_are_those_of_the_index_or_of_what_is_written(op: str, dense: int, table: int, found: Plane) -> None:
    assert plane(geometry(with_units(build(op, (64, 32), 0, 9, element="f32"), dense, table)), ADD) == found


#: Shape of the factors, axis, places; and the factors of a thread.
PRODUCTS: list[tuple[tuple[int, ...], int, int, int]] = [
    ((250, 7), 0, 5, 8),
    ((3, 50, 40), 1, 4, 8),
    ((300,), 0, 4, 8),
    ((5, 40), 1, 3, 8),
    ((3, 2), 0, 1, 4),
    ((3, 40), 0, 3, 1),  # as many places as factors: few meet
]


@pytest.mark.parametrize("where", [pytest.param(w, marks=getattr(pytest.mark, w)) for w in ("interpret", "gpu")])
@pytest.mark.parametrize("units", [None, (0, 1), (1, 0)])
@pytest.mark.parametrize(("shape", "axis", "places", "factors"), PRODUCTS)
def test_factors_of_a_thread_that_meet_are_multiplied_first(
    shape: tuple[int, ...], axis: int, places: int, factors: int, units: tuple[int, int] | None, where: str
) -> None:
    desc = build("scatter_prod", shape, axis, places, element="i64" if axis else "i32")
    plan = pinned(desc if units is None else with_units(desc, *units), "atomic_reduce", proofs.target(where))
    assert plan is not None
    assert plan.launches[-1].constexprs.get("JOINED", 1) == factors
    check_plan(plan, seed=1)


def test_factors_of_one_index_surely_meet() -> None:
    """Even if there are more places."""
    index = tp.Layout.strided(zero_axes=(0,))
    desc = build("scatter_prod", (20, 40), 0, 30, element="i32").replace(layouts={"index": index})
    plan = pinned(desc, "atomic_reduce", H200)
    assert plan is not None
    assert plan.launches[-1].constexprs["JOINED"] == 8


@pytest.mark.parametrize("where", [pytest.param(w, marks=getattr(pytest.mark, w)) for w in ("interpret", "gpu")])
@pytest.mark.parametrize("spread", [5, 7])
def test_programs_that_contend_are_spread(where: str, spread: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all points, each of which is visited once."""
    monkeypatch.setattr(traversals, "SPREAD", spread)
    plan = pinned(build("scatter_prod", (32, 250), 1, 9, element="i32"), "atomic_reduce", proofs.target(where))
    assert plan is not None
    (launch,) = plan.launches
    assert launch.constexprs["SPREAD"] == spread
    assert launch.grid == {5: 65, 7: 63}[spread]  # 62 programs have points
    check_plan(plan, seed=spread)


@pytest.mark.parametrize("where", [pytest.param(w, marks=getattr(pytest.mark, w)) for w in ("interpret", "gpu")])
@pytest.mark.parametrize(
    ("held", "spread", "each", "programs"),
    [(25, 4, 8, 64), (13, 4, 6, 72), (13, 6, 4, 72), (3, 4, 1, 62), (0, 4, 1, 62)],
)
def test_programs_that_contend_are_spread_over_what_the_cache_holds(
    held: int, spread: int, each: int, programs: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over as many rows of the outer dimensions, of which the cache holds the table of ``held``, or in order."""
    monkeypatch.setattr(traversals, "SPREAD", spread)
    monkeypatch.setattr(traversals, "L2_BYTES", 0)
    monkeypatch.setattr(traversals, "L2_SHARE", held * 9 * 4)
    plan = pinned(build("scatter_prod", (32, 250), 1, 9, element="i32"), "atomic_reduce", proofs.target(where))
    assert plan is not None
    (launch,) = plan.launches
    assert launch.constexprs["SPREAD"] == (spread if each > 1 else 1)
    assert launch.grid == programs
    check_plan(plan, seed=held)


@pytest.mark.parametrize("where", [pytest.param(w, marks=getattr(pytest.mark, w)) for w in ("interpret", "gpu")])
@pytest.mark.parametrize(("op", "entry", "spread"), [("scatter", "elements", 3), ("gather", "elements", 1)])
def test_stores_are_spread(where: str, op: str, entry: str, spread: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that follow each other would store to one row of the outer dimensions."""
    monkeypatch.setattr(traversals, "FEWER", 3)
    plan = pinned(build(op, (2, 250, 3), 1, 9, element="i32"), entry, proofs.target(where))
    assert plan is not None
    assert plan.launches[-1].constexprs["SPREAD"] == spread
    check_plan(plan, seed=spread)


@pytest.mark.parametrize(("elements", "block"), [(100, 128), (67_584, 128), (67_585, 256), (135_169, 512)])
def test_small_problems_have_small_programs(elements: int, block: int) -> None:
    plan = pinned(build("gather", (elements, 1), 0, 9, element="f32"), "elements", H200)
    assert plan is not None
    assert plan.launches[-1].constexprs["BLOCK"] == block


def test_short_rows_few_columns_and_packed_operands_have_no_tiles() -> None:
    for shape in ((15, 15), (64, 20)):
        assert plane(geometry(with_units(build("gather", shape, 0, 9, element="f32"), 0, 0)), ADD) is None
    assert plane(geometry(build("gather", (64, 64), 0, 9, element="f32")), ADD) is None


# --- additions of neighbours that meet ---


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("entry", "element"),
    [("atomic_elements", "i32"), ("atomic_elements", "f16"), ("atomic_elements", "f64"), ("atomic_f32", "f16")],
)
def test_neighbours_that_meet_are_added_up_in_a_thread(entry: str, element: str, first: int, where: str) -> None:
    """Of runs of 1 to 9 equal indices, some out of bounds, nothing is lost and nothing is added twice."""
    lengths = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 9] * 6)
    index = ((53 - torch.arange(54)) * 5 % 54).repeat_interleave(lengths)[:-1]
    desc: Any = tp.ScatterAddDescriptor(src_shape=index.shape, scatter_dim=0, out_dim_size=51, element=element)
    desc = desc.replace(layouts={"out": tp.Layout(alignment=desc.element.itemsize)})
    plan = pinned(desc, entry, target(where))
    assert plan is not None
    assert min(JOINED, 16 // desc.element.itemsize) in [x.constexprs.get("JOINED") for x in plan.launches]
    device, dtype = plan.target.device_type, desc.element.torch
    src = torch.arange(len(index)) % 11 + 1
    inside = (index >= 0) & (index < 51)
    wanted = torch.zeros(51, dtype=torch.int64).index_add_(0, index[inside], src[inside])
    out = torch.zeros(52, dtype=dtype, device=device)[first:][:51]
    args = plan.args_type(out=out, index=index.to(device), src=src.to(device, dtype))
    plan.run(args, tp.Workspace.allocate(plan))
    assert torch.equal(out.cpu().long(), wanted)


# --- additions of 16-bit floats ---

#: A table without gaps, whose rows of odd length lie across memory.
TURNED = tp.Layout.strided(order=(1, 0), alignment=4)


@compiles
@pytest.mark.parametrize("element", ["f16", "bf16"])
@pytest.mark.parametrize(
    ("layout", "alone"), [(None, False), (tp.Layout(alignment=2), True), ("odd", True), (TURNED, False)]
)
def test_elements_are_added_alone_only_where_a_pair_may_lie_outside(layout: Any, alone: bool, element: str) -> None:
    """A lone 16-bit addition is a compare-and-swap loop."""
    desc: Any = build("scatter_add", (64, 32 - (layout == "odd")), 0, 9, element=element)
    if isinstance(layout, tp.Layout):
        desc = desc.replace(layouts={"out": layout})
    plan = pinned(desc, "atomic_elements", H200)
    assert plan is not None
    (record,) = plan.compile()
    assert re.search(r"add\.noftz\.(v2\.b?f16|b?f16x2)", record.ptx)
    assert bool(re.search(r"add\.noftz\.b?f16\s", record.ptx)) is alone
    assert record.spill_bytes == 0
