"""Products of tf32 by mma.sync, of factors that lie along C: when they are, where k is cut, and the results."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cases import H200, pinned, required
from cases.gemm import COLUMN, LOOSE_COLUMN, LOOSE_ROW, backward, batched_grid, check, grid, plan_with
from cases.gluon import emulate

import triplan as tp
from triplan.backends.runtime.launch import overlapping
from triplan.backends.triton.gemm import mma
from triplan.backends.triton.gemm.split_k import Split
from triplan.backends.triton.gemm.tile_shapes import programs_of

LONG = tp.GemmDescriptor(m=768, n=256, k=1 << 17, element="f32", math="tf32", layouts={"a": COLUMN})


def test_where_it_is_chosen() -> None:
    """For gradients of weights with a long k, whose C is not so large that wgmma makes up for copies."""
    for change in ({}, {"m": 127, "n": 1024, "layouts": {"a": LOOSE_COLUMN}}, {"m": 1024, "n": 1024, "k": 1 << 14}):
        plan = tp.plan(LONG.replace(**change), target=H200)
        assert plan.sku().kernel == "mma"
        assert [x.kernel.__name__ for x in plan.launches] == ["mma_kernel", "pieces_kernel"]
    for change in ({"m": 4096, "n": 4096, "k": 4096}, {"k": 4096}, {"math": "tf32x3"}, {"layouts": {}}):
        assert tp.plan(LONG.replace(**change), target=H200).sku().kernel != "mma"
    assert tp.plan(LONG, target=H200, max_workspace_bytes=0).sku().kernel != "mma"
    gradient = tp.plan(backward(1 << 17, 256, 768, "f32", (0, 1, 0), math="tf32"), target=H200)
    assert [x.kernel.__name__ for x in gradient.launches] == ["mma_kernel", "pieces_kernel"]


def test_what_it_refuses() -> None:
    for change, reason in (
        ({"math": "tf32x3"}, "not as tf32"),
        ({"layouts": {}}, "not column-major"),
        ({"layouts": {"a": COLUMN, "b": COLUMN}}, "not row-major"),
        ({"m": 4096, "n": 4096}, "copies of the factors"),
        ({"k": 0}, "nothing to multiply"),
        ({"k": 1 << 31}, "31 bits"),
    ):
        with pytest.raises(tp.Unsupported, match=reason):
            required(LONG.replace(**change), "mma", H200)
    with pytest.raises(tp.Unsupported, match="sm90a"):
        required(LONG, "mma", tp.Target.preset("a100"))
    empty = required(LONG.replace(n=0), "mma", H200)
    assert (empty.launches, empty.workspace_size()) == ((), 0)


@pytest.mark.parametrize(("m", "n"), [(768, 256), (127, 1024), (100, 100), (1000, 1024)])
def test_pieces_of_k_fill_whole_waves(m: int, n: int) -> None:
    desc = LONG.replace(m=m, n=n)
    split = mma.cheapest(desc, H200)
    programs, slots = split.count(desc.k) * programs_of(desc, split.tile), 132 * mma.RESIDENT
    assert 0.9 * slots < programs <= slots
    assert mma.split_us(desc, split, H200) < mma.split_us(desc, Split(split.tile, 1), H200)


def test_a_short_k_has_few_pieces() -> None:
    assert [split.pieces for split in mma.splits_of(LONG.replace(k=500), H200)] == [1, 3]
    assert [split.pieces for split in mma.splits_of(LONG.replace(k=1), H200)] == [1]


@pytest.mark.parametrize(
    ("change", "tile", "vectors"),
    [
        ({}, mma.TILE, (4, 4)),
        ({"m": 767}, mma.TILE_SINGLE, (1, 4)),
        ({"n": 255}, mma.TILE_SINGLE, (4, 1)),
        ({"layouts": {"a": LOOSE_COLUMN, "b": LOOSE_ROW}}, mma.TILE_SINGLE, (1, 1)),
        ({"k": 999}, mma.TILE, (4, 4)),
    ],
)
def test_single_elements_have_a_tile_of_their_own(
    change: dict[str, object], tile: mma.Tile, vectors: tuple[int, int]
) -> None:
    desc = LONG.replace(**change)
    assert mma.tile_for(desc) == tile
    first, _ = required(desc, "mma", H200).launches
    assert (first.constexprs["A_VECTOR"], first.constexprs["B_VECTOR"]) == vectors
    assert first.constexprs["STAGES"] == tile.stages


@pytest.mark.parametrize("loose", [False, True])
@pytest.mark.parametrize(
    ("batch", "m", "n", "k", "pieces"), [(0, 127, 131, 33, 1), (0, 136, 5, 203, 1), (2, 3, 129, 97, 2), (3, 1, 1, 1, 1)]
)
def test_partial_sums(batch: int, m: int, n: int, k: int, pieces: int, loose: bool) -> None:
    """Small integers, whose sums are exact; NaN behind rows and zeros behind those of the sums, and nothing behind."""
    lead, generator = (batch,) * (batch > 0), torch.Generator().manual_seed(m)
    leading = {"a": m + 1 if loose else -(-m // 8) * 8, "b": n + 1 if loose else -(-n // 8) * 8}
    x = {name: torch.full((*lead, k, extent), float("nan")) for name, extent in leading.items()}
    for name, extent in (("a", m), ("b", n)):
        x[name] = x[name][..., :extent]
        x[name].copy_(torch.randint(-3, 4, (*lead, k, extent), generator=generator))
    x["a"] = x["a"].mT
    layouts = {name: tp.Layout.of(t.shape, t.stride(), 4 if loose else 16, 4) for name, t in x.items()}
    fields = {"m": m, "n": n, "k": k, "element": "f32", "math": "tf32", "layouts": layouts}
    desc = tp.BatchedGemmDescriptor(batch=batch, **fields) if batch else tp.GemmDescriptor(**fields)
    split = Split(mma.tile_for(desc), pieces)
    nbytes = mma.split_k.partial_bytes(desc, split)
    workspace = torch.full((nbytes + 1024,), 255, dtype=torch.uint8)
    launch, _ = overlapping(mma.launches(desc, split), H200)
    emulate(launch, x, workspace)
    found = workspace[:nbytes].view(torch.float32).view(split.count(k), *lead, m, -1).sum(0)
    assert torch.equal(found[..., :n], x["a"] @ x["b"])
    assert not found[..., n:].any()
    assert (workspace[nbytes:] == 255).all()


def problems(m: int, n: int, k: int) -> Iterator[tp.Descriptor]:
    for desc in (*grid("f32", m, n, k), *batched_grid("f32", 3, m, n, k)):
        yield desc.replace(math="tf32")
    for layouts in ({"a": COLUMN}, {"a": LOOSE_COLUMN, "b": LOOSE_ROW, "c": LOOSE_COLUMN}):
        yield tp.GemmDescriptor(m=m, n=n, k=k, element="f32", math="tf32", layouts=layouts)
    column = tp.Layout.strided(unit_axis=1, alignment=16, stride_multiple=8)
    yield tp.BatchedGemmDescriptor(batch=3, m=m, n=n, k=k, element="f32", math="tf32", layouts={"a": column})


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 203, 1024, 8191])
def test_every_layout_on_the_gpu(k: int) -> None:
    target = tp.Target.current()
    for m, n in ((136, 264), (3, 515)):
        found = [plan for desc in problems(m, n, k) if (plan := pinned(desc, "mma", target)) is not None]
        assert sum(check(plan, turn) for turn, plan in enumerate(found)) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("pieces", [1, 2, 7, 33])
def test_pieces_on_the_gpu(pieces: int) -> None:
    target, entry = tp.Target.current(), next(e for e in tp.TABLE.rows("gemm") if e.name == "mma")
    for turn, desc in enumerate(d for d in problems(131, 260, 4101) if d.op == "gemm" and entry.supports(d, target)):
        split = Split(mma.tile_for(desc), pieces)
        plan = plan_with(
            desc, "cut", mma.launches(desc, split), mma.split_k.partial_bytes(desc, split), entry.guarantee, target
        )
        assert check(plan, turn) > 0


@pytest.mark.gpu
def test_gradients_on_the_gpu() -> None:
    for turn, (m, k) in enumerate(((8192, 256), (8191, 127))):
        plan = tp.plan(backward(m, 512, k, "f32", (1, 1, 1), math="tf32"), target=tp.Target.current())
        assert check(plan, turn) > 0
