"""One token of each row, entry ``looped``: a row is read once for each pass.

Sums are of integers, so that they do not depend on their order. Thresholds are found by bits: keys are integers in the
order of the logits, and each pass of a search decides two bits of the smallest key that stays.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.philox_kernels import as_i64, words_of
from triplan.backends.triton.common.rows_kernels import axis_offset

#: The mass of the largest logit: 2**MASS_BITS.
WHOLE = tl.constexpr(1 << 40)
#: A logit so far below the largest, in units of the temperature, has no mass: exp(-28) < 2**-40.
FAR = tl.constexpr(-28.0)


@triton.jit
def load_block(at, stride, start, n, BLOCK: tl.constexpr):
    """(columns, logits in f32) of a block of a row; -inf beyond its end."""
    col = start + tl.arange(0, BLOCK)
    x = tl.load(at + axis_offset(col, stride), mask=col < n, other=-float("inf"))
    return col, x.to(tl.float32)


@triton.jit
def key_of(x):
    """Integers i32 in the order of f32 numbers ``x``; -0 and 0 have one."""
    bits = tl.where(x == 0.0, 0, x.to(tl.int32, bitcast=True))
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def mass_of(x, top, temperature):
    """floor(2**40 * exp((x - top) / temperature)) as i64, where ``top`` (f32) is the largest of ``x`` (f32).

    In f64: f32 has no 40 bits. That of ``top`` is 2**40 also where it or the temperature is infinite, or the
    temperature 0.
    """
    z = (x.to(tl.float64) - top.to(tl.float64)) / temperature
    is_near = z > FAR
    mass = (tl.exp(tl.where(is_near, z, FAR)) * WHOLE).to(tl.int64)
    return tl.where(x == top, WHOLE, tl.where(is_near, mass, 0))


@triton.jit
def smallest_kept(
    at, stride, n, lowest, top, temperature, bound, MASS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr
):
    """The smallest key t such that the weight of greater keys is below ``bound`` (f64), as an i32 scalar.

    The weight of a token is 1; with MASS, its mass if its key is not below ``lowest``. Each step decides two bits of t:
    with j of 1, 2, 3, t is at least t0 + j * unit if keys from there on weigh ``bound`` or more.
    """
    found = tl.full((), -(1 << 31), tl.int64)
    unit = tl.full((), 1 << 30, tl.int64)
    for _ in range(STEPS):
        first = (found + unit).to(tl.int32)
        second = (found + 2 * unit).to(tl.int32)
        third = (found + 3 * unit).to(tl.int32)
        from_first = tl.zeros((BLOCK,), tl.int64)
        from_second = tl.zeros((BLOCK,), tl.int64)
        from_third = tl.zeros((BLOCK,), tl.int64)
        for start in range(0, n, BLOCK):
            col, x = load_block(at, stride, start, n, BLOCK)
            key = key_of(x)
            weight = (col < n).to(tl.int64)
            if MASS:
                weight = tl.where((col < n) & (key >= lowest), mass_of(x, top, temperature), 0)
            from_first += tl.where(key >= first, weight, 0)
            from_second += tl.where(key >= second, weight, 0)
            from_third += tl.where(key >= third, weight, 0)
        steps = (tl.sum(from_first, 0).to(tl.float64) >= bound).to(tl.int64)
        steps += (tl.sum(from_second, 0).to(tl.float64) >= bound).to(tl.int64)
        steps += (tl.sum(from_third, 0).to(tl.float64) >= bound).to(tl.int64)
        found += steps * unit
        unit = unit >> 2
    return found.to(tl.int32)


@triton.jit
def kept_masses(at, stride, start, n, lowest, least, top, temperature, BLOCK: tl.constexpr):
    """Masses of a block, 0 of those whose key is below ``lowest`` or whose mass is below ``least`` (f64)."""
    col, x = load_block(at, stride, start, n, BLOCK)
    mass = mass_of(x, top, temperature)
    dropped = (col >= n) | (key_of(x) < lowest) | (mass.to(tl.float64) < least)
    return col, tl.where(dropped, 0, mass)


@triton.jit
def sample_kernel(
    logits,
    row_stride,
    stride,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    position,
    out,
    strides,
    n,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[row] = the first i with mass[0] + ... + mass[i] > u * sum(mass), of the tokens that the filters keep.

    logits: [rows, n] of f16, bf16 or f32; temperature, top_p, min_p: [rows] of f32; top_k, seed, position, out: [rows]
    of i64. A program takes one row. A filter that is None does not exist.
    """
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * row_stride
    tops = tl.full((BLOCK,), -float("inf"), tl.float32)
    nans = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, n, BLOCK):
        col, x = load_block(at, stride, start, n, BLOCK)
        nans |= (x != x).to(tl.int32)
        tops = tl.maximum(tops, tl.where(x != x, -float("inf"), x))
    top = tl.max(tops, 0)
    is_bad = (tl.max(nans, 0) > 0) | (top == -float("inf"))

    t = tl.load(temperature + row * strides[0]).to(tl.float64)
    is_greedy = ~(t > 0.0)
    t = tl.where(is_greedy, 0.0, t)
    lowest = tl.full((), -(1 << 31), tl.int32)
    if top_k is not None:
        k = tl.load(top_k + row * strides[1])
        if (k > 0) & (k < n):
            lowest = smallest_kept(at, stride, n, lowest, top, t, k.to(tl.float64), False, STEPS, BLOCK)
    if top_p is not None:
        p = tl.load(top_p + row * strides[2]).to(tl.float64)
        if p < 1.0:
            sums = tl.zeros((BLOCK,), tl.int64)
            for start in range(0, n, BLOCK):
                col, mass = kept_masses(at, stride, start, n, lowest, 0.0, top, t, BLOCK)
                sums += mass
            bound = p * tl.sum(sums, 0).to(tl.float64)
            bound = tl.where(bound > 1.0, bound, 1.0)
            # (Of keys below ``lowest`` none has weight: the smallest that stays may be below it.)
            by_mass = smallest_kept(at, stride, n, lowest, top, t, bound, True, STEPS, BLOCK)
            lowest = tl.maximum(lowest, by_mass)
    least = tl.full((), 0.0, tl.float64)
    if min_p is not None:
        least = tl.load(min_p + row * strides[3]).to(tl.float64)
        least = tl.where(least > 1.0, 1.0, least) * WHOLE

    sums = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, n, BLOCK):
        col, mass = kept_masses(at, stride, start, n, lowest, least, top, t, BLOCK)
        sums += mass
    total = tl.sum(sums, 0)
    w0, w1, _, _ = words_of(
        tl.load(seed + row * strides[4]), tl.load(position + row * strides[5]), tl.full((), 0, tl.int64)
    )
    word = w0.to(tl.uint64) | (w1.to(tl.uint64) << 32)
    chosen = tl.umulhi(word, total.to(tl.uint64)).to(tl.int64)
    chosen = tl.where(is_greedy, as_i64(0), chosen)

    # The number of tokens whose cumulative mass is at most ``chosen``: the id of the first with more.
    before = tl.full((), 0, tl.int64)
    skipped = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, n, BLOCK):
        col, mass = kept_masses(at, stride, start, n, lowest, least, top, t, BLOCK)
        skipped += ((before + tl.cumsum(mass, 0) <= chosen) & (col < n)).to(tl.int64)
        before += tl.sum(mass, 0)
    token = tl.sum(skipped, 0)
    tl.store(out + row * strides[6], tl.where(is_bad, as_i64(-1), token))
