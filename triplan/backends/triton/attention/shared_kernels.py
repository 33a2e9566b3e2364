"""What the attention kernels that read through pointers share: tiles of operands, scores, exponentials.

Scores and lse are kept in units of UNIT: base-2 logarithms, because the hardware's exponential is of base 2; in f64,
whose exponential is not, natural ones.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl


@triton.jit
def exponential(x):
    """What a score in units of UNIT is the logarithm of. In f32 it is ex2.approx.ftz."""
    if x.dtype == tl.float64:
        return tl.exp(x)
    return tl.exp2(x)


@triton.jit
def logarithm(x):
    """The inverse of ``exponential``."""
    if x.dtype == tl.float64:
        return tl.log(x)
    return tl.log2(x)


@triton.jit
def head_pointer(pointer, strides, batch, head):
    """The first element of a head of a sequence; ``strides`` are (batch, head, row, element), the last None for 1."""
    return pointer + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]


@triton.jit
def load_tile(pointer, strides, row, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Rows ``row`` (n,) of a head: (n, BLOCK), or (BLOCK, n) if TRANSPOSED; 0 beyond ``rows`` and WIDTH."""
    column = tl.arange(0, BLOCK)
    at = row.to(tl.int64) * strides[2]
    step = column if strides[3] is None else column.to(tl.int64) * strides[3]
    if TRANSPOSED:
        offset = at[None, :] + step[:, None]
        inside = (row < rows)[None, :]
        if WIDTH != BLOCK:
            inside = inside & (column < WIDTH)[:, None]
    else:
        offset = at[:, None] + step[None, :]
        inside = (row < rows)[:, None]
        if WIDTH != BLOCK:
            inside = inside & (column < WIDTH)[None, :]
    return tl.load(pointer + offset, mask=inside, other=0.0)


@triton.jit
def store_tile(pointer, strides, row, rows, value, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write rows ``row`` (n,) of a head: ``value`` (n, BLOCK), rounded to the operand's element."""
    column = tl.arange(0, BLOCK)
    step = column if strides[3] is None else column.to(tl.int64) * strides[3]
    inside = (row < rows)[:, None] if WIDTH == BLOCK else (row < rows)[:, None] & (column < WIDTH)[None, :]
    at = pointer + (row.to(tl.int64) * strides[2])[:, None] + step[None, :]
    tl.store(at, value.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def keys_of(first, last, keys, shift, left, right, BLOCK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """The range of keys that some query from ``first`` to ``last`` sees, from a multiple of BLOCK on.

    Where a block begins must not depend on the tile of queries, or a query's bits would.
    """
    start = 0
    end = keys
    if RIGHT:
        end = tl.minimum(keys, tl.maximum(last + shift + right + 1, 0))
    if LEFT:
        start = tl.maximum(first + shift - left, 0) // BLOCK * BLOCK
    return start, end


@triton.jit
def queries_of(first, last, queries, shift, left, right, BLOCK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """The range of queries that see some key from ``first`` to ``last``, from a multiple of BLOCK on."""
    start = 0
    end = queries
    if RIGHT:
        start = tl.maximum(first - shift - right, 0) // BLOCK * BLOCK
    if LEFT:
        end = tl.minimum(queries, tl.maximum(last - shift + left + 1, 0))
    return start, end


@triton.jit
def scores_of(
    product,
    query,
    key,
    mask,
    mask_strides,
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
    """Scores in units of UNIT from products q @ k.T, -inf where a query does not see a key; and with CAPPED the tanh.

    ``query`` and ``key`` are positions that broadcast to the product's shape. MASK: None, "bool" or "float"; ``mask``
    is that of a head. LEFT, RIGHT: there is a window on that side. EDGE: keys may lie beyond ``keys``.
    """
    bent = product
    if CAPPED:
        # tanh(x) = 1 - 2 / (exp(2x) + 1): 1 and -1 for infinite exponentials.
        bent = 1.0 - 2.0 / (exponential(product * (scale * (2 * UNIT) / softcap)) + 1.0)
        s = bent * (softcap * UNIT)
    else:
        s = product * (scale * UNIT)
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
            s += tl.load(at, mask=inside, other=0.0).to(s.dtype) * UNIT
    if EDGE or LEFT or RIGHT or MASK == "bool":
        s = tl.where(seen, s, -float("inf"))
    return s, bent
