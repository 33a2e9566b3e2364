"""Kernels of ``total``: the norm of a list of tensors, in two stages of fixed order."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.overlap import begin
from triplan.backends.triton.common.tables_kernels import address_of, chunk_of, load_stream

#: What is accumulated: sum x**2, sum |x|, sum |x|**order, max |x|, min |x|.
SQUARES = tl.constexpr(0)
MAGNITUDES = tl.constexpr(1)
POWERS = tl.constexpr(2)
LARGEST = tl.constexpr(3)
SMALLEST = tl.constexpr(4)


@jit
def _larger(a, b):
    """max(a, b); NaN if either is."""
    return tl.where((b > a) | (b != b), b, a)


@jit
def _smaller(a, b):
    """min(a, b); NaN if either is."""
    return tl.where((b < a) | (b != b), b, a)


@jit
def _merged(a, b, KIND: tl.constexpr):
    if KIND == LARGEST:
        return _larger(a, b)
    if KIND == SMALLEST:
        return _smaller(a, b)
    return a + b


@jit
def _reduced(a, KIND: tl.constexpr):
    if KIND == LARGEST:
        return tl.reduce(a, 0, _larger)
    if KIND == SMALLEST:
        return tl.reduce(a, 0, _smaller)
    return tl.sum(a, 0)


@jit
def _term(x, order, KIND: tl.constexpr):
    """What an element contributes: f64, in which no square and no fourth power of an f32 overflows."""
    a = tl.abs(x.to(tl.float64))
    if KIND == SQUARES:
        a = a * a
    elif KIND == POWERS:
        # 0**order is 0, or inf for a negative order; log would warn of 0 in the interpreter.
        power = tl.exp(order * tl.log(tl.where(a == 0.0, 1.0, a)))
        a = tl.where(a == 0.0, tl.where(order > 0.0, 0.0, float("inf")), power)
    return a


@jit
def _of_chunk(
    total,
    x,
    first,
    order,
    TYPE: tl.constexpr,
    KIND: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """``total`` [BLOCK] and the terms of a whole chunk. x: an address that is a multiple of ALIGNMENT."""
    pointer = tl.multiple_of(x.to(tl.pointer_type(TYPE)), ALIGNMENT)
    for i in range(0, CHUNK, BLOCK):
        value = tl.load(pointer + (first + i + tl.arange(0, BLOCK))).to(tl.float32)
        total = _merged(total, _term(value, order, KIND), KIND)
    return total


@jit
def chunk_kernel(
    chunks,
    starts,
    sizes,
    addresses,
    partials,
    columns,
    order,
    TYPE: tl.constexpr,
    KIND: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """partials[program] = sum of |x|**order (KIND: or the extremum) of one chunk of one tensor, in f64.

    addresses: i64 [1, columns], of tensors of TYPE; order: f64; partials: f64 [programs].
    """
    begin(OVERLAPS)
    _, column, first, rest = chunk_of(chunks, starts, sizes, columns, CHUNK)
    count = tl.minimum(rest, CHUNK).to(tl.int32)
    x = address_of(addresses, 0, column, columns)
    neutral = float("inf") if KIND == SMALLEST else 0.0
    total = tl.full([BLOCK], neutral, tl.float64)
    # Each loop gives each lane the same elements, so the bits do not depend on addresses.
    if (count == CHUNK) & ((x % 16) == 0):
        total = _of_chunk(total, x, first, order, TYPE, KIND, CHUNK, BLOCK, 16)
    elif (count == CHUNK) & ((x % 4) == 0):
        # Lanes that load their neighbouring elements one by one take as many cycles of the L1 cache as for four bytes.
        total = _of_chunk(total, x, first, order, TYPE, KIND, CHUNK, BLOCK, 4)
    else:
        for i in range(0, count, BLOCK):
            offset = i + tl.arange(0, BLOCK)
            inside = offset < count
            term = _term(load_stream(x, first + offset, inside, TYPE, False), order, KIND)
            total = _merged(total, tl.where(inside, term, neutral), KIND)
    tl.store(partials + tl.program_id(0), _reduced(total, KIND))


@jit
def _root(partials, count, order, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """(sum of partials) ** (1 / order) (KIND: or their extremum). partials: f64 [count] or None."""
    neutral = float("inf") if KIND == SMALLEST else 0.0
    total = tl.full([BLOCK], neutral, tl.float64)
    if partials is not None:
        for i in range(0, count, BLOCK):
            offset = i + tl.arange(0, BLOCK)
            total = _merged(total, tl.load(partials + offset, mask=offset < count, other=neutral), KIND)
    found = _reduced(total, KIND)
    if KIND == SQUARES:
        found = tl.sqrt(found)
    elif KIND == POWERS:
        root = tl.exp(tl.log(tl.where(found == 0.0, 1.0, found)) / order)
        found = tl.where(found == 0.0, tl.where(order > 0.0, 0.0, float("inf")), root)
    return found


@jit
def root_kernel(partials, count, norm, order, KIND: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """norm = (sum of partials) ** (1 / order) (KIND: or their extremum).

    partials: f64 [count] or None; norm: f64 [1].
    """
    begin(OVERLAPS)
    tl.store(norm, _root(partials, count, order, KIND, BLOCK))


@jit
def roots_kernel(
    sizes,
    tensors,
    partials,
    count,
    norm,
    order,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """norm[t] = (sum of the partials of tensor t) ** (1 / order) (KIND: or their extremum); a tensor per program.

    sizes: i64 [tensors], or a tuple of few if tensors is None; partials: f64 [count], of the chunks of one tensor after
    the other, or None; norm: f64 [tensors].
    """
    begin(OVERLAPS)
    tensor = tl.program_id(0)
    if tensors is None and partials is not None:
        before = tensor.to(tl.int64) * 0
        size = before + sizes[0]
        for i in tl.static_range(1, len(sizes)):
            before += tl.where(tensor >= i, tl.cdiv(sizes[i - 1], CHUNK), 0)
            size = tl.where(tensor >= i, sizes[i], size)
        partials += before
        count = tl.cdiv(size, CHUNK).to(tl.int32)
    elif partials is not None:
        before = tl.zeros([BLOCK], tl.int64)
        for i in range(0, tensor, BLOCK):
            at = i + tl.arange(0, BLOCK)
            before += tl.cdiv(tl.load(sizes + at, mask=at < tensor, other=0), CHUNK)
        partials += tl.sum(before, 0)
        count = tl.cdiv(tl.load(sizes + tensor), CHUNK).to(tl.int32)
    tl.store(norm + tensor, _root(partials, count, order, KIND, BLOCK))
