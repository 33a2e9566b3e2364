"""Kernel ``rows``: rows that are contiguous or broadcast: row and column vectors, padded rows, (b, 1, s, 1)."""

from __future__ import annotations

from triplan.backends.runtime.launch import Int, Launch, power_of_two_in
from triplan.backends.triton.common.offsets import ceil_power, padded
from triplan.backends.triton.elementwise import geometry, rows_kernels as kernels
from triplan.backends.triton.elementwise.entries import elementwise
from triplan.descriptors.elementwise.problems import ElementwiseDescriptor
from triplan.sku import SUPPORTED, Support, Target

#: Threads of a program. Untuned.
THREADS = 128
#: Time relative to ``flat``: offsets of rows are computed. Untuned.
SLOWDOWN = 1.02
#: Time of a lane that a mask leaves idle, relative to one that moves elements. Untuned.
IDLE = 0.3


def _dims(desc: ElementwiseDescriptor) -> tuple[geometry.Dim, ...]:
    return geometry.dims(desc) or (geometry.blank(desc),)


def tile(desc: ElementwiseDescriptor) -> tuple[int, int]:
    """(rows, columns) of a program's tile: the widest of those that leave the fewest lanes idle."""
    elements, columns = THREADS * geometry.lanes(desc), _dims(desc)[-1].size
    widths = [w for w in (elements, elements // 2, elements // 4, elements // 8) if w <= ceil_power(columns)]
    width = min(widths or [ceil_power(columns)], key=lambda w: (-(-columns // w) * w, -w))
    return elements // width, width


def _programs(desc: ElementwiseDescriptor) -> int:
    height, width = tile(desc)
    columns = _dims(desc)[-1].size
    return -(-(desc.operands()[-1].numel // max(columns, 1)) // height) * -(-columns // width)


def applies(desc: ElementwiseDescriptor, target: Target) -> Support:
    found = _dims(desc)
    written = [o.is_written for o in geometry.tensors(desc)]
    if 0 in desc.shape:
        return Support.no("there is no row")
    for stride, writes in zip(found[-1].strides, written, strict=True):
        if stride != 1 and ((writes and found[-1].size > 1) or stride != 0):
            return Support.no("a row is not promised contiguous or broadcast")
    programs = _programs(desc)
    return SUPPORTED if programs < 2**31 else Support.no(f"needs {programs} programs; a grid holds fewer than 2**31")


def rank(desc: ElementwiseDescriptor, target: Target) -> float:
    height, width = tile(desc)
    idle = _programs(desc) * height * width / desc.operands()[-1].numel - 1
    return geometry.bytes_us(desc, SLOWDOWN * (1 + IDLE * idle))


@elementwise("rows", applies, rank)
def rows(desc: ElementwiseDescriptor, target: Target) -> list[Launch]:
    *outer, inner = _dims(desc)
    wide = geometry.is_wide(desc)
    height, width = tile(desc)
    count = desc.operands()[-1].numel // inner.size
    args = {
        **geometry.base_args(desc),
        "strides": geometry.stride_args(desc, outer),
        "sizes": padded((Int(d.size, wide) for d in outer), Int(1, wide)),
        "rows": Int(count, wide),
        "columns": Int(inner.size, wide, power_of_two_in(inner.size)),
    }
    constants = {
        **geometry.constants(desc),
        "ROWS_VARY": tuple(any(d.strides[i] != 0 for d in outer) for i in range(len(inner.strides))),
        "COLUMNS_VARY": tuple(s == 1 for s in inner.strides),
        "BLOCK_ROWS": height,
        "BLOCK_COLUMNS": width,
    }
    return [Launch(kernels.rows_kernel, _programs(desc), args, constants, num_warps=THREADS // 32, fuses=False)]
