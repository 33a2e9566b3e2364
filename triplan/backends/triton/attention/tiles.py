"""Kernel ``tiles``: attention with one tile of queries of one head per program, read through pointers at any strides.

The tile size does not depend on the batch, the heads or the number of queries, so neither do the bits of a row.
"""

from __future__ import annotations

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.attention import arguments
from triplan.backends.triton.attention.arguments import Choice, Tile, columns_of, constants, has_edge, tiles_of_rows
from triplan.backends.triton.attention.costs import Pace, forward_us, pace_of
from triplan.backends.triton.attention.entries import pointers_entry
from triplan.backends.triton.attention.tiles_kernels import attention_tiles_kernel
from triplan.backends.triton.common import card
from triplan.descriptors import AttentionDescriptor
from triplan.descriptors.attention import AttendingDescriptor
from triplan.sku import Support, Target

#: Of halves and of parts by least squares over bench/results/anywhere-attention-* and attention-*, and over heads of 24
#: to 128 elements of f32 (21 to 2048 queries, an H200); of "elements" with weights, so that problems where two entries
#: are about equal choose the faster; the others untuned. Single elements are loaded before a step, vectors during those
#: before it. Where only q is read by single elements, of halves, its bytes per microsecond are those of "elements".
PACES = {
    "half": Pace(1.1, 0.0, 457.0, together=1.18, loads=6.3e4, scores=3.9e4),
    "elements 64": Pace(0.0, 1.1, 240.0, together=1.55, start_us=1.2, loads=6.3e4, scores=3.9e4),
    # The registers of eight warps leave no room for a second tile. The wider ones: of four heads of 129 to 255 elements
    # and few queries, on an H200.
    "elements 128": Pace(0.0, 1.1, 240.0, start_us=1.2, loads=6.3e4, scores=3.9e4),
    "elements 256": Pace(0.0, 0.5, 120.0, start_us=2.3),
    "tf32": Pace(0.5, 0.6, 150.0, together=1.6),
    "parts": Pace(0.47, 1.17, 45.0, together=1.66),
    "scalar": Pace(0.5, 1.0, 9.0, together=1.6),
}
#: Tiles by kind of arithmetic and padded width of a head: the largest found that do not spill registers (sm80 and
#: sm90a, causal; Triton 3.6 and 3.9), but for heads of f32 and f64 that are read one element at a time, which may a
#: little. Of f64 each of four warps multiplies 8 keys of a step; of fewer keys than 32 some would multiply the same.
#: Their speed is untuned, but for heads of 256 halves, and of more than 128 in f64, on sm90a (an H200; of f64 by a run
#: that is not published: that of 192 spills a little, and was the fastest of three all the same). Those of f64 read
#: shared memory least often, by their machine code. Parts of f32 have 32 queries, whose products are mma.sync's;
#: ``large_tiles`` has those of wgmma. Heads of tf32 are not cut into chunks: ptxas may confuse two layouts (see
#: ``tiles_backward``).
TILES = Choice(
    usual={
        ("half", 64): (Tile(128, 64, 4, 3),),
        ("half", 128): (Tile(128, 64, 8, 3),),
        ("half", 256): (Tile(128, 64, 8, 2),),
        ("tf32", 64): (Tile(64, 32, 4, 2, 256),),
        ("tf32", 128): (Tile(64, 32, 4, 2, 256),),
        ("tf32", 256): (Tile(32, 16, 4, 2, 256),),
        ("parts", 64): (Tile(32, 32, 4, 2),),
        ("parts", 128): (Tile(32, 32, 4, 2),),
        ("parts", 256): (Tile(16, 32, 4, 2),),
        ("scalar", 64): (Tile(32, 32, 4, 1),),
        ("scalar", 128): (Tile(32, 32, 4, 1),),
        ("scalar", 192): (Tile(32, 32, 4, 1),),
        ("scalar", 256): (Tile(16, 32, 4, 1),),
    },
    dropout={("half", 128): (Tile(64, 64, 8, 3),), ("half", 256): (Tile(64, 32, 8, 3),)},
    sm80={
        ("half", 256): (Tile(64, 32, 8, 3, 128),),
        ("parts", 128): (Tile(32, 16, 4, 2),),
        ("scalar", 128): (Tile(32, 16, 4, 1),),
        ("scalar", 256): (Tile(16, 16, 4, 1),),
    },
)


def programs_of(desc: AttendingDescriptor, tile: Tile) -> int:
    return tiles_of_rows(desc, desc.queries, tile.queries) * desc.batch * desc.heads


def supports(desc: AttentionDescriptor, target: Target) -> Support:
    return arguments.supports(desc, lambda d: programs_of(d, TILES.of(d, target)[0]))


def rank(desc: AttentionDescriptor, target: Target) -> float:
    return tiles_us(desc, target, TILES.of(desc, target)[0])


def tiles_us(desc: AttentionDescriptor, target: Target, tile: Tile, alike: bool = False) -> float:
    """Estimated microseconds."""
    return forward_us(desc, target, (tile.queries, tile.keys), columns_of(desc, tile, alike), pace_of(desc, PACES))


def numerics(desc: AttendingDescriptor, choice: Choice = TILES, version: int = 7, name: str = "tiles") -> str | None:
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
    return f"{desc.op}-{name}.{kind}.v{version}"


@pointers_entry(
    AttentionDescriptor,
    name="tiles",
    supports=supports,
    rank=rank,
    numerics=numerics,
    priority=1,  # after wgmma, which gives other bits
    version=6,
)
def tiles(desc: AttentionDescriptor, target: Target) -> list[Launch]:
    return launches(desc, TILES.of(desc, target)[0])


def launches(desc: AttentionDescriptor, tile: Tile, alike: bool = False) -> list[Launch]:
    """``alike``: see ``constants``."""
    if desc.operand("lse").numel == 0:
        return []
    return [
        Launch(
            attention_tiles_kernel,
            programs_of(desc, tile),
            arguments.arguments(desc, attention_tiles_kernel),
            {**constants(desc, tile, alike), "EDGE": has_edge(desc, tile)},
            num_warps=tile.warps,
            num_stages=tile.stages,
            max_registers=card.MAX_THREAD_REGISTERS,
        )
    ]
