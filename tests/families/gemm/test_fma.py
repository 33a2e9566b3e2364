"""Products of f32 by FMAs in large tiles: what is copied, where k is cut, and the results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cases import H200, compiles, pinned, required
from cases.gemm import COLUMN, LOOSE_COLUMN, LOOSE_ROW, ROW, backward_grid, batched_grid, check, grid, plan_with

import triplan as tp
from triplan.backends.triton.gemm import fma
from triplan.backends.triton.gemm.cuts import Cut
from triplan.backends.triton.gemm.split_k import Split
from triplan.backends.triton.gemm.tile_costs import RESERVED_SHARED_BYTES
from triplan.backends.triton.gemm.tile_shapes import programs_of

SQUARE = tp.GemmDescriptor(m=4096, n=4096, k=4096, element="f32")
KERNEL, COPY, SUMS, PARTS = "fma_kernel", "matrix_copy_kernel", "pieces_kernel", "parts_kernel"


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({}, [KERNEL]),
        ({"layouts": {"a": COLUMN}, "epilogue": "bias_silu"}, [KERNEL]),
        ({"layouts": {"b": COLUMN}}, [COPY, KERNEL]),
        ({"layouts": {"a": "strided"}}, [COPY, KERNEL]),
        ({"layouts": {"a": "strided", "b": "strided"}}, [COPY, COPY, KERNEL]),
        ({"m": 1023, "n": 1023, "k": 4095, "layouts": {"a": LOOSE_COLUMN, "b": LOOSE_ROW}}, [KERNEL, SUMS]),
        ({"m": 2047, "n": 2047, "k": 4095}, [COPY, COPY, KERNEL]),
        ({"m": 255, "n": 12288, "k": 1 << 16, "layouts": {"a": LOOSE_COLUMN}}, [COPY, KERNEL, SUMS]),
        ({"m": 255, "n": 12288, "k": 4101}, [COPY, KERNEL, SUMS]),
        ({"n": 12288}, [COPY, KERNEL]),
        ({"n": 12288, "layouts": {"a": COLUMN}}, [KERNEL]),
        ({"m": 1 << 16, "n": 97, "k": 4111, "layouts": {"a": LOOSE_ROW}}, [COPY, KERNEL]),
        ({"reads_c0": True}, [KERNEL, SUMS]),
        ({"epilogue": "gelu"}, [KERNEL, SUMS]),
        ({"epilogue": "bias_relu", "layouts": {"c": COLUMN}}, [KERNEL, SUMS]),
        ({"layouts": {"c": LOOSE_COLUMN}}, [KERNEL]),
        ({"m": 512, "n": 512, "k": 1 << 16}, [KERNEL, SUMS]),
    ],
)
def test_launches(change: dict[str, Any], names: list[str]) -> None:
    """Copies of an A without unit stride, of a B that is not row-major, and of small factors whose rows are odd; sums
    where k is cut, or registers spill."""
    assert [x.kernel.__name__ for x in required(SQUARE.replace(**change), "fma", H200).launches] == names


def test_where_it_is_chosen() -> None:
    for change in ({}, {"layouts": {"a": COLUMN}}, {"layouts": {"b": COLUMN}}, {"k": 4095, "epilogue": "bias_gelu"}):
        assert tp.plan(SQUARE.replace(**change), target=H200).sku().kernel == "fma"
    for change in ({"m": 16}, {"k": 16, "n": 64}, {"math": "tf32"}, {"element": "f64"}):
        assert tp.plan(SQUARE.replace(**change), target=H200).sku().kernel != "fma"
    empty = required(SQUARE.replace(m=0), "fma", H200)
    assert (empty.launches, empty.workspace_size()) == ((), 0)
    with pytest.raises(tp.Unsupported, match="not as f32"):
        required(SQUARE.replace(math="tf32"), "fma", H200)
    with pytest.raises(tp.Unsupported, match="nothing to multiply"):
        required(SQUARE.replace(k=0), "fma", H200)
    with pytest.raises(tp.Unsupported, match="sm90a"):
        required(SQUARE, "fma", tp.Target.preset("a100"))


def test_without_workspace_it_runs_without_copies_or_pieces() -> None:
    """They save some percent, but other kernels take half as long again."""
    for change in ({"n": 12288}, {"n": 12288, "k": 4095}, {"m": 2048, "n": 12288, "k": 1 << 14}):
        desc = SQUARE.replace(**change)
        assert tp.plan(desc, target=H200).workspace_size() > 0
        plan = tp.plan(desc, target=H200, max_workspace_bytes=0)
        assert (plan.sku().kernel, plan.workspace_size()) == ("fma", 0)
        assert [x.kernel.__name__ for x in plan.launches] == [KERNEL]
        assert "in place, for its workspace" in plan.explain()
    with pytest.raises(tp.Unsupported, match="bytes of workspace"):
        tp.plan(SQUARE.replace(reads_c0=True), target=H200, kernel="fma", max_workspace_bytes=0)


@pytest.mark.parametrize(("m", "n", "k"), [(3072, 73, 108736), (1600, 2689, 18432), (4096, 33, 65536)])
def test_pieces_of_k_fill_whole_waves(m: int, n: int, k: int) -> None:
    """A wave that is not full takes as long as a full one; of few columns a warp has 64 rows."""
    desc = tp.GemmDescriptor(m=m, n=n, k=k, element="f32")
    split = min(fma.splits_of(desc, H200), key=lambda found: fma.fma_us(desc, found, H200))
    programs, slots = split.count(k) * programs_of(desc, split.tile), 132 * fma.RESIDENT_WARPS // split.tile.warps
    assert programs % slots == 0 or programs % slots > 0.95 * slots
    assert (split.tile.n == 64) == (n == 33)


def test_a_last_wave_of_few_tiles_is_cut() -> None:
    """37 rows of 5 tiles are one wave of 132, and 53 tiles."""
    desc = tp.GemmDescriptor(m=4655, n=1280, k=485, element="f32")
    plan, cut = required(desc, "fma", H200), fma.cheapest(desc, H200)
    assert isinstance(cut, Cut)
    assert (cut.whole, cut.rest, cut.parts) == (132, 53, 2)
    assert [x.kernel.__name__ for x in plan.launches][-2:] == [KERNEL, PARTS]
    assert plan.workspace_size() >= cut.nbytes == 53 * 2 * 128 * 256 * 4
    assert [x.spill_bytes for x in plan.compile()] == [0] * len(plan.launches)
    assert not plan.precision_guarantee("c").batch_invariant
    for change in ({"reads_c0": True}, {"epilogue": "gelu"}, {"layouts": {"c": COLUMN}}, {"m": 132 * 128, "n": 256}):
        assert fma.cuts_of(desc.replace(**change), H200) == ()
    assert {c.tile.n for c in fma.cuts_of(desc.replace(m=40_000, n=97), H200)} == {128}


@pytest.mark.parametrize("layout", [LOOSE_COLUMN, COLUMN, LOOSE_ROW, "packed"], ids=str)
def test_few_columns_have_a_narrow_tile(layout: Any) -> None:
    desc = tp.GemmDescriptor(m=32767, n=21, k=2948, element="f32", layouts={} if layout == "packed" else {"a": layout})
    assert fma.cheapest(desc, H200).tile.n == 32
    assert {split.tile.n for split in fma.splits_of(desc.replace(n=33), H200)} <= {64, 128, 256}


def test_the_tile_of_few_columns_has_two_stages_for_single_elements_of_rows() -> None:
    """These pass through the L1 cache, which shares its memory with the stages."""
    desc = tp.GemmDescriptor(m=32767, n=21, k=2948, element="f32")
    for layouts, k, stages in (
        ({}, 2948, 3),
        ({}, 2947, 2),
        ({"a": LOOSE_ROW}, 2948, 2),
        ({"a": LOOSE_COLUMN}, 2947, 3),
    ):
        problem = desc.replace(k=k, layouts=layouts)
        assert {split.tile.stages for split in fma.splits_of(problem, H200) if split.tile.n == 32} == {stages}


@pytest.mark.parametrize(("change", "held"), [({}, True), ({"m": 1 << 16}, False), ({"m": 1 << 16, "n": 97}, False)])
def test_single_elements_of_rows_are_copied_if_b_is_read_in_vectors(change: dict[str, Any], held: bool) -> None:
    """Other rows of A pass through registers, but in narrow tiles. Of the odd problem's B, the copy would take too long
    for few rows."""
    odd = tp.GemmDescriptor(m=65, n=1023, k=4096, element="f32", layouts={"a": LOOSE_ROW}).replace(**change)
    for desc, expected in ((odd, held), (odd.replace(layouts={}), True)):
        for split in fma.splits_of(desc, H200):
            (multiplies,) = (x for x in fma.launches(desc, split) if x.kernel.__name__ == KERNEL)
            assert multiplies.constexprs["A_ROWS"]
            assert multiplies.constexprs["A_HELD"] is (expected and split.tile.n > 64)


def test_large_tiles_copy_single_elements_of_long_rows_only() -> None:
    desc = tp.GemmDescriptor(m=1 << 16, n=1024, k=1025, element="f32", layouts={"a": LOOSE_ROW})
    held = {}
    for split in fma.splits_of(desc, H200):
        (multiplies,) = (x for x in fma.launches(desc, split) if x.kernel.__name__ == KERNEL)
        held[split.tile.m, split.tile.n] = multiplies.constexprs["A_HELD"]
    assert held == {(128, 128): True, (64, 128): False, (128, 64): False}
    assert fma.cheapest(desc, H200).tile.m == 128


def test_tiles_of_64_rows_are_faster_for_odd_rows() -> None:
    desc = tp.GemmDescriptor(m=58788, n=97, k=4111, element="f32", epilogue="bias_relu", layouts={"a": LOOSE_ROW})
    assert (fma.cheapest(desc, H200).tile.m, fma.cheapest(desc, H200).tile.n) == (64, 128)


@pytest.mark.parametrize("layouts", [{}, {"a": "strided", "b": LOOSE_COLUMN}, {"c": COLUMN}], ids=str)
def test_few_rows_are_multiplied_as_columns(layouts: dict[str, Any]) -> None:
    """B is the first factor, and C is written by columns; the narrow tile takes a row-major B."""
    desc = tp.GemmDescriptor(m=21, n=2048, k=32767, element="f32", layouts=layouts)
    found = fma.launches(desc, fma.cheapest(desc, H200))
    multiplies, sums = found[-2:]
    assert [x.kernel.__name__ for x in found] == [COPY, KERNEL, SUMS]
    assert multiplies.constexprs["BLOCK_N"] == 32
    assert multiplies.constexprs["A_ROWS"] == ("b" in layouts)
    assert (multiplies.args["m"].value, multiplies.args["k"].value) == (2048, 32767)  # type: ignore[union-attr]
    assert multiplies.args["a"].operand == "b"  # type: ignore[union-attr]
    assert (sums.args["m"].value, sums.args["c"].operand) == (2048, "c")  # type: ignore[union-attr]
    cm, cn = (sums.args.get(x, sums.constexprs.get(x)) for x in ("cm", "cn"))
    assert (cm == 1, cn == 1) == ("c" not in layouts, "c" in layouts)
    for change in ({"m": 16}, {"n": 20}, {"k": 64}, {"epilogue": "bias"}, {"reads_c0": True}):
        assert fma.turned(desc.replace(**change)) is None
    assert (fma.turned(desc.replace(m=33)) is None) == ("b" not in layouts)


def test_a_column_major_b_is_multiplied_as_rows_where_its_copy_takes_longer() -> None:
    desc = tp.GemmDescriptor(m=55, n=1 << 17, k=1025, element="f32", layouts={"b": LOOSE_COLUMN})
    found = fma.launches(desc, Split(fma.TILES[3], 1))
    assert [x.kernel.__name__ for x in found] == [COPY, KERNEL]
    assert found[1].args["a"].operand == "b"  # type: ignore[union-attr]
    assert (found[1].constexprs["A_ROWS"], found[1].constexprs["C_COLUMNS"]) == (True, True)
    for change in ({"m": 4096, "n": 4096}, {"m": 65}, {"layouts": {}}):
        assert fma.turned(desc.replace(**change)) is None


def test_rows_that_begin_anywhere_are_stored_by_adjacent_threads() -> None:
    for change, single in (({}, False), ({"n": 4095}, True), ({"n": 4095, "layouts": {"c": COLUMN}}, False)):
        (launch,) = fma.launches(SQUARE.replace(**change), Split(fma.TILES[2], 1), copied=False)
        assert launch.constexprs["C_SINGLE"] is single


def test_copies_and_partial_sums_of_odd_rows_are_read_and_written_in_vectors() -> None:
    """Their rows are rounded up, of copies to lines, and the extents that mask loads and stores include the zeros."""
    a_copied = tp.GemmDescriptor(m=255, n=12287, k=1 << 16, element="f32", layouts={"a": LOOSE_COLUMN})
    b_copied = tp.GemmDescriptor(m=256, n=177, k=1 << 16, element="f32", layouts={"b": COLUMN})
    for desc, vectors, extents in ((a_copied, (4, 1), (256, 12287, 12288)), (b_copied, (4, 4), (None, 192, 180))):
        _, launch, _ = fma.launches(desc, Split(fma.TILES[1], 4))
        assert (launch.constexprs["A_VECTOR"], launch.constexprs["B_VECTOR"]) == vectors
        found = (launch.args[x] for x in ("a_rows", "b_columns", "n"))
        assert tuple(x if x is None else x.value for x in found) == extents  # type: ignore[union-attr]
        assert not launch.constexprs["C_SINGLE"]


def test_narrow_tiles_of_rows_store_vectors_where_single_elements_would_spill() -> None:
    desc = tp.GemmDescriptor(m=4096, n=65, k=1 << 16, element="f32")
    turned = desc.replace(layouts={"a": LOOSE_COLUMN})
    for problem, tile, columns in ((desc, 3, 68), (desc, 2, 68), (turned, 3, 68), (desc.replace(n=21), 4, 24)):
        launch, _ = fma.launches(problem, Split(fma.TILES[tile], 4), copied=False)
        assert launch.args["n"].value == columns  # type: ignore[union-attr]
        assert fma.workspace_with(problem, Split(fma.TILES[tile], 4), copied=False) == 4 * 4096 * columns * 4
    for problem, tile, names in ((desc, 3, [KERNEL, SUMS]), (desc, 2, [KERNEL]), (turned, 3, [KERNEL])):
        assert [x.kernel.__name__ for x in fma.launches(problem, Split(fma.TILES[tile], 1), copied=False)] == names


@compiles
@pytest.mark.parametrize(("n", "k"), [(384, 4096), (379, 4095)])
def test_few_rows_that_are_not_multiplied_as_columns_have_a_low_tile(n: int, k: int) -> None:
    """Its eight programs share the memory of a multiprocessor, and fewer than 17 rows do not have it."""
    desc = tp.BatchedGemmDescriptor(batch=64, m=32, n=n, k=k, element="f32", epilogue="bias_silu")
    plan, tile = required(desc, "fma", H200), fma.cheapest(desc, H200).tile
    assert (fma.turned(desc), tile.m, tile.n) == (None, 32, 128)
    assert fma.RESIDENT_WARPS // tile.warps * (tile.shared_bytes(4) + RESERVED_SHARED_BYTES) <= H200.shared_memory
    assert [found.spill_bytes for found in plan.compile()] == [0] * len(plan.launches)
    for m in (16, 33):
        assert min(split.tile.m for split in fma.splits_of(desc.replace(m=m), H200)) == 64


@compiles
@pytest.mark.parametrize("layouts", [{"a": COLUMN, "b": COLUMN, "c": ROW}], ids=str)
def test_the_tile_of_few_rows_does_not_spill_where_single_elements_are_stored(layouts: dict[str, Any]) -> None:
    desc = tp.GemmDescriptor(m=32, n=379, k=400, element="f32", epilogue="silu", layouts=layouts)
    split = Split(fma.TILES[-1], 1)
    found = fma.launches(desc, split)
    assert [x.kernel.__name__ for x in found] == [COPY, KERNEL, SUMS]
    entry = next(e for e in tp.TABLE.rows("gemm") if e.name == "fma")
    plan = plan_with(desc, "low", found, fma.workspace_with(desc, split), entry.guarantee, H200)
    assert [record.spill_bytes for record in plan.compile()] == [0] * len(found)


@compiles
@pytest.mark.parametrize(
    ("layouts", "columns"),
    [({"a": LOOSE_COLUMN}, 32), ({"a": LOOSE_COLUMN, "b": COLUMN}, 32), ({}, 32), ({"a": LOOSE_ROW}, 32)],
    ids=["rows", "copied", "row-major", "row-major, single"],
)
def test_the_tile_of_few_columns_does_not_spill(layouts: dict[str, Any], columns: int) -> None:
    desc = tp.GemmDescriptor(m=32767, n=32, k=4096, element="f32", layouts=layouts)
    plan = required(desc, "fma", H200)
    assert fma.cheapest(desc, H200).tile.n == columns
    assert [found.spill_bytes for found in plan.compile()] == [0] * len(plan.launches)


def problems(m: int, n: int, k: int) -> Iterator[tp.Descriptor]:
    yield from grid("f32", m, n, k)
    yield from batched_grid("f32", 3, m, n, k)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 203, 1024])
def test_every_layout_on_the_gpu(k: int) -> None:
    target = tp.Target.current()
    for m, n in ((136, 264), (29, 515), (3, 515)):
        found = [plan for desc in problems(m, n, k) if (plan := pinned(desc, "fma", target)) is not None]
        assert sum(check(plan, turn) for turn, plan in enumerate(found)) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("tile", fma.TILES, ids=str)
def test_every_tile_and_pieces_on_the_gpu(tile: fma.Tile) -> None:
    target, entry = tp.Target.current(), next(e for e in tp.TABLE.rows("gemm") if e.name == "fma")
    for turn, pieces in enumerate(fma.PIECES):
        split = Split(tile, pieces)
        for desc in grid("f32", 131, 259, 2053):
            plan = plan_with(
                desc, "cut", fma.launches(desc, split), fma.workspace_with(desc, split), entry.guarantee, target
            )
            assert check(plan, turn) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize("layout", [COLUMN, LOOSE_COLUMN, LOOSE_ROW, ROW], ids=str)
def test_every_cut_on_the_gpu(layout: tp.Layout, batch: int | None) -> None:
    target, entry, ran = tp.Target.current(), next(e for e in tp.TABLE.rows("gemm") if e.name == "fma"), 0
    for turn, epilogue in enumerate(("identity", "bias_silu")):
        desc: Any = tp.GemmDescriptor(m=4655, n=1283, k=485, element="f32", epilogue=epilogue, layouts={"a": layout})
        if batch is not None:
            desc = tp.BatchedGemmDescriptor(batch=batch, m=1655, n=1283, k=485, element="f32", epilogue=epilogue)
        for cut in fma.cuts_of(desc, target):
            launches = fma.launches(desc, cut)
            plan = plan_with(desc, str(cut), launches, fma.workspace_with(desc, cut), entry.guarantee, target)
            ran += check(plan, turn) > 0
    assert ran > 0


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [LOOSE_COLUMN, LOOSE_ROW, ROW], ids=str)
@pytest.mark.parametrize(("m", "n"), [(131, 12288), (129, 12291)])
def test_a_copied_a_on_the_gpu(m: int, n: int, layout: tp.Layout) -> None:
    for turn, epilogue in enumerate(("identity", "bias_gelu")):
        desc = tp.GemmDescriptor(m=m, n=n, k=2053, element="f32", epilogue=epilogue, layouts={"a": layout})
        assert [copy.unit for copy in fma.moved(desc)] == [0]
        assert check(required(desc, "fma", tp.Target.current()), turn) > 0


@pytest.mark.gpu
def test_a_copied_row_major_b_on_the_gpu() -> None:
    for turn, (epilogue, layouts) in enumerate((("identity", {}), ("bias_silu", {"a": LOOSE_ROW}))):
        desc = tp.GemmDescriptor(m=12291, n=131, k=2053, element="f32", epilogue=epilogue, layouts=layouts)
        assert [copy.operand.name for copy in fma.moved(desc)] == ["b"]
        assert check(required(desc, "fma", tp.Target.current()), turn) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 513, 4111])
def test_few_rows_and_few_columns_on_the_gpu(k: int) -> None:
    target = tp.Target.current()
    for m, n in ((31, 1031), (1031, 31), (32, 260)):
        found = [plan for desc in problems(m, n, k) if (plan := pinned(desc, "fma", target)) is not None]
        assert sum(check(plan, turn) for turn, plan in enumerate(found)) > 0


@pytest.mark.gpu
def test_gradients_on_the_gpu() -> None:
    target = tp.Target.current()
    for turn, desc in enumerate(backward_grid("f32", 1025, 515, 771)):
        plan = tp.plan(desc, target=target)
        assert check(plan, turn) > 0
