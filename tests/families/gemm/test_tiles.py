"""Tiles by pointers that only some problems may take: where both factors lie along C, and of few columns."""

from __future__ import annotations

from typing import Any

import pytest
from cases import H200
from cases.gemm import COLUMN, LOOSE_COLUMN, LOOSE_ROW, backward, check

import triplan as tp
from triplan.backends.triton.gemm import fma, separate, separate_wgmma, tile_shapes as shapes
from triplan.backends.triton.gemm.products import gradient_products
from triplan.backends.triton.gemm.split_k import cheapest_split
from triplan.backends.triton.gemm.tile_costs import cheapest_tile, resident_programs
from triplan.backends.triton.gemm.tiles_invariant import invariant_tile

#: The gradient of b, from factors whose rows of C begin anywhere.
TF32 = tp.GemmDescriptor(m=127, n=1024, k=121505, element="f32", math="tf32", layouts={"a": LOOSE_COLUMN})
F64 = tp.GemmDescriptor(m=5517, n=8193, k=2048, element="f64", layouts={"a": LOOSE_COLUMN, "b": LOOSE_ROW})


def test_factors_that_lie_along_c_have_tiles_of_two_warps() -> None:
    assert cheapest_split(TF32, H200).tile == shapes.TILES_TF32_ALONG[0]
    assert cheapest_tile(F64, H200) == shapes.TILES_F64_ALONG[0] not in shapes.tiles_of(F64.replace(n=129), H200)
    assert shapes.TILES_TF32_ALONG[2] == cheapest_split(TF32.replace(m=255, n=31), H200).tile


@pytest.mark.parametrize("desc", [TF32, F64], ids=["tf32", "f64"])
@pytest.mark.parametrize(
    "change",
    [
        {"epilogue": "bias"},
        {"reads_c0": True},
        {"saves_pre": True},
        {"layouts": {"a": LOOSE_ROW, "b": LOOSE_ROW}},
        {"layouts": {"a": LOOSE_COLUMN, "b": LOOSE_COLUMN}},
        {"layouts": {"a": LOOSE_COLUMN, "b": "strided"}},
    ],
    ids=str,
)
def test_they_have_none_where_registers_would_spill(desc: tp.GemmDescriptor, change: dict[str, Any]) -> None:
    along = {*shapes.TILES_TF32_ALONG, *shapes.TILES_F64_ALONG}
    elementwise = desc.replace(n=16385)
    assert along & set(shapes.tiles_of(elementwise, H200))
    assert not along & set(shapes.tiles_of(elementwise.replace(**change), H200))


def test_the_invariant_tile_does_not_depend_on_how_the_other_factor_lies() -> None:
    for desc in (TF32.replace(n=16385), F64):
        other = {**dict(desc.layouts), "a": LOOSE_ROW}
        assert invariant_tile(desc, H200) == invariant_tile(desc.replace(layouts=other), H200)


def test_few_columns_have_a_tall_tile_of_halves_and_more_stages_of_tf32() -> None:
    words = tp.Layout.strided(unit_axis=0, alignment=16, stride_multiple=4)
    halves = tp.GemmDescriptor(m=1 << 20, n=46, k=1025, element="f16", layouts={"a": words})
    assert cheapest_tile(halves, H200) == shapes.TALL_2_BYTES_ELEMENTWISE
    for n in (30, 66):
        assert shapes.TALL_2_BYTES_ELEMENTWISE not in shapes.tiles_of(halves.replace(n=n), H200)
    narrow = tp.GemmDescriptor(
        m=121505,
        n=127,
        k=1024,
        element="f32",
        math="tf32",
        layouts={"b": tp.Layout.strided(unit_axis=0, alignment=16, stride_multiple=16)},
    )
    assert cheapest_tile(narrow, H200) == shapes.Tile(128, 128, 32, 8, 4)
    assert {t.stages for t in shapes.tiles_of(narrow.replace(n=129), H200) if (t.m, t.n) == (128, 128)} == {3}


def test_strided_f64_has_a_tile_of_which_three_programs_fit() -> None:
    desc = tp.GemmDescriptor(m=65537, n=4529, k=256, element="f64", epilogue="gelu", layouts={"c": COLUMN})
    tile = cheapest_tile(desc, H200)
    assert tile == shapes.Tile(64, 32, 16, 4, 3)
    assert resident_programs(desc, tile, H200) == 3
    assert invariant_tile(desc, H200) == shapes.Tile(32, 32, 16, 2, 3)


def test_few_programs_of_f64_are_dealt_evenly() -> None:
    """320 tiles of 64 rows are three on the fullest of 132 multiprocessors, 640 of 32 rows are five."""
    desc = tp.GemmDescriptor(m=20480, n=17, k=2560, element="f64")
    assert cheapest_tile(desc, H200) == shapes.Tile(32, 32, 16, 2, 3)


def test_few_columns_have_narrow_tiles_of_tf32x3() -> None:
    few = tp.GemmDescriptor(m=4263, n=19, k=170, element="f32", math="tf32x3", epilogue="bias")
    for n, found in ((16, 2), (19, 1), (33, 0)):
        assert len({*shapes.NARROW_TF32X3} & {*shapes.tiles_of(few.replace(n=n), H200)}) == found
        assert invariant_tile(few.replace(n=n), H200) == shapes.TILES_TF32X3[H200.arch][0]
    assert cheapest_tile(few, H200) == shapes.NARROW_TF32X3[0]
    gradient = few.replace(m=43, n=9, k=45934, epilogue="identity", layouts={"a": LOOSE_COLUMN, "b": LOOSE_ROW})
    assert cheapest_split(gradient, H200).tile == shapes.NARROW_TF32X3[1]


def test_gradients_in_tf32x3_of_a_strided_dc_are_multiplied_as_f32() -> None:
    desc = backward(361, 3824, 511, "f32", (1, 0, 0), math="tf32x3", layouts={"dc": "strided"})
    (product,) = gradient_products(desc).values()
    assert separate.way_of(product.desc, H200, separate.WAYS).build is fma.fma


@pytest.mark.parametrize("shared_memory", [1000, 30000, 50000, 100000])
def test_tiles_fit_in_shared_memory(shared_memory: int) -> None:
    small = H200.replace(shared_memory=shared_memory)
    narrow = tp.GemmDescriptor(m=4096, n=127, k=1024, element="f32", math="tf32", layouts={"b": COLUMN})
    for desc in (TF32, F64, narrow):
        assert all(t.shared_bytes(desc.element.itemsize) <= shared_memory for t in shapes.tiles_of(desc, small))


def test_gradients_are_refused_where_no_tile_fits() -> None:
    desc = backward(4099, 1025, 1024, "f16", (1, 1, 0))
    for module in (separate, separate_wgmma):
        assert not module.supports(desc, H200.replace(shared_memory=1000))


@pytest.mark.gpu
@pytest.mark.parametrize(("element", "math"), [("f32", "tf32"), ("f64", None), ("f16", None)])
def test_gradients_of_odd_rows_on_the_gpu(element: str, math: str | None) -> None:
    target = tp.Target.current()
    for turn, (m, n, k) in enumerate(((4099, 256, 127), (4100, 255, 128), (1023, 46, 2051), (300, 1025, 33))):
        desc = backward(m, n, k, element, (1, 1, 0), math=math)
        assert check(tp.plan(desc, target=target), turn) > 0
