"""Kernel ``groups``: consecutive elements of a stream; Philox is evaluated once for all elements of a counter.

Results that are not packed are written where they lie: which row an element is in costs a division, by multiplication.
"""

from __future__ import annotations

from triplan.backends.runtime.launch import Arg, Int, Launch
from triplan.backends.triton.common.offsets import I32_LIMIT, ceil_power, divisor, extents
from triplan.backends.triton.random import groups_kernels as kernels
from triplan.backends.triton.random.dims import beside, dims, stride_args
from triplan.backends.triton.random.entries import STRIDED, arguments, block_of, constants, cost, entry, fits
from triplan.descriptors import RandomDescriptor
from triplan.descriptors.random import READING
from triplan.sku import Support, Target

#: Blocks of a program at most, and the fewest programs of several blocks, so that they are many waves. Chosen on an
#: H200, by runs that are not published, as was what ``_blocks`` leaves out.
BLOCKS, PROGRAMS = 8, 4096
#: Registers of a thread that reads and has several blocks. Chosen in the same runs.
LOOPED_REGISTERS = 64
#: Time relative to packed results where each element's place is computed; set by hand, so that ``rows`` is chosen only
#: with tiles of one row: it took longer in five other problems on an H200, as long in two, by an unpublished run.
SCATTERED = 1.05


def _is_packed(desc: RandomDescriptor) -> bool:
    """Whether all tensors are one dimension of consecutive elements."""
    return all(o.layout.packed for o in desc.operands())


def _block(desc: RandomDescriptor) -> int:
    return block_of(desc) if _is_packed(desc) else min(block_of(desc), STRIDED)


def _vector(desc: RandomDescriptor) -> int:
    """Elements whose place is computed together: of one counter, if all of them are neighbours in every tensor."""
    columns, shared = dims(desc)[-1], 2 if desc.is_wide else 4
    return shared if columns.size % shared == 0 and all(s == 1 for s in columns.strides) else 1


def _blocks(desc: RandomDescriptor) -> int:
    """Blocks of a program. Words of 64 bits, and reads of elements wider than 16 bits, gain nothing by several."""
    if desc.is_wide or (desc.op in READING and desc.operand("out").element.itemsize > 2):
        return 1
    most = desc.operand("out").numel // (_block(desc) * PROGRAMS)
    return min(ceil_power(most + 1) // 2, BLOCKS) if most else 1


def _programs(desc: RandomDescriptor) -> int:
    """Programs; one counter more, because ``first`` may lie in the middle of the first one."""
    return -(-(desc.operand("out").numel + 3) // (_block(desc) * _blocks(desc)))


def applies(desc: RandomDescriptor, target: Target) -> Support:
    if not _is_packed(desc):
        *outer, columns = dims(desc)
        if beside(outer, columns):
            return Support.no("a tensor is contiguous along another axis than the last")
        if desc.operand("out").numel >= I32_LIMIT:
            return Support.no("it divides 32-bit numbers alone, to find the rows of elements")
    if desc.global_shape is not None and desc.global_shape[1:] != desc.out_shape[1:]:
        return Support.no("its elements are not consecutive in the whole tensor")
    return fits(desc, _programs(desc))


def rank(desc: RandomDescriptor, target: Target) -> float:
    return cost(desc) * (1.0 if _is_packed(desc) or _vector(desc) > 1 else SCATTERED)


@entry("groups", applies, rank)
def groups(desc: RandomDescriptor, target: Target) -> list[Launch]:
    numel = desc.operand("out").numel
    if numel == 0:
        return []
    args = {**arguments(desc), "numel": Int(numel, numel >= I32_LIMIT)}
    vector = 1
    rows: dict[str, Arg] = dict.fromkeys(("columns", "sizes", "out_strides", "x_strides"))
    if not _is_packed(desc):
        (*outer, columns), vector = dims(desc), _vector(desc)
        count = max(len(outer), 1)  # each further dimension costs a division and a product of 64 bits an element
        sizes = extents([d.size for d in outer], False)[:count]
        rows |= {"columns": divisor(columns.size // vector, False), "sizes": sizes}
        rows["out_strides"] = stride_args(desc, 1, outer, (columns,), count)
        rows["x_strides"] = stride_args(desc, 2, outer, (columns,), count) if desc.op in READING else None
    made = {**constants(desc), "VECTOR": vector, "BLOCK": _block(desc), "BLOCKS": _blocks(desc)}
    most = None
    if desc.op in READING and _is_packed(desc):
        # Without a limit ptxas aims at some 80 registers, to raise occupancy, and spills 8 bytes.
        most = 96 if _blocks(desc) == 1 else LOOPED_REGISTERS
    grid = _programs(desc)
    return [Launch(kernels.groups_kernel, grid, args | rows, made, num_warps=4, max_registers=most, fuses=False)]
