"""Cross-entropy: rows held whole, and rows in a loop; and its adjoint. (Rows split between programs have a module.)

Tuples of strides as in ``rows_kernels``. With GRAD the gradient of the reduced loss is written as well: to ``dx``,
which may be ``x``. For one row with softmax p, target t and weights w, smoothed by s, it is

    share * ((A * p) - (1 - s) * w[t] * (c == t) - s / C * w[c]),   A = (1 - s) * w[t] + s / C * sum(w)

where ``share`` is what the row's loss is multiplied by in the reduced one. Rows that are not kept are not read.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.rows_kernels import again, along, exponential, lanes_of, rows_of, subtracted
from triplan.backends.triton.losses.shared_kernels import incoming, of_class, share_of, targets_of


@triton.jit
def parts_of(weight, class_sum, at, kept, n, smoothing, SMOOTH: tl.constexpr, COMPUTE: tl.constexpr):
    """By row: (1 - s) * w[t]; s / C; sum(w)."""
    picked = of_class(weight, at, kept, COMPUTE)
    spread = tl.zeros_like(picked)
    whole = tl.zeros_like(picked)
    if SMOOTH:
        picked = picked * (1.0 - smoothing)
        whole += n.to(COMPUTE) if class_sum is None else tl.load(class_sum)
        spread = tl.where(kept, smoothing / n.to(COMPUTE), 0.0)
    return picked, spread, whole


@triton.jit
def shift_of(mine):
    """What is taken off logits before they are weighted and added up, where the maximum is not yet known: the target's,
    if finite. The loss is of differences: sums of the logits themselves would lose what they have in common."""
    return tl.where(tl.abs(mine) < float("inf"), mine, 0.0)


@triton.jit
def plain_of(v, shift, weight, col, kept, n, axis: tl.constexpr, COMPUTE: tl.constexpr):
    """The sum of weighted logits, less ``shift`` each."""
    weights = weights_at(weight, col, col < n, COMPUTE)
    return tl.sum(tl.where(kept & (col < n), (v - shift) * weights, 0.0), axis)


@triton.jit
def loss_of(v, top, total, plain, shift, kept, picked, spread, whole, SMOOTH: tl.constexpr):
    """A row's loss from its target's logit, maximum, sum of exponentials, and what ``plain_of`` gave."""
    log_total = tl.log(total)
    loss = picked * (log_total - (v - top))
    if SMOOTH:
        loss += spread * (whole * ((top - shift) + log_total) - plain)
    return tl.where(kept, loss, 0.0)


@triton.jit
def gradient_of(v, col, at, weights, top, factor, picked, spread, SMOOTH: tl.constexpr):
    """An element's gradient; ``factor``, ``picked`` and ``spread`` have the row's share in them."""
    g = exponential(v - top) * factor
    if SMOOTH:
        g -= spread * weights
    return g - tl.where(col == at, picked, 0.0)


@triton.jit
def weights_at(weight, col, mask, COMPUTE: tl.constexpr):
    """Weights of classes; where all are 1, the number."""
    if weight is None:
        found = tl.full((), 1.0, COMPUTE)
    else:
        found = tl.load(weight + col, mask=mask, other=0.0)
    return found


@triton.jit
def read_block(from_row, col, step, n, kept, policy: tl.constexpr):
    """Logits at the columns ``col``; -inf beyond their number, and in rows that are not kept."""
    return tl.load(from_row + along(col, step), mask=kept & (col < n), other=-float("inf"), eviction_policy=policy)


@triton.jit
def write_block(
    v, to_row, col, step, n, inside, top, factor, spread, weight, SMOOTH: tl.constexpr, COMPUTE: tl.constexpr
):
    """The gradients of a block, as if none of it were a target."""
    g = exponential(v.to(COMPUTE) - top) * factor
    if SMOOTH:
        g -= spread * weights_at(weight, col, col < n, COMPUTE)
    to = to_row + along(col, step)
    tl.store(to, g.to(to_row.dtype.element_ty), mask=inside & (col < n), eviction_policy="evict_first")


@triton.jit
def write_target(
    mine, to_row, at, step, kept, top, factor, picked, spread, weight, SMOOTH: tl.constexpr, COMPUTE: tl.constexpr
):
    """The gradient of the target, over what another thread wrote there."""
    tl.debug_barrier()
    weights = weights_at(weight, at, kept, COMPUTE) if SMOOTH else 0.0
    g = gradient_of(mine, at, at, weights, top, factor, picked, spread, SMOOTH)
    tl.store(to_row + along(at, step), g.to(to_row.dtype.element_ty), mask=kept)


@triton.jit
def cross_entropy_rows_kernel(
    x,
    dx,
    target,
    losses,
    lse,
    weight,
    share,
    counts,
    class_sum,
    status,
    x_strides,
    dx_strides,
    sizes,
    lanes,
    n,
    blocks,
    ignore,
    smoothing,
    parts,
    GRAD: tl.constexpr,
    MEAN: tl.constexpr,
    SMOOTH: tl.constexpr,
    CLAMP: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Whole rows in registers: each element is read once and written once.

    With NARROW they are held as they are read, in 16 bits, for two programs' rows to be there at a time. The target's
    gradient is written on its own, last.
    """
    outer, lane = lanes_of(tl.program_id(0), blocks, lanes, sizes, ROWS)
    inside = lane < lanes
    row = outer.to(tl.int64) * lanes + lane
    at, kept = targets_of(target, row, inside, n, ignore, status, CLAMP)
    from_row = rows_of(x, x_strides, outer, sizes, lane)
    mine = tl.load(from_row + along(at, x_strides[2]), mask=kept, other=0.0).to(COMPUTE)
    col = tl.arange(0, BLOCK)[None, :]
    held = read_block(from_row, col, x_strides[2], n, kept, "evict_first")
    picked, spread, whole = parts_of(weight, class_sum, at, kept, n, smoothing, SMOOTH, COMPUTE)
    scale = share_of(share, counts, parts, at, kept, MEAN, COMPUTE, PARTS) if GRAD else 0.0
    v = held.to(COMPUTE)
    top = tl.max(v, 1, keep_dims=True)
    if NARROW:
        v = again(held).to(COMPUTE)
    total = tl.sum(exponential(v - subtracted(top)), 1, keep_dims=True)
    plain = 0.0
    if SMOOTH:
        plain = plain_of(v, top, weight, col, kept, n, 1, COMPUTE)[:, None]
    tl.store(losses + row, loss_of(mine, top, total, plain, top, kept, picked, spread, whole, SMOOTH), mask=inside)
    tl.store(lse + row, top + tl.log(total), mask=inside)
    if GRAD:
        factor = tl.where(kept, scale * (picked + spread * whole) / total, 0.0)
        picked = scale * picked
        spread = scale * spread
        top = tl.where(kept, top, 0.0)
        to_row = rows_of(dx, dx_strides, outer, sizes, lane)
        if NARROW:
            held = again(held)
        # Where the gradient goes over x, every thread has its row's target by now.
        tl.debug_barrier()
        write_block(held, to_row, col, dx_strides[2], n, inside, top, factor, spread, weight, SMOOTH, COMPUTE)
        write_target(mine, to_row, at, dx_strides[2], kept, top, factor, picked, spread, weight, SMOOTH, COMPUTE)


