"""Kernel ``groups``: one launch normalises whole groups of channels; others sum gradients of weight and bias.

Groups are read twice; the second time they come from the L2 cache while those of all programs fit there.
"""

from __future__ import annotations

from collections.abc import Mapping

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch, power_of_two_in
from triplan.backends.table import kernel
from triplan.backends.triton.batch_norm import groups_kernels as kernels
from triplan.backends.triton.batch_norm.channels import (
    ELEMENTS,
    MOST,
    TILE_BYTES,
    WARPS,
    Geometry,
    arguments,
    array,
    geometry,
    in_full_tiles,
    in_vectors,
    launch,
    summing,
)
from triplan.backends.triton.batch_norm.channels_kernels import batch_norm_sums_kernel
from triplan.backends.triton.batch_norm.merge_kernels import batch_norm_fold_kernel
from triplan.backends.triton.common import bounds, card
from triplan.backends.triton.common.offsets import TL, ceil_power, divisor, layout
from triplan.backends.triton.common.rows import FEW_WARPS_FROM, UNALIGNED_BYTES
from triplan.backends.triton.common.tiles import Tile, fits_grid
from triplan.descriptors import GroupNormBackwardDescriptor, GroupNormDescriptor
from triplan.descriptors.batch_norm import GroupNormProblem
from triplan.sku import PrecisionGuarantee, Support, Target
from triplan.sku.facts import fact

#: Bytes that a program moves in a microsecond while few run. Measured on an H200 at 2, 5 and 24 groups of 10**6
#: elements: 0.8e4 to 2.1e4.
PROGRAM_BYTES_PER_US = 1.5e4
#: Microseconds of a block of TILE_BYTES that a program of the forward op reads twice: its own latency, and what each
#: program on a multiprocessor adds; and what 4,096 loads of a weight or bias add to both, of which each element has its
#: own. Fitted by least squares to 2 to 616 groups of several blocks in ``bench/results/anywhere-batch_norm-*.json``.
BLOCK_US, SM_BLOCK_US = 0.55, 0.53
NUMBERS_US, SM_NUMBERS_US, NUMBERS = 0.45, 0.33, 4096


