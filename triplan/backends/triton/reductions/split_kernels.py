"""Kernel of ``split`` that merges the accumulators of the chunks of each line."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.overlap import begin
from triplan.backends.triton.reductions.shared_kernels import (
    ARGMAX,
    ARGMIN,
    ENDS,
    MOMENTS,
    accumulator_at,
    finished,
    folded,
    lines_of,
    merged,
    opposite,
    store_second,
)


@jit
def merge_kernel(
    firsts,
    seconds,
    out,
    second,
    kept,
    lanes,
    n,
    chunk,
    chunks,
    correction,
    order,
    KIND: tl.constexpr,
    FINISH: tl.constexpr,
    IDENTITY: tl.constexpr,
    COMPUTE: tl.constexpr,
    RESULT: tl.constexpr,
    LANES_BESIDE: tl.constexpr,
    POINT_TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out[r] = finish(merge over c of (firsts[r, c], seconds[r, c])), in the order of c.

    firsts, seconds: [lanes, chunks], accumulators of ``chunk`` elements each (the last may have fewer); out: [lanes] of
    RESULT; second: [lanes], or None: see ``store_second``. LANES_BESIDE: see ``accumulator_at``.
    """
    begin(OVERLAPS)
    _, out_at, second_at, number, inside = lines_of(tl.program_id(0), lanes, lanes, kept, None, False, ROWS, POINT_TYPE)
    col = tl.arange(0, BLOCK)
    a = tl.full((ROWS, BLOCK), IDENTITY, COMPUTE)
    if KIND == MOMENTS:
        for step in range(tl.cdiv(chunks, BLOCK)):  # first the mean of all, then the squared deviations from it
            c = step * BLOCK + col
            live = inside[:, None] & (c < chunks)[None, :]
            at = accumulator_at(number[:, None], c[None, :], lanes, chunks, LANES_BESIDE)
            share = tl.minimum(n - c.to(n.dtype) * chunk, chunk).to(COMPUTE)[None, :] / n.to(COMPUTE)
            a += tl.where(live, tl.load(firsts + at, mask=live, other=0) * share, 0)
        mean = tl.sum(a, 1)
        b = tl.zeros((ROWS, BLOCK), COMPUTE)
        for step in range(tl.cdiv(chunks, BLOCK)):
            c = step * BLOCK + col
            live = inside[:, None] & (c < chunks)[None, :]
            at = accumulator_at(number[:, None], c[None, :], lanes, chunks, LANES_BESIDE)
            weight = tl.minimum(n - c.to(n.dtype) * chunk, chunk).to(COMPUTE)[None, :]
            apart = tl.load(firsts + at, mask=live, other=0) - mean[:, None]
            b += tl.where(live, tl.load(seconds + at, mask=live, other=0) + weight * apart * apart, 0)
        a, b = mean, tl.sum(b, 1)
    else:
        if KIND == ARGMAX or KIND == ARGMIN:
            b = tl.full((ROWS, BLOCK), 0x7FFFFFFFFFFFFFFF, tl.int64)
        elif KIND == ENDS:
            b = tl.full((ROWS, BLOCK), opposite(IDENTITY), COMPUTE)
        else:
            b = tl.zeros((ROWS, BLOCK), COMPUTE)
        for step in range(tl.cdiv(chunks, BLOCK)):
            c = step * BLOCK + col
            live = inside[:, None] & (c < chunks)[None, :]
            at = accumulator_at(number[:, None], c[None, :], lanes, chunks, LANES_BESIDE)
            v = tl.load(firsts + at, mask=live, other=0)
            w = v
            if seconds is not None:
                w = tl.load(seconds + at, mask=live, other=0)
            if KIND == ARGMAX or KIND == ARGMIN:
                b = tl.where(live & (b == 0x7FFFFFFFFFFFFFFF), w, b)  # no position yet: all equal the identity
            a, b = merged(a, b, v, w, live, KIND, IDENTITY)
        a, b = folded(a, b, b, b, KIND)
    tl.store(out + out_at, finished(a, b, n.to(COMPUTE), correction, order, FINISH).to(RESULT), mask=inside)
    if second is not None:
        store_second(second + second_at, a, b, inside, KIND)
