"""Every op: the reference against torch's own ops, and every kernel against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases.indexing import ENTRIES, OPS, build, elements_of, grid, pinned
from hypothesis import given, settings, strategies as st
from torch.nn import functional

import triplan as tp
from triplan.testing import args_for, check_plan, check_refusals, descriptors, magnitudes, oracle
from triplan.testing.oracle import judge

CPU = tp.Target.cpu()


@pytest.mark.parametrize("op", OPS)
def test_the_cpu_backend_keeps_its_guarantee(op: str) -> None:
    exact = 0

    @settings(max_examples=40)
    @given(descriptors(tp.descriptor_types()[op], 1 << 13, target=CPU), st.integers(0, 2**31))
    def holds(desc: tp.Descriptor, seed: int) -> None:
        nonlocal exact
        plan = tp.plan(desc, target=CPU)
        exact += check_plan(plan, seed=seed, runs=2).exact
        assert check_refusals(plan, seed=seed) > 0

    holds()
    assert exact > 0


# --- the reference against torch, in float64, on valid indices ---


def case(op: str, axis: int, index_element: str, seed: int, **options: Any) -> tuple[tp.Descriptor, Any]:
    desc = build(op, (4, 5, 6), axis, 7, element="f64", index_element=index_element, **options)
    return desc, args_for(desc, seed=seed, indices="valid").host()


GRID = [(axis, index, seed) for axis in range(3) for index in ("i32", "i64") for seed in range(3)]


def assert_close(desc: tp.Descriptor, x: Any, name: str, want: torch.Tensor) -> None:
    """The oracle's sums are torch's, as far as the reference's own guarantee lets two orders of adding differ."""
    guarantee = tp.plan(desc, target=CPU).precision_guarantee(name)
    verdict = judge(oracle(desc, x)[name], want, magnitudes(desc, x)[name], guarantee)
    assert not verdict.wrong.any(), verdict.describe(name, oracle(desc, x)[name], want)