@triton.jit
def absorbed(v, col, n, kept, top, total, plain, shift, weight, SMOOTH: tl.constexpr, COMPUTE: tl.constexpr):
    """Maxima, sums of exponentials and of weighted logits less ``shift``, with a block's added: [rows, cols] each."""
    v = v.to(COMPUTE)
    new = tl.maximum(top, tl.max(v, 2))
    base = subtracted(new)
    total = total * exponential(top - base) + tl.sum(exponential(v - base[:, :, None]), 2)
    if SMOOTH:
        plain += plain_of(v, shift, weight, col, kept, n, 2, COMPUTE)
    return new, total, plain


@triton.jit
def cross_entropy_looped_kernel(
    x,
    dx,
    target,
    losses,
    lse,
    weight,
    share,
    counts,
    class_sum,
    status,
    x_strides,
    dx_strides,
    sizes,
    lanes,
    n,
    blocks,
    ignore,
    smoothing,
    parts,
    GRAD: tl.constexpr,
    MEAN: tl.constexpr,
    SMOOTH: tl.constexpr,
    CLAMP: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    VEC: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Rows block by block with running maxima and sums (Milakov and Gimelshein, arXiv 1805.02867).

    Each thread keeps a maximum and a sum of its own for every VEC neighbours that it loads at once: one exponential
    more for VEC of them, no exchange between threads within the loop, so that many loads are under way.
    The gradients go backwards: what was read last is still in the caches. The target's gradient is written on its own,
    last: a comparison less for each element.
    """
    WIDTH: tl.constexpr = COLS * VEC
    KEEP: tl.constexpr = "evict_last" if GRAD else "evict_first"
    outer = tl.program_id(0) // blocks
    lane = (tl.program_id(0) % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = lane < lanes
    row = outer.to(tl.int64) * lanes + lane
    at, kept = targets_of(target, row, inside, n, ignore, status, CLAMP)
    from_row = rows_of(x, x_strides, outer, sizes, lane)
    mine = tl.load(from_row + along(at, x_strides[2]), mask=kept, other=0.0).to(COMPUTE)
    picked, spread, whole = parts_of(weight, class_sum, at, kept, n, smoothing, SMOOTH, COMPUTE)
    from_row = from_row[:, None, None]
    read = kept[:, None, None]
    within = (tl.arange(0, COLS)[:, None] * VEC + tl.arange(0, VEC)[None, :])[None, :, :]
    steps = tl.cdiv(n, WIDTH)
    any_kept = tl.max(kept.to(tl.int32), 0) > 0
    top = tl.full((ROWS, COLS), -float("inf"), COMPUTE)
    total = tl.zeros((ROWS, COLS), COMPUTE)
    plain = tl.zeros((ROWS, COLS), COMPUTE)
    shift = shift_of(mine)
    for start in range(0, tl.where(any_kept, steps, 0) * WIDTH, WIDTH):
        col = start + within
        v = read_block(from_row, col, x_strides[2], n, read, KEEP)
        top, total, plain = absorbed(v, col, n, read, top, total, plain, shift[:, None, None], weight, SMOOTH, COMPUTE)
    tops = tl.max(top, 1)
    totals = tl.sum(total * exponential(top - subtracted(tops)[:, None]), 1)
    plains = tl.sum(plain, 1)
    tl.store(losses + row, loss_of(mine, tops, totals, plains, shift, kept, picked, spread, whole, SMOOTH), mask=inside)
    tl.store(lse + row, tops + tl.log(totals), mask=inside)
    if GRAD:
        # Where the gradient goes over x, every thread has its row's target by now.
        tl.debug_barrier()
        scale = share_of(share, counts, parts, at, kept, MEAN, COMPUTE, PARTS)
        factor = tl.where(kept, scale * (picked + spread * whole) / totals, 0.0)
        tops = tl.where(kept, tops, 0.0)
        picked = scale * picked
        spread = scale * spread
        to_rows = rows_of(dx, dx_strides, outer, sizes, lane)
        to_row = to_rows[:, None, None]
        live = inside[:, None, None]
        t = tops[:, None, None]
        f = factor[:, None, None]
        s = spread[:, None, None]
        for step in range(steps):
            col = (steps - 1 - step) * WIDTH + within
            v = read_block(from_row, col, x_strides[2], n, read, "evict_first")
            write_block(v, to_row, col, dx_strides[2], n, live, t, f, s, weight, SMOOTH, COMPUTE)
        write_target(mine, to_rows, at, dx_strides[2], kept, tops, factor, picked, spread, weight, SMOOTH, COMPUTE)


@triton.jit
def cross_entropy_backward_kernel(
    dloss,
    x,
    target,
    lse,
    dx,
    weight,
    share,
    counts,
    class_sum,
    status,
    x_strides,
    dx_strides,
    sizes,
    lanes,
    n,
    blocks,
    ignore,
    smoothing,
    parts,
    MEAN: tl.constexpr,
    EACH: tl.constexpr,
    SMOOTH: tl.constexpr,
    CLAMP: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Each element by itself, from its row's logsumexp. A program has one block of its rows' columns."""
    columns = tl.maximum(tl.cdiv(n, BLOCK), 1)
    group = tl.program_id(0) // columns
    outer, lane = lanes_of(group, blocks, lanes, sizes, ROWS)
    inside = lane < lanes
    row = outer.to(tl.int64) * lanes + lane
    at, kept = targets_of(target, row, inside, n, ignore, status, CLAMP)
    picked, spread, whole = parts_of(weight, class_sum, at, kept, n, smoothing, SMOOTH, COMPUTE)
    scale = share_of(share, counts, parts, at, kept, MEAN, COMPUTE, PARTS)
    scale = tl.where(kept, scale * incoming(dloss, row, inside, EACH, COMPUTE), 0.0)
    known = tl.load(lse + row, mask=kept, other=0.0)
    col = (tl.program_id(0) % columns) * BLOCK + tl.arange(0, BLOCK)[None, :]
    v = tl.load(
        rows_of(x, x_strides, outer, sizes, lane) + along(col, x_strides[2]),
        mask=kept & (col < n),
        other=-float("inf"),
        eviction_policy="evict_first",
    ).to(COMPUTE)
    weights = weights_at(weight, col, col < n, COMPUTE) if SMOOTH else 0.0
    factor = scale * (picked + spread * whole)
    g = gradient_of(v, col, at, weights, known, factor, scale * picked, scale * spread, SMOOTH)
    to = rows_of(dx, dx_strides, outer, sizes, lane) + along(col, dx_strides[2])
    tl.store(to, g.to(dx.dtype.element_ty), mask=inside & (col < n), eviction_policy="evict_first")
