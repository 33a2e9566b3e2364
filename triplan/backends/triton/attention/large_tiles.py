"""Kernel ``large_tiles``: ``tiles`` of f32 with 64 queries a tile, which wgmma multiplies in parts of bf16.

Where tiles fill the card it is faster: wgmma reads a factor from shared memory once for 64 rows. Where they do not,
``tiles`` is faster, as its smaller tiles occupy more multiprocessors and have shorter steps. Bits depend on no batch,
but are others than those of ``tiles``, which has other blocks of keys or columns.
"""

from __future__ import annotations

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.attention import arguments, tiles
from triplan.backends.triton.attention.arguments import Choice, Tile, arithmetic, is_elementwise
from triplan.backends.triton.attention.entries import pointers_entry
from triplan.descriptors import AttentionDescriptor
from triplan.sku import ArchSku, Support, Target

#: The widest head: of a wider one, or of one of elements that are loaded one by one, far more would spill than below.
WIDEST, WIDEST_OF_ELEMENTS = 192, 64
#: By kind of arithmetic and padded width of a head. On sm90a they spill up to 250 bytes where heads have 64 to 100
#: elements, and less with masks of heads of 128. On an H200 they were faster than ``tiles`` all the same, also with
#: masks and caps. Of wider heads two groups of warps share the parts of keys and values, with fewer instructions for a
#: score than ``tiles`` by a half; they spill up to 740 bytes, and were the fastest of three on an H200, by a
#: run that is not published.
TILES = Choice(
    usual={
        ("parts", 64): (Tile(64, 64, 4, 1),),
        ("parts", 128): (Tile(64, 32, 4, 2),),
        ("parts", 256): (Tile(128, 32, 8, 1),),
    },
    dropout={},
    sm80={},
)


def supports(desc: AttentionDescriptor, target: Target) -> Support:
    if desc.dropout:
        return Support.no("dropout, whose random numbers take registers")
    if arithmetic(desc) != "parts":
        return Support.no(f"products in {arithmetic(desc)}; it multiplies f32 in parts of bf16")
    if max(desc.head_dim, desc.values) > WIDEST:
        return Support.no(f"heads of {desc.head_dim} and {desc.values} elements; it holds up to {WIDEST}")
    if max(desc.head_dim, desc.values) > WIDEST_OF_ELEMENTS and any(is_elementwise(desc.operand(n)) for n in "kv"):
        return Support.no(
            f"single elements of heads of {desc.head_dim} and {desc.values}: their addresses would spill registers"
        )
    return arguments.supports(desc, lambda d: tiles.programs_of(d, TILES.of(d)[0]))


def rank(desc: AttentionDescriptor, target: Target) -> float:
    """Estimated microseconds."""
    return tiles.tiles_us(desc, target, TILES.of(desc)[0], alike=True)


@pointers_entry(
    AttentionDescriptor,
    name="large_tiles",
    elements=("f32",),
    archs=(ArchSku.SM90A,),
    supports=supports,
    rank=rank,
    numerics=lambda desc: tiles.numerics(desc, TILES, 3, "large_tiles"),
    # Before tiles, where one choice must serve all batch sizes: large batches gain more than small ones lose.
    priority=0,
    version=3,
)
def large_tiles(desc: AttentionDescriptor, target: Target) -> list[Launch]:
    # Parts of k and of v take turns at an address in shared memory. If they had two layouts there, ptxas 12.8, which
    # Triton 3.6 brings, would compute the descriptors of one from registers that nothing writes (``unwritten`` of the
    # tests finds it): of heads of 40 elements with values of 24.
    return tiles.launches(desc, TILES.of(desc)[0], alike=True)
