"""Kernel ``tiles``: attention with one tile of queries of one head per program, read through pointers at any strides.

The tile size does not depend on the batch, the heads or the number of queries, so neither do the bits of a row.
"""

from __future__ import annotations

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.attention import arguments
from triplan.backends.triton.attention.arguments import (
    PRODUCTS,
    Choice,
    Tile,
    constants,
    has_edge,
    padded_width,
    reads_elements,
    tiles_cost_us,
    tiles_of_rows,
)
from triplan.backends.triton.attention.entries import pointers_entry
from triplan.backends.triton.attention.tiles_kernels import attention_tiles_kernel
from triplan.backends.triton.common import card
from triplan.descriptors import AttentionDescriptor
from triplan.descriptors.attention import AttendingDescriptor
from triplan.sku import ArchSku, Support, Target

#: TFLOP/s, by kind of arithmetic and architecture: for half on sm90a about those of an H100 with 512 and 1024 queries;
#: the others untuned.
TERAFLOPS = {
    "half": {ArchSku.SM90A: 300.0, ArchSku.SM80: 130.0},
    "tf32": {ArchSku.SM90A: 150.0, ArchSku.SM80: 70.0},
    "parts": {ArchSku.SM90A: 40.0, ArchSku.SM80: 15.0},
    "scalar": {ArchSku.SM90A: 9.0, ArchSku.SM80: 4.0},
}
#: Microseconds of one multiprocessor that a tile of queries takes besides its products; by wgmma too. From 61 and 433
#: queries in bench/results/anywhere-attention-seed8-nvidia-h200.json.
TILE_US = 1.6
#: The same where elements are loaded one by one, but once and not for each tile, by padded width of a head. From 2 to 4
#: queries there and in -seed3-*; untuned for 256.
ELEMENTWISE_START_US = {64: 2.0, 128: 3.0, 256: 10.0}
#: Tiles by kind of arithmetic and padded width of a head: the largest found that do not spill registers (sm80 and
#: sm90a, causal; Triton 3.6 and 3.9), but for heads of f32 that are read one element at a time, which may a little.
#: Their speed is untuned, but for heads of 256 halves on sm90a (an H200). Parts of f32 have 32 queries, whose products
#: are mma.sync's: Tile(64, 64, 4, 1, 64), by wgmma, is faster, but with ptxas 12.8, which Triton 3.6 brings, wrong for
#: heads of 40 with values of 24. There parts of k and of v take turns at an address, with descriptors of two layouts,
#: and ptxas computes those of v from a register that nothing writes (``unwritten`` of the tests finds it).
TILES = Choice(
    usual={
        ("half", 64): (Tile(128, 64, 4, 3),),
        ("half", 128): (Tile(128, 64, 8, 3),),
        ("half", 256): (Tile(128, 64, 8, 2),),
        ("tf32", 64): (Tile(64, 32, 4, 2),),
        ("tf32", 128): (Tile(64, 32, 4, 2),),
        ("tf32", 256): (Tile(32, 16, 4, 2),),
        ("parts", 64): (Tile(32, 32, 4, 2, 64),),
        ("parts", 128): (Tile(32, 32, 4, 2, 64),),
        ("parts", 256): (Tile(16, 32, 4, 2, 64),),
        ("scalar", 64): (Tile(32, 32, 4, 1),),
        ("scalar", 128): (Tile(32, 16, 4, 1),),
        ("scalar", 256): (Tile(16, 16, 4, 1),),
    },
    dropout={("half", 128): (Tile(64, 64, 8, 3),), ("half", 256): (Tile(64, 32, 8, 3),)},
    sm80={
        ("half", 256): (Tile(64, 32, 8, 3),),
        ("parts", 128): (Tile(32, 16, 4, 2, 64),),
    },
)


def tile_of(desc: AttendingDescriptor, target: Target | None = None) -> Tile:
    return TILES.of(desc, target)[0]


def programs_of(desc: AttentionDescriptor, target: Target) -> int:
    return tiles_of_rows(desc, desc.queries, tile_of(desc, target).queries) * desc.batch * desc.heads


def supports(desc: AttentionDescriptor, target: Target) -> Support:
    return arguments.supports(desc, lambda d: programs_of(d, target))


def rank(desc: AttentionDescriptor, target: Target) -> float:
    """Estimated microseconds."""
    found = tiles_cost_us(desc, target, PRODUCTS, TERAFLOPS, tile_of(desc, target).queries)
    if reads_elements(desc):
        return found + ELEMENTWISE_START_US[padded_width(desc)]
    return found + TILE_US * programs_of(desc, target) / target.sm_count


def numerics(desc: AttendingDescriptor, choice: Choice = TILES, version: int = 4) -> str | None:
    """The numerics id: what the bits of a row depend on besides the row and its keys. None with dropout, as they then
    depend on the place of the row."""
    if desc.dropout:
        return None
    edges = "".join("-" if side is None else "w" for side in (desc.window_left, desc.right))
    each = dict.fromkeys(choice.of(desc, target)[0].keys for target in (None, Target.sm80()))
    edge = "packed" if desc.sequences is not None else "".join(f"{desc.keys % n > 0:d}" for n in each)
    widths = f"{desc.head_dim}.{desc.values}.{edge}"
    extras = "".join(f".{o.name}" for o in desc.operands() if o.name in ("slopes", "sink"))
    kind = f"{desc.element}.{desc.multiplicands}.{widths}.{edges}.{desc.softcap}.{desc.mask}{extras}"
    return f"{desc.op}-tiles.{kind}.v{version}"


@pointers_entry(
    AttentionDescriptor,
    name="tiles",
    supports=supports,
    rank=rank,
    numerics=numerics,
    priority=1,  # after wgmma, which gives other bits
    version=3,
)
def tiles(desc: AttentionDescriptor, target: Target) -> list[Launch]:
    if desc.operand("lse").numel == 0:
        return []
    tile = tile_of(desc, target)
    return [
        Launch(
            attention_tiles_kernel,
            programs_of(desc, target),
            arguments.arguments(desc, attention_tiles_kernel),
            {**constants(desc, tile), "EDGE": has_edge(desc, tile)},
            num_warps=tile.warps,
            num_stages=tile.stages,
            max_registers=card.MAX_THREAD_REGISTERS,
        )
    ]
