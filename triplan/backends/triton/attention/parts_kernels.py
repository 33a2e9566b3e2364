"""Matrix products of tiles of a head: of 16 bits, tf32 and f64 as they are, of f32 on tensor cores of bf16.

An f32 number is exactly the sum of three bf16 numbers, of 8 bits each. Of the nine products of the parts of two factors
six are added up; the others are together below 2**-24 of the product, half a unit in its last place. So f32 factors are
multiplied as precisely as by FMAs, in six products of bf16, which tensor cores multiply sixteen times as fast. Parts
of a head come as tuples of tiles, in chunks of BLOCK columns, the last of as few as a power of two allows: a head of 80
elements in chunks of 64 and 16. Everything else is of one part.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.attention.shared_kernels import load_tile, store_tile


@triton.constexpr_function
def columns_at(first, width, block):
    """Columns of the chunk of a head that begins at ``first``; the last is no wider than its columns need."""
    return block if first == 0 or width - first >= block else max(triton.next_power_of_2(width - first), 16)


@jit
def store_chunks(pointer, strides, row, rows, chunks, factor, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """``store_tile`` of each chunk times ``factor``."""
    for i in tl.static_range(len(chunks)):
        store_tile(pointer, strides, row, rows, chunks[i] * factor, WIDTH, chunks[i].shape[1], i * BLOCK)


@jit
def zero_chunks(ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr):
    """Accumulators (ROWS, columns) of the chunks of a head."""
    found = ()
    for first in tl.static_range(0, WIDTH, BLOCK):
        found = found + (tl.zeros((ROWS, columns_at(first, WIDTH, BLOCK)), ACC),)
    return found


@jit
def parts_of(x, PARTS: tl.constexpr):
    """``x``, or the three tiles of bf16 of which it is the sum."""
    found = (x,)
    if PARTS == 3:
        a, rest = split(x)
        b, rest = split(rest)
        found = (a, b, rest.to(tl.bfloat16))
    return found


@jit
def split(x):
    """(the nearest bf16 of ``x``, the rest of it).

    Integers round, and take the larger magnitude of two that are equally near. Where the rest is needed, ptxas converts
    numbers one by one (F2F), in the slow pipe of exponentials. A NaN may round to 0, but its rest is NaN.
    """
    bits = tl.add(x.to(tl.uint32, bitcast=True), 0x8000, sanitize_overflow=False) & 0xFFFF0000
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True), x - bits.to(tl.float32, bitcast=True)


@jit
def load_parts(
    pointer,
    strides,
    row,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The parts of ``load_tile`` of each BLOCK columns of a head."""
    found = ()
    for first in tl.static_range(0, WIDTH, BLOCK):
        x = load_tile(pointer, strides, row, rows, WIDTH, columns_at(first, WIDTH, BLOCK), TRANSPOSED, first)
        found = found + (parts_of(x, PARTS),)
    return found


@jit
def load_with_sums(
    pointer,
    strides,
    other,
    other_strides,
    row,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    ACC: tl.constexpr,
):
    """(``load_parts`` of a head, the sum of each row's products with the row of ``other``)."""
    found = ()
    total = tl.zeros((row.shape[0],), ACC)
    for first in tl.static_range(0, WIDTH, BLOCK):
        x = load_tile(pointer, strides, row, rows, WIDTH, columns_at(first, WIDTH, BLOCK), False, first)
        y = load_tile(other, other_strides, row, rows, WIDTH, columns_at(first, WIDTH, BLOCK), False, first)
        total += tl.sum(x.to(ACC) * y.to(ACC), 1)
        found = found + (parts_of(x, PARTS),)
    return found, total


@jit
def transposed(x):
    """Each part of each chunk, transposed."""
    found = ()
    for i in tl.static_range(len(x)):
        parts = ()
        for j in tl.static_range(len(x[i])):
            parts = parts + (tl.trans(x[i][j]),)
        found = found + (parts,)
    return found


@jit
def multiply(x, y, PRECISION: tl.constexpr, ACC: tl.constexpr):
    """The sum of x[i] @ y[i] over chunks, (m, BLOCK) and (BLOCK, n). The small products are added before the large
    ones, whose last bit would cut them off."""
    if len(x[0]) == 1:
        found = tl.dot(x[0][0], y[0][0], input_precision=PRECISION, out_dtype=ACC)
        for i in tl.static_range(1, len(x)):
            found = tl.dot(x[i][0], y[i][0], found, input_precision=PRECISION, out_dtype=ACC)
    else:
        found = tl.zeros((x[0][0].shape[0], y[0][0].shape[1]), ACC)
        for i in tl.static_range(len(x)):
            found = tl.dot(x[i][0], y[i][2], found)
            found = tl.dot(x[i][1], y[i][1], found)
            found = tl.dot(x[i][2], y[i][0], found)
            found = tl.dot(x[i][0], y[i][1], found)
            found = tl.dot(x[i][1], y[i][0], found)
        for i in tl.static_range(len(x)):
            found = tl.dot(x[i][0], y[i][0], found)
    return found


@jit
def accumulate(acc, x, y, PRECISION: tl.constexpr, ACC: tl.constexpr):
    """acc[i] + x @ y[i] of each chunk, (m, n) and (n, BLOCK). Products of parts are summed on their own: the last bit
    of acc would cut off the small ones."""
    found = ()
    if len(y[0]) == 1:
        factor = x.to(y[0][0].dtype)
        # From the last chunk, as Triton lays out all products of a chain as it does the last of them: along its columns
        # if these are more than its rows.
        for i in tl.static_range(len(y) - 1, -1, -1):
            found = (tl.dot(factor, y[i][0], acc[i], input_precision=PRECISION, out_dtype=ACC),) + found
    else:
        parts = (parts_of(x, 3),)
        for i in tl.static_range(len(y) - 1, -1, -1):
            found = (acc[i] + multiply(parts, (y[i],), PRECISION, ACC),) + found
    return found


@jit
def scaled(chunks, factor):
    """Each chunk times ``factor``."""
    found = ()
    for i in tl.static_range(len(chunks)):
        found = found + (chunks[i] * factor,)
    return found
