"""Fixed-point sums: what happens at a point, and the conversion back.

Integer addition is associative, so atomics on 64-bit integers give the same bits in whatever order they run. The points
below add floats as integers to packed 64-bit *sums*; ``fixed_fold_kernel`` turns those back into floats. Every float is
``m * 2**(e - 150)``, with the integer m below 2**24 and e the biased exponent of f32 (1 for subnormals).

Infinities and NaN have no integer. They set one of two sticky *flags* of their destination, or both; as OR commutes, no
order shows in them either. Each destination has a byte of flags, or they are the second byte of its exponent's word:
that is then larger than any exponent, so that their maximum leaves it, and the exponent below matters no more.

The dense element is read whether its index turns out to hit or not: the two loads then need not wait for each other.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.offsets_kernels import unravel
from triplan.backends.triton.indexing.kernels import scaled

INFINITY = tl.constexpr(float("inf"))


@triton.jit
def ordinary(x, alpha):
    """Whether neither x nor alpha is infinite or NaN."""
    found = tl.abs(x) < INFINITY
    if alpha is not None:
        found = found & (tl.abs(tl.zeros_like(x) + alpha) < INFINITY)
    return found


@triton.jit
def flag(x):
    """+inf: 1, -inf: 2, NaN: 3, as if both."""
    return tl.where(x > 0, 1, tl.where(x < 0, 2, 3))


@triton.jit
def exact_point(table, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """sums += dense * 2**24, for f16: an integer below 2**40, so nothing is rounded.

    ``alpha`` multiplies the finished sum instead; here it only decides what an infinity becomes.
    """
    sums, flags = table  # atomics take words, of four flags' bytes
    x = tl.load(dense, mask=live, other=0).to(tl.float32)
    usual = ordinary(x, alpha)
    # Exact in f32: a power of two times eleven bits. Zeros need no addition.
    term = (tl.where(usual, x, 0.0) * 16777216.0).to(tl.int64)
    tl.atomic_add(sums + at, term, mask=hit & (term != 0), sem="relaxed")
    seen = flag(scaled(x, alpha, tl.float32)) << ((at & 3) * 8).to(tl.int32)
    tl.atomic_or(flags + (at >> 2), seen, mask=hit & (usual == 0), sem="relaxed")


@triton.jit
def largest_point(exponents, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """exponents = max(exponents, e of dense); zeros leave no trace, infinities and NaN set flags."""
    x = tl.load(dense, mask=live, other=0).to(tl.float32)
    usual = ordinary(x, alpha)
    e = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 255, 1)
    tl.atomic_max(exponents + at, e, mask=hit & usual & (x != 0), sem="relaxed")
    seen = flag(scaled(x, alpha, tl.float32)) << 8
    tl.atomic_or(exponents + at, seen, mask=hit & (usual == 0), sem="relaxed")


@triton.jit
def aligned_point(table, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """sums += m * 2**room >> (largest e - e), rounded to nearest: ``room`` bits below those of the largest term."""
    sums, exponents, room = table
    x = tl.load(dense, mask=live, other=0).to(tl.float32)
    hit = hit & ordinary(x, alpha) & (x != 0)
    largest = tl.load(exponents + at, mask=hit, other=0)
    word = x.to(tl.int32, bitcast=True)
    biased = (word >> 23) & 255
    m = (word & 0x7FFFFF) | tl.where(biased > 0, 0x800000, 0)
    # From 42 on nothing is left of any term (beside flags, nothing matters): shifts stay below the 64 bits at which
    # hardware and C differ.
    right = tl.minimum(tl.maximum(largest - tl.maximum(biased, 1), 0), 62).to(tl.int64)
    half = (right * 0 + 1 << right) >> 1
    term = ((m.to(tl.int64) << room) + half) >> right
    term = tl.where(word < 0, -term, term)
    tl.atomic_add(sums + at, term, mask=hit & (term != 0), sem="relaxed")


@triton.jit
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
    """out = alpha * sums * 2**(scale + exponents), with KEEP out += that; flags overrule.

    ``out`` is taken as (rows, inner); ``sums``, ``exponents`` and ``flags`` are packed panel by panel of that, a panel
    being ``panel`` columns, or what is left, of all rows. All is computed in f64, whose 53 bits hold what the narrower
    element can show, and rounded once into the element (bf16: by way of f32). With KEEP, elements whose sum is zero
    keep their exact bits: adding zero would change no value, only the sign of a zero or the payload of a NaN.
    """
    # A panel beside the other, so that neighbouring programs finish whole rows of ``out``.
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
    # A load for every element, as those of sums are: threads that shared a word of flags would hold other elements
    # than those whose vectors they read, and everything would have to change hands.
    if exponents is not None:
        word = tl.load(exponents + at, mask=live, other=0)
        power += word & 255
        seen = word >> 8
    else:
        seen = tl.load(flags + at, mask=live, other=0)
    # 2**power, by its bits: an f64 with a biased exponent of 1023 + power and nothing behind the leading one.
    value = total.to(tl.float64) * ((1023 + power) << 52).to(tl.float64, bitcast=True)
    if alpha is not None:
        value = value * alpha
    special = tl.where(seen == 1, INFINITY, tl.where(seen == 2, -INFINITY, float("nan")))
    value = tl.where(seen == 0, value, special)
    if KEEP:
        old = tl.load(place, mask=live, other=0)
        value += old.to(tl.float32).to(tl.float64)
    if out.dtype.element_ty == tl.bfloat16:
        value = value.to(tl.float32)
    value = value.to(out.dtype.element_ty)
    if KEEP:
        # Written back rather than masked out: a mask that depends on data splits vectors into elements.
        value = tl.where((total != 0) | (seen != 0), value, old)
    tl.store(place, value, mask=live)
