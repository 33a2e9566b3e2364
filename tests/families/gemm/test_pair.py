"""How the launch of both gradients of a matrix product deals its tiles to programs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import triplan as tp
from triplan.backends.triton.common.card import BYTES_PER_US
from triplan.backends.triton.gemm import wgmma_backward, wgmma_column_sums_kernels, wgmma_deal_kernels as kernels
from triplan.backends.triton.gemm.products import gradient_products
from triplan.backends.triton.gemm.rings import tile_us, tiles_in
from triplan.testing import check_plan

H200 = tp.Target.preset("h200")


@pytest.fixture
def deal(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``rest_of`` of the kernel's module, run as Python for one of several programs."""
    place = SimpleNamespace(program=0, programs=1)
    stub = SimpleNamespace(
        program_id=lambda _: place.program,
        num_programs=lambda _: place.programs,
        where=lambda c, x, y: x if c else y,
        maximum=max,
        cdiv=lambda x, y: -(-x // y),
    )
    for module, names in ((wgmma_column_sums_kernels, ["first_item"]), (kernels, ["first_item", "items_of"])):
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name).fn)
        monkeypatch.setattr(module, "gl", stub)

    def share(program: int, programs: int, done: int, items: int, few: int) -> range:
        place.program, place.programs = program, programs
        first, step, count = kernels.rest_of.fn(done, items, few)
        return range(first, first + step * count, step)

    return share


def problem(m: int, n: int, k: int) -> tp.GemmBackwardDescriptor:
    column = tp.Layout.strided(unit_axis=0, alignment=16, stride_multiple=8)
    return tp.GemmBackwardDescriptor(m=m, n=n, k=k, element="bf16", layouts={"b": column, "db": column})


SHAPES = [(32768, 2304, 768), (32768, 768, 768), (32768, 3072, 768), (32768, 768, 3072), (4096, 4096, 4096)]
SHAPES += [(8192, 1024, 640), (72, 4096, 4096), (512, 384, 128)]


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_tile_is_dealt_once_and_evenly(shape: tuple[int, ...], cut: bool, deal: Any) -> None:
    """Both ways deal every tile once; the one that is chosen has the smaller maximum, as estimated."""
    desc = problem(*shape)
    ring = wgmma_backward.cheapest_ring(desc, H200)
    parts = wgmma_backward.parts_of(desc, ring, H200) if cut else 1
    one, two = sorted((p.desc for p in gradient_products(desc).values()), key=lambda d: -d.k)
    long, short = parts * tiles_in(one, ring), tiles_in(two, ring)
    programs = min(long + short, H200.sm_count)
    few, busiest, plain = wgmma_backward.dealt(desc, ring, H200, parts)
    ratio = tile_us(ring, one.k / parts) / tile_us(ring, two.k)
    found = {}
    for way in {few, -1}:
        shares = [deal(p, programs, long, short, way) for p in range(programs)]
        assert sorted(i for share in shares for i in share) == list(range(short))
        found[way] = max(len(range(p, long, programs)) * ratio + len(share) for p, share in enumerate(shares))
    assert found[few] == pytest.approx(busiest)
    assert found[-1] == pytest.approx(plain)
    assert (few >= 0) == (busiest < plain)


def test_many_rows_are_dealt_unevenly() -> None:
    desc = problem(32768, 3072, 768)
    few, busiest, plain = wgmma_backward.dealt(desc, wgmma_backward.cheapest_ring(desc, H200), H200)
    assert few >= 0
    assert busiest < 0.8 * plain
    assert tp.plan(desc, target=H200).sku().kernel == "wgmma"


def test_short_tiles_take_what_writing_them_takes() -> None:
    """Of n = 128, da has tiles of two steps: programs with a tile of db take fewer of them than its FLOPs would say."""
    desc = tp.GemmBackwardDescriptor(m=16384, n=128, k=4304, element="f16")
    ring = wgmma_backward.cheapest_ring(desc, H200)
    assert wgmma_backward.parts_of(desc, ring, H200) == 2
    assert wgmma_backward.dealt(desc, ring, H200, 2).few > 10
    assert wgmma_backward.rank(desc, H200) > sum(o.nbytes for o in desc.operands()) / BYTES_PER_US


@pytest.mark.gpu
@pytest.mark.skipif("tp.Target.current().arch is not tp.ArchSku.SM90A")
@pytest.mark.parametrize("shape", [(8192, 512, 256), (12296, 384, 384)], ids=str)
def test_uneven_shares_on_the_gpu(shape: tuple[int, ...]) -> None:
    desc = problem(*shape)
    target = tp.Target.current()
    assert wgmma_backward.dealt(desc, wgmma_backward.cheapest_ring(desc, target), target).few >= 0
    check_plan(tp.plan(desc, kernel="wgmma"), runs=3)
