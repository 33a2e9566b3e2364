"""Kernel ``split`` of ``group_norm_backward``: long groups of channels, of which several programs share one.

One launch sums each channel of each image, a *plane*; gradients of weight and bias and of x both follow from those
sums, so that x and dout are read twice. Where planes have few elements, cannot be read in vectors, or are too many in a
group, one launch sums parts of each group instead. The next adds the parts and writes the gradient of x; those of
weight and bias have the launches of ``groups``.
"""

from __future__ import annotations

from collections.abc import Mapping

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch, power_of_two_in
from triplan.backends.table import kernel
from triplan.backends.triton.batch_norm import groups, groups_kernels as kernels
from triplan.backends.triton.batch_norm.channels import (
    ELEMENTS,
    MERGE_CHANNELS,
    MERGE_PARTS,
    MERGE_WARPS,
    MOST,
    PROGRAMS_BACKWARD,
    VECTOR_BYTES,
    WARPS,
    arguments,
    array,
    launch,
)
from triplan.backends.triton.batch_norm.merge_kernels import batch_norm_fold_kernel
from triplan.backends.triton.batch_norm.split import MOST_SPLITS
from triplan.backends.triton.common import bounds, card
from triplan.backends.triton.common.offsets import TL, ceil_power, layout, padded_bytes
from triplan.backends.triton.common.strides import count
from triplan.backends.triton.common.tiles import Tile
from triplan.descriptors import GroupNormBackwardDescriptor
from triplan.sku import PrecisionGuarantee, Support, Target

#: Bytes of an operand that a program holds of planes: 16 for each of its threads. Chosen on an H200,
#: by runs that are not published.
PLANE_BYTES = 4096
#: Elements of a plane at least, and planes of a group at most, whose sums each program of that group reads. Untuned.
LEAST_PLANE, MOST_PLANES = 32, 1024
#: Time of sums of planes, as a part of that of ``groups``, which reads long groups once more, from L2 at best. Untuned.
PLANES_PART = 0.9


