"""Matrix products of one row, one column or a short k, without tensor cores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cases import H200, INTERPRETER, required
from cases.gemm import ELEMENTS, batched_grid, check, compared, grid, plan_with
from proofs import MARKS, target

import triplan as tp
from triplan.backends.runtime.compile import BLOCK_REGISTERS
from triplan.backends.triton.gemm import gemv, outer
from triplan.backends.triton.gemm.gemv import Block

#: Of one row, of one column, of both.
VECTORS = ((1, 35, 70), (37, 1, 70), (1, 1, 70), (1, 5, 0), (0, 1, 3))
#: k up to the longest.
SHORT = ((17, 35, 1), (19, 34, 13), (6, 21, 16), (5, 66, 3), (70, 3, 8), (1, 9, 2), (9, 1, 5), (3, 4, 0))


#: Of a long k, few rows, and few columns of a column-major C.
STREAMED = ((2, 300, 37), (8, 135, 70), (151, 5, 21))


def streamed(element: str) -> Iterator[tp.Descriptor]:
    """Few rows or columns with and without a batch, c0 and a bias."""
    for turn, (m, n, k) in enumerate(STREAMED):
        for batch in (None, 3):
            kind, lead = (tp.GemmDescriptor, {}) if batch is None else (tp.BatchedGemmDescriptor, {"batch": batch})
            columns = tp.Layout.strided(unit_axis=0 if batch is None else 1)
            layouts = {} if m < n else dict.fromkeys("ac", columns)
            epilogue = ("identity", "bias_relu", "bias_gelu")[turn]
            yield kind(m=m, n=n, k=k, element=element, epilogue=epilogue, reads_c0=turn == 1, layouts=layouts, **lead)


def problems(where: str, entry: str, element: str) -> Iterator[tp.Descriptor]:
    sizes = VECTORS if entry == "gemv" else SHORT
    if where == "interpret":  # slow: f16 and bf16 share the sizes, and so do f32 and f64
        sizes = sizes[ELEMENTS.index(element) % 2 :: 2]
    yield from (desc for m, n, k in sizes for desc in grid(element, m, n, k))
    yield from (desc for m, n, k in sizes[:3] for desc in batched_grid(element, 3, m, n, k))
    if entry == "outer":
        yield from streamed(element)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("where", [pytest.param(where, marks=mark) for where, mark in MARKS.items() if where != "cpu"])
@pytest.mark.parametrize("entry", ["gemv", "outer"])
@pytest.mark.parametrize("element", ELEMENTS)
def test_every_layout_and_epilogue(where: str, entry: str, element: str) -> None:
    assert compared(problems(where, entry, element), lambda desc: required(desc, entry, target(where))) > 0


def test_counters_of_k_do_not_wrap() -> None:
    for k in (2**31 - 9000, 2**31 - 8000):
        plan = required(tp.GemmDescriptor(m=1, n=1, k=k, element="f16"), "gemv", H200)
        wide = dict(plan.launches[0].source().signature)["k"] == "i64"
        assert wide or k + plan.launches[0].constexprs["DEPTH"] < 2**31
        assert wide == (k > 2**31 - max(gemv.DEPTHS))


@pytest.mark.gpu
def test_pieces_that_end_at_the_largest_i32() -> None:
    desc = tp.GemmDescriptor(m=1, n=1, k=2**31 - 520_000, element="f16")
    plan = required(desc, "gemv", target("gpu"))
    args = plan.args_type(
        a=torch.ones(1, desc.k, dtype=torch.float16, device="cuda"),
        b=torch.zeros(desc.k, 1, dtype=torch.float16, device="cuda"),
        c=torch.empty(1, 1, dtype=torch.float16, device="cuda"),
    )
    args.b[-3:] = 1
    plan.run(args, tp.Workspace.allocate(plan, torch.device("cuda")))
    assert args.c.item() == 3


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("where", [pytest.param(where, marks=mark) for where, mark in MARKS.items() if where != "cpu"])
@pytest.mark.parametrize("pieces", [2, 16, 32])
def test_pieces(where: str, pieces: int) -> None:
    """Wide along k and wide along rows; a last piece that is shorter, and more pieces than are added at a time."""
    ran, entry = 0, next(e for e in tp.TABLE.rows("gemm") if e.name == "gemv")
    for turn, block in enumerate((Block(16, 32, pieces), Block(32, 8, pieces))):
        k = block.depth * (pieces + 8) - 3
        for m, n in ((1, 35), (37, 1)):
            layouts = {"a": tp.Layout.strided(unit_axis=turn)}
            desc = tp.GemmDescriptor(m=m, n=n, k=k, element="bf16", epilogue="bias_silu", layouts=layouts)
            made, size = gemv.launches(desc, block), gemv.partial_bytes(desc, block)
            assert size == block.count(k) * m * n * 4
            plan = plan_with(desc, f"gemv {block}", made, size, entry.guarantee, target(where))
            ran += check(plan, turn)
    assert ran > 0


@pytest.mark.parametrize(("n", "columns"), [(5, 8), (96, 32), (250, 256), (521, 64), (4096, 256)])
def test_few_columns_of_a_tile_do_not_exist(n: int, columns: int) -> None:
    """A warp of columns may be narrower; the same along a column-major C."""
    row = tp.GemmDescriptor(m=500_000, n=n, k=3, element="f32")
    column = tp.GemmDescriptor(m=n, n=500_000, k=3, element="f32", layouts={"c": tp.Layout.strided(unit_axis=0)})
    for desc, axis in ((row, 1), (column, 0)):
        tile = outer.tile_of(desc, H200)
        assert (tile[axis], tile.m * tile.n) == (columns, 4096)


@pytest.mark.parametrize(("m", "n", "tile"), [(9000, 257, (4, 128)), (1, 900_000, (1, 512)), (90_000, 8, (128, 8))])
def test_tiles_of_a_result_without_unit_stride_have_few_rows(m: int, n: int, tile: tuple[int, int]) -> None:
    """Unless its own rows are short: threads would have no elements."""
    desc = tp.GemmDescriptor(m=m, n=n, k=3, element="f32", layouts={"c": tp.Layout.strided()})
    assert outer.tile_of(desc, H200) == tile


@pytest.mark.parametrize("k", [0, 1, 31, 64, 1000, 4097])
@pytest.mark.parametrize("pieces", [1, 2, 64])
def test_pieces_hold_all_of_k_once_and_none_is_empty(pieces: int, k: int) -> None:
    block = Block(8, 32, pieces)
    depth, count = block.piece(k), block.count(k)
    assert depth % 32 == 0
    assert 1 <= count <= pieces
    assert (count - 1) * depth < max(k, 1) <= count * depth


def test_blocks_share_elements_of_the_vector_and_have_no_row_too_many() -> None:
    odd = tp.GemmDescriptor(m=1, n=9763, k=16383, element="bf16")
    assert gemv.cheapest_block(odd, H200).rows == 512
    few = odd.replace(n=3)
    assert {block.rows for block in gemv.blocks_of(few)} == {4}
    assert gemv.cheapest_block(few, H200).depth == 1024


@pytest.mark.parametrize("element", ["f16", "f32"])
def test_vectors_of_a_batch_are_loaded_in_vectors(element: str) -> None:
    """Their extent of 1 says nothing of where the next one begins."""
    desc = tp.BatchedGemmDescriptor(batch=24, m=207, n=1, k=8192, element=element)
    for ptx in (found.ptx for found in required(desc, "gemv", H200).compile()):
        loads = [line for line in ptx.splitlines() if "ld.global" in line]
        assert loads
        assert all(".v4.b32" in line for line in loads)


def test_a_block_shares_elements_of_a_long_vector() -> None:
    """A block of one row would load as many elements of the vector as of the matrix."""
    desc = tp.BatchedGemmDescriptor(batch=24, m=207, n=1, k=8192, element="f16")
    assert gemv.cheapest_block(desc, H200).rows > 1


@pytest.mark.parametrize(
    "desc",
    [tp.GemmDescriptor(m=1, n=127, k=17450, element="f32"), tp.GemmDescriptor(m=65535, n=1, k=179, element="f16")],
)
def test_registers_leave_room_for_the_programs_that_costs_count(desc: tp.GemmDescriptor) -> None:
    """Where each element has an address of its own, blocks that share much of the vector take more registers."""
    along_k, block = gemv.matrix_of(desc)[1], gemv.cheapest_block(desc, H200)
    assert gemv.is_elementwise(gemv.matrix_of(desc)[0])
    assert gemv._shared(desc, block, along_k) in gemv.RESIDENT_SINGLE
    registers = required(desc, "gemv", H200).compile()[0].registers
    assert registers * gemv.THREADS * gemv._resident(desc, block) <= BLOCK_REGISTERS


def test_what_is_chosen() -> None:
    """Blocks are wide along the unit-stride axis, k is cut where rows are few, and no block is wasted on one row."""
    row = tp.GemmDescriptor(m=4, n=1, k=50000, element="f16")
    assert tp.plan(row, target=H200).sku().kernel == "gemv"
    found = gemv.cheapest_block(row, H200)
    assert found.depth > 32 * found.rows
    assert found.pieces > 1
    many = gemv.cheapest_block(row.replace(m=1, n=100000, k=512), H200)
    assert many.rows > many.depth
    dots = tp.BatchedGemmDescriptor(batch=256, m=1, n=1, k=768, element="f32")
    assert gemv.cheapest_block(dots, H200).pieces == 1
    assert tp.plan(tp.GemmDescriptor(m=4096, n=4095, k=2, element="bf16"), target=H200).sku().kernel == "outer"
    for desc, kernel in ((row.replace(n=2), "gemv"), (row.replace(k=outer.MOST_K + 1), "outer")):
        with pytest.raises(tp.Unsupported, match=r"neither one row|is longer than"):
            required(desc, kernel, H200)


def test_a_long_k_is_streamed_for_few_rows_that_lie_as_the_factor() -> None:
    wide = tp.GemmDescriptor(m=4, n=5_450_571, k=129, element="f32")
    assert tp.plan(wide, target=H200).sku().kernel == "outer"
    tall = wide.replace(m=wide.n, n=4, layouts=dict.fromkeys("ac", tp.Layout.strided(unit_axis=0)))
    assert tp.plan(tall, target=H200).sku().kernel == "outer"
    for other in (wide.replace(m=outer.FEW + 1), wide.replace(layouts={"b": tp.Layout.strided(unit_axis=0)})):
        with pytest.raises(tp.Unsupported, match="neither factor is streamed"):
            required(other, "outer", H200)


def test_counters_of_k_that_is_streamed_do_not_wrap() -> None:
    for k in (2**31 - 513, 2**31 - 2):
        plan = required(tp.GemmDescriptor(m=2, n=3, k=k, element="f16"), "outer", H200)
        wide = dict(plan.launches[0].source().signature)["k"] == "i64"
        assert wide or k + max(step for _, step in outer.BLOCKS) < 2**31


def test_gradients_are_products_of_their_own() -> None:
    """Of one column of factors, da is a matrix times a vector, and so is db; of one row, one of them is an outer."""
    one = tp.GemmBackwardDescriptor(m=257, n=22914, k=1, element="f32")
    plan = tp.plan(one, target=H200)
    assert plan.sku().kernel == "separate"
    names = {x.kernel.__name__ for x in plan.launches}
    assert names <= {"gemv_kernel", "gemv_pieces_kernel", "pieces_kernel"}
    names = {x.kernel.__name__ for x in tp.plan(one.replace(m=1, k=512), target=H200).launches}
    assert "outer_kernel" in names
    tall = tp.GemmBackwardDescriptor(m=100_000, n=96, k=96, element="f32", wants_da=False)
    assert [x.kernel.__name__ for x in required(tall, "separate", H200).launches] == ["split_kernel", "pieces_kernel"]


@pytest.mark.interpret
def test_an_outer_product_is_exact_interpreted() -> None:
    desc = tp.GemmDescriptor(m=5, n=300, k=1, element="f32", math="tf32")
    a, b, c = torch.randn(5, 1), torch.randn(1, 300), torch.empty(5, 300)
    required(desc, "outer", INTERPRETER).run(tp.GemmArgs(a=a, b=b, c=c))
    assert torch.equal(c, a * b)
