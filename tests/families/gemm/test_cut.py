"""Products whose last tiles are cut along k: when, and what is added in which order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import CPU, H200, repeats, required
from cases.gemm import COLUMN, CUT_WAYS, backward, plan_with, tiles_in_order

import triplan as tp
from triplan.backends.runtime.interpreter import interpret
from triplan.backends.runtime.launch import Scratch, overlapping
from triplan.backends.triton.gemm import cuts, separate, separate_wgmma, wgmma_cut
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
        steps = -(-k // cut.tile.k)
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
    found = [cut for cut in wgmma_cut.cuts_of(LINEAR.replace(m=m, n=n, k=k), H200) if cut.tile.n == 128]
    assert {cut.rest for cut in found} == {rest}
    assert (parts, depth) == max((cut.parts, cut.depth) for cut in found)


@pytest.mark.parametrize("wants_db", [False, True])
def test_gradients_take_cuts(wants_db: bool) -> None:
    """Of a frozen weight only da is wanted. Where both are, one launch of ``wgmma`` shares the tiles of both."""
    desc = backward(2560, 4096, 2560, "bf16", (1, wants_db, 0), layouts={"b": COLUMN})
    plan = tp.plan(desc, target=H200)
    assert plan.sku().kernel == ("wgmma" if wants_db else "separate_wgmma")
    if not wants_db:
        (product,) = separate.products_of(desc, H200, separate_wgmma.WAYS)
        cut = wgmma_cut.cheapest_cut(product.desc, H200)
        assert [x.kernel.__name__ for x in plan.launches] == ["wgmma_kernel", "parts_kernel"]
        assert plan.workspace_size() == cut.nbytes


def test_parts_of_gradients_lie_behind_a_shared_copy() -> None:
    desc = backward(2560, 4096, 2560, "bf16", (1, 1, 1), layouts={"dc": "strided"})
    (copy,) = separate.shared(desc, H200, CUT_WAYS)
    cuts = [wgmma_cut.cheapest_cut(p.desc, H200) for p in separate.products_of(desc, H200, CUT_WAYS)]
    assert separate.workspace(desc, H200, CUT_WAYS) == copy.nbytes + max(cut.nbytes for cut in cuts)
    launches = separate.launches(desc, H200, CUT_WAYS)
    assert [x.args["partial"] for x in launches[1:5]] == [Scratch(copy.nbytes, tp.ElementKind.F32)] * 4


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
    first = next(c for c in wgmma_cut.cuts_of(desc, target) if c.tile.n == 128)
    assert first.whole > 0
    cut = cuts.Cut(first.tile, first.whole, first.rest, parts, first.depth)
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
    interpret(overlapping([cuts.sum_launch(desc, cut, cut.tile.group)], CPU), args, partial.view(-1).view(torch.uint8))
    changed = expected != before.double()
    assert changed.any()
    assert not changed.all()
    assert torch.equal(x["c"][~changed], before[~changed])
    torch.testing.assert_close(x["c"].double(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.interpret
@pytest.mark.parametrize(
    "layouts", [{}, {"b": COLUMN, "db": COLUMN}, {"dc": COLUMN, "da": COLUMN}], ids=["rows", "linear", "columns"]
)
def test_parts_are_added_where_gradients_lie(layouts: Any) -> None:
    """A column-major gradient is that of the transposed product."""
    desc = backward(584, 520, 584, "bf16", (1, 1, 0), layouts=layouts, out_element="f32")
    target = tp.Target(arch=H200.arch, sm_count=40, shared_memory=H200.shared_memory)
    g = torch.Generator().manual_seed(1)
    launches = separate.launches(desc, target, CUT_WAYS)
    for p, launch in zip(separate.products_of(desc, target, CUT_WAYS), launches[1::2], strict=True):
        cut, view = wgmma_cut.cheapest_cut(p.desc, target), p.views["c"]
        m, n = cut.tile.m, cut.tile.n
        partial = torch.randn((cut.parts, cut.rest, m, n), generator=g)
        out = torch.full((p.desc.m, p.desc.n), float("nan"))
        args = SimpleNamespace(**{view.operand.name: out.t() if view.transposed else out}, alpha=2.0)
        interpret(overlapping([launch], CPU), args, partial.view(-1).view(torch.uint8))
        places = tiles_in_order(p.desc, cut)[cut.whole :]
        for (_, row, column), total in zip(places, 2.0 * partial.sum(0), strict=True):
            own = out[row : row + m, column : column + n]
            torch.testing.assert_close(own, total[: own.shape[0], : own.shape[1]])


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


@pytest.mark.gpu
@pytest.mark.skipif("tp.Target.current().arch is not tp.ArchSku.SM90A")
@pytest.mark.parametrize("programs", [7, 132])
@pytest.mark.parametrize(
    "layouts", [{}, {"b": COLUMN, "db": COLUMN}, {"dc": "strided", "da": COLUMN}], ids=["rows", "linear", "copied"]
)
def test_gradients_on_the_gpu(layouts: Any, programs: int) -> None:
    desc = backward(1032, 1544, 1096, "bf16", (1, 1, 1), layouts=layouts)
    target = tp.Target.current().replace(sm_count=programs)
    launches, space = (f(desc, target, CUT_WAYS) for f in (separate.launches, separate.workspace))
    plan = plan_with(desc, "cut gradients", launches, space, separate.guarantee, target)
    assert check_plan(plan, seed=programs, runs=repeats(plan)).compared > 0