@pytest.mark.parametrize(("axis", "index", "seed"), GRID)
def test_gather_is_torchs(axis: int, index: str, seed: int) -> None:
    desc, x = case("gather", axis, index, seed)
    assert torch.equal(oracle(desc, x)["out"], torch.gather(x.src, axis, x.index.long()))


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize(("axis", "index", "seed"), GRID)
def test_gather_backward_is_torchs(axis: int, index: str, seed: int, accumulate: bool) -> None:
    desc, x = case("gather_backward", axis, index, seed, accumulate=accumulate)
    src = torch.zeros(desc.operand("dsrc").shape, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(torch.gather(src, axis, x.index.long()), src, x.dout)
    assert_close(desc, x, "dsrc", grad + x.dsrc if accumulate else grad)


@pytest.mark.parametrize(("axis", "index", "seed"), GRID)
def test_scatter_add_is_torchs(axis: int, index: str, seed: int) -> None:
    desc, x = case("scatter_add", axis, index, seed)
    assert_close(desc, x, "out", x.out.scatter_add(axis, x.index.long(), x.src))


@pytest.mark.parametrize(("axis", "index", "seed"), GRID)
def test_scatter_is_torchs_where_no_index_repeats(axis: int, index: str, seed: int) -> None:
    desc = build("scatter", (4, 5, 6), axis, 7, element="f64", index_element=index)
    x = args_for(desc, seed=seed, indices="distinct").host()
    assert torch.equal(oracle(desc, x)["out"], x.out.scatter(axis, x.index.long(), x.src))


def test_scatter_keeps_the_last_write() -> None:
    desc = build("scatter", (4, 2), 0, 3, element="f64")
    x = args_for(
        desc,
        given={"index": torch.tensor([[1, 0], [1, 2], [0, 2], [1, 0]]), "src": torch.arange(8.0).double().view(4, 2)},
    ).host()
    out = oracle(desc, x)["out"]
    assert out[0].tolist() == [4, 7]
    assert out[1, 0] == 6
    assert out[2, 1] == 5
    assert torch.equal(out[1, 1], x.out[1, 1])
    assert torch.equal(out[2, 0], x.out[2, 0])


@pytest.mark.parametrize(("axis", "index", "seed"), GRID)
def test_index_select_is_torchs(axis: int, index: str, seed: int) -> None:
    desc, x = case("index_select", axis, index, seed)
    assert torch.equal(oracle(desc, x)["out"], torch.index_select(x.src, axis, x.index))


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize(("axis", "index", "seed"), GRID)
def test_index_select_backward_is_torchs(axis: int, index: str, seed: int, accumulate: bool) -> None:
    desc, x = case("index_select_backward", axis, index, seed, accumulate=accumulate)
    src = torch.zeros(desc.operand("dsrc").shape, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(torch.index_select(src, axis, x.index), src, x.dout)
    assert_close(desc, x, "dsrc", grad + x.dsrc if accumulate else grad)


@pytest.mark.parametrize(("axis", "index", "seed"), GRID)
def test_index_add_is_torchs(axis: int, index: str, seed: int) -> None:
    desc, x = case("index_add", axis, index, seed)
    alpha = 1 if x.alpha is None else x.alpha
    assert_close(desc, x, "out", x.out.index_add(axis, x.index, x.src, alpha=alpha))


@pytest.mark.parametrize(("axis", "index", "seed"), GRID)
def test_index_put_is_torchs(axis: int, index: str, seed: int) -> None:
    desc, x = case("index_put", axis, index, seed, accumulate=True)
    found = tuple(i.long() for i in x.indices)
    assert_close(desc, x, "out", x.out.index_put(found, x.values, accumulate=True))
    desc = desc.replace(accumulate=False)
    x = args_for(desc, seed=seed, indices="distinct").host()
    found = tuple(i.long() for i in x.indices)
    assert torch.equal(oracle(desc, x)["out"], x.out.index_put(found, x.values))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("index", ["i32", "i64"])
def test_embedding_is_torchs(index: str, seed: int) -> None:
    desc, x = case("embedding", 0, index, seed)
    assert torch.equal(oracle(desc, x)["out"], functional.embedding(x.index, x.weight))


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("padding", [None, 0, 3])
@pytest.mark.parametrize("index", ["i32", "i64"])
def test_embedding_backward_is_torchs(index: str, padding: int | None, accumulate: bool) -> None:
    desc, _ = case("embedding_backward", 0, index, 0, accumulate=accumulate)
    desc = desc.replace(padding_idx=padding)
    x = args_for(desc, seed=3, indices="valid").host()
    weight = torch.zeros(desc.operand("dweight").shape, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(functional.embedding(x.index, weight, padding_idx=padding), weight, x.dout)
    if padding is not None:
        assert bool((x.index == padding).any())  # else this shows nothing
    assert_close(desc, x, "dweight", grad + x.dweight if accumulate else grad)


# --- what indices out of bounds do, written out by hand ---


def gathered(policy: str, wrap: bool, index: list[int]) -> tuple[list[float], Any, Any]:
    desc = build("gather", (len(index),), 0, 3, element="f32", out_of_bounds=policy, wrap_negative=wrap)
    src = torch.tensor([10.0, 20.0, 30.0])
    placed = args_for(desc, given={"src": src, "index": torch.tensor(index)})
    plan = tp.plan(desc, target=CPU)
    plan.run(placed.args)
    return placed.args.out.tolist(), plan, placed.args


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
    got, plan, args = gathered(policy, wrap, BAD)
    assert got == want
    if policy == "error":
        assert args.status.item() == 1
        with pytest.raises(IndexError, match=r"index\[1\] = 3 is out of bounds for extent 3"):
            plan.check(args)
    got, plan, args = gathered(policy, wrap, [0, 2, 1])
    assert got == [10, 30, 20]
    if policy == "error":
        plan.check(args)


# --- every Triton kernel on the GPU ---


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
        for preference in (tp.PlanPreference(deterministic=False), tp.PlanPreference(deterministic=True)):
            plan = tp.plan(desc, preference=preference)
            check_plan(plan, seed=seed)
            check_refusals(plan, seed=seed)

    holds()
