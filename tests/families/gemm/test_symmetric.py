"""Products that the caller promises to be symmetric, of which Hopper's kernel computes half."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases.gemm import plan_with

import triplan as tp
from triplan.backends.triton.gemm import wgmma
from triplan.backends.triton.gemm.rings import Ring, lower, rings_of, tiles_in

H200 = tp.Target.sm90a()


def problem(m: int, k: int, batch: int = 2, **fields: Any) -> tp.BatchedGemmDescriptor:
    sizes = {"batch": batch, "m": m, "n": m, "k": k}
    return tp.BatchedGemmDescriptor(**sizes, element="bf16", symmetric=True, **fields)


def halving(desc: tp.Descriptor, ratio: int) -> Ring:
    """A ring that computes half of C in tiles ``ratio`` times as wide as high."""
    return next(r for r in rings_of(desc, H200, True) if lower(desc, r) == ratio)  # type: ignore[arg-type]


@pytest.mark.parametrize(("m", "squares", "wide"), [(8, 1, 1), (128, 1, 1), (136, 3, 2), (264, 6, 4), (4096, 528, 272)])
def test_tiles_of_one_triangle_are_computed(m: int, squares: int, wide: int) -> None:
    desc = problem(m, 64)
    assert [tiles_in(desc, halving(desc, ratio)) for ratio in (1, 2)] == [2 * squares, 2 * wide]


def test_half_of_the_work_is_chosen() -> None:
    desc = problem(4096, 4096, 24)
    plan, whole = (tp.plan(d, target=H200) for d in (desc, desc.replace(symmetric=False)))
    costs = [next(c.cost_us for c in p.candidates if c.kernel == "wgmma") for p in (plan, whole)]
    assert plan.sku().kernel == "wgmma"
    assert costs[0] < 0.6 * costs[1]


def test_refusals() -> None:
    with pytest.raises(tp.InvalidProblem, match="m = n"):
        tp.GemmDescriptor(m=8, n=16, k=4, element="f32", symmetric=True)
    with pytest.raises(tp.InvalidProblem, match="no bias"):
        tp.GemmDescriptor(m=8, n=8, k=4, element="f32", symmetric=True, epilogue="bias")


@pytest.mark.gpu
@pytest.mark.skipif("tp.Target.current().arch is not tp.ArchSku.SM90A")
@pytest.mark.parametrize("reads_c0", [False, True])
@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize(("m", "k"), [(8, 16), (136, 200), (1544, 712)])
def test_both_triangles_on_the_gpu(m: int, k: int, ratio: int, tall: bool, reads_c0: bool) -> None:
    g = torch.Generator(device="cuda").manual_seed(m + k)
    shape = (2, k, m) if tall else (2, m, k)
    x = torch.randn(shape, generator=g, device="cuda").bfloat16()
    a = x.mT if tall else x
    c0 = torch.randn(2, m, m, generator=g, device="cuda").bfloat16()
    c0 = c0.tril() + c0.tril(-1).mT
    wide, beta = a.double(), 2.0 * reads_c0
    exact = wide @ wide.mT * 0.5 - c0.double() * beta
    terms = wide.abs() @ wide.abs().mT * 0.5 + c0.double().abs() * beta
    for in_place in (False, True) if reads_c0 else (False,):
        c = c0.clone() if in_place else torch.full_like(c0, torch.nan)
        given: dict[str, Any] = {"c0": c0, "beta": -2.0} if reads_c0 else {}
        args = tp.BatchedGemmArgs(a=a, b=a.mT, c=c, alpha=0.5, **given)
        desc = tp.BatchedGemmDescriptor.from_args(args, symmetric=True)
        found = tp.plan(desc).precision_guarantee("c")
        launches = wgmma.launches(desc, halving(desc, ratio), tp.Target.current())
        plan = plan_with(desc, "half", launches, 0, lambda desc, found=found: {"c": found}, tp.Target.current())
        plan.run(replace(args, c0=c) if in_place else args)
        t = found.tolerance
        bound = t.rtol * exact.abs() + t.ctol * terms + t.underflow
        assert bool(((c.double() - exact).abs() <= bound).all())
        block = torch.arange(m, device="cuda") // 64
        apart = block[:, None] != block
        assert torch.equal(c[:, apart], c.mT[:, apart])
