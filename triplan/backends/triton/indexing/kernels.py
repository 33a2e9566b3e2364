"""The kernels of the indexing family.

Every op of the family moves or adds elements between a *dense* side, with one element a point of the problem, and a
*table* that indices point into. Three traversals cover them: ``rows_kernel`` (packed operands, wide rows),
``elements_kernel`` (any strides) and ``ordered_kernel`` (one owner for each table element, contributions in order).
What happens at a point is a jit function passed as a constexpr: it is given the table (an address, or a tuple of
addresses of equal layout), the offset into it, and the address of the dense element.

Tuples of sizes and strides run from the innermost dimension outwards.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.indices_kernels import NO_BAD_INDEX, report, resolve
from triplan.backends.triton.common.offsets_kernels import unravel

# --- what happens at a point ---


@triton.jit
def gather_point(table, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """dense = table; zero where the index was out of bounds, so that no stale memory survives."""
    tl.store(dense, tl.load(table + at, mask=hit, other=0), mask=live)


@triton.jit
def store_point(table, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """table = dense. Where indices repeat, any one write stays."""
    tl.store(table + at, tl.load(dense, mask=hit), mask=hit)


@triton.jit
def no_point(table, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """Nothing: the traversal only reports bad indices."""


@triton.jit
def scaled(x, alpha, COMPUTE: tl.constexpr):
    x = x.to(COMPUTE)
    if alpha is not None:
        x = x * alpha
        x = x.to(COMPUTE)
    return x


@triton.jit
def atomic_point(table, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """table += alpha * dense, in the table's own element, in whatever order the hardware chooses."""
    x = scaled(tl.load(dense, mask=hit, other=0), alpha, COMPUTE)
    # Relaxed: additions commute and nothing else is published through them.
    tl.atomic_add(table + at, x.to(table.dtype.element_ty), mask=hit, sem="relaxed")


