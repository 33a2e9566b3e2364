"""Visiting a table stripe by stripe of columns, as wide as the indices suggest.

Where every element has an index of its own, contributions to one row of the table may come from anywhere. If neighbours
point to different rows, each addition is a request of its own, and it is fast only while the stripe that all programs
are at fits in the L2 cache: narrow stripes. If neighbours point to the same row, their additions share requests, the
fewer the longer the runs: wide stripes. Only the device has the indices, so it chooses, by a sample.

The choice steers the order in which programs visit points, and nothing else: integer sums come out the same.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.indices_kernels import report, resolve

#: Steps through the columns that a sample looks at: a prime, so that only its multiples share a factor with it.
COLUMN_STEP = tl.constexpr(40487)


@triton.jit
def sample_kernel(index, stripe, n_rows, inner, enough, wide, narrow, SAMPLES: tl.constexpr):
    """stripe = wide if ``enough`` of SAMPLES pairs of neighbours in ``index`` (n_rows, inner) are equal, else narrow.

    One program. ``wide`` and ``narrow`` are logarithms, base 2, of numbers of columns.
    """
    k = tl.arange(0, SAMPLES)
    row = k.to(tl.int64) * n_rows // SAMPLES
    pair = index + row * inner + k * COLUMN_STEP % (inner - 1)
    equal = tl.sum((tl.load(pair) == tl.load(pair + 1)).to(tl.int32))
    tl.store(stripe, tl.where(equal >= enough, wide, narrow))


@triton.jit
def stripes_kernel(
    dense,
    table,
    index,
    status,
    alpha,
    padding,
    stripe,
    n_rows,
    count,
    inner,
    slots,
    extent,
    POINT: tl.constexpr,
    REPORT: tl.constexpr,
    WRAP: tl.constexpr,
    CLAMP: tl.constexpr,
    OFFSET: tl.constexpr,
    COMPUTE: tl.constexpr,
    PANEL: tl.constexpr,
    LOG_BLOCK: tl.constexpr,
):
    """Packed operands folded to (outer, count, inner), an index an element: one stripe of columns after the other.

    A stripe has 2**stripe columns, at most PANEL and 2**LOG_BLOCK; ``stripe`` is that number, or an address where it
    lies. The grid must suffice for every stripe that may be found there. ``count`` is absent if outer is 1. The table
    is packed panel by panel: PANEL columns, or what is left, of all its ``slots`` = outer * extent rows.
    """
    if stripe.dtype.is_ptr():
        stripe = tl.load(stripe)
    # Lanes walk along rows and no lane takes two elements in a row: an atomic instruction of a warp then covers
    # neighbours, and its additions to one cache line are one request.
    log_rows = LOG_BLOCK - stripe
    row_blocks = (n_rows + (1 << log_rows) - 1) >> log_rows
    pid = tl.program_id(0)
    lane = tl.arange(0, 1 << LOG_BLOCK)
    row = ((pid % row_blocks).to(OFFSET) << log_rows) + (lane >> stripe)
    start = (pid // row_blocks).to(OFFSET) << stripe  # beyond ``inner`` in programs that this stripe has no need of
    col = start + (lane & ((1 << stripe) - 1))
    live = (row < n_rows) & (col < inner)
    position = row * inner + col
    given = tl.load(index + position, mask=live, other=0)
    at, hit = resolve(given, extent, live, WRAP, CLAMP)
    if REPORT:
        report(status, live & (hit == 0), position)
    if padding is not None:
        hit = hit & (at != padding)
    slot = at.to(OFFSET)
    if count is not None:
        slot += row // count * extent
    panel = start // PANEL * PANEL
    place = panel * slots + slot * tl.minimum(PANEL, inner - panel) + (col - panel)
    POINT(table, place, dense + position, hit, live, alpha, COMPUTE)
