"""One token of each row, entry ``looped``: a row is read once for each pass."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.philox_kernels import as_i64
from triplan.backends.triton.sampling.shared_kernels import (
    NO_KEY,
    drawn,
    key_of,
    least_of,
    load_block,
    mass_of,
    part_of,
    rate_of,
    scale_of,
)


@jit
def smallest_kept(at, stride, n, lowest, scale, bound, MASS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest key t such that the weight of greater keys is below ``bound`` (f64), as an i32 scalar.

    The weight of a token is 1; with MASS, its mass if its key is not below ``lowest``. Each step decides two bits of t:
    with j of 1, 2, 3, t is at least t0 + j * unit if keys from there on weigh ``bound`` or more.
    """
    found = tl.full((), NO_KEY, tl.int64)
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
                weight = tl.where((col < n) & (key >= lowest), mass_of(x, scale), 0)
            from_first += tl.where(key >= first, weight, 0)
            from_second += tl.where(key >= second, weight, 0)
            from_third += tl.where(key >= third, weight, 0)
        steps = (tl.sum(from_first, 0).to(tl.float64) >= bound).to(tl.int64)
        steps += (tl.sum(from_second, 0).to(tl.float64) >= bound).to(tl.int64)
        steps += (tl.sum(from_third, 0).to(tl.float64) >= bound).to(tl.int64)
        found += steps * unit
        unit = unit >> 2
    return found.to(tl.int32)


@jit
def kept_masses(at, stride, start, n, lowest, least, scale, BLOCK: tl.constexpr):
    """Masses of a block, 0 of those whose key is below ``lowest`` or whose mass is below ``least`` (f64)."""
    col, x = load_block(at, stride, start, n, BLOCK)
    mass = mass_of(x, scale)
    dropped = (col >= n) | (key_of(x) < lowest) | (mass.to(tl.float64) < least)
    return col, tl.where(dropped, 0, mass)


@jit
def _drawn_token(at, stride, n, row, each, strides, rate, top, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """The first i with mass[0] + ... + mass[i] > u * sum(mass), of the tokens that stay. rate: of ``rate_of``."""
    _, top_k, top_p, min_p, seed, position, _ = each
    scale = scale_of(rate, top)
    lowest = tl.full((), NO_KEY, tl.int32)
    if top_k is not None:
        k = tl.load(top_k + row * strides[1])
        if (k > 0) & (k < n):
            lowest = smallest_kept(at, stride, n, lowest, scale, k.to(tl.float64), False, STEPS, BLOCK)
    if top_p is not None:
        p = tl.load(top_p + row * strides[2]).to(tl.float64)
        if p < 1.0:
            sums = tl.zeros((BLOCK,), tl.int64)
            for start in range(0, n, BLOCK):
                col, mass = kept_masses(at, stride, start, n, lowest, 0.0, scale, BLOCK)
                sums += mass
            # (Of keys below ``lowest`` none has weight: the smallest that stays may be below it.)
            bound = part_of(p, tl.sum(sums, 0))
            by_mass = smallest_kept(at, stride, n, lowest, scale, bound, True, STEPS, BLOCK)
            lowest = tl.maximum(lowest, by_mass)
    least = least_of(min_p, row, strides[3])

    sums = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, n, BLOCK):
        col, mass = kept_masses(at, stride, start, n, lowest, least, scale, BLOCK)
        sums += mass
    chosen = drawn(seed, position, row, strides[4], strides[5], tl.sum(sums, 0), False)

    # The number of tokens whose cumulative mass is at most ``chosen``: the id of the first with more.
    before = tl.full((), 0, tl.int64)
    skipped = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, n, BLOCK):
        col, mass = kept_masses(at, stride, start, n, lowest, least, scale, BLOCK)
        skipped += ((before + tl.cumsum(mass, 0) <= chosen) & (col < n)).to(tl.int64)
        before += tl.sum(mass, 0)
    return tl.sum(skipped, 0)


@jit
def looped_token(at, stride, n, row, each, strides, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """The token of the row at ``at``: the first of the largest logits, which every filter keeps, where the temperature
    says so; else ``_drawn_token``."""
    rate, is_greedy = rate_of(each[0], row, strides[0])  # here, so that the row is not read after it
    tops = tl.full((BLOCK,), -float("inf"), tl.float32)
    firsts = tl.zeros((BLOCK,), tl.int32)  # the block in which each lane has its largest logit first
    nans = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, n, BLOCK):
        _, x = load_block(at, stride, start, n, BLOCK)
        nans |= (x != x).to(tl.int32)
        is_larger = x > tops  # false of NaN
        tops, firsts = tl.where(is_larger, x, tops), tl.where(is_larger, start, firsts)
    top = tl.max(tops, 0)
    is_bad = (tl.max(nans, 0) > 0) | (top == -float("inf"))
    if is_greedy:
        token = tl.min(tl.where(tops == top, firsts + tl.arange(0, BLOCK), 2**31 - 1), 0).to(tl.int64)
    else:
        token = _drawn_token(at, stride, n, row, each, strides, rate, top, STEPS, BLOCK)
    return tl.where(is_bad, as_i64(-1), token)


@jit
def sample_kernel(logits, row_stride, stride, n, each, strides, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """out[row] = ``looped_token`` of the row. A program takes one row.

    logits: [rows, n] of f16, bf16 or f32; each: temperature, top_k, top_p, min_p, seed, position, out, [rows] of f32,
    i64, f32, f32, i64, i64, i64. A filter that is None does not exist.
    """
    row = tl.program_id(0).to(tl.int64)
    token = looped_token(logits + row * row_stride, stride, n, row, each, strides, STEPS, BLOCK)
    tl.store(each[6] + row * strides[6], token)
