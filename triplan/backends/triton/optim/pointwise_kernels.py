"""Kernel of ``pointwise``: functions of the elements of lists of tensors; a chunk of a tensor per program."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.tables_kernels import (
    address_of,
    chunk_of,
    half_of,
    read_stream,
    shift_of,
    shifted,
    shifted_count,
    store_stream,
)

#: Lists at most of which both halves of a masked block are loaded before one is stored: registers hold them. Untuned.
BOTH = tl.constexpr(2)


@jit
def _read(lists, ones, offset, mask, READ: tl.constexpr, TYPES: tl.constexpr, WHOLE: tl.constexpr):
    values = ()
    for i in tl.static_range(len(READ)):
        if READ[i] < 0:
            values = values + (ones[-1 - READ[i]],)
        else:
            values = values + (read_stream(lists[READ[i]], offset, mask, TYPES[READ[i]], WHOLE),)
    return values


@jit
def _write(
    lists, values, scalars, offset, mask, FUNCTION: tl.constexpr, WRITTEN: tl.constexpr, TYPES: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    results = FUNCTION(values, scalars)
    for i in tl.static_range(len(WRITTEN)):
        store_stream(lists[WRITTEN[i]], offset, results[i], mask, TYPES[WRITTEN[i]], WHOLE)


@jit
def pointwise_kernel(
    chunks,
    starts,
    sizes,
    addresses,
    ones,
    scalars,
    columns,
    FUNCTION: tl.constexpr,
    READ: tl.constexpr,
    WRITTEN: tl.constexpr,
    TYPES: tl.constexpr,
    NARROWEST: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """lists[WRITTEN] = FUNCTION(lists[READ] and ones, scalars), element by element of a part of a chunk.

    addresses: i64 [len(TYPES), columns], of lists of TYPES; ones: pointers to one element. READ has the number of a
    list for each value of FUNCTION, or -1 - i for the i-th of ``ones``. NARROWEST: a list of the narrowest type.
    """
    _, column, first, rest = chunk_of(chunks, starts, sizes, columns, CHUNK, PARTS)
    shift = shift_of(address_of(addresses, NARROWEST, column, columns), TYPES[NARROWEST])
    lists, joined = (), first * 0
    for k in tl.static_range(len(TYPES)):
        address = shifted(address_of(addresses, k, column, columns), shift, TYPES[k])
        lists, joined = lists + (address,), joined | address
    single = ()
    for k in tl.static_range(len(ones)):
        single = single + (tl.load(ones[k]),)
    if PARTS > 1:
        if rest <= 0:
            return
    count = shifted_count(rest, shift, CHUNK // PARTS)
    # A chunk has an element. Were that not known, addresses would be loaded behind a branch, when ``rest`` has come.
    for i in range(0, tl.maximum(count, 1), BLOCK):
        # Alignment is tested on the addresses themselves, so that no table can promise a wrong one.
        if ((joined % 16) == 0) & (first + i >= shift) & (i + BLOCK <= count):
            whole = first + i + tl.arange(0, BLOCK)
            wholes = _read(lists, single, whole, None, READ, TYPES, True)
            _write(lists, wholes, scalars, whole, None, FUNCTION, WRITTEN, TYPES, True)
        elif len(TYPES) <= BOTH:
            first_offset, first_mask = half_of(0, first, i, shift, count, BLOCK)  # see ``half_of``
            offset, mask = half_of(1, first, i, shift, count, BLOCK)
            values = _read(lists, single, first_offset, first_mask, READ, TYPES, False)
            others = _read(lists, single, offset, mask, READ, TYPES, False)
            _write(lists, values, scalars, first_offset, first_mask, FUNCTION, WRITTEN, TYPES, False)
            _write(lists, others, scalars, offset, mask, FUNCTION, WRITTEN, TYPES, False)
        else:
            for half in tl.static_range(2):
                offset, mask = half_of(half, first, i, shift, count, BLOCK)
                values = _read(lists, single, offset, mask, READ, TYPES, False)
                _write(lists, values, scalars, offset, mask, FUNCTION, WRITTEN, TYPES, False)
