"""Kernel ``strided``: operands of any strides; each element has its own address."""

from __future__ import annotations

from triplan.backends.runtime.launch import Int, Launch
from triplan.backends.triton.common.offsets import extents
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.elementwise import geometry, strided_kernels as kernels
from triplan.backends.triton.elementwise.entries import elementwise
from triplan.descriptors.elementwise.problems import ElementwiseDescriptor
from triplan.sku import Support, Target

#: Elements per program; few, because each offset takes two registers. Untuned.
BLOCK = 512
#: Time relative to ``flat``, if all operands go along the same axis and if not. On an H100, of problems that
#: ``bench anywhere`` draws: 1.05 to 1.7 (f64 and equal rows the least), and 3 to 9.
SLOWDOWN, TURNED_SLOWDOWN = 1.38, 2.3


def applies(desc: ElementwiseDescriptor, target: Target) -> Support:
    return fits_grid(-(-desc.operands()[-1].numel // BLOCK))


def rank(desc: ElementwiseDescriptor, target: Target) -> float:
    return geometry.bytes_us(desc, SLOWDOWN if geometry.turned(desc) is None else TURNED_SLOWDOWN)


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
    return [Launch(kernels.strided_kernel, -(-numel // BLOCK), args, constants, fuses=False)]
