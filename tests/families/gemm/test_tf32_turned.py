"""Products of tf32 by wgmma where a factor lies along C: which are taken, the binaries, and the results."""

from __future__ import annotations

from typing import Any

import pytest
from cases import H200, compiles, pinned, required
from cases.gemm import COLUMN, LOOSE_COLUMN, LOOSE_ROW, backward_grid, batched_grid, check, grid, plan_with

import triplan as tp
from triplan.backends.triton.gemm import tf32_turned
from triplan.backends.triton.gemm.split_k import Split
from triplan.backends.triton.gemm.tile_shapes import Tile

SQUARE = tp.GemmDescriptor(m=4096, n=4096, k=4096, element="f32", math="tf32")
KERNEL, SUMS = "tf32_turned_kernel", "pieces_kernel"
#: Each pair of layouts of A and B of which one lies along C.
LAYOUTS = ({}, {"a": COLUMN}, {"a": COLUMN, "b": COLUMN})


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({}, [KERNEL]),
        ({"layouts": {"a": COLUMN}, "epilogue": "bias_relu"}, [KERNEL]),
        ({"layouts": {"a": COLUMN, "b": COLUMN}}, [KERNEL]),
        ({"m": 4097, "layouts": {"a": LOOSE_COLUMN}}, [KERNEL]),
        ({"reads_c0": True}, [KERNEL, SUMS]),
        ({"epilogue": "gelu"}, [KERNEL, SUMS]),
        ({"m": 512, "n": 512, "k": 1 << 16}, [KERNEL, SUMS]),
    ],
)
def test_launches(change: dict[str, Any], names: list[str]) -> None:
    assert [x.kernel.__name__ for x in required(SQUARE.replace(**change), "tf32_turned", H200).launches] == names


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"math": "f32"}, "not as tf32"),
        ({"layouts": {"b": COLUMN}}, "both factors lie along k"),
        ({"layouts": {"a": "strided"}}, "no unit stride"),
        ({"layouts": {"b": LOOSE_ROW}}, "would spill"),
        ({"k": 0}, "nothing to multiply"),
    ],
)
def test_what_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(tp.Unsupported, match=reason):
        required(SQUARE.replace(**change), "tf32_turned", H200)
    with pytest.raises(tp.Unsupported, match="sm90a"):
        required(SQUARE, "tf32_turned", tp.Target.preset("a100"))


@compiles
@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
def test_factors_are_read_in_vectors(layouts: dict[str, Any]) -> None:
    """A Y that lies along C is stored in vectors along k, and no product waits for the next one."""
    plan = required(SQUARE.replace(layouts=layouts), "tf32_turned", H200)
    (found,) = plan.compile()
    assert found.spill_bytes == 0
    for text, wanted in (("wgmma.mma_async", True), ("cp.async.cg", True), ("cp.async.ca", False)):
        assert (text in found.ptx) == wanted
    assert ("st.shared.v4" in found.ptx) == ("ld.global.v4" in found.ptx) == (layouts == {"a": COLUMN})


@pytest.mark.gpu
@pytest.mark.parametrize("k", [4, 260, 1025])
def test_every_layout_on_the_gpu(k: int) -> None:
    target, checked = tp.Target.current(), 0
    for m, n in ((136, 264), (4, 516), (131, 260)):
        for turn, desc in enumerate((*grid("f32", m, n, k), *batched_grid("f32", 3, m, n, k))):
            plan = pinned(desc.replace(math="tf32"), "tf32_turned", target)
            checked += 0 if plan is None else check(plan, turn)
    assert checked > 0


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
@pytest.mark.parametrize("pieces", [1, 3])
def test_every_tile_on_the_gpu(layouts: dict[str, Any], pieces: int) -> None:
    target, entry = tp.Target.current(), next(e for e in tp.TABLE.rows("gemm") if e.name == "tf32_turned")
    desc = tp.GemmDescriptor(m=396, n=260, k=2052, element="f32", math="tf32", epilogue="bias_relu", layouts=layouts)
    for turn, tile in enumerate(
        sorted({str(s.tile): s.tile for s in tf32_turned.splits_of(desc, target)}.values(), key=str)
    ):
        assert isinstance(tile, Tile)
        split = Split(tile, pieces)
        ways = tf32_turned.launches(desc, split), tf32_turned.workspace_with(desc, split)
        assert check(plan_with(desc, "cut", *ways, entry.guarantee, target), turn) > 0


@pytest.mark.gpu
def test_gradients_on_the_gpu() -> None:
    for turn, desc in enumerate(backward_grid("f32", 1028, 132, 260)):
        assert check(required(desc.replace(math="tf32"), "separate", tp.Target.current()), turn) > 0
