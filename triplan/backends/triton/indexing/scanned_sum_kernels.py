"""Sums of few contributions in one launch, without a sort, in the order that ``segments_kernels`` defines."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.indices_kernels import report
from triplan.backends.triton.common.offsets_kernels import unravel
from triplan.backends.triton.indexing.segments_kernels import add_contributions, walk
from triplan.backends.triton.indexing.sorting_kernels import slot_keys


@jit
def scanned_kernel(
    dense,
    table,
    indices,
    status,
    padding,
    order,
    alpha,
    count,
    slots,
    outer,
    inner,
    sizes,
    index_strides,
    position_strides,
    extents,
    key_strides,
    outer_sizes,
    outer_dense,
    outer_table,
    inner_sizes,
    inner_dense,
    inner_table,
    step_sizes,
    step_dense,
    slot_sizes,
    slot_strides,
    REPORT: tl.constexpr,
    WRAP: tl.constexpr,
    CLAMP: tl.constexpr,
    KEEP: tl.constexpr,
    FLAT: tl.constexpr,
    OFFSET: tl.constexpr,
    COMPUTE: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """table[slot] = sum of the contributions whose key is ``slot``, added to what the table holds with KEEP.

    ``dense`` (count, outer x inner lanes), ``table`` (slots, outer x inner), of any strides; count <= BLOCK <= CHUNK *
    CHUNK; ``order`` (count,) i32. A program reads all keys. If its own position is the first with its key, it lists
    the positions with this key, ascending, in ``order`` (at the place that a sort would give them, so that the lists of
    two slots never overlap) and adds their contributions, ROWS x COLS lanes at a time.
    """
    pid = tl.program_id(0)
    col_blocks = tl.cdiv(inner, COLS)
    row_blocks = tl.cdiv(outer, ROWS)
    item = pid // (col_blocks * row_blocks)
    j = tl.arange(0, BLOCK)
    live_key = j < count
    key, inside = slot_keys(
        indices, j, live_key, sizes, index_strides, None, extents, key_strides, padding, slots, WRAP, CLAMP
    )
    if REPORT:
        if pid == 0:
            report(status, live_key & (inside == 0), unravel(j, sizes, position_strides))
    own_key = tl.sum(tl.where(j == item, key, 0), axis=0)
    same = live_key & (key == own_key)
    earlier = tl.sum((same & (j < item)).to(tl.int32), axis=0)
    if (earlier == 0) & (own_key < slots):
        length = tl.sum(same.to(tl.int32), axis=0)
        start = tl.sum((live_key & (key < own_key)).to(tl.int32), axis=0)
        # Programs of the same slot's other lanes write the same positions to the same places.
        tl.store(order + start + tl.cumsum(same.to(tl.int32), axis=0) - 1, j, mask=same)
        tl.debug_barrier()  # threads read what other threads of the program have written
        row = (pid // col_blocks) % row_blocks * ROWS + tl.arange(0, ROWS)
        col = pid % col_blocks * COLS + tl.arange(0, COLS)
        live = (row < outer)[:, None] & (col < inner)[None, :]
        lane = walk(row, count.to(OFFSET) * inner, outer_sizes, outer_dense, FLAT, OFFSET)[:, None]
        lane += walk(col, 1, inner_sizes, inner_dense, FLAT, OFFSET)[None, :]
        to = walk(row, slots.to(OFFSET) * inner, outer_sizes, outer_table, FLAT, OFFSET)[:, None]
        to += walk(col, 1, inner_sizes, inner_table, FLAT, OFFSET)[None, :]
        own = table + (to + walk(own_key, inner, slot_sizes, slot_strides, FLAT, OFFSET))
        if KEEP:
            held = tl.load(own, mask=live, other=0)
        acc = tl.zeros((ROWS, COLS), COMPUTE)
        for done in range(0, length, CHUNK):
            first = row * 0 + (start + done)
            last = row * 0 + (start + tl.minimum(length, done + CHUNK))
            acc += add_contributions(
                tl.zeros((ROWS, COLS), COMPUTE), dense + lane, order, first, last, live, alpha, inner,
                step_sizes, step_dense, FLAT, OFFSET, UNROLL,
            )  # fmt: skip
        if KEEP:
            acc += held.to(COMPUTE)
        tl.store(own, acc.to(table.dtype.element_ty), mask=live)
