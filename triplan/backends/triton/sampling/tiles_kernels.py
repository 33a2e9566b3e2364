"""Tiles of several chunks of a row, and sets of them as bits, for ``split``."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.rows_kernels import axis_offset


@jit
def columns_of(first, n, CHUNK: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr):
    """(columns [SPAN * TILE] of a tile, TILE of each of SPAN chunks from column ``first`` on; how many tiles).

    A thread has one of these columns, and TILE further for each tile, if that is in its chunk and in the row.
    """
    slot = tl.arange(0, SPAN * TILE)
    col = first + slot // TILE * CHUNK + slot % TILE
    return col, tl.minimum((n - col + TILE - 1) // TILE, CHUNK // TILE)


@jit
def tiles_from(at, stride, columns, first, TILE: tl.constexpr):
    """(addresses of the tile ``first``, how many tiles there are from it on)."""
    col, tiles = columns
    return at + axis_offset(col + first * TILE, stride), tiles - first


@jit
def load_tile(places, stride, i: tl.constexpr, TILE: tl.constexpr):
    """Logits of the ``i``-th tile of ``tiles_from``; -inf where there is none. Past the L1 cache: programs call it
    before they wait."""
    address, tiles = places
    here = address + axis_offset(tl.full((), i * TILE, tl.int32), stride)
    return tl.load(here, mask=i < tiles, other=-float("inf"), cache_modifier=".cg")


@jit
def load_tiles(at, stride, columns, COUNT: tl.constexpr, TILE: tl.constexpr):
    """The first COUNT tiles."""
    places, tiles = tiles_from(at, stride, columns, 0, TILE), ()
    for i in tl.static_range(COUNT):
        tiles += (load_tile(places, stride, i, TILE),)
    return tiles


@jit
def tiles_until(at, stride, columns, last, TILE: tl.constexpr):
    """(addresses of the tile ``last``, of how many before it there is none), for ``load_before``."""
    col, tiles = columns
    return at + axis_offset(col + last * TILE, stride), tl.where(last < 0, 1 << 30, last - tiles + 1)


@jit
def load_before(places, stride, i: tl.constexpr, TILE: tl.constexpr, held=None):
    """``load_tile`` of the ``i``-th tile before that of ``tiles_until``.

    held: the result if there is no tile ``last``; if there is, all are. Their registers take the logits.
    """
    address, absent = places
    here = address - axis_offset(tl.full((), i * TILE, tl.int32), stride)
    if held is None:
        return tl.load(here, mask=i >= absent, other=-float("inf"), cache_modifier=".cg")
    return tl.load(here, mask=absent <= 0, other=held, cache_modifier=".cg")


@jit
def ones_of(bits):
    """How many bits of an i32 are 1: sums of 2, 4 and 8 neighbours, then of the four bytes by a product."""
    pairs = bits - ((bits >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    return (((fours + (fours >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@jit
def ones_of_all(words):
    """(``ones_of`` all words of a tuple, calls of ``without_lowest`` until all are 0)."""
    count = ones_of(words[0])
    none = tl.zeros(count.shape, tl.int32)
    for i in tl.static_range(1, len(words)):
        count += ones_of(words[i])
        none += (words[i - 1] == 0).to(tl.int32)
    return count, count + none


@jit
def with_bits(words, bits, first):
    """``words`` of 32 bits with ``bits`` from bit ``first`` on; all of these are in one word."""
    found = ()
    for i in tl.static_range(len(words)):
        found += (tl.where(first // 32 == i, words[i] | (bits << (first % 32)), words[i]),)
    return found


@jit
def without_lowest(words, first):
    """(words without the lowest bit that is 1 of words[0], the next ``first``, the bit's number, whether there is one).

    first: the number that the lowest bit of words[0] has. If this word is 0 then, the others move up by one. So a call
    may find a word without bits: a choice of the first word that has some would take more instructions.
    """
    bit = words[0] & -words[0]
    number = first + (bit.to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    word, left = words[0] ^ bit, ()
    is_none = word == 0
    for i in tl.static_range(len(words)):
        following = words[i + 1] if i + 1 < len(words) else 0
        left += (tl.where(is_none, following, word if i == 0 else words[i]),)
    return left, tl.where(is_none, first + 32, first), number, bit != 0
