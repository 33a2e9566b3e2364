"""The offset of an element from its row-major number and the strides."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit


@jit
def quotient(point, by):
    """point // by[0]; by: (size, multiplier, shift), as the host's ``divisor`` has them."""
    if point.dtype.primitive_bitwidth == 64:
        found = point // by[0]
    else:
        twice = point.to(tl.uint32) << 1
        found = tl.umulhi(twice, twice * 0 + by[1].to(tl.uint32, bitcast=True)) >> by[2].to(tl.uint32)
        found = found.to(point.dtype)
    return found


@jit
def steps(index, stride):
    """index * stride. An index is not negative: extended by zeros, it takes two products where a sign takes three."""
    if index.dtype.primitive_bitwidth < stride.dtype.primitive_bitwidth:
        index = index.to(tl.uint32).to(stride.dtype)
    return index * stride


@jit
def unravel(point, sizes, strides):
    """sum(i[d] * strides[d]), where i are the coordinates of ``point``, numbered row-major over ``sizes``.

    ``point``: integers of any shape; ``sizes`` (see ``quotient``) and ``strides``: tuples, innermost dimension first.
    The offset has the wider of the types of points and strides: the host chooses 64 bits where operands need it.
    """
    offset = (point * 0).to(strides[0].dtype)
    for d in tl.static_range(len(sizes)):
        if d == len(sizes) - 1:
            offset += steps(point, strides[d])
        else:
            rest = quotient(point, sizes[d])
            offset += steps(point - rest * sizes[d][0], strides[d])
            point = rest
    return offset


@jit
def tile_start(rows, columns, POINT_TYPE, BLOCK_ROWS, BLOCK_COLUMNS):
    """(first row, first column) of the program's tile; tiles of the same rows follow each other.

    ``rows`` is None where there is one row: its tiles are numbered without a division, which takes 0.1 us on an H200.
    """
    if rows is None:
        first_row, tile = 0, tl.program_id(0)
    else:
        across = tl.cdiv(columns, BLOCK_COLUMNS)
        first_row = (tl.program_id(0) // across).to(POINT_TYPE) * BLOCK_ROWS
        tile = tl.program_id(0) % across
    return first_row, tile.to(POINT_TYPE) * BLOCK_COLUMNS


@jit
def reversed_axes(v):
    """``v`` of two or three axes, with these in reverse."""
    if len(v.shape) == 2:
        found = tl.permute(v, (1, 0))
    else:
        found = tl.permute(v, (2, 1, 0))
    return found


@jit
def load_tile(at, mask, other, ALONG: tl.constexpr):
    """The values at addresses ``at`` [rows, ..., columns]. ALONG: whether the compiler knows that columns are
    contiguous.

    Where it knows of no contiguous axis, it lets consecutive threads access the first one. So columns go first.
    """
    return load_tile_with(at, mask, other, ALONG, "")


@jit
def load_tile_with(at, mask, other, ALONG: tl.constexpr, POLICY: tl.constexpr):
    """``load_tile`` with an eviction policy."""
    if ALONG:
        found = tl.load(at, mask=mask, other=other, eviction_policy=POLICY)
    elif mask is None:
        found = reversed_axes(tl.load(reversed_axes(at), eviction_policy=POLICY))
    else:
        found = tl.load(reversed_axes(at), mask=reversed_axes(mask), other=other, eviction_policy=POLICY)
        found = reversed_axes(found)
    return found


@jit
def store_tile(at, value, mask, ALONG: tl.constexpr):
    """Store ``value`` [rows, ..., columns] to the addresses ``at``; see ``load_tile``."""
    store_tile_with(at, value, mask, ALONG, "")


@jit
def store_tile_with(at, value, mask, ALONG: tl.constexpr, POLICY: tl.constexpr):
    """``store_tile`` with an eviction policy."""
    if ALONG:
        tl.store(at, value, mask=mask, eviction_policy=POLICY)
    elif mask is None:
        tl.store(reversed_axes(at), reversed_axes(value), eviction_policy=POLICY)
    else:
        tl.store(reversed_axes(at), reversed_axes(value), mask=reversed_axes(mask), eviction_policy=POLICY)
