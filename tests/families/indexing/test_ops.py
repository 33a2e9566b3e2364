"""Every op: the reference against torch's own ops, and every kernel against the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CPU, pinned
from cases.functional import integers
from cases.indexing import ENTRIES, OPS, build, elements_of, grid
from hypothesis import given, settings, strategies as st
from torch.nn import functional

import triplan as tp
import triplan.functional as F  # noqa: N812
from triplan.testing import args_for, check_plan, check_refusals, descriptors, magnitudes, oracle
from triplan.testing.oracle import judge


@pytest.mark.parametrize("op", OPS)
def test_the_cpu_backend_keeps_its_guarantee(op: str) -> None:
    exact = 0

    @settings(max_examples=16)  # the ops share most of their references
    @given(descriptors(tp.descriptor_types()[op], 1 << 13, target=CPU), st.integers(0, 2**31))
    def holds(desc: tp.Descriptor, seed: int) -> None:
        nonlocal exact
        plan = tp.plan(desc, target=CPU)
        exact += check_plan(plan, seed=seed, runs=2).exact
        assert check_refusals(plan, seed=seed) > 0

    holds()
    assert exact > 0


# --- the reference of backwards against torch, in float64: functional calls compare the others ---

FORWARD: dict[str, Callable[[Any, Any, torch.Tensor], torch.Tensor]] = {
    "gather_backward": lambda d, index, src: torch.gather(src, d.gather_dim, index.long()),
    "index_select_backward": lambda d, index, src: torch.index_select(src, d.select_dim, index),
    "embedding_backward": lambda d, index, weight: functional.embedding(index, weight, d.padding_idx),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("index", ["i32", "i64"])
@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("op", FORWARD)
def test_backwards_are_torchs(op: str, axis: int, accumulate: bool, index: str, seed: int) -> None:
    """As far as the reference's own guarantee lets two orders of adding differ."""
    desc: Any = build(op, (4, 5, 6), axis, 7, element="f64", index_element=index, accumulate=accumulate)
    if op == "embedding_backward":
        desc = desc.replace(padding_idx=(None, 0, 3)[axis])
    x = args_for(desc, seed=seed, indices="valid").host()
    assert getattr(desc, "padding_idx", None) is None or (x.index == desc.padding_idx).any()  # else it shows nothing
    (name,) = (o.name for o in desc.operands() if o.is_written)
    leaf = torch.zeros_like(getattr(x, name), requires_grad=True)
    (want,) = torch.autograd.grad(FORWARD[op](desc, x.index, leaf), leaf, x.dout)
    want, got = want + getattr(x, name) if accumulate else want, oracle(desc, x)[name]
    verdict = judge(got, want, magnitudes(desc, x)[name], tp.plan(desc, target=CPU).precision_guarantee(name))
    assert not verdict.wrong.any(), verdict.describe(name, got, want)


# --- what indices out of bounds do, written out by hand ---

BAD = [0, 3, -1, 2, -3, -4, 2**62, -(2**63)]


@pytest.mark.parametrize(
    ("policy", "wrap", "want"),
    [
        ("skip", False, [10, 0, 0, 30, 0, 0, 0, 0]),
        ("skip", True, [10, 0, 30, 30, 10, 0, 0, 0]),
        ("clamp", False, [10, 30, 10, 30, 10, 10, 30, 10]),
        ("clamp", True, [10, 30, 30, 30, 10, 10, 30, 10]),
        ("error", False, [10, 0, 0, 30, 0, 0, 0, 0]),
        ("error", True, [10, 0, 30, 30, 10, 0, 0, 0]),
    ],
)
def test_policies_on_indices_out_of_bounds(policy: str, wrap: bool, want: list[float]) -> None:
    for index, found in ((BAD, want), ([0, 2, 1], [10, 30, 20])):
        desc = build("gather", (len(index),), 0, 3, element="f32", out_of_bounds=policy, wrap_negative=wrap)
        operands = {"src": torch.tensor([10.0, 20.0, 30.0]), "index": torch.tensor(index)}
        plan, args = tp.plan(desc, target=CPU), args_for(desc, given=operands).args
        plan.run(args)
        assert args.out.tolist() == found
        if policy == "error" and index is BAD:
            assert args.status.item() == 1
            with pytest.raises(IndexError, match=r"index\[1\] = 3 is out of bounds for extent 3"):
                plan.check(args)
        elif policy == "error":
            plan.check(args)


