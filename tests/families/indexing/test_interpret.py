"""Every kernel of every indexing op in Triton's interpreter, on problems of one or two programs.

An operation of a program takes about a millisecond, so shapes are tiny. What needs size (offsets past 2**31, many
blocks at once) runs on the GPU. Ops share kernels: each op meets every element, layout, axis and policy, but not all of
their combinations.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from cases import INTERPRETER, pinned, repeats, required
from cases.indexing import ENTRIES, OPS, POLICIES, STORING, accumulate_of, build, elements_of, grid
from hypothesis import Phase, given, settings, strategies as st

import triplan as tp
from triplan.backends.triton.indexing.geometry import geometry
from triplan.backends.triton.indexing.registration import STORES
from triplan.testing import check_plan, check_refusals, descriptors
from triplan.testing.values import Values

pytestmark = [
    pytest.mark.interpret,
    # numpy, under the interpreter, warns of what the hardware does silently: inf - inf, x % 0 in lanes that are masked.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

#: The last axis is wide enough for the rows kernels and no multiple of any block.
SHAPE, EXTENT = (2, 3, 17), 5


def passes_of(row: str, seed: int) -> tuple[Values, ...]:
    if row in STORING:
        return ("bits",)
    # The ordered kernel walks all contributions, each an interpreted step: one kind of values at a time.
    sums: tuple[Values, ...] = ("integers", "special")
    return sums[seed % 2 :][:1] if row in ("ordered_sum", "ordered_reduce", "scanned_sum") else sums


def check(plan: tp.Plan[Any, Any], row: str, seed: int) -> int:
    return check_plan(plan, seed=seed, runs=repeats(plan), passes=passes_of(row, seed)).exact


def plans(descs: Iterable[tp.Descriptor], row: str) -> list[tp.Plan[Any, Any]]:
    """Of those problems that the kernel takes; it must take some."""
    found = [plan for desc in descs if (plan := pinned(desc, row, INTERPRETER)) is not None]
    assert found
    return found


def element_of(op: str, row: str) -> str:
    """One that the kernel takes here: Triton's interpreter has no bf16 atomics."""
    return "i32" if "i32" in elements_of(op, row) else "f16"


@triton.jit
def halved(x):  # type: ignore[no-untyped-def]
    return tl.sum(x, 0) / 2


@triton.jit
def halves(src, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, BLOCK)
    at = tl.program_id(0)
    tl.store(out + at, halved(tl.load(src + at * BLOCK + lane)) + tl.max(tl.zeros((BLOCK,), tl.float32), 0))


def test_kernels_of_ones_own_run_between_plans() -> None:
    """What makes plans' kernels faster here leaves Triton's language as it was."""
    desc = build("gather", SHAPE, 0, EXTENT, element="f32")
    for _ in range(3):
        check(required(desc, "elements", INTERPRETER), "elements", 1)
        src, out = torch.randn(5, 16), torch.empty(5)
        halves[(5,)](src, out, BLOCK=16)
        torch.testing.assert_close(out, src.sum(1) / 2)


@pytest.mark.parametrize(("op", "row"), ENTRIES)
def test_every_element_index_and_layout(op: str, row: str) -> None:
    grids = [list(grid(op, row, element, SHAPE, EXTENT, every_policy=False)) for element in elements_of(op, row)]
    turns = range(max(len(grids), len(grids[0])))
    drawn = (grids[(turn + OPS.index(op)) % len(grids)] for turn in turns)
    descs = (each[turn % len(each)] for turn, each in zip(turns, drawn, strict=True))
    assert sum(check(plan, row, seed) for seed, plan in enumerate(plans(descs, row), 1)) > 0


@pytest.mark.parametrize(("op", "row"), ENTRIES)
def test_every_policy_and_axis(op: str, row: str) -> None:
    planned = 0
    element = element_of(op, row)
    for turn, (policy, wrap) in enumerate(POLICIES):
        for axis in ((turn + OPS.index(op)) % 3, 2):  # a kernel may refuse an axis, but not the last
            options = {"out_of_bounds": policy, "wrap_negative": wrap}
            accumulate = accumulate_of(op, row, turn + axis)
            desc = build(op, SHAPE, axis, EXTENT, element=element, accumulate=accumulate, **options)
            plan = pinned(desc, row, INTERPRETER)
            if plan is not None:
                planned += 1
                check(plan, row, 10 * axis + turn)
                break
    assert planned > 0


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("op", STORES)
def test_of_stores_that_always_meet_the_first_is_made(op: str, axis: int) -> None:
    """An index of stride 0 along the axis that it selects along."""
    desc = build(op, SHAPE, axis, EXTENT, element="f32", out_of_bounds="error", accumulate=False)
    name, along = ("indices", 0) if op == "index_put" else ("index", axis)
    desc = desc.replace(layouts={name: tp.Layout.strided(zero_axes=(along,))})
    g = geometry(desc)
    assert g.once.numel * g.sizes[along] == g.numel
    check(required(desc, "elements", INTERPRETER), "elements", axis)


@pytest.mark.parametrize(("op", "row"), ENTRIES)
def test_refusals(op: str, row: str) -> None:
    options = {"element": element_of(op, row), "accumulate": accumulate_of(op, row, 0)}
    for seed, plan in enumerate(plans((build(op, SHAPE, axis, EXTENT, **options) for axis in range(3)), row)):
        assert check_refusals(plan, seed=seed) > 20


# The rows kernels take packed, wide problems only, which a free draw rarely hits.
@pytest.mark.parametrize(("op", "row"), [r for r in ENTRIES if r[1] not in ("rows", "atomic_rows")])
def test_any_problem(op: str, row: str) -> None:
    fixed = {"accumulate": accumulate_of(op, row, 0)} if op == "index_put" else {}
    # Triton's interpreter has no bf16 atomics.
    elements = [e for e in elements_of(op, row) if e != "bf16" or row != "atomic_elements"]

    @settings(max_examples=2, database=None, phases=[Phase.generate])
    @given(st.data(), st.integers(0, 2**31))
    def holds(data: st.DataObject, seed: int) -> None:
        element = data.draw(st.sampled_from(elements))
        desc = data.draw(descriptors(tp.descriptor_types()[op], 512, fixed={"op": op, "element": element, **fixed}))
        check(required(desc, row, INTERPRETER), row, seed)

    holds()


@pytest.mark.parametrize(("op", "row"), ENTRIES)
def test_empty_problems(op: str, row: str) -> None:
    """No points, no places to point to, or neither: what must be filled is filled, and a bad index is reported."""
    elements, policies = elements_of(op, row), cycle(("error", "skip", "clamp"))
    options = {"element": "f32" if "f32" in elements else elements[0]}
    accumulates = (accumulate_of(op, row, 0),) if op == "index_put" else (True, False)
    shapes = (((0, 3, 17), 5), ((2, 3, 17), 0), ((0, 3, 17), 0), ((2, 0, 17), 5), ((2, 3, 0), 5))
    descs = (
        build(op, shape, 0, extent, out_of_bounds=next(policies), accumulate=accumulate, **options)
        for shape, extent in shapes
        for accumulate in accumulates
    )
    for seed, plan in enumerate(plans(descs, row), 1):
        check(plan, row, seed)
