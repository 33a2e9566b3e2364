"""Visits a table one stripe of columns after the other; the device chooses how wide the stripes are.

Where every element has an index of its own, contributions to one row of the table may come from anywhere. If neighbours
point to different rows, each addition is a memory request of its own, and it is fast only while the stripe on which all
programs work fits in the L2 cache: narrow stripes. If neighbours point to the same row, their additions share requests,
and the longer the runs, the fewer requests: wide stripes. Only the device has the indices, so it takes a sample.

The choice decides the order in which programs visit points, and nothing else: integer sums come out the same.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.indices_kernels import report, resolve

#: Columns between one sampled pair and the next, modulo inner - 1: a prime, so that the pairs spread over all columns
#: (unless inner - 1 is a multiple of it).
COLUMN_STEP = tl.constexpr(40487)


@jit
def sample_kernel(index, stripe, n_rows, inner, enough, wide, narrow, SAMPLES: tl.constexpr):
    """stripe = wide if at least ``enough`` of SAMPLES pairs of neighbours in ``index`` are equal, else narrow.

    ``index`` (n_rows, inner), i32 or i64; ``stripe`` one i32. ``wide`` and ``narrow`` are logarithms, base 2, of
    numbers of columns. One program.
    """
    k = tl.arange(0, SAMPLES)
    row = k.to(tl.int64) * n_rows // SAMPLES
    pair = index + row * inner + k * COLUMN_STEP % (inner - 1)
    equal = tl.sum((tl.load(pair) == tl.load(pair + 1)).to(tl.int32))
    tl.store(stripe, tl.where(equal >= enough, wide, narrow))


@jit
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
    """POINT at every point of packed operands: dense[o, c, i] with table[o, index[o, c, i], i].

    ``dense`` and ``index`` (i32 or i64) (outer, count, inner), n_rows = outer * count; ``count`` is None if outer is 1.
    ``table`` has ``slots`` = outer * extent rows of ``inner`` columns, and is packed panel by panel: PANEL columns, or
    what is left, of all rows. A stripe has 2**stripe columns, at most PANEL and 2**LOG_BLOCK; ``stripe`` is that
    exponent, or its address. The grid must suffice for every stripe that may be found there.
    """
    if stripe.dtype.is_ptr():
        stripe = tl.load(stripe)
    # Consecutive lanes take consecutive elements of a row: an atomic instruction of a warp then covers neighbours, and
    # its additions to one cache line are one request.
    log_rows = LOG_BLOCK - stripe
    row_blocks = (n_rows + (1 << log_rows) - 1) >> log_rows
    pid = tl.program_id(0)
    lane = tl.arange(0, 1 << LOG_BLOCK)
    row = ((pid % row_blocks).to(OFFSET) << log_rows) + (lane >> stripe)
    start = (pid // row_blocks).to(OFFSET) << stripe  # beyond ``inner`` in programs that this stripe does not need
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
