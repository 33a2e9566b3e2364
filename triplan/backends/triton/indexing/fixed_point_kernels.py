"""Fixed-point sums: the point functions that add to them, and the conversion back to floats.

Integer addition is associative, so atomics on 64-bit integers give the same bits in whatever order they run. The point
functions below add floats as integers to packed 64-bit *sums*; ``fixed_fold_kernel`` converts those to floats. Every
finite float is ``m * 2**(e - 150)``, with the integer m below 2**24 and e the biased exponent of f32 (1 for
subnormals).

Infinities and NaN have no integer. They set one of two sticky *flags* of their table element, or both; OR commutes, so
their order does not matter either. The flags are a byte of their own, or the second byte of the word that holds the
exponent: that word is then larger than any exponent, so the integer maximum keeps it, and its exponent is not used.

The dense element is loaded whether its index turns out to be usable or not: the two loads then do not wait for each
other.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.offsets_kernels import unravel
from triplan.backends.triton.indexing.points_kernels import apart, scaled

INFINITY = tl.constexpr(float("inf"))


@jit
def finite(x, alpha):
    """abs(x) < inf and abs(alpha) < inf; ``alpha`` None is 1."""
    found = tl.abs(x) < INFINITY
    if alpha is not None:
        found = found & (tl.abs(tl.zeros_like(x) + alpha) < INFINITY)
    return found


@jit
def flags_of(x):
    """The flags of an infinity or NaN: 1 for +inf, 2 for -inf, 3 (both) for NaN."""
    return tl.where(x > 0, 1, tl.where(x < 0, 2, 3))


@jit
def exact_point(table, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """sums[at] += dense * 2**24: an integer below 2**40, so nothing is rounded.

    ``dense`` f16, ``table`` (sums i64, flags i32 words of four elements' bytes). ``alpha`` multiplies the finished sum
    instead; here it only decides what an infinity becomes.
    """
    sums, flags = table
    x = tl.load(dense, mask=live, other=0).to(tl.float32)
    is_finite = finite(x, alpha)
    # Exact in f32: a power of two times eleven bits. Zeros need no addition.
    term = (tl.where(is_finite, x, 0.0) * 16777216.0).to(tl.int64)
    tl.atomic_add(apart(sums, at), term, mask=hit & (term != 0), sem="relaxed")
    flag = flags_of(scaled(x, alpha, tl.float32)) << ((at & 3) * 8).to(tl.int32)
    tl.atomic_or(flags + (at >> 2), flag, mask=hit & (is_finite == 0), sem="relaxed")


@jit
def largest_point(exponents, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """exponents[at] = max(exponents[at], e of dense); zeros change nothing, infinities and NaN set flags.

    ``dense`` f16, bf16 or f32; ``exponents`` i32, with flags in the second byte.
    """
    x = tl.load(dense, mask=live, other=0).to(tl.float32)
    is_finite = finite(x, alpha)
    e = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 255, 1)
    tl.atomic_max(apart(exponents, at), e, mask=hit & is_finite & (x != 0), sem="relaxed")
    flag = flags_of(scaled(x, alpha, tl.float32)) << 8
    tl.atomic_or(exponents + at, flag, mask=hit & (is_finite == 0), sem="relaxed")


@jit
def aligned_point(table, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """sums[at] += m * 2**room >> (exponents[at] - e), rounded to nearest.

    ``dense`` f16, bf16 or f32; ``table`` (sums i64, exponents i32 from ``largest_point``, room): ``room`` bits below
    those of the largest term are kept.
    """
    sums, exponents, room = table
    x = tl.load(dense, mask=live, other=0).to(tl.float32)
    hit = hit & finite(x, alpha) & (x != 0)
    largest = tl.load(exponents + at, mask=hit, other=0)
    word = x.to(tl.int32, bitcast=True)
    biased = (word >> 23) & 255
    m = (word & 0x7FFFFF) | tl.where(biased > 0, 0x800000, 0)
    # A shift of 42 or more leaves nothing of any term, and where flags are set no term matters. So shifts are clamped
    # below 64, from where on hardware and C differ.
    right = tl.minimum(tl.maximum(largest - tl.maximum(biased, 1), 0), 62).to(tl.int64)
    half = (right * 0 + 1 << right) >> 1
    term = ((m.to(tl.int64) << room) + half) >> right
    term = tl.where(word < 0, -term, term)
    tl.atomic_add(apart(sums, at), term, mask=hit & (term != 0), sem="relaxed")


@jit
def fixed_fold_kernel(
    sums,
    exponents,
    flags,
    out,
    alpha,
    scale,
    rows,
    inner,
    panel,
    sizes,
    strides,
    KEEP: tl.constexpr,
    POINT_TYPE: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """out = alpha * sums * 2**(scale + exponents), or with KEEP out += that; inf or NaN where flags say so.

    ``out`` (rows, inner), f16, bf16 or f32; ``sums`` i64, and ``exponents`` i32 or ``flags`` u8, of the same elements,
    packed panel by panel: ``panel`` columns, or what is left, of all rows. All is computed in f64 and rounded once
    into the narrower element (bf16: through f32). With KEEP, elements whose sum is zero keep their exact bits: adding
    zero would change no value, only the sign of a zero or the payload of a NaN.
    """
    # Programs go along rows from panel to panel, so that neighbouring programs complete whole rows of ``out``.
    pid = tl.program_id(0)
    panel_blocks = tl.cdiv(panel, BLOCK_COLS)
    col_blocks = ((inner - 1) // panel + 1) * panel_blocks  # (inner + panel may pass 2**31)
    block = pid % col_blocks
    first = (block // panel_blocks).to(POINT_TYPE) * panel
    width = tl.minimum(panel, inner - first)
    row = (pid // col_blocks).to(POINT_TYPE) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = (block % panel_blocks).to(POINT_TYPE) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    live = (row < rows)[:, None] & (col < width)[None, :]
    at = first * rows + row[:, None] * width + col[None, :]
    point = row[:, None] * inner + (first + col)[None, :]
    if FLAT:
        place = out + point
    else:
        place = out + unravel(point, sizes, strides)
    total = tl.load(sums + at, mask=live, other=0)
    power = (at * 0).to(tl.int64) + scale
    # One load for every element, laid out as the loads of sums are: if threads shared a word of flags, the layouts
    # would differ and Triton would exchange everything between threads.
    if exponents is not None:
        word = tl.load(exponents + at, mask=live, other=0)
        power += word & 255
        flag = word >> 8
    else:
        flag = tl.load(flags + at, mask=live, other=0)
    # 2**power from its bits: an f64 with a biased exponent of 1023 + power and a mantissa of zero.
    value = total.to(tl.float64) * ((1023 + power) << 52).to(tl.float64, bitcast=True)
    if alpha is not None:
        value = value * alpha
    special = tl.where(flag == 1, INFINITY, tl.where(flag == 2, -INFINITY, float("nan")))
    value = tl.where(flag == 0, value, special)
    if KEEP:
        old = tl.load(place, mask=live, other=0)
        value += old.to(tl.float32).to(tl.float64)
    if out.dtype.element_ty == tl.bfloat16:
        value = value.to(tl.float32)
    value = value.to(out.dtype.element_ty)
    if KEEP:
        # Written back, not masked out: a mask that depends on data splits vectors into single elements.
        value = tl.where((total != 0) | (flag != 0), value, old)
    tl.store(place, value, mask=live)
