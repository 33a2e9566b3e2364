"""Top-k of ``split``: the token of a row of which few tokens can be drawn."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.overlap import begin
from triplan.backends.triton.common.philox_kernels import as_i64
from triplan.backends.triton.sampling.shared_kernels import (
    LEAST_KEY,
    NO_KEY,
    drawn,
    key_of,
    least_of,
    load_logits,
    mass_of,
    part_of,
    rate_of,
    scale_of,
    threshold_of,
    value_of,
)

#: The key of a group that holds a NaN.
NAN_KEY = tl.constexpr(0x7FFFFFFF)
#: What is left to do for a row: nothing, as for a wide row, or all.
DONE = tl.constexpr(0)
WIDE = tl.constexpr(1)
SLOW = tl.constexpr(2)
#: Groups of which a first bound knows one maximum.
NEIGHBOURS = tl.constexpr(16)
#: Tokens of few groups that a program takes as a small block. Untuned.
SMALL = tl.constexpr(2048)


@jit
def has_few(each, strides, row, n):
    """Whether a row is one of ``narrow_kernel``: it has top-k, or its largest logit is taken."""
    is_few = False
    if each[1] is not None:
        k = tl.load(each[1] + row * strides[1])
        _, is_greedy = rate_of(each[0], row, strides[0])
        is_few = is_greedy | ((k > 0) & (k < n))
    return is_few


@jit
def token_of_few(x, col, known, n, row, low, best, rate, is_greedy, each, strides):
    """The token of a row of which no other tokens than the ``known`` of a block can be drawn.

    x, col, known: logits, ascending ids, and which are the row's. No logit with a key below ``low`` stays, nor is one
    above ``best``.
    """
    _, top_k, top_p, min_p, seed, position, _ = each
    scale = scale_of(rate, value_of(best))
    key = tl.where(known, key_of(x), NO_KEY)
    if top_k is not None:
        k = tl.load(top_k + row * strides[1])
        if (k > 0) & (k < n):
            low = threshold_of(key, None, 0, low, k.to(tl.float64), k)[0]
    mass = tl.where(known & (key >= low), mass_of(x, scale), 0)
    if top_p is not None:
        p = tl.load(top_p + row * strides[2]).to(tl.float64)
        if p < 1.0:
            low = threshold_of(key, mass, 0, low, part_of(p, tl.sum(mass, 0)), as_i64(0))[0]
            mass = tl.where(key >= low, mass, 0)
    if min_p is not None:
        mass = tl.where(mass.to(tl.float64) < least_of(min_p, row, strides[3]), 0, mass)
    number = drawn(seed, position, row, strides[4], strides[5], tl.sum(mass, 0), is_greedy)
    place = tl.sum((tl.cumsum(mass, 0) <= number).to(tl.int32), 0)
    return tl.sum(tl.where(tl.arange(0, x.shape[0]) == place, col, 0), 0).to(tl.int64)


@jit
def token_of_groups(
    places,
    count,
    at,
    stride,
    n,
    row,
    low,
    best,
    rate,
    is_greedy,
    each,
    strides,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
):
    """``token_of_few`` of ``count`` groups of GROUP tokens, whose numbers are at ``places``; of SIZE tokens at most."""
    slot = tl.arange(0, SIZE)
    is_taken = slot // GROUP < count
    col = tl.load(places + slot // GROUP, mask=is_taken, other=0) * GROUP + slot % GROUP
    is_taken = is_taken & (col < n)
    x = load_logits(at, stride, col, is_taken)
    return token_of_few(x, col, is_taken, n, row, low, best, rate, is_greedy, each, strides)


@jit
def narrow_kernel(
    logits,
    row_stride,
    stride,
    n,
    each,
    strides,
    largest,
    chosen,
    state,
    groups,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The token of a row of which few tokens can be drawn, into out; what is left to do for it, into state.

    largest: [rows, groups]; chosen: [rows, FEW // GROUP], the groups whose tokens are looked at; state: [rows]. FEW >=
    groups.
    """
    begin(OVERLAPS)
    temperature, top_k, _, _, _, _, out = each
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * row_stride
    of_row = largest + row * groups
    group = tl.arange(0, FEW)
    known = group < groups
    keys = tl.load(of_row + group, mask=known, other=LEAST_KEY)
    best = tl.max(keys, 0)
    is_bad = (best == NAN_KEY) | (best == LEAST_KEY)
    rate, is_greedy = rate_of(temperature, row, strides[0])
    given = tl.load(top_k + row * strides[1])
    is_few = is_greedy | ((given > 0) & (given < n))
    k = tl.where(is_greedy, 1, given)

    left = tl.full((), WIDE, tl.int32)
    if is_bad:
        tl.store(out + row * strides[6], as_i64(-1))
        left = tl.full((), DONE, tl.int32)
    if is_few & (left == WIDE):
        # Any key up to the k-th largest of some maxima will do, if it leaves few groups.
        maxima = tl.max(tl.reshape(keys, (FEW // NEIGHBOURS, NEIGHBOURS)), 1)
        fits = as_i64(SMALL // GROUP // 2)
        least = threshold_of(maxima, None, 0, LEAST_KEY + 1, k.to(tl.float64), fits)[0]
        count = tl.sum((known & (keys >= least)).to(tl.int32), 0)
        if count * GROUP > FEW:
            least = threshold_of(keys, None, 0, LEAST_KEY + 1, k.to(tl.float64), as_i64(FEW // GROUP))[0]
            count = tl.sum((known & (keys >= least)).to(tl.int32), 0)
        left = tl.where(count * GROUP <= FEW, DONE, SLOW).to(tl.int32)
        if left == DONE:
            is_chosen = known & (keys >= least)
            places = chosen + row * (FEW // GROUP)
            tl.store(places + tl.cumsum(is_chosen.to(tl.int32), 0) - 1, group, mask=is_chosen)
            tl.debug_barrier()  # threads read what other threads of the program have written
            token = tl.full((), 0, tl.int64)
            if count * GROUP <= SMALL:
                token = token_of_groups(
                    places, count, at, stride, n, row, least, best, rate, is_greedy, each, strides, GROUP, SMALL
                )
            else:
                token = token_of_groups(
                    places, count, at, stride, n, row, least, best, rate, is_greedy, each, strides, GROUP, FEW
                )
            tl.store(out + row * strides[6], token)
    tl.store(state + row, left)