@triton.jit
def atomic_pair_point(table, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """The same for 16-bit floats at scattered places, two table elements at a time.

    The hardware adds 16-bit floats only in aligned pairs; a lone one becomes a compare-and-swap loop. The partner
    receives -0.0, which changes no value. The caller vouches that every pair lies inside the table.
    """
    x = scaled(tl.load(dense, mask=hit, other=0), alpha, COMPUTE).to(table.dtype.element_ty)
    table = table + at
    address = table.to(tl.int64)
    odd = (address >> 1) & 1
    pair = tl.multiple_of((address - odd * 2).to(table.dtype), [4] * len(table.shape))
    side = tl.arange(0, 2)
    for _ in tl.static_range(len(table.shape)):
        side = tl.expand_dims(side, 0)
    odd, x, pair, hit = (
        tl.expand_dims(odd, -1),
        tl.expand_dims(x, -1),
        tl.expand_dims(pair, -1),
        tl.expand_dims(hit, -1),
    )
    both = tl.where(side == odd, x, -0.0).to(table.dtype.element_ty)
    tl.atomic_add(pair + side, both, mask=hit & (side >= 0), sem="relaxed")


# --- traversals ---


@triton.jit
def rows_kernel(
    dense,
    table,
    index,
    status,
    alpha,
    padding,
    n_rows,
    count,
    inner,
    extent,
    POINT: tl.constexpr,
    FULL: tl.constexpr,
    REPORT: tl.constexpr,
    WRAP: tl.constexpr,
    CLAMP: tl.constexpr,
    OFFSET: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Packed operands folded to (outer, count, inner): a tile of rows times a tile of the contiguous inner extent.

    The index is one a row, or with FULL one an element.
    """
    pid = tl.program_id(0)
    col_blocks = tl.cdiv(inner, BLOCK_COLS)
    if FULL:
        # Stripe by stripe: the table's part of one stripe of columns stays in the L2 cache while all rows visit it.
        row_blocks = tl.num_programs(0) // col_blocks
        row_block, col_block = pid % row_blocks, pid // row_blocks
    else:
        row_block, col_block = pid // col_blocks, pid % col_blocks
    row = row_block.to(OFFSET) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = col_block * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    live_row = row < n_rows
    live = live_row[:, None] & (col < inner)[None, :]
    outer = row // count
    offset = row[:, None] * inner + col[None, :]
    if FULL:
        position = offset
        given = tl.load(index + position, mask=live, other=0)
        at, hit = resolve(given, extent, live, WRAP, CLAMP)
        if REPORT:
            report(status, live & (hit == 0), position)
        if padding is not None:
            hit = hit & (at != padding)
        base = (outer * extent)[:, None] + at.to(OFFSET)
    else:
        position = row - outer * count
        given = tl.load(index + position, mask=live_row, other=0)
        at, hit = resolve(given, extent, live_row, WRAP, CLAMP)
        if REPORT:
            report(status, live_row & (hit == 0), position)
        if padding is not None:
            hit = hit & (at != padding)
        base = (outer * extent + at.to(OFFSET))[:, None]
        hit = live & hit[:, None]
    POINT(table, base * inner + col[None, :], dense + offset, hit, live, alpha, COMPUTE)


@triton.jit
def elements_kernel(
    dense,
    table,
    indices,
    status,
    alpha,
    padding,
    numel,
    sizes,
    dense_strides,
    table_strides,
    index_strides,
    position_strides,
    extents,
    axis_strides,
    POINT: tl.constexpr,
    REPORT: tl.constexpr,
    WRAP: tl.constexpr,
    CLAMP: tl.constexpr,
    POINT_TYPE: tl.constexpr,
    COMPUTE: tl.constexpr,
    DENSE_FLAT: tl.constexpr,
    INDEX_FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Any strides, any number of index tensors: one point a lane.

    DENSE_FLAT and INDEX_FLAT: that operand's elements are numbered as the points are, so its loads stay vectors.
    """
    point = tl.program_id(0).to(POINT_TYPE) * BLOCK + tl.arange(0, BLOCK)
    live = point < numel
    inside = live
    hit = live
    offset = unravel(point, sizes, table_strides)
    for k in tl.static_range(len(indices)):
        if INDEX_FLAT:
            given = tl.load(indices[k] + point, mask=live, other=0)
        else:
            given = tl.load(indices[k] + unravel(point, sizes, index_strides[k]), mask=live, other=0)
        at, valid = resolve(given, extents[k], live, WRAP, CLAMP)
        inside = inside & valid
        if padding is not None:
            valid = valid & (at != padding)
        hit = hit & valid
        offset += at.to(axis_strides[k].dtype) * axis_strides[k]
    if REPORT:
        report(status, live & (inside == 0), unravel(point, sizes, position_strides))
    if DENSE_FLAT:
        POINT(table, offset, dense + point, hit, live, alpha, COMPUTE)
    else:
        POINT(table, offset, dense + unravel(point, sizes, dense_strides), hit, live, alpha, COMPUTE)


@triton.jit
def add_step(acc, written, value, hit):
    return tl.where(hit, acc + value, acc), written | hit


@triton.jit
def last_step(acc, written, value, hit):
    return tl.where(hit, value, acc), written | hit


@triton.jit
def ordered_kernel(
    dense,
    table,
    indices,
    status,
    alpha,
    padding,
    slots,
    lanes,
    steps,
    lane_sizes,
    lane_dense,
    lane_table,
    lane_index,
    lane_position,
    step_sizes,
    step_dense,
    step_index,
    step_position,
    extents,
    axis_strides,
    STEP: tl.constexpr,
    KEEP: tl.constexpr,
    REPORT: tl.constexpr,
    WRAP: tl.constexpr,
    CLAMP: tl.constexpr,
    POINT_TYPE: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_LANES: tl.constexpr,
):
    """Each program owns a tile of the table (slots: positions under the indices; lanes: everything else) and meets all
    contributions in ascending order, so the bits depend on nothing but the contributions of each element.

    KEEP starts from what the table holds; otherwise from zero, and every element is written.
    """
    pid = tl.program_id(0)
    lane_blocks = tl.cdiv(lanes, BLOCK_LANES)
    slot = (pid // lane_blocks).to(POINT_TYPE) * BLOCK_SLOTS + tl.arange(0, BLOCK_SLOTS)
    lane = (pid % lane_blocks).to(POINT_TYPE) * BLOCK_LANES + tl.arange(0, BLOCK_LANES)
    live_lane = lane < lanes
    live = (slot < slots)[:, None] & live_lane[None, :]

    rest = slot
    slot_offset = (slot * 0).to(axis_strides[0].dtype)
    for k in tl.static_range(len(indices)):
        slot_offset += (rest % extents[k]) * axis_strides[k]
        rest = rest // extents[k]
    own = table + (slot_offset[:, None] + unravel(lane, lane_sizes, lane_table)[None, :])
    if KEEP:
        acc = tl.load(own, mask=live, other=0).to(COMPUTE)
    else:
        acc = tl.zeros((BLOCK_SLOTS, BLOCK_LANES), COMPUTE)
    written = live & (slot < 0)[:, None]
    dense_lane = dense + unravel(lane, lane_sizes, lane_dense)
    if REPORT:
        lowest = tl.full((BLOCK_LANES,), NO_BAD_INDEX, tl.int64)

    for step in range(steps):
        point = (lane * 0 + step).to(POINT_TYPE)
        hit = live_lane
        inside = live_lane
        target = (lane * 0).to(tl.int64)
        scale = 1
        for k in tl.static_range(len(indices)):
            offset = unravel(lane, lane_sizes, lane_index[k]) + unravel(point, step_sizes, step_index[k])
            given = tl.load(indices[k] + offset, mask=live_lane, other=0)
            at, valid = resolve(given, extents[k], live_lane, WRAP, CLAMP)
            inside = inside & valid
            if padding is not None:
                valid = valid & (at != padding)
            hit = hit & valid
            target += at.to(tl.int64) * scale
            scale = scale * extents[k].to(tl.int64)  # extents of 32 bits each may multiply to more
        if REPORT:
            position = unravel(lane, lane_sizes, lane_position) + unravel(point, step_sizes, step_position)
            lowest = tl.minimum(lowest, tl.where(live_lane & (inside == 0), position.to(tl.int64), NO_BAD_INDEX))
        # Only lanes whose target lies in this tile read their contribution.
        first = (pid // lane_blocks).to(tl.int64) * BLOCK_SLOTS
        hit = hit & (target >= first) & (target < first + BLOCK_SLOTS)
        value = tl.load(dense_lane + unravel(point, step_sizes, step_dense), mask=hit, other=0)
        value = scaled(value, alpha, COMPUTE)
        acc, written = STEP(acc, written, value[None, :], hit[None, :] & (target[None, :] == slot[:, None]))

    if REPORT:
        if pid < lane_blocks:  # every program has seen all indices of its lanes; the first slots' reports are enough
            report(status, lowest < NO_BAD_INDEX, lowest)
    if KEEP:
        live = live & written  # untouched elements keep their exact bits
    tl.store(own, acc.to(table.dtype.element_ty), mask=live)