@pytest.mark.parametrize("index_element", ["i32", "i64"])
@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("policy", ["skip", "clamp", "error"])
@pytest.mark.parametrize("op", ["gather", "index_select", "embedding", "scatter", "scatter_add", "index_add"])
def test_hostile_indices(op: str, policy: str, wrap: bool, index_element: str) -> None:
    """Against loops over Python integers, which cannot overflow."""
    bits, n = int(index_element[1:]), 3
    index = [
        *(i for i in BAD if -(2 ** (bits - 1)) <= i < 2 ** (bits - 1)),
        1,
        2 ** (bits - 1) - 1,
        2**31 - 2,
        0,
        n - 1,
    ]

    def place(i: int) -> int | None:
        i = i + n if wrap and -n <= i < 0 else i
        return i if 0 <= i < n else None if policy != "clamp" else max(0, min(i, n - 1))

    table, rows = [[10.0, 11.0], [20.0, 21.0], [30.0, 31.0]], [[2.0**i, 3.0**i] for i in range(len(index))]
    places = [place(i) for i in index]
    along, whole = torch.tensor(index), torch.tensor(index)[:, None].expand(-1, 2)
    reads = op in ("gather", "index_select", "embedding")
    options = {"element": "f64", "index_element": index_element, "out_of_bounds": policy, "wrap_negative": wrap}
    given = {"index": (whole if op in ("gather", "scatter", "scatter_add") else along).to(getattr(torch, f"int{bits}"))}
    if reads:
        want = [[0.0, 0.0] if at is None else table[at] for at in places]
        given["weight" if op == "embedding" else "src"] = torch.tensor(table).double()
    else:
        want = [list(row) for row in table]
        for at, row in zip(places, rows, strict=True):
            if at is not None:
                want[at] = row if op == "scatter" else [a + b for a, b in zip(want[at], row, strict=True)]
        given |= {"src": torch.tensor(rows).double(), "out": torch.tensor(table).double()}
    desc = build(op, (len(index), 2), 0, n, **options)
    plan, args = tp.plan(desc, target=CPU), args_for(desc, given=given).args
    if op == "index_add":
        args = dataclasses.replace(args, alpha=1.0)
    plan.run(args)
    assert args.out.tolist() == want
    if policy == "error":
        first = next(i for i, at in enumerate(places) if at is None)
        with pytest.raises(IndexError, match=rf"= {index[first]} is out of bounds"):
            plan.check(args)


# --- large functional calls, and every Triton kernel on the GPU ---


@pytest.mark.parametrize("name", ["gather", "scatter_add"])
def test_large_calls_are_torchs(name: str, device: str) -> None:
    """On small integers, whose sums are exact."""
    table, src = (integers((n, 65), torch.float32, device, n) for n in (1_000, 20_011))
    index = torch.randint(0, 1_000, (20_011, 65), device=device)
    rest = (src,) if name == "scatter_add" else ()
    assert torch.equal(getattr(F, name)(table, 0, index, *rest), getattr(torch, name)(table, 0, index, *rest))


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "row", "element"), [(op, row, e) for op, row in ENTRIES for e in elements_of(op, row)])
def test_kernels_on_the_gpu(op: str, row: str, element: str) -> None:
    """Every index element x layout, with axes and policies in turns; in f32, all of them crossed."""
    target, ran = tp.Target.current(), 0
    for desc in grid(op, row, element, (5, 70, 33), 37, every_policy=element == "f32"):
        plan = pinned(desc, row, target)
        if plan is not None:
            ran += check_plan(plan, seed=ran).runs
    assert ran > 0


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_any_problem_on_the_gpu(op: str) -> None:
    @settings(max_examples=10)  # most of the time goes into compiling
    @given(descriptors(tp.descriptor_types()[op], 1 << 20, target=tp.Target.current()), st.integers(0, 2**31))
    def holds(desc: tp.Descriptor, seed: int) -> None:
        for deterministic in (False, True):
            plan = tp.plan(desc, preference=tp.PlanPreference(deterministic=deterministic))
            check_plan(plan, seed=seed)
            check_refusals(plan, seed=seed)

    holds()
