"""Kernel ``groups``: consecutive elements of a stream, each of whose counters is evaluated once for all of them."""

from __future__ import annotations

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.random import groups_kernels as kernels
from triplan.backends.triton.random.entries import arguments, constants, cost, entry, fits, geometry
from triplan.descriptors import RandomDescriptor
from triplan.descriptors.random import READING
from triplan.sku import Support, Target

#: Elements per program of 4 warps. Untuned; uniform f32 has 23 instructions an element, and 28 in blocks of 1024.
BLOCK = 2048


def _programs(desc: RandomDescriptor) -> int:
    """Elements of the first counter may belong to what precedes the tensor."""
    return -(-(desc.operand("out").numel + 3) // BLOCK)


def applies(desc: RandomDescriptor, target: Target) -> Support:
    if desc.global_shape is not None and desc.global_shape[1:] != desc.out_shape[1:]:
        return Support.no("its elements are not consecutive ones of the whole tensor")
    return fits(desc, _programs(desc))


@entry("groups", applies, lambda desc, target: cost(desc, desc.operand("out").numel // 4))
def groups(desc: RandomDescriptor, target: Target) -> list[Launch]:
    if desc.operand("out").numel == 0:
        return []
    packed = all(o.layout.packed for o in desc.operands())
    args = {**arguments(desc), **(dict.fromkeys(("sizes", "out_strides", "x_strides")) if packed else geometry(desc))}
    made = {**constants(desc), "BLOCK": BLOCK}
    # Left alone, ptxas spills 8 bytes of some 80 registers to raise occupancy.
    most = 255 if not packed else 96 if desc.op in READING else None
    grid = _programs(desc)
    return [Launch(kernels.groups_kernel, grid, args, made, num_warps=4, max_registers=most, fuses=False)]
