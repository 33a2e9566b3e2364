"""softmax, log_softmax and their backward, entry ``looped``: rows of any length, read block by block, twice.

Operands of shape [outer, lanes, n], their strides and ``blocks``: see ``common/rows_kernels``.
The maximum ignores NaN, as the hardware's does. A NaN then enters the sum, and through it every element of its row.

Both passes have the loads of UNROLL blocks in flight at a time. The second pass runs from a row's end to its start:
what the first one read last is still in the cache. The first pass loads with ``evict_last``, to keep the rows there,
the second one with ``evict_first``.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.rows_kernels import (
    accumulate_softmax,
    axis_offset,
    exponential,
    group_lanes,
    load_rows,
    merge_softmax,
    row_pointers,
    store_rows,
)
from triplan.backends.triton.common.shifted_kernels import (
    moved_back,
    other_elements,
    read_end,
    rest_elements,
    shifted_row,
    whole_vectors,
)
from triplan.backends.triton.softmax.shared_kernels import gradient_of, gradient_term, softmax_of

#: The lowest number of f32.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@jit
def softmax_looped_kernel(
    x,
    out,
    x_strides,
    out_strides,
    sizes,
    lanes,
    n,
    blocks,
    LOG: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """out = exp(x - max(x)) / sum(exp(x - max(x))) along each row; with LOG, its logarithm.

    x, out: [outer, lanes, n] of f16, bf16, f32 or f64. A program walks along ROWS rows by blocks of BLOCK elements.

    The first pass accumulates by ``accumulate_softmax``.
    """
    outer, lane = group_lanes(tl.program_id(0), blocks, lanes, sizes, ROWS)
    at = row_pointers(x, x_strides, outer, sizes, lane)[:, :, None]
    to = row_pointers(out, out_strides, outer, sizes, lane)[:, :, None]
    inside = (lane < lanes)[:, :, None]
    place = tl.arange(0, BLOCK // VECTOR)[None, :, None] * VECTOR + tl.arange(0, VECTOR)[None, None, :]
    top = tl.full((ROWS, BLOCK // VECTOR, 1), -float("inf"), COMPUTE)
    total = tl.zeros((ROWS, BLOCK // VECTOR, 1), COMPUTE)
    for start in range(0, n, BLOCK * UNROLL):
        for u in tl.static_range(UNROLL):
            col = start + u * BLOCK + place
            place_at = at + axis_offset(col, x_strides[2])
            v = load_rows(place_at, inside & (col < n), -float("inf"), x_strides, "evict_last").to(COMPUTE)
            top, total = accumulate_softmax(v, top, total, True)
    top, total = merge_softmax(top, total, 1, True)
    steps = tl.cdiv(n, BLOCK * UNROLL)
    for step in range(steps):
        loaded = ()
        for u in tl.static_range(UNROLL):
            col = ((steps - 1 - step) * UNROLL + u) * BLOCK + place
            live = inside & (col < n)
            v = load_rows(at + axis_offset(col, x_strides[2]), live, 0.0, x_strides, "evict_first")
            loaded = loaded + (v,)
        for u in tl.static_range(UNROLL):
            col = ((steps - 1 - step) * UNROLL + u) * BLOCK + place
            y = softmax_of(loaded[u].to(COMPUTE), top, total, LOG)
            out_at = to + axis_offset(col, out_strides[2])
            store_rows(out_at, y.to(out.dtype.element_ty), inside & (col < n), out_strides, "")


@jit
def softmax_backward_looped_kernel(
    dout,
    out,
    dx,
    dout_strides,
    out_strides,
    dx_strides,
    sizes,
    lanes,
    n,
    blocks,
    LOG: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """dx = out * (dout - sum(dout * out)) along each row; with LOG, dx = dout - exp(out) * sum(dout).

    dout, out, dx: [outer, lanes, n] of f16, bf16, f32 or f64. A program walks along ROWS rows by blocks of BLOCK
    elements.

    The first pass accumulates a sum for each column of the blocks, reduced between threads after the loop. The second
    pass also stores with ``evict_first``: gradients must not displace the rows that are still to be read.
    """
    outer, lane = group_lanes(tl.program_id(0), blocks, lanes, sizes, ROWS)
    dout_at = row_pointers(dout, dout_strides, outer, sizes, lane)
    out_at = row_pointers(out, out_strides, outer, sizes, lane)
    to = row_pointers(dx, dx_strides, outer, sizes, lane)
    inside = lane < lanes
    total = tl.zeros((ROWS, BLOCK), COMPUTE)
    for start in range(0, n, BLOCK * UNROLL):
        for u in tl.static_range(UNROLL):
            col = start + u * BLOCK + tl.arange(0, BLOCK)[None, :]
            live = inside & (col < n)
            dy = load_rows(dout_at + axis_offset(col, dout_strides[2]), live, 0.0, dout_strides, "evict_last")
            dy = dy.to(COMPUTE)
            y = dy
            if not LOG:
                y = load_rows(out_at + axis_offset(col, out_strides[2]), live, 0.0, out_strides, "evict_last")
                y = y.to(COMPUTE)
            total += gradient_term(dy, y, LOG)
    total = tl.sum(total, 1, keep_dims=True)
    steps = tl.cdiv(n, BLOCK * UNROLL)
    for step in range(steps):
        loaded = ()
        for u in tl.static_range(UNROLL):
            col = ((steps - 1 - step) * UNROLL + u) * BLOCK + tl.arange(0, BLOCK)[None, :]
            live = inside & (col < n)
            dy = load_rows(dout_at + axis_offset(col, dout_strides[2]), live, 0.0, dout_strides, "evict_first")
            y = load_rows(out_at + axis_offset(col, out_strides[2]), live, 0.0, out_strides, "evict_first")
            loaded = loaded + (dy, y)
        for u in tl.static_range(UNROLL):
            col = ((steps - 1 - step) * UNROLL + u) * BLOCK + tl.arange(0, BLOCK)[None, :]
            g = gradient_of(loaded[2 * u].to(COMPUTE), loaded[2 * u + 1].to(COMPUTE), total, LOG)
            dx_at = to + axis_offset(col, dx_strides[2])
            store_rows(dx_at, g.to(dx.dtype.element_ty), inside & (col < n), dx_strides, "evict_first")


@jit
def _accumulate(top, total, v):
    """(maxima, sums of exponentials relative to them) of accumulators and elements ``v``, each by itself."""
    new = tl.maximum(top, v)
    return new, tl.fma(total, exponential(top - new), exponential(v - new))


@jit
def softmax_shifted_kernel(
    x,
    out,
    n,
    LOG: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """out = exp(x - max(x)) / sum(exp(x - max(x))) along each row; with LOG, its logarithm.

    x, out: [rows, n] of f16 or bf16, packed, aligned. A program walks along a row by blocks of BLOCK elements, as in
    ``softmax_backward_shifted_kernel``. Each accumulator has its own maximum: one of several neighbours would be of
    other neighbours in a row that begins elsewhere, and round their sums otherwise. It begins as the lowest number, not
    as -inf, from which -inf cannot be subtracted.
    """
    skipped, start, end = shifted_row(tl.program_id(0), n, VECTOR)
    known = read_end(tl.program_id(0), end, VECTOR)
    steps = tl.cdiv(end, BLOCK * UNROLL)
    top = tl.full((BLOCK,), LOWEST, COMPUTE)
    total = tl.zeros((BLOCK,), COMPUTE)
    for step in range(steps):
        loaded = ()
        for u in tl.static_range(UNROLL):
            place = (step * UNROLL + u) * BLOCK + tl.arange(0, BLOCK)
            vectors = place // VECTOR * VECTOR < known
            loaded = loaded + (tl.load(x + start + place, mask=vectors, other=0.0, eviction_policy="evict_last"),)
        for u in tl.static_range(UNROLL):
            first = (step * UNROLL + u) * BLOCK
            if first < known:
                v = loaded[u].to(COMPUTE)
                if (first < skipped) | (first + BLOCK > known):  # most blocks lie within the row
                    place = first + tl.arange(0, BLOCK)
                    v = tl.where((place >= skipped) & (place < known), v, -float("inf"))
                top, total = _accumulate(top, total, v)
    if known < end:
        place, live = rest_elements(known, end, BLOCK)
        v = tl.load(x + start + place, mask=live, other=-float("inf")).to(COMPUTE)
        top, total = _accumulate(top, total, v)
    row_top = tl.max(top, 0)
    total = total * exponential(top - row_top)
    total = tl.sum(moved_back(total, skipped, BLOCK), 0)
    for step in range(steps):
        loaded = ()
        for u in tl.static_range(UNROLL):
            place = ((steps - 1 - step) * UNROLL + u) * BLOCK + tl.arange(0, BLOCK)
            whole = whole_vectors(place, skipped, end, VECTOR)
            loaded = loaded + (tl.load(x + start + place, mask=whole, other=0.0, eviction_policy="evict_first"),)
        for u in tl.static_range(UNROLL):
            place = ((steps - 1 - step) * UNROLL + u) * BLOCK + tl.arange(0, BLOCK)
            y = softmax_of(loaded[u].to(COMPUTE), row_top, total, LOG).to(out.dtype.element_ty)
            tl.store(out + start + place, y, mask=whole_vectors(place, skipped, end, VECTOR))
    place, live = other_elements(skipped, end, VECTOR)
    v = tl.load(x + start + place, mask=live, other=0.0).to(COMPUTE)
    tl.store(out + start + place, softmax_of(v, row_top, total, LOG).to(out.dtype.element_ty), mask=live)


@jit
def softmax_backward_shifted_kernel(
    dout,
    out,
    dx,
    n,
    LOG: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """dx = out * (dout - sum(dout * out)) along each row; with LOG, dx = dout - exp(out) * sum(dout).

    dout, out, dx: [rows, n] of f16 or bf16, packed, aligned. A program walks along a row by blocks of BLOCK elements.
    The row begins ``skipped`` elements behind an aligned vector of VECTOR elements, the same in every operand.

    The row is read and written as ``common/shifted_kernels`` says. Element k is added to accumulator
    (k + skipped) % BLOCK. The accumulators are moved back by ``skipped`` before they are reduced: the bits of a row do
    not depend on where it begins.
    """
    skipped, start, end = shifted_row(tl.program_id(0), n, VECTOR)
    known = read_end(tl.program_id(0), end, VECTOR)
    steps = tl.cdiv(end, BLOCK)
    total = tl.zeros((BLOCK,), COMPUTE)
    for step in range(steps):
        place = step * BLOCK + tl.arange(0, BLOCK)
        vectors = place // VECTOR * VECTOR < known
        dy = tl.load(dout + start + place, mask=vectors, other=0.0, eviction_policy="evict_last").to(COMPUTE)
        y = dy
        if not LOG:
            y = tl.load(out + start + place, mask=vectors, other=0.0, eviction_policy="evict_last").to(COMPUTE)
        total += tl.where((place >= skipped) & (place < known), gradient_term(dy, y, LOG), 0.0)
    if known < end:
        place, live = rest_elements(known, end, BLOCK)
        dy = tl.load(dout + start + place, mask=live, other=0.0).to(COMPUTE)
        y = tl.load(out + start + place, mask=live, other=0.0).to(COMPUTE)
        total += tl.where(live, gradient_term(dy, y, LOG), 0.0)
    total = tl.sum(moved_back(total, skipped, BLOCK), 0)
    for step in range(steps):
        place = (steps - 1 - step) * BLOCK + tl.arange(0, BLOCK)
        whole = whole_vectors(place, skipped, end, VECTOR)
        dy = tl.load(dout + start + place, mask=whole, other=0.0, eviction_policy="evict_first").to(COMPUTE)
        y = tl.load(out + start + place, mask=whole, other=0.0, eviction_policy="evict_first").to(COMPUTE)
        g = gradient_of(dy, y, total, LOG).to(dx.dtype.element_ty)
        tl.store(dx + start + place, g, mask=whole, eviction_policy="evict_first")
    place, live = other_elements(skipped, end, VECTOR)
    dy = tl.load(dout + start + place, mask=live, other=0.0).to(COMPUTE)
    y = tl.load(out + start + place, mask=live, other=0.0).to(COMPUTE)
    tl.store(dx + start + place, gradient_of(dy, y, total, LOG).to(dx.dtype.element_ty), mask=live)
