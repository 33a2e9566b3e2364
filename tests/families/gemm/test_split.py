"""Matrix products by pieces of k: how k is cut, what is added in which order, and what the workspace holds."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from cases import H200, INTERPRETER, required
from cases.gemm import COLUMN, LAYOUTS, batched_grid, check, grid, plan_with

import triplan as tp
from triplan.backends.triton.gemm import split_k
from triplan.backends.triton.gemm.matrices import unit_axis
from triplan.backends.triton.gemm.products import transposed
from triplan.backends.triton.gemm.split_k import PIECES, Split
from triplan.backends.triton.gemm.tile_shapes import Tile

DECODE = tp.GemmDescriptor(m=16, n=4096, k=4096, element="bf16", epilogue="bias", layouts={"b": COLUMN})


def by(split: Split, desc: tp.Descriptor, target: tp.Target) -> tp.Plan:  # type: ignore[type-arg]
    """The plan of ``split_k`` that cuts k as ``split`` says."""
    entry = next(e for e in tp.TABLE.rows(desc.op) if e.name == "split_k")
    launches, workspace = split_k.launches(desc, split), split_k.partial_bytes(desc, split)
    return plan_with(desc, f"split_k {split}", launches, workspace, entry.guarantee, target)


@pytest.mark.parametrize("k", [0, 1, 31, 32, 33, 64, 65, 1000, 4096])
@pytest.mark.parametrize("pieces", PIECES)
def test_pieces_hold_all_of_k_once_and_none_is_empty(pieces: int, k: int) -> None:
    split = Split(Tile(16, 32, 32, 4, 3), pieces)
    depth, count = split.depth(k), split.count(k)
    assert depth % 32 == 0
    assert 1 <= count <= pieces
    assert (count - 1) * depth < max(k, 1) <= count * depth


@pytest.mark.parametrize(
    ("m", "n", "layouts", "pieces", "block"),
    [
        (4096, 7, {}, 2, (64, 8)),
        (4096, 31, {}, 2, (16, 32)),
        (4096, 33, {}, 2, (8, 64)),
        (4096, 4096, {}, 16, (4, 128)),
        (4096, 4096, {"c": COLUMN}, 2, (64, 8)),
        (31, 4096, {"c": COLUMN}, 2, (32, 16)),
        (2, 4096, {"c": COLUMN}, 2, (4, 128)),
        (4096, 4096, {}, 17, (2, 128)),
        (4096, 7, {}, 64, (16, 8)),
        (4096, 4096, {}, 1000, (1, 32)),
        (2, 4096, {"c": COLUMN}, 256, (2, 16)),
        (31, 4096, {"c": COLUMN}, 256, (4, 8)),
    ],
    ids=str,
)
def test_pieces_are_added_in_blocks_that_suit_c(
    m: int, n: int, layouts: dict[str, Any], pieces: int, block: tuple[int, int]
) -> None:
    """Columns that do not exist would leave threads idle; a column-major C is written by long columns. Of many pieces
    threads share an element of C, so that a program loads as many partial sums."""
    desc = tp.GemmDescriptor(m=m, n=n, k=4096, element="f32", layouts=layouts)
    sums = split_k.sum_launch(desc, pieces, desc.n)
    found = sums.constexprs["BLOCK_M"], sums.constexprs["BLOCK_N"]
    assert found == block
    assert sums.grid == -(-m // block[0]) * -(-desc.n // block[1])


@pytest.mark.parametrize("element", ["f32", "f64"])
@pytest.mark.parametrize("pieces", [4, 16, 64])
def test_all_loads_of_a_round_of_pieces_precede_the_additions(element: str, pieces: int) -> None:
    """In the machine code: with 32 registers, a thread has three loads in flight."""
    desc = tp.GemmDescriptor(m=64, n=4096, k=4096, element=element)
    split = Split(Tile(16, 32, 32, 4, 3), pieces)
    sums = split_k.launches(desc, split)[1]
    compiled = by(split, desc, H200).compile()[1]
    assert compiled.registers > sums.constexprs["MOST_PIECES"] * 4  # of 16 bytes each


@pytest.mark.parametrize(("n", "rows"), [(456110, 128), (456112, 64)])
def test_tiles_are_tall_where_elements_are_loaded_one_by_one(n: int, rows: int) -> None:
    """They load each element less often."""
    desc = tp.GemmDescriptor(m=1025, n=128, k=n, element="bf16", layouts={"b": COLUMN})
    assert split_k.cheapest_split(desc, H200).tile.m == rows


def test_few_tiles_and_a_long_k_are_cut_and_many_tiles_are_not() -> None:
    long = tp.plan(tp.GemmDescriptor(m=16, n=1024, k=8192, element="f16", layouts={"b": COLUMN}), target=H200)
    assert long.sku().kernel == "split_k"
    assert len(long.launches) == 2
    split = split_k.cheapest_split(long.descriptor, H200)
    assert long.workspace_size() == split.count(8192) * 16 * 1024 * 4
    assert split.count(8192) > 1
    square = tp.plan(tp.GemmDescriptor(m=4096, n=4096, k=4096, element="f32"), target=tp.Target.preset("a100"))
    assert square.sku().kernel == "tiles"
    with pytest.raises(tp.Unsupported, match="batch_invariant"):
        tp.plan(DECODE, target=H200, preference=tp.PlanPreference(kernel="split_k", batch_invariant=True))
    nothing = required(DECODE.replace(m=0), "split_k", H200)
    assert (nothing.launches, nothing.workspace_size()) == ((), 0)


@pytest.mark.parametrize(
    ("element", "n", "columns"),
    [("f32", 1023, 1024), ("bf16", 177, 180), ("f32", 1024, 1024), ("f32", 45, 45), ("f64", 1023, 1024), ("f64", 9, 9)],
)
def test_rows_of_partial_sums_are_whole_vectors_unless_there_are_few_columns(
    element: str, n: int, columns: int
) -> None:
    assert split_k.padded_columns(tp.GemmDescriptor(m=8, n=n, k=64, element=element)) == columns


@pytest.mark.parametrize(("layouts", "columns"), [({}, 1024), ({"b": COLUMN}, 1023)], ids=["rows", "column-major B"])
def test_the_workspace_is_what_partial_sums_take(layouts: dict[str, tp.Layout], columns: int) -> None:
    desc = tp.GemmDescriptor(m=8, n=1023, k=4096, element="f32", layouts=layouts)
    split = Split(Tile(16, 64, 32, 4, 3), 4)
    assert split_k.partial_bytes(desc, split) == 4 * 8 * columns * 4
    product, total = split_k.launches(desc, split)
    assert (product.args["leading"] is None) == (total.args["leading"] is None) == (columns == 1023)


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("element", ["bf16", "f32"])
def test_every_layout_interpreted(element: str) -> None:
    """Two pieces and three, of which the last is shorter."""
    held = 0
    tile = Tile(16, 32, 32, 4, 3)
    for turn, desc in enumerate([*grid(element, 5, 35, 70), *islice(batched_grid(element, 2, 5, 9, 70), 1, 4)]):
        plan = by(Split(tile, PIECES[turn % 2]), desc, INTERPRETER)
        rows = desc.operand("c").numel // desc.n
        # Stores of FMAs of a column-major B take single elements.
        single = element == "f32" and unit_axis(desc.operand("b")) == 0
        assert plan.workspace_size() == (2, 3)[turn % 2] * rows * {35: 35 if single else 36, 9: 9}[desc.n] * 4
        held += check(plan, turn)
    assert held > 0


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("layouts", LAYOUTS, ids="".join)
def test_the_transposed_product_gives_c_interpreted(layouts: dict[str, Any]) -> None:
    """Its launches, on the operands of the product itself: ``fma`` multiplies few rows so."""
    desc = tp.GemmDescriptor(m=5, n=41, k=67, element="f32", epilogue="silu", layouts=layouts)
    product, split = transposed(desc), Split(Tile(16, 32, 32, 4, 3), 2)
    entry = next(e for e in tp.TABLE.rows("gemm") if e.name == "split_k")
    launches = [product.on_operands(x) for x in split_k.launches(product.desc, split)]
    workspace = split_k.partial_bytes(product.desc, split)
    assert check(plan_with(desc, "transposed", launches, workspace, entry.guarantee, INTERPRETER), 0) > 0


@pytest.mark.interpret
def test_pieces_are_added_in_order_interpreted() -> None:
    """1e8 + 1 - 1e8 in single precision: 0 if added from the first piece to the last, 1 in other orders."""
    a = torch.zeros(1, 64)
    a[0, 0], a[0, 16], a[0, 32] = 1e8, 1.0, -1e8
    desc = tp.GemmDescriptor(m=1, n=1, k=64, element="f32")
    for order, want in (([0, 16, 32], 0.0), ([0, 32, 16], 1.0)):
        plan = by(Split(Tile(16, 16, 16, 4, 3), 4), desc, INTERPRETER)
        x, c = torch.zeros(1, 64), torch.empty(1, 1)
        x[0, [0, 16, 32]] = a[0, order]
        plan.run(tp.GemmArgs(a=x, b=torch.ones(64, 1), c=c), tp.Workspace.allocate(plan))
        assert c.item() == want


@pytest.mark.gpu
@pytest.mark.parametrize("element", ["f16", "bf16", "f32", "f64"])
def test_every_split_on_the_gpu(element: str) -> None:
    """Few rows and many, pieces of one step and of several, a last one that is shorter."""
    target, ran = tp.Target.current(), 0
    for m, n, k in ((3, 72, 200), (40, 136, 1096)):
        desc = tp.GemmDescriptor(m=m, n=n, k=k, element=element, epilogue="bias_gelu", layouts={"b": COLUMN})
        for turn, split in enumerate(split_k.splits_of(desc, target)):
            ran += check(by(split, desc, target), turn)
    assert ran > 0


@pytest.mark.parametrize("element", ["f16", "f32", "f64"])
def test_tiles_do_not_depend_on_what_the_second_kernel_writes(element: str) -> None:
    plain = tp.GemmDescriptor(m=124, n=4556, k=2434, element=element)
    assert len(split_k.splits_of(plain, H200)) > 1
    for change in ({"layouts": {"c": "strided"}}, {"epilogue": "bias_gelu"}, {"reads_c0": True}, {"saves_pre": True}):
        assert split_k.splits_of(plain.replace(**change), H200) == split_k.splits_of(plain, H200)


def test_few_rows_of_odd_halves_leave_room_for_four_programs() -> None:
    """Each waits for its steps: ptxas would take registers of which three have enough."""
    few = tp.GemmDescriptor(m=5, n=3881, k=108639, element="bf16")
    for desc, registers in ((few, 128), (few.replace(n=3880), 255), (few.replace(layouts={"b": COLUMN}), 255)):
        assert required(desc, "split_k", H200).launches[0].max_registers == registers
