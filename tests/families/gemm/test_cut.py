"""Products whose last tiles are cut along k: when, and what is added in which order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import CPU, H200, repeats, required
from cases.gemm import COLUMN, plan_with, tiles_in_order

import triplan as tp
from triplan.backends.runtime.interpreter import interpret
from triplan.backends.runtime.launch import overlapping
from triplan.backends.triton.gemm import wgmma_cut
from triplan.testing import check_plan

LINEAR = tp.GemmDescriptor(m=2560, n=2560, k=4096, element="bf16", layouts={"b": COLUMN})


def test_a_last_wave_of_few_tiles_is_cut() -> None:
    """2560 by 2560 are 400 tiles of 128 by 128: three waves of 132, and four tiles."""
    plan = tp.plan(LINEAR, target=H200)
    assert plan.sku().kernel == "wgmma_cut"
    cut = wgmma_cut.cheapest_cut(LINEAR, H200)
    assert (cut.whole, cut.rest) == (396, 4)
    assert plan.workspace_size() == 4 * cut.parts * 128 * 128 * 4
    assert plan.precision_guarantee("c").deterministic
    assert not plan.precision_guarantee("c").batch_invariant
    nothing = required(LINEAR.replace(m=0), "tiles", H200)
    assert nothing.launches == ()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"k": 256}, "too few steps"),
        ({"m": 0}, "every wave"),
        ({"m": 2560, "n": 2560, "symmetric": True}, "symmetric"),
        ({"saves_pre": True, "epilogue": "bias_relu"}, "pre"),
    ],
)
def test_what_is_not_cut(change: dict[str, Any], word: str) -> None:
    plan = tp.plan(LINEAR.replace(**change), target=H200)
    (refused,) = (c for c in plan.candidates if c.kernel == "wgmma_cut")
    assert refused.cost_us is None
    assert word in refused.reason


def test_a_thousand_shapes_compile_a_handful_of_kernels() -> None:
    plans = (required(LINEAR.replace(m=64 + i, k=8 * (64 + i)), "wgmma_cut", H200) for i in range(1000))
    assert len({launch.source() for plan in plans for launch in plan.launches}) <= 40


@pytest.mark.parametrize("k", [512, 520, 1000, 1600, 4096, 14336])
@pytest.mark.parametrize("n", [264, 2560, 9216])
def test_parts_hold_all_steps_once_and_none_is_empty(n: int, k: int) -> None:
    desc = LINEAR.replace(n=n, k=k)
    cuts = wgmma_cut.cuts_of(desc, H200)
    assert cuts
    for cut in cuts:
        steps = -(-k // cut.ring.k)
        assert (cut.parts - 1) * cut.depth < steps <= cut.parts * cut.depth
        assert cut.whole % H200.sm_count == 0
        assert 0 < cut.rest < H200.sm_count
        assert len(tiles_in_order(desc, cut)) == cut.whole + cut.rest


@pytest.mark.parametrize(
    ("extents", "rest", "parts", "depth"),
    [((6144, 384, 2560), 12, 10, 4), ((2560, 2560, 8192), 4, 16, 8), ((2560, 2560, 640), 4, 2, 5)],
    ids=["one part more would be empty", "as many as are added", "as deep as a part must be"],
)
def test_parts_fill_a_round_as_far_as_they_may(
    extents: tuple[int, int, int], rest: int, parts: int, depth: int
) -> None:
    m, n, k = extents
    found = [cut for cut in wgmma_cut.cuts_of(LINEAR.replace(m=m, n=n, k=k), H200) if cut.ring.n == 128]
    assert {cut.rest for cut in found} == {rest}
    assert (parts, depth) == max((cut.parts, cut.depth) for cut in found)


BATCHED = tp.BatchedGemmDescriptor(batch=2, m=200, n=136, k=1096, element="f16", epilogue="silu", reads_c0=True)


@pytest.mark.interpret
@pytest.mark.parametrize("parts", [2, 3, 5])
@pytest.mark.parametrize(
    "desc",
    [tp.GemmDescriptor(m=200, n=456, k=1096, element="bf16", epilogue="bias_relu", out_element="f32"), BATCHED],
    ids=["bias", "batched_c0"],
)
def test_parts_are_added_where_their_tiles_lie(desc: Any, parts: int) -> None:
    """Whole tiles are left as they are, and what lies beside C's part of a tile is not read: there it is NaN."""
    target = tp.Target(arch=H200.arch, sm_count=3, shared_memory=H200.shared_memory)
    first = next(c for c in wgmma_cut.cuts_of(desc, target) if c.ring.n == 128)
    assert first.whole > 0
    cut = wgmma_cut.Cut(first.ring, first.whole, first.rest, parts, first.depth)
    g = torch.Generator().manual_seed(parts)
    partial = torch.randn((parts, cut.rest, 128, 128), generator=g)
    written = [o for o in desc.operands() if o.name in ("c", "c0", "bias")]
    x = {o.name: torch.randn(o.shape, generator=g).to(o.element.torch) for o in written}
    before = x["c"].clone()
    expected = before.double()
    for (product, row, column), own in zip(tiles_in_order(desc, cut)[cut.whole :], range(cut.rest), strict=True):
        c = expected[product, row : row + 128, column : column + 128]
        value = 2.0 * partial[:, own, : c.shape[0], : c.shape[1]].double().sum(0)
        partial[:, own, c.shape[0] :] = float("nan")
        partial[:, own, :, c.shape[1] :] = float("nan")
        if desc.has_bias:
            value = (value + x["bias"][column : column + 128].double()).relu()
        else:
            value = value - x["c0"][product, row : row + 128, column : column + 128].double()
            value = torch.nn.functional.silu(value)
        c.copy_(value)
    args = SimpleNamespace(**x, alpha=2.0, beta=-1.0)
    interpret(overlapping([wgmma_cut.sum_launch(desc, cut)], CPU), args, partial.view(-1).view(torch.uint8))
    changed = expected != before.double()
    assert changed.any()
    assert not changed.all()
    assert torch.equal(x["c"][~changed], before[~changed])
    torch.testing.assert_close(x["c"].double(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.skipif("tp.Target.current().arch is not tp.ArchSku.SM90A")
@pytest.mark.parametrize("programs", [7, 132])
@pytest.mark.parametrize(
    "desc",
    [
        LINEAR.replace(m=1544, n=2056, k=1096, epilogue="bias_silu"),
        LINEAR.replace(m=72, n=2568, k=1096, layouts={}, out_element="f32"),
        LINEAR.replace(m=904, n=904, k=1096, layouts={"a": COLUMN}, reads_c0=True),
        BATCHED,
    ],
    ids=["linear", "f32", "c0", "batched"],
)
def test_every_cut_on_the_gpu(desc: Any, programs: int) -> None:
    """With few programs there are several waves."""
    target = tp.Target.current().replace(sm_count=programs)
    (entry,) = (e for e in tp.TABLE.rows(desc.op) if e.name == "wgmma_cut")
    for cut in wgmma_cut.cuts_of(desc, target):
        launches = wgmma_cut.launches(desc, cut, target)
        plan = plan_with(desc, f"cut {cut}", launches, cut.nbytes, entry.guarantee, target)
        assert check_plan(plan, seed=cut.parts, runs=repeats(plan)).compared > 0