def tile(desc: GroupNormProblem) -> Tile:
    """What a program holds at a time; of the elements of a group alone, so that the batch decides no bits.

    Where whole groups begin between two vectors, few warps share one (see ``Rows.whole_tile``)."""
    size = TILE_BYTES // desc.element.itemsize
    block = min(ceil_power(max(desc.count, 1)), size)
    vectors = power_of_two_in(desc.count) * desc.element.itemsize >= 16
    if one(desc) and block >= FEW_WARPS_FROM and not vectors:
        each = 32 * UNALIGNED_BYTES // desc.element.compute.itemsize
        return Tile(max(each // block, 1), block, max(block // each, 1))
    return Tile(size // block, block, WARPS)


@fact
def by_channel(desc: GroupNormProblem) -> Geometry:
    """How gradients of weight and bias are summed."""
    found = in_full_tiles(desc, geometry(desc))
    return in_vectors(desc, found) if desc.pixels > 1 else found


def one(desc: GroupNormProblem) -> bool:
    """Whether a group is one block, which is read once."""
    return desc.count * desc.element.itemsize <= TILE_BYTES


def rows(desc: GroupNormProblem) -> int:
    return desc.batch * desc.groups


def supports(desc: GroupNormProblem, target: Target) -> Support:
    for o in desc.operands():
        if not o.layout.packed:
            return Support.no(f"{o.name} is strided: a group must be contiguous")
    largest = max(rows(desc), desc.count, desc.batch, desc.channels)
    if largest >= MOST:
        return Support.no(f"an extent of {largest}; it counts fewer than {MOST}")
    return fits_grid(geometry(desc).blocks * geometry(desc).groups)


def blocks(desc: GroupNormProblem) -> int:
    """Blocks of a group."""
    return max(-(-desc.count // tile(desc).block), 1)


def sums(desc: GroupNormProblem) -> bool:
    """Whether gradients of weight or bias are asked for."""
    return isinstance(desc, GroupNormBackwardDescriptor) and (desc.weight or desc.bias)


def walks_us(desc: GroupNormDescriptor, each: int, programs: int, moved: int, target: Target) -> float:
    """Microseconds in which ``programs`` walk ``each`` blocks of groups twice and move ``moved`` bytes in all."""
    numbers = (desc.weight + desc.bias) * tile(desc).block / NUMBERS
    beside = (SM_BLOCK_US + SM_NUMBERS_US * numbers) * programs / target.sm_count
    return max(each * (BLOCK_US + NUMBERS_US * numbers + beside), moved / card.BYTES_PER_US)


def rank(desc: GroupNormProblem, target: Target) -> float:
    """Estimated microseconds."""
    if isinstance(desc, GroupNormDescriptor) and not one(desc):
        moved = sum(o.nbytes for o in desc.operands())
        return card.LAUNCH_US + walks_us(desc, blocks(desc), rows(desc), moved, target)
    read = sum(o.nbytes for o in desc.operands() if len(o.shape) == 3 and not o.is_written)
    nbytes = sum(o.nbytes for o in desc.operands()) + read * (2 if sums(desc) else 1)
    programs = max(-(-rows(desc) // tile(desc).rows), 1)
    rate = min(programs * PROGRAM_BYTES_PER_US, card.BYTES_PER_US)
    return card.LAUNCH_US * (3 if sums(desc) else 1) + nbytes / rate


def workspace(desc: GroupNormProblem, target: Target) -> int:
    return 2 * array(desc, by_channel(desc)) if sums(desc) else 0


def guarantee(desc: GroupNormProblem) -> Mapping[str, PrecisionGuarantee]:
    """As of ``channels``: a group is merged within its program, in an order that its length alone decides."""
    back, found = isinstance(desc, GroupNormBackwardDescriptor), {}
    for o in desc.operands():
        if o.is_written:
            summed = o.name in ("dweight", "dbias")
            depth = by_channel(desc).depth if summed else tile(desc).additions(desc.count)
            each = depth + 32 if back else 8 * depth + 48
            found[o.name] = bounds.rounded(o.element, desc.element.compute, 8, each, batch=not summed)
    return found


def numerics(desc: GroupNormProblem) -> str | None:
    """Of a group: alignments, and a divisor of its length, decide which elements a thread loads together."""
    if sums(desc):
        return None
    promised = ",".join(str(min(o.alignment, 16)) for o in desc.operands())
    parameters = f"{desc.parameter_element or desc.element}.{desc.weight}.{desc.bias}"
    found = f"{desc.op}.groups.v{2 if one(desc) else 1}.{desc.element}.{parameters}"
    found += f".{tile(desc).text}.{promised}.{min(power_of_two_in(desc.count), 16)}"
    return f"{found}.{desc.eps!r}" if isinstance(desc, GroupNormDescriptor) else found


def prepared(desc: GroupNormProblem) -> tuple[list[Launch], dict[str, Arg]]:
    """The launches that sum gradients of weight and bias, and what kernels take of groups, which are their rows."""
    compute, per = desc.element.compute, Int(desc.channels // desc.groups)
    found = by_channel(desc)
    given: dict[str, Arg] = {**arguments(desc, found), "groups": Int(desc.groups), "per": per}
    launches = []
    if sums(desc):
        names = ("totals", "projections")
        stored = {name: Scratch(i * array(desc, found), compute) for i, name in enumerate(names)}
        launches = summing(desc, found, batch_norm_sums_kernel, batch_norm_fold_kernel, {**given, **stored})
    n = Int(desc.count, divisibility=power_of_two_in(desc.count))
    alone = {"per": None} if desc.channels == desc.groups else {}
    return launches, given | {"rows": Int(rows(desc)), "n": n, "pixels": divisor(desc.pixels, False)} | alone


def build(desc: GroupNormProblem, target: Target) -> list[Launch]:
    if desc.channels == 0:
        return []
    found, compute = tile(desc), desc.element.compute
    launches, given = prepared(desc)
    which = kernels.group_norm_kernel if isinstance(desc, GroupNormDescriptor) else kernels.group_norm_gradient_kernel
    programs = -(-rows(desc) // found.rows)
    constants = {"COMPUTE": TL[compute], "ROWS": found.rows, "BLOCK": found.block, "ONE": one(desc)}
    return [*launches, launch(which, programs, given, found.warps, **constants)]


for _cls in (GroupNormDescriptor, GroupNormBackwardDescriptor):
    for _op in _cls.ops():
        kernel(
            op=_op,
            name="groups",
            elements=ELEMENTS,
            supports=supports,
            rank=rank,
            guarantee=guarantee,
            numerics=numerics,
            workspace=workspace,
            version=4 if _cls is GroupNormBackwardDescriptor else 1,  # merges of more parts at a time
            layout=layout,
        )(build)
