"""Kernel ``flat``: packed operands, read and written as consecutive elements."""

from __future__ import annotations

from triplan.backends.runtime.launch import Int, Launch
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.elementwise import flat_kernels as kernels, geometry
from triplan.backends.triton.elementwise.entries import elementwise
from triplan.descriptors.elementwise.problems import ElementwiseDescriptor
from triplan.sku import Support, Target

#: Threads of a program: the best of 128, 256 and 512 on an H200, with gelu, silu and add of 16384 x 16384 bf16.
THREADS = 128
#: As ``geometry.FEW``, chosen on an H200 for ops of 8 and 16 bits. (Of wider elements it matters only where narrower
#: ones are written, as by comparisons.)
FEW = ((1 << 17, 2), (5 << 16, 4), (1 << 21, 8))


def _block(desc: ElementwiseDescriptor) -> int:
    return THREADS * geometry.lanes(desc, few=FEW)


def applies(desc: ElementwiseDescriptor, target: Target) -> Support:
    found = geometry.dims(desc)
    if len(found) > 1 or any(s not in (0, 1) for d in found for s in d.strides):
        return Support.no("the operands are not packed tensors of one shape, or of one element")
    return fits_grid(-(-desc.operands()[-1].numel // _block(desc)))


def rank(desc: ElementwiseDescriptor, target: Target) -> float:
    return geometry.bytes_us(desc)


@elementwise("flat", applies, rank)
def flat(desc: ElementwiseDescriptor, target: Target) -> list[Launch]:
    numel, block = desc.operands()[-1].numel, _block(desc)
    if numel == 0:
        return []
    (dim,) = geometry.dims(desc) or (geometry.blank(desc),)
    return [
        Launch(
            kernels.flat_kernel,
            -(-numel // block),
            {**geometry.base_args(desc), "numel": Int(numel, geometry.is_wide(desc))},
            {**geometry.constants(desc), "STRIDES": dim.strides, "BLOCK": block},
            num_warps=THREADS // 32,
            fuses=False,
        )
    ]
