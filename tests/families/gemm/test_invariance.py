"""Matrix products whose bits must not depend on the number of rows: one tile for all, or another numerics_id."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from cases import H200, SM80
from cases.gemm import COLUMN, LOOSE_COLUMN, LOOSE_ROW, ROW, backward
from proofs import MARKS, target

import triplan as tp
from triplan.backends.triton.gemm import tiles_invariant
from triplan.backends.triton.gemm.products import gradient_products

INVARIANT = tp.PlanPreference(batch_invariant=True)
STRIDED = tp.Layout.strided()
#: Of da, db and dbias, da alone is wanted.
DA = (1, 0, 0)


@pytest.mark.parametrize(
    "sized",
    [lambda m: tp.GemmDescriptor(m=m, n=4096, k=4096, element="bf16"), lambda m: backward(m, 4096, 1024, "bf16", DA)],
    ids=["gemm", "gemm_backward"],
)
def test_one_tile_for_every_number_of_rows(sized: Callable[[int], tp.Descriptor]) -> None:
    tiles = set()
    for m in (1, 16, 64, 512, 8192):
        plan = tp.plan(sized(m), preference=INVARIANT, target=H200)
        assert plan.sku().kernel == "tiles_invariant"
        (launch,) = plan.launches
        tiles.add(tuple(launch.constexprs[f"BLOCK_{x}"] for x in "MNK"))
    assert len(tiles) == 1


def test_sums_over_rows_are_not_batch_invariant() -> None:
    desc = backward(64, 4096, 1024, "bf16", DA).replace(wants_dbias=True)
    with pytest.raises(tp.Unsupported, match="batch"):
        tp.plan(desc, preference=INVARIANT, target=H200)


@pytest.mark.parametrize("element", ["f16", "f32"])
def test_equal_ids_mean_one_tile(element: str) -> None:
    """Of every mix of layouts, with one row and with several."""
    layouts = (None, ROW, COLUMN, LOOSE_ROW, LOOSE_COLUMN, STRIDED)
    tiles = defaultdict(set)
    for m, k, *each in product((1, 2, 64), (40, 41), layouts, layouts, layouts):
        reads_c0 = m == 2
        named: dict[str, Any] = {name: x for name, x in zip("abc", each, strict=True) if x is not None}
        desc = tp.GemmDescriptor(m=m, n=72, k=k, element=element, math="tf32" if element == "f32" else None)
        desc = desc.replace(reads_c0=reads_c0, layouts=named)
        tiles[tiles_invariant.numerics(desc)].add(tuple(tiles_invariant.invariant_tile(desc, t) for t in (SM80, H200)))
    assert len(tiles) > 1
    assert all(len(found) == 1 for found in tiles.values()), tiles


def test_equal_ids_of_the_backward_mean_one_product() -> None:
    layouts = (None, ROW, COLUMN, STRIDED)
    entry = next(e for e in tp.TABLE.rows("gemm_backward") if e.name == "tiles_invariant")
    tiles = defaultdict(set)
    for m, *each in product((1, 64), layouts, layouts, layouts):
        named = {name: x for name, x in zip(("dc", "b", "da"), each, strict=True) if x is not None}
        desc = backward(m, 72, 40, "f16", DA, layouts=named)
        da = gradient_products(desc)["da"]
        tile = tiles_invariant.invariant_tile(da.desc, H200, da.fixed)
        tiles[entry.numerics(desc)].add((tile, da.views["c"].transposed))
    assert len(tiles) > 2
    assert all(len(found) == 1 for found in tiles.values()), tiles


def invariant_plan(args: Any, target: tp.Target) -> tp.Plan[Any, Any]:
    """For ``args`` as they lie."""
    desc = {tp.GemmArgs: tp.GemmDescriptor, tp.GemmBackwardArgs: tp.GemmBackwardDescriptor}[type(args)].from_args(args)
    return tp.plan(desc, target=target, preference=INVARIANT)


def test_rows_of_any_end_have_one_id() -> None:
    """How a matrix with an axis of rows is read, by vectors or not, hangs on where rows begin and end."""
    x = torch.empty(1 << 16, dtype=torch.float16)

    def products() -> Iterator[tp.GemmArgs]:
        for m in (1, 2, 8, 63, 64):
            for a in (x[: m * 72].view(m, 72), x[: m * 72].view(72, m).t(), x[1 : m * 81 + 1].view(m, 81)[:, :72]):
                yield tp.GemmArgs(a=a, b=x[: 72 * 40].view(72, 40), c=x[: m * 40].view(m, 40))

    def backwards() -> Iterator[tp.GemmBackwardArgs]:
        for m in (2, 8, 63, 64):
            for dc in (x[: m * 72].view(m, 72), x[: m * 72].view(72, m).t()):
                yield tp.GemmBackwardArgs(dc=dc, b=x[: 72 * 40].view(40, 72), da=x[: m * 40].view(40, m).t())

    for problems in (products(), backwards()):
        assert len({invariant_plan(args, H200).sku().numerics_id for args in problems}) == 1


# --- bits ---


def ran(args: Any, result: str, target: tp.Target) -> tuple[str | None, torch.Tensor]:
    """The numerics_id of the plan for ``args`` as they lie, and the first row of its result."""
    plan = invariant_plan(args, target)
    plan.run(args, tp.Workspace.allocate(plan))
    return plan.sku().numerics_id, getattr(args, result)[0].clone()


@pytest.mark.parametrize(
    ("where", "element"),
    [
        pytest.param(where, element, marks=MARKS[where])
        for where, elements in (("interpret", ("f16", "bf16")), ("gpu", ("f16", "bf16", "f32")))
        for element in elements
    ],
)
def test_one_row_is_as_among_others(where: str, element: str) -> None:
    """Of a column-major A, of a column of a wider C, and of the backward's column-major dc; results are in f32, whose
    last bits show in which order they were added."""
    g = torch.Generator().manual_seed(0)
    dtype, device = tp.ElementKind(element).torch, target(where).device_type

    def x(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(dtype).to(device)

    columns, rows, b, vector, wide = x(300, 64).t(), x(64, 300), x(300, 40), x(300, 1), x(40, 300)
    for result, make in (
        ("c", lambda m: tp.GemmArgs(a=columns[:m], b=b, c=torch.empty(m, 40, device=device))),
        ("c", lambda m: tp.GemmArgs(a=rows[:m], b=vector, c=torch.empty(64, 8, device=device)[:m, :1])),
        ("da", lambda m: tp.GemmBackwardArgs(dc=columns[:m], b=wide, da=torch.empty(m, 40, device=device))),
    ):
        (one, alone), (all_, among) = (ran(make(m), result, target(where)) for m in (1, 64))
        assert one == all_ is not None
        assert torch.equal(alone, among)


def test_an_axis_of_one_may_be_the_unit_axis() -> None:
    """One row of a column-major matrix is column-major, as two are, and one column of a row-major one row-major."""
    x = torch.empty(64, 24, dtype=torch.float16)
    for t in (x.t()[:1], x.t()[:2], x[:, :1], x[:, :2], x[None, :, :1]):
        layout = tp.Layout.of(t.shape, t.stride(), 16, 2)
        assert layout.unit_axis == t.stride().index(1)
        assert layout.stride_multiple == 8
        assert layout.broken_by(t.shape, t.stride()) is None
    assert tp.Layout.of((1, 5), (1, 1), 16, 2).packed
    for shape, strides in (((0, 3), (1, 0)), ((3, 0), (0, 1)), ((0, 3), (0, 0)), ((2, 0, 3), (7, 7, 7))):
        assert tp.Layout.of(shape, strides, 16, 2).packed
        assert tp.Layout.strided(unit_axis=0, stride_multiple=4).broken_by(shape, strides) is None
    assert tp.Layout.of((5, 1, 3), (1, 1, 7), 16, 2).unit_axis == 0
