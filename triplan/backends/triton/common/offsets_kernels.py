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
def load_tile(at, mask, other, ALONG: tl.constexpr):
    """The values at addresses ``at`` [rows, columns]. ALONG: whether the compiler knows that columns are contiguous.

    Where it knows of no contiguous axis, it lets consecutive threads access the first one. So columns go first.
    """
    if ALONG:
        found = tl.load(at, mask=mask, other=other)
    elif mask is None:
        found = tl.trans(tl.load(tl.trans(at)))
    else:
        found = tl.trans(tl.load(tl.trans(at), mask=tl.trans(mask), other=other))
    return found


@jit
def store_tile(at, value, mask, ALONG: tl.constexpr):
    """Store ``value`` [rows, columns] to the addresses ``at``; see ``load_tile``."""
    if ALONG:
        tl.store(at, value, mask=mask)
    elif mask is None:
        tl.store(tl.trans(at), tl.trans(value))
    else:
        tl.store(tl.trans(at), tl.trans(value), mask=tl.trans(mask))
