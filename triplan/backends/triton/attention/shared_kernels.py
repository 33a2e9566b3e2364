"""What the attention kernels that read through pointers share: tiles of operands, scores, exponentials.

Scores and lse are multiplied by UNIT. In f32 it is log2(e), because the hardware's exponential has base 2; in f64,
which has no such instruction, it is 1.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.philox_kernels import words_of


@jit
def exponential(x):
    """exp(x / UNIT): 2**x in f32 (ex2.approx.ftz), e**x in f64."""
    if x.dtype == tl.float64:
        return tl.exp(x)
    return tl.exp2(x)


@jit
def logarithm(x):
    """The inverse of ``exponential``."""
    if x.dtype == tl.float64:
        return tl.log(x)
    return tl.log2(x)


@jit
def head_pointer(pointer, strides, batch, head):
    """Address of the first element of a head; ``strides`` are (batch, head, row, element), the last None for 1."""
    return pointer + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]


@jit
def load_tile(
    pointer,
    strides,
    row,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    FIRST: tl.constexpr = 0,
):
    """Load rows ``row`` (n,) of a head from column FIRST on as (n, BLOCK), or (BLOCK, n) if TRANSPOSED; 0 beyond
    ``rows`` and WIDTH."""
    column = FIRST + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * strides[2]
    step = column if strides[3] is None else column.to(tl.int64) * strides[3]
    if TRANSPOSED:
        offset = at[None, :] + step[:, None]
        inside = (row < rows)[None, :]
        if WIDTH < FIRST + BLOCK:
            inside = inside & (column < WIDTH)[:, None]
    else:
        offset = at[:, None] + step[None, :]
        inside = (row < rows)[:, None]
        if WIDTH < FIRST + BLOCK:
            inside = inside & (column < WIDTH)[None, :]
    return tl.load(pointer + offset, mask=inside, other=0.0)


@jit
def store_tile(pointer, strides, row, rows, value, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr = 0):
    """Store ``value`` (n, BLOCK), rounded to the operand's element, to rows ``row`` (n,) of a head from column FIRST
    on."""
    column = FIRST + tl.arange(0, BLOCK)
    step = column if strides[3] is None else column.to(tl.int64) * strides[3]
    inside = (row < rows)[:, None] if WIDTH >= FIRST + BLOCK else (row < rows)[:, None] & (column < WIDTH)[None, :]
    at = pointer + (row.to(tl.int64) * strides[2])[:, None] + step[None, :]
    tl.store(at, value.to(pointer.dtype.element_ty), mask=inside)


@jit
def _bounds(starts, stride, segment, sequences, rows, OUTER: tl.constexpr):
    """(first row, end) of ``segment``. Segment s + 1 is sequence s; the first and the last segment hold the rows before
    and after all sequences, and are empty without OUTER.

    Starts are clamped, so that no value of theirs can make a program touch memory outside the operand.
    """
    at = starts + (segment - 1) * (1 if stride is None else stride)
    first = tl.load(at, mask=(segment > 0) & (segment < sequences + 2), other=0)
    after = at + (1 if stride is None else stride)
    end = tl.load(after, mask=segment <= sequences, other=rows)
    first, end = tl.minimum(tl.maximum(first, 0), rows), tl.minimum(tl.maximum(end, 0), rows)
    if not OUTER:
        end = tl.where((segment > 0) & (segment <= sequences), end, first)
    return first, tl.maximum(end, first)


@jit
def packed_tiles(rows, sequences, BLOCK: tl.constexpr):
    """Number of tiles of BLOCK rows that ``packed_tile`` knows; some may be empty. The host computes the same."""
    return rows // BLOCK + sequences + 2


@jit
def packed_tile(tile, starts, stride, rows, others, other_stride, other_rows, sequences, BLOCK: tl.constexpr):
    """The rows of tile number ``tile``: (offset of its segment, first row within the segment, rows of the segment,
    offset of the segment on the other side, rows there). ``starts`` divide ``rows``; ``others`` divide ``other_rows``.

    Segment i, which begins at row r, owns the tiles from r // BLOCK + i on. Segments cannot share a tile, because
    ceil(n / BLOCK) <= (r + n) // BLOCK - r // BLOCK + 1. A tile beyond its segment's rows gets no rows on the other
    side.
    """
    STEP: tl.constexpr = 128
    before = 0
    for at in range(0, sequences + 2, STEP):
        segment = at + tl.arange(0, STEP)
        first, _ = _bounds(starts, stride, segment, sequences, rows, True)
        before += tl.sum(((segment < sequences + 2) & (first // BLOCK + segment <= tile)).to(tl.int32), 0)
    segment = before - 1
    offset, end = _bounds(starts, stride, segment, sequences, rows, True)
    other, other_end = _bounds(others, other_stride, segment, sequences, other_rows, False)
    first = tl.maximum(tile - offset // BLOCK - segment, 0) * BLOCK  # negative only if starts decrease
    own = end - offset
    return offset, first, own, other, tl.where(first < own, other_end - other, 0)


@jit
def keys_of(first, last, keys, shift, left, right, BLOCK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """(begin, end) of the keys that queries ``first`` to ``last`` see; begin is rounded down to a multiple of BLOCK.

    Blocks begin at the same keys for every tile of queries, so that a query's bits do not depend on its tile.
    """
    start = 0
    end = keys
    if RIGHT:
        end = tl.minimum(keys, tl.maximum(last + shift + right + 1, 0))
    if LEFT:
        start = tl.maximum(first + shift - left, 0) // BLOCK * BLOCK
    return start, end


@jit
def queries_of(first, last, queries, shift, left, right, BLOCK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """(begin, end) of the queries that see keys ``first`` to ``last``; begin is rounded down to a multiple of BLOCK."""
    start = 0
    end = queries
    if RIGHT:
        start = tl.maximum(first - shift - right, 0) // BLOCK * BLOCK
    if LEFT:
        end = tl.minimum(queries, tl.maximum(last - shift + left + 1, 0))
    return start, end


@jit
def slope_of(slopes, stride, head, UNIT: tl.constexpr):
    """The slope of a head times UNIT; None without slopes."""
    found = None
    if slopes is not None:
        found = tl.load(slopes + head.to(tl.int64) * (1 if stride is None else stride)) * UNIT
    return found


@jit
def draw_of(state, stride, dropout_p, keys, ACC: tl.constexpr):
    """What tiles draw their dropout with; None without. (seed, offset, limit, every, scale, groups of 4 keys in a row).

    A key is dropped if its word is below ``limit`` or ``every`` one is. What is kept is multiplied by ``scale``.
    """
    found = None
    if state is not None:
        seed = tl.load(state)
        offset = tl.load(state + (1 if stride is None else stride))
        p = tl.full((), dropout_p, tl.float64)
        limit = tl.ceil(tl.minimum(tl.maximum(p, 0.0), 1.0) * 4294967296.0).to(tl.int64)
        scale = tl.where(p < 1.0, 1.0 / (1.0 - p).to(ACC), 0.0)
        found = (seed, offset, limit.to(tl.uint32), limit >= 4294967296, scale, tl.cdiv(keys, 4))
    return found


@jit
def dropped_of(draw, row, first, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Whether keys ``first`` (a multiple of 4) to ``first + BLOCK_K - 1`` are dropped for each query: (n, BLOCK_K), or
    (BLOCK_K, n) if TRANSPOSED. ``row`` (n,): i64, the number of a query among those of all heads and batch entries.

    Four keys share a counter, that of the op ``dropout`` for rows of so many whole groups. Words become bools at once:
    those cost less to bring into the layout of the scores.
    """
    seed, offset, limit, every, _, groups = draw
    group = first // 4 + tl.arange(0, BLOCK_K // 4)
    if TRANSPOSED:
        counter = row[None, :] * groups + group[:, None]
    else:
        counter = row[:, None] * groups + group[None, :]
    w0, w1, w2, w3 = words_of(seed, offset, counter)
    even = tl.join((w0 < limit) | every, (w2 < limit) | every)
    odd = tl.join((w1 < limit) | every, (w3 < limit) | every)
    found = tl.join(even, odd)
    if TRANSPOSED:
        found = found.permute(0, 2, 3, 1).reshape(BLOCK_K, row.shape[0])
    else:
        found = found.reshape(row.shape[0], BLOCK_K)
    return found


