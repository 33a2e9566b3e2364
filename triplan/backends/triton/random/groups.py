"""Kernel ``groups``: consecutive elements of a stream; Philox is evaluated once for all elements of a counter."""

from __future__ import annotations

from triplan.backends.runtime.launch import Int, Launch
from triplan.backends.triton.common.offsets import I32_LIMIT, ceil_power
from triplan.backends.triton.random import groups_kernels as kernels
from triplan.backends.triton.random.entries import arguments, block_of, constants, cost, entry, fits
from triplan.descriptors import RandomDescriptor
from triplan.descriptors.random import READING
from triplan.sku import Support, Target

#: Blocks of a program at most, and the fewest programs of several blocks, so that they are many waves. Chosen on an
#: H200, by runs that are not published, as was what ``_blocks`` leaves out.
BLOCKS, PROGRAMS = 8, 4096
#: Registers of a thread that reads and has several blocks. Chosen in the same runs.
LOOPED_REGISTERS = 64


def _blocks(desc: RandomDescriptor) -> int:
    """Blocks of a program. Words of 64 bits, and reads of elements wider than 16 bits, gain nothing by several."""
    if desc.is_wide or (desc.op in READING and desc.operand("out").element.itemsize > 2):
        return 1
    most = desc.operand("out").numel // (block_of(desc) * PROGRAMS)
    return min(ceil_power(most + 1) // 2, BLOCKS) if most else 1


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
    most = None if desc.op not in READING else 96 if _blocks(desc) == 1 else LOOPED_REGISTERS
    grid = _programs(desc)
    return [Launch(kernels.groups_kernel, grid, args, made, num_warps=4, max_registers=most, fuses=False)]
