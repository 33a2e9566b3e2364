"""Kernel ``groups``: consecutive elements of a stream; Philox is evaluated once for all elements of a counter."""

from __future__ import annotations

from triplan.backends.runtime.launch import Int, Launch
from triplan.backends.triton.common.offsets import I32_LIMIT
from triplan.backends.triton.random import groups_kernels as kernels
from triplan.backends.triton.random.entries import arguments, block_of, constants, cost, entry, fits
from triplan.descriptors import RandomDescriptor
from triplan.descriptors.random import READING
from triplan.sku import Support, Target

#: Blocks per program of at least LOOPED elements, from which on many waves of programs remain. Untuned.
BLOCKS, LOOPED = 4, 1 << 25


def _blocks(desc: RandomDescriptor) -> int:
    return BLOCKS if desc.operand("out").numel >= LOOPED else 1


def _programs(desc: RandomDescriptor) -> int:
    """Programs; one counter more, because ``first`` may lie in the middle of the first one."""
    return -(-(desc.operand("out").numel + 3) // (block_of(desc) * _blocks(desc)))


def applies(desc: RandomDescriptor, target: Target) -> Support:
    if not all(o.layout.packed for o in desc.operands()):
        return Support.no("it takes only packed operands")
    if desc.global_shape is not None and desc.global_shape[1:] != desc.out_shape[1:]:
        return Support.no("its elements are not consecutive in the whole tensor")
    return fits(desc, _programs(desc))


@entry("groups", applies, lambda desc, target: cost(desc))
def groups(desc: RandomDescriptor, target: Target) -> list[Launch]:
    numel = desc.operand("out").numel
    if numel == 0:
        return []
    args = {**arguments(desc), "numel": Int(numel, numel >= I32_LIMIT)}
    made = {**constants(desc), "BLOCK": block_of(desc), "BLOCKS": _blocks(desc)}
    # Without a limit ptxas aims at some 80 registers, to raise occupancy, and spills 8 bytes.
    most = 96 if desc.op in READING else None
    grid = _programs(desc)
    return [Launch(kernels.groups_kernel, grid, args, made, num_warps=4, max_registers=most, fuses=False)]
