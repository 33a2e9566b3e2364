"""One owner for each table element, which visits all contributions in ascending order. Slow, but needs no scratch.

Tuples of sizes and strides run from the innermost dimension outwards.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.indices_kernels import NO_BAD_INDEX, report, resolve
from triplan.backends.triton.common.offsets_kernels import unravel
from triplan.backends.triton.indexing.points_kernels import scaled


@jit
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
    UNROLL: tl.constexpr,
):
    """table[slot, lane] = STEP over all points of that slot and lane, in ascending order of their position.

    ``table`` (slots, lanes) and ``dense`` (steps, lanes), of any strides: slots are the positions under the indices,
    lanes the dimensions that move in the table, steps those that do not. A program owns BLOCK_SLOTS x BLOCK_LANES table
    elements, accumulates in COMPUTE, and visits every step of its lanes, so the bits depend on nothing but the
    contributions of each element. UNROLL steps are loaded at a time. KEEP starts from what the table holds, and leaves
    elements without a contribution as they are; otherwise from zero, and every element is written.
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

    first = (pid // lane_blocks).to(tl.int64) * BLOCK_SLOTS
    for start in range(0, steps, UNROLL):
        # First the loads of all indices, then those of all contributions: ptxas leaves their order as it is.
        given = ()
        for u in tl.static_range(UNROLL):
            point = tl.full((), start + u, POINT_TYPE)
            exists = live_lane & (start + u < steps)
            for k in tl.static_range(len(indices)):
                offset = unravel(lane, lane_sizes, lane_index[k]) + unravel(point, step_sizes, step_index[k])
                given = given + (tl.load(indices[k] + offset, mask=exists, other=0),)
        targets = ()
        values = ()
        for u in tl.static_range(UNROLL):
            point = tl.full((), start + u, POINT_TYPE)
            exists = live_lane & (start + u < steps)
            hit = exists
            inside = exists
            target = (lane * 0).to(tl.int64)
            scale = 1
            for k in tl.static_range(len(indices)):
                at, valid = resolve(given[u * len(indices) + k], extents[k], exists, WRAP, CLAMP)
                inside = inside & valid
                if padding is not None:
                    valid = valid & (at != padding)
                hit = hit & valid
                target += at.to(tl.int64) * scale
                scale = scale * extents[k].to(tl.int64)  # extents of 32 bits each may multiply to more
            if REPORT:
                position = unravel(lane, lane_sizes, lane_position) + unravel(point, step_sizes, step_position)
                lowest = tl.minimum(lowest, tl.where(exists & (inside == 0), position.to(tl.int64), NO_BAD_INDEX))
            # Only lanes whose target lies in this tile read their contribution.
            hit = hit & (target >= first) & (target < first + BLOCK_SLOTS)
            values = values + (tl.load(dense_lane + unravel(point, step_sizes, step_dense), mask=hit, other=0),)
            targets = targets + (tl.where(hit, target, -1),)
        for u in tl.static_range(UNROLL):
            value = scaled(values[u], alpha, COMPUTE)
            acc, written = STEP(acc, written, value[None, :], targets[u][None, :] == slot[:, None])

    if REPORT:
        if pid < lane_blocks:  # all programs of these lanes read the same indices: only those of the first slots report
            report(status, lowest < NO_BAD_INDEX, lowest)
    if KEEP:
        live = live & written  # untouched elements keep their exact bits
    tl.store(own, acc.to(table.dtype.element_ty), mask=live)
