"""Kernel ``groups``: consecutive elements of a stream; Philox is evaluated once for all elements of a counter."""

from __future__ import annotations

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.random import groups_kernels as kernels
from triplan.backends.triton.random.entries import arguments, constants, cost, entry, fits, geometry
from triplan.descriptors import RandomDescriptor
from triplan.descriptors.random import READING
from triplan.sku import Support, Target

#: Elements per program of 4 warps. Untuned; uniform f32 takes 23 instructions an element, 28 in blocks of 1024.
BLOCK = 2048


def _programs(desc: RandomDescriptor) -> int:
    """Programs; one counter more, because ``first`` may lie in the middle of the first one."""
    return -(-(desc.operand("out").numel + 3) // BLOCK)


def applies(desc: RandomDescriptor, target: Target) -> Support:
    if desc.global_shape is not None and desc.global_shape[1:] != desc.out_shape[1:]:
        return Support.no("its elements are not consecutive in the whole tensor")
    return fits(desc, _programs(desc))


@entry("groups", applies, lambda desc, target: cost(desc, desc.operand("out").numel // 4))
def groups(desc: RandomDescriptor, target: Target) -> list[Launch]:
    if desc.operand("out").numel == 0:
        return []
    packed = all(o.layout.packed for o in desc.operands())
    args = {**arguments(desc), **(dict.fromkeys(("sizes", "out_strides", "x_strides")) if packed else geometry(desc))}
    made = {**constants(desc), "BLOCK": BLOCK}
    # Without a limit ptxas aims at some 80 registers, to raise occupancy, and spills 8 bytes.
    most = 255 if not packed else 96 if desc.op in READING else None
    grid = _programs(desc)
    return [Launch(kernels.groups_kernel, grid, args, made, num_warps=4, max_registers=most, fuses=False)]
