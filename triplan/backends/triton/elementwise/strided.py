"""Kernel ``strided``: operands of any strides; each element has its own address."""

from __future__ import annotations

import math

from triplan.backends.runtime.launch import Int, Launch
from triplan.backends.triton.common.card import L2_BYTES, LAUNCH_US, MAX_THREAD_REGISTERS, SECTOR
from triplan.backends.triton.common.offsets import extents
from triplan.backends.triton.common.strides import Along
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.elementwise import geometry, strided_kernels as kernels
from triplan.backends.triton.elementwise.entries import elementwise
from triplan.descriptors.elementwise.problems import ElementwiseDescriptor
from triplan.sku import ElementKind, Support, Target

#: Elements per program; few, because each offset takes two registers. Untuned.
BLOCK = 512
#: Time relative to ``flat``. On an H100, of problems that ``bench anywhere`` draws: 1.05 to 1.7 (f64 and equal rows the
#: least) if all operands go along the same axis.
SLOWDOWN = 1.38
#: The same where one of the two axes along which operands go has at most so many elements: consecutive threads then
#: share sectors. (From drawn problems on an H200.)
SHORT_SLOWDOWN, SHORT = 1.0, 4
#: Bytes a microsecond of the sectors that elements of a turned input lie in, one read for each element: by default, and
#: where the L2 cache holds all operands and one of the two axes has NEAR elements at most, so that programs which run
#: at the same time share sectors. (From drawn problems on an H200.)
SECTORS_PER_US, NEAR_SECTORS_PER_US, NEAR = 4.6e6, 9e6, 64
#: Addresses of elements that all programs compute in a microsecond: of narrow elements they are the limit. Those of two
#: dimensions, with one division for all operands, and of more. (From drawn problems on an H200.)
ADDRESSES_PER_US = (1.65e6, 1.25e6)
#: Microseconds of dividing an element's number by each extent but those of two dimensions. (From drawn problems on an
#: H200.)
DIVISION_US = 0.1


def applies(desc: ElementwiseDescriptor, target: Target) -> Support:
    return fits_grid(-(-desc.operands()[-1].numel // BLOCK))


def rank(desc: ElementwiseDescriptor, target: Target) -> float:
    # Operands that are broadcast have few addresses.
    addresses = sum(o.numel for o in geometry.tensors(desc) if o.numel == desc.operands()[-1].numel)
    turned, found = geometry.turned(desc), geometry.dims(desc)
    side = math.inf if turned is None else min(found[turned].size, found[-1].size)
    near = side <= NEAR and sum(o.nbytes for o in geometry.tensors(desc)) <= L2_BYTES
    addresses_us = addresses / ADDRESSES_PER_US[len(found) > 2]
    sectors_us = _sectors(desc) / (NEAR_SECTORS_PER_US if near else SECTORS_PER_US)
    strided_us = LAUNCH_US + max(sectors_us, addresses_us)
    division_us = DIVISION_US * max(len(found) - 2, 0)
    return division_us + max(geometry.bytes_us(desc, SHORT_SLOWDOWN if side <= SHORT else SLOWDOWN), strided_us)


def _sectors(desc: ElementwiseDescriptor) -> float:
    """Bytes that the programs move, if some input is contiguous along another axis than the result.

    A block of consecutive elements that holds several rows finds as many consecutive elements of that input.
    """
    turned = geometry.turned(desc)
    if turned is None:
        return 0
    found, numel = geometry.dims(desc), desc.operands()[-1].numel
    run = max(BLOCK // max(found[-1].size, 1), 1) if turned == len(found) - 2 else 1
    moved = 0.0
    for o, inner, is_turned in zip(
        geometry.tensors(desc), found[-1].strides, geometry.are_turned(desc, turned), strict=True
    ):
        item = o.element.itemsize
        apart = SECTOR if isinstance(inner, Along) else min(inner * item, SECTOR)
        moved += numel * min(apart, item + SECTOR / run) if is_turned else o.nbytes
    return moved


@elementwise("strided", applies, rank)
def strided(desc: ElementwiseDescriptor, target: Target) -> list[Launch]:
    numel, wide = desc.operands()[-1].numel, geometry.is_wide(desc)
    if numel == 0:
        return []
    found = geometry.dims(desc)
    args = {
        **geometry.base_args(desc),
        "strides": geometry.stride_args(desc, found),
        "sizes": extents((d.size for d in found), wide),
        "numel": Int(numel, wide),
    }
    constants = {**geometry.constants(desc), "BLOCK": BLOCK}
    # Without a limit ptxas spills some f64 (gradients of mish) to raise occupancy.
    most = MAX_THREAD_REGISTERS if any(o.element is ElementKind.F64 for o in geometry.tensors(desc)) else None
    grid = -(-numel // BLOCK)
    return [Launch(kernels.strided_kernel, grid, args, constants, max_registers=most, fuses=False)]
