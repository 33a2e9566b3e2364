"""Kernel ``transposed``: copies whose input and result are contiguous along different axes."""

from __future__ import annotations

import math

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common.card import MAX_THREAD_REGISTERS
from triplan.backends.triton.common.offsets import ceil_power
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.copies import geometry, transposed_kernels as kernels
from triplan.descriptors.copies import MoveDescriptor
from triplan.sku import Support, Target

#: (rows and columns of a tile, threads) for bytes, and for other elements: the best on an H200, of 16 x 16 to 128 x
#: 128, for 6000 x 6000 and 4001 x 3999.
WIDE_TILE, TILE = (128, 256), (64, 256)
#: The same below SMALL bytes of the result, so that every multiprocessor has work: roll of 248 x 255 bf16 takes 1.7 us
#: in place of 5.2, flip of 174 x 4608 f32 2.6 in place of 3.0 (H200).
SMALL_TILE, SMALL = (32, 64), 1 << 22
#: Copies of two-byte elements have WIDE_TILE too from LARGE bytes of the result on, unless that takes more than WIDER
#: times as many lanes. (Untuned; on an H200 it is faster for 8192 x 8192 and 8191 x 8189, but not for f32.)
LARGE, WIDER = 1 << 26, 1.04
#: Sides of a tile if there are so few rows or columns, and the length of its other side at most. Such a tile has half
#: as many elements, because 16 x 1024 spills; of two bytes as many as of one: 256 x 4 x 256 x 256 bf16 to channels last
#: are copied faster by 1024 x 4 than by 512 x 4 (H200).
NARROW, LONG = (4, 16), 1024
#: Time relative to a packed copy; that of elementwise's ``transposed``.
SLOWDOWN = 1.04
#: Microseconds in which the threads of a program exchange a tile. From drawn problems on an H200.
TURN_US = 0.15
#: Time of a masked-off lane, relative to one that moves elements. Untuned.
IDLE = 0.3


def _turned(desc: MoveDescriptor) -> int | None:
    """The dimension along which x is contiguous, if along the innermost one out is and x is not (nor broadcast)."""
    found = geometry.dims(desc)
    if not found or found[-1].out != 1 or found[-1].x in (0, 1):
        return None
    return next((at for at in reversed(range(len(found) - 1)) if found[at].x == 1), None)


def _tile(desc: MoveDescriptor, turned: int) -> tuple[int, int, int]:
    """(rows, columns, threads)."""
    found = geometry.dims(desc)
    item = max(desc.element.itemsize, desc.result.itemsize)
    block, threads = WIDE_TILE if item == 1 else TILE
    if desc.operand("out").nbytes < SMALL:
        block, threads = SMALL_TILE
    rows, columns = (min(block, ceil_power(found[at].size)) for at in (turned, -1))
    area = block * block // 2
    if item <= 2 and block >= TILE[0]:
        area = WIDE_TILE[0] * WIDE_TILE[0] // 2
    for narrow in NARROW:
        if rows <= narrow:
            return narrow, min(area // narrow, LONG), threads
        if columns <= narrow:
            return min(area // narrow, LONG), narrow, threads
    if item == 2 and desc.op == "copy" and desc.operand("out").nbytes >= LARGE:
        wide, most = WIDE_TILE
        sizes = [found[at].size for at in (turned, -1)]
        lanes, wide_lanes = (math.prod(-(-n // side) * side for n in sizes) for side in (block, wide))
        if wide_lanes <= WIDER * lanes:
            return wide, wide, most
    return block, block, threads


def _programs(desc: MoveDescriptor, turned: int) -> int:
    found, (rows, columns, _) = geometry.dims(desc), _tile(desc, turned)
    count = -(-found[turned].size // rows) * -(-found[-1].size // columns)
    for at, dim in enumerate(found[:-1]):
        count *= 1 if at == turned else dim.size
    return count


def applies(desc: MoveDescriptor, target: Target) -> Support:
    turned = _turned(desc)
    if turned is None or desc.operand("out").numel == 0:
        return Support.no("x is not promised contiguous along another axis than the result")
    if desc.op in ("tril", "triu") and turned != len(geometry.dims(desc)) - 2:
        return Support.no("x is contiguous along a batch axis of its matrices")
    return fits_grid(_programs(desc, turned))


def rank(desc: MoveDescriptor, target: Target) -> float:
    turned = _turned(desc)
    assert turned is not None
    rows, columns, _ = _tile(desc, turned)
    full = _programs(desc, turned) * rows * columns / desc.operand("out").numel
    return TURN_US + geometry.bytes_us(desc, SLOWDOWN * (1 + IDLE * (full - 1)))


@geometry.copies("transposed", applies, rank)
def transposed(desc: MoveDescriptor, target: Target) -> list[Launch]:
    found, turned = geometry.dims(desc), _turned(desc)
    assert turned is not None
    rows, columns, threads = _tile(desc, turned)
    dims, maps = geometry.outer_args(desc, [d for at, d in enumerate(found[:-1]) if at != turned])
    args = {
        **geometry.base_args(desc),
        "dims": dims,
        # Where elements are moved one by one, most instructions would compute offsets of 64 bits.
        "across": geometry.dim_arg(desc, found[turned], wide_strides=geometry.is_wide(desc)),
        "along": geometry.dim_arg(desc, found[-1], wide_strides=geometry.is_wide(desc)),
    }
    constants = {
        **geometry.constants(desc),
        "MAPS": maps,
        "ACROSS": found[turned].map,
        "ALONG": found[-1].map,
        "BLOCK_ROWS": rows,
        "BLOCK_COLUMNS": columns,
    }
    return [
        Launch(
            kernels.transposed_kernel,
            _programs(desc, turned),
            args,
            constants,
            num_warps=threads // 32,
            # Maps add masks; unless told otherwise, ptxas spills a few registers to raise occupancy (Triton 3.9, sm80).
            max_registers=None if desc.op == "copy" else MAX_THREAD_REGISTERS,
        )
    ]