@jit
def scores_of(
    product,
    query,
    key,
    mask,
    mask_strides,
    slope,
    queries,
    keys,
    scale,
    softcap,
    shift,
    left,
    right,
    CAPPED: tl.constexpr,
    MASK: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    EDGE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """(scores * UNIT from products q @ k.T, -inf where a query does not see a key; with CAPPED, the softcap's slope).

    ``query`` and ``key`` are indices that broadcast to the product's shape. MASK: None, "bool" or "float"; ``mask`` is
    the address of a head's mask; ``slope`` is from ``slope_of``. LEFT, RIGHT: there is a window on that side. EDGE:
    ``key`` may reach beyond ``keys``.
    """
    steepness = product
    if CAPPED:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which gives 1 and -1 where the exponential overflows or underflows.
        power = exponential(product * (scale * (2 * UNIT) / softcap))
        share = 2.0 / (power + 1.0)
        s = (1.0 - share) * (softcap * UNIT)
        # 1 - tanh(x)**2 would cancel where tanh is near 1 or -1. It is 4 exp(2x) / (exp(2x) + 1)**2; 0 beyond.
        steepness = tl.where(power == float("inf"), 0.0, share * (share * power))
    else:
        s = product * (scale * UNIT)
    if slope is not None:
        # An explicit FMA: if ptxas chose which of two products to contract, binaries could round differently.
        s = tl.fma(slope, (key - query - shift).to(s.dtype), s)
    seen = key < keys
    if RIGHT:
        seen = seen & (key <= query + (shift + right))
    if LEFT:
        seen = seen & (key >= query + (shift - left))
    if MASK is not None:
        inside = (query < queries) & (key < keys)
        at = mask + query.to(tl.int64) * mask_strides[2]
        at += key if mask_strides[3] is None else key.to(tl.int64) * mask_strides[3]
        if MASK == "bool":
            seen = seen & (tl.load(at, mask=inside, other=0) != 0)
        else:
            s = tl.fma(tl.load(at, mask=inside, other=0.0).to(s.dtype), UNIT, s)
    if EDGE or LEFT or RIGHT or MASK == "bool":
        s = tl.where(seen, s, -float("inf"))
    return s, steepness