def planes(desc: GroupNormBackwardDescriptor) -> Tile | None:
    """What a program holds of planes; None where parts are those of whole groups."""
    per = desc.channels // desc.groups
    if groups.one(desc) or desc.pixels < LEAST_PLANE or per > MOST_PLANES or desc.batch * desc.channels >= MOST:
        return None
    if power_of_two_in(desc.pixels) * desc.element.itemsize < VECTOR_BYTES:  # whole groups are read in longer vectors
        return None
    size = PLANE_BYTES // desc.element.itemsize
    block = min(ceil_power(desc.pixels), size)
    rows = min(size // block, ceil_power(per))
    return Tile(rows, block, max(rows * block * WARPS // size, 1))


def parts(desc: GroupNormBackwardDescriptor) -> tuple[int, int]:
    """(blocks that a program walks, programs that share a group)."""
    blocks = groups.blocks(desc)
    shared = min(max(PROGRAMS_BACKWARD // max(groups.rows(desc), 1), 1), MOST_SPLITS)
    each = -(-blocks // shared)
    return each, -(-blocks // each)


def supports(desc: GroupNormBackwardDescriptor, target: Target) -> Support:
    found = groups.supports(desc, target)
    if found and planes(desc) is None and parts(desc)[1] < 2:
        return Support.no("a program has a whole group: groups are short or many")
    return found


def rank(desc: GroupNormBackwardDescriptor, target: Target) -> float:
    """Estimated microseconds."""
    reads, launches, part = (3, 4, 1.0) if planes(desc) is None else (2, 3, PLANES_PART)
    moved = sum(o.nbytes * (1 if o.is_written else reads) for o in desc.operands() if len(o.shape) == 3)
    return card.LAUNCH_US * (launches if groups.sums(desc) else 2) + part * moved / card.BYTES_PER_US


def sizes(desc: GroupNormBackwardDescriptor) -> tuple[int, int]:
    """Bytes of what ``groups`` stores, and of the partial sums of one kind."""
    if planes(desc) is not None:
        return 0, padded_bytes(desc.batch * desc.channels * desc.element.compute.itemsize)
    partials = groups.rows(desc) * parts(desc)[1]
    stored = 2 * array(desc, groups.by_channel(desc)) if groups.sums(desc) else 0
    return stored, padded_bytes(partials * desc.element.compute.itemsize)


def workspace(desc: GroupNormBackwardDescriptor, target: Target) -> int:
    before, each = sizes(desc)
    return before + 2 * each


def guarantee(desc: GroupNormBackwardDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """As of ``groups``, but a batch decides how many programs share a group, and with it bits."""
    found, tile = dict(groups.guarantee(desc)), planes(desc)
    if tile is not None:
        per = ceil_power(desc.channels // desc.groups)
        plane, compute = tile.additions(desc.pixels), desc.element.compute
        merged = -(-desc.batch // merging(desc)[0]) + MERGE_PARTS * MERGE_CHANNELS // (32 * MERGE_WARPS) + 12
        depths = {"dx": Tile(1, per, tile.warps).additions(per), "dweight": merged, "dbias": merged}
        for o in desc.operands():
            if o.is_written:
                found[o.name] = bounds.rounded(o.element, compute, 8, plane + depths[o.name] + 32)
        return found
    depth = groups.tile(desc).additions(desc.count) + ceil_power(parts(desc)[1]).bit_length()
    found["dx"] = bounds.rounded(desc.element, desc.element.compute, 8, depth + 32)
    return found


def merging(desc: GroupNormBackwardDescriptor) -> tuple[int, int]:
    """Images whose planes a merging program holds at a time, and its warps."""
    images = min(ceil_power(desc.batch), MERGE_PARTS)
    return images, max(images * MERGE_WARPS // MERGE_PARTS, 1)


def of_planes(desc: GroupNormBackwardDescriptor, tile: Tile) -> list[Launch]:
    """The launches that sum planes first."""
    compute, per, nbytes = desc.element.compute, desc.channels // desc.groups, sizes(desc)[1]
    shares = -(-per // tile.rows)
    given: dict[str, Arg] = {
        **arguments(desc, groups.by_channel(desc)),
        **{name: Scratch(i * nbytes, compute) for i, name in enumerate(("totals", "projections"))},
        "planes": Int(desc.batch * desc.channels),
        "size": count(desc.pixels),
        "per": Int(per),
        "groups": Int(desc.groups),
        "n": Int(desc.count),
        "parts": Int(desc.batch),
        "shares": Int(shares),
    }
    held = {"COMPUTE": TL[compute], "ROWS": tile.rows, "BLOCK": tile.block, "PER": ceil_power(per)}
    launches = [
        launch(kernels.group_norm_planes_kernel, -(-desc.batch * desc.channels // tile.rows), given, tile.warps, **held)
    ]
    if groups.sums(desc):
        images, warps = merging(desc)
        constants = {"COMPUTE": TL[compute], "PARTS": images, "BLOCK": MERGE_CHANNELS}
        programs = -(-desc.channels // MERGE_CHANNELS)
        launches.append(launch(batch_norm_fold_kernel, programs, given, warps, **constants))
    last = launch(kernels.group_norm_of_planes_kernel, groups.rows(desc) * shares, given, tile.warps, **held)
    return [*launches, last]


def build(desc: GroupNormBackwardDescriptor, target: Target) -> list[Launch]:
    if (tile := planes(desc)) is not None:
        return of_planes(desc, tile)
    launches, given = groups.prepared(desc)
    (each, splits), compute, (first, nbytes) = parts(desc), desc.element.compute, sizes(desc)
    given |= {"each": Int(each), "splits": Int(splits)}
    given |= {name: Scratch(first + i * nbytes, compute) for i, name in enumerate(("shifts", "shares"))}
    constants = {"COMPUTE": TL[compute], "BLOCK": groups.tile(desc).block, "SPLITS": ceil_power(splits)}
    programs, warps = groups.rows(desc) * splits, groups.tile(desc).warps
    which = (kernels.group_norm_partials_kernel, kernels.group_norm_parts_kernel)
    return [*launches, *(launch(k, programs, given, warps, **constants) for k in which)]


kernel(
    op="group_norm_backward",
    name="split",
    elements=ELEMENTS,
    supports=supports,
    rank=rank,
    guarantee=guarantee,
    workspace=workspace,
    version=4,  # merges of more parts at a time
    layout=layout,
)(build)
