"""Kernel ``split``: long groups of channels, of which several programs share one.

Forward one launch has statistics of parts of each group; the next merges them and writes the result, so that x is read
twice.

Backward one launch sums each channel of each image, a *plane*; gradients of weight and bias and of x both follow from
those sums, so that x and dout are read twice. Where planes have few elements, cannot be read in vectors, or are too
many in a group, one launch sums parts of each group instead. The next adds the parts and writes the gradient of x;
those of weight and bias have the launches of ``groups``.
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
    PROGRAMS_FORWARD,
    VECTOR_BYTES,
    WARPS,
    arguments,
    array,
    launch,
)
from triplan.backends.triton.batch_norm.merge_kernels import batch_norm_fold_kernel
from triplan.backends.triton.common import bounds, card
from triplan.backends.triton.common.offsets import TL, ceil_power, layout, padded_bytes
from triplan.backends.triton.common.strides import count
from triplan.backends.triton.common.tiles import Tile
from triplan.descriptors import GroupNormBackwardDescriptor, GroupNormDescriptor
from triplan.descriptors.batch_norm import GroupNormProblem
from triplan.sku import PrecisionGuarantee, Support, Target

#: Programs that share a group, at most. Untuned.
MOST_SPLITS = 256
#: Blocks that a program of the forward op walks, if MOST_SPLITS allow it: beside these merging takes little, and
#: programs are many more than run at once, so that the last of them leave few multiprocessors idle. Untuned.
FORWARD_BLOCKS = 16
#: Bytes of an operand that a program holds of planes: 16 for each of its threads. Chosen on an H200,
#: by runs that are not published.
PLANE_BYTES = 4096
#: Elements of a plane at least, and planes of a group at most, whose sums each program of that group reads. Untuned.
LEAST_PLANE, MOST_PLANES = 32, 1024
#: Time of sums of planes, as a part of that of ``groups``, which reads long groups once more, from L2 at best. Untuned.
PLANES_PART = 0.9
#: Microseconds in which a program reads partial statistics and merges them. Untuned.
MERGE_US = 1.5


def planes(desc: GroupNormProblem) -> Tile | None:
    """What a program holds of planes; None where parts are those of whole groups, as all of the forward op are."""
    if isinstance(desc, GroupNormDescriptor):
        return None
    per = desc.channels // desc.groups
    if groups.one(desc) or desc.pixels < LEAST_PLANE or per > MOST_PLANES or desc.batch * desc.channels >= MOST:
        return None
    if power_of_two_in(desc.pixels) * desc.element.itemsize < VECTOR_BYTES:  # whole groups are read in longer vectors
        return None
    size = PLANE_BYTES // desc.element.itemsize
    block = min(ceil_power(desc.pixels), size)
    rows = min(size // block, ceil_power(per))
    return Tile(rows, block, max(rows * block * WARPS // size, 1))


def parts(desc: GroupNormProblem) -> tuple[int, int]:
    """(blocks that a program walks, programs that share a group)."""
    blocks, rows = groups.blocks(desc), max(groups.rows(desc), 1)
    if isinstance(desc, GroupNormDescriptor):
        # (A group is one program's where those of all groups fill the card.)
        shared = max(PROGRAMS_FORWARD // rows, blocks // FORWARD_BLOCKS) if rows < PROGRAMS_FORWARD else 1
    else:
        shared = PROGRAMS_BACKWARD // rows
    each = -(-blocks // min(max(shared, 1), MOST_SPLITS))
    return each, -(-blocks // each)


def supports(desc: GroupNormProblem, target: Target) -> Support:
    found = groups.supports(desc, target)
    if found and planes(desc) is None and parts(desc)[1] < 2:
        return Support.no("a program has a whole group: groups are short or many")
    return found


def rank(desc: GroupNormProblem, target: Target) -> float:
    """Estimated microseconds."""
    if isinstance(desc, GroupNormDescriptor):
        each, splits = parts(desc)
        moved = sum(o.nbytes * (1 if o.is_written else 2) for o in desc.operands())
        walks = groups.walks_us(desc, each, groups.rows(desc) * splits, moved, target)
        return 2 * card.LAUNCH_US + MERGE_US + walks
    reads, launches, part = (3, 4, 1.0) if planes(desc) is None else (2, 3, PLANES_PART)
    moved = sum(o.nbytes * (1 if o.is_written else reads) for o in desc.operands() if len(o.shape) == 3)
    return card.LAUNCH_US * (launches if groups.sums(desc) else 2) + part * moved / card.BYTES_PER_US


def sizes(desc: GroupNormProblem) -> tuple[int, int]:
    """Bytes of what ``groups`` stores, and of the partial sums or statistics of one kind."""
    if planes(desc) is not None:
        return 0, padded_bytes(desc.batch * desc.channels * desc.element.compute.itemsize)
    partials = groups.rows(desc) * parts(desc)[1]
    stored = 2 * array(desc, groups.by_channel(desc)) if groups.sums(desc) else 0
    return stored, padded_bytes(partials * desc.element.compute.itemsize)


def workspace(desc: GroupNormProblem, target: Target) -> int:
    before, each = sizes(desc)
    return before + 2 * each


def guarantee(desc: GroupNormProblem) -> Mapping[str, PrecisionGuarantee]:
    """As of ``groups``, but a batch decides how many programs share a group, and with it bits."""
    found, tile, compute = dict(groups.guarantee(desc)), planes(desc), desc.element.compute
    if tile is not None:
        per = ceil_power(desc.channels // desc.groups)
        plane = tile.additions(desc.pixels)
        merged = -(-desc.batch // merging(desc)[0]) + MERGE_PARTS * MERGE_CHANNELS // (32 * MERGE_WARPS) + 12
        depths = {"dx": Tile(1, per, tile.warps).additions(per), "dweight": merged, "dbias": merged}
        for o in desc.operands():
            if o.is_written:
                found[o.name] = bounds.rounded(o.element, compute, 8, plane + depths[o.name] + 32)
        return found
    depth = groups.tile(desc).additions(desc.count) + ceil_power(parts(desc)[1]).bit_length()
    if isinstance(desc, GroupNormDescriptor):
        return {o.name: bounds.rounded(o.element, compute, 8, 8 * depth + 48) for o in desc.operands() if o.is_written}
    found["dx"] = bounds.rounded(desc.element, compute, 8, depth + 32)
    return found


def merging(desc: GroupNormProblem) -> tuple[int, int]:
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


def build(desc: GroupNormProblem, target: Target) -> list[Launch]:
    if isinstance(desc, GroupNormBackwardDescriptor) and (tile := planes(desc)) is not None:
        return of_planes(desc, tile)
    launches, given = groups.prepared(desc)
    (each, splits), compute, (first, nbytes) = parts(desc), desc.element.compute, sizes(desc)
    given |= {"each": Int(each), "splits": Int(splits)}
    if isinstance(desc, GroupNormDescriptor):
        stored = ("means", "squares")
        which = (kernels.group_norm_statistics_kernel, kernels.group_norm_of_statistics_kernel)
    else:
        stored = ("shifts", "shares")
        which = (kernels.group_norm_partials_kernel, kernels.group_norm_parts_kernel)
    given |= {name: Scratch(first + i * nbytes, compute) for i, name in enumerate(stored)}
    constants = {"COMPUTE": TL[compute], "BLOCK": groups.tile(desc).block, "SPLITS": ceil_power(splits)}
    programs, warps = groups.rows(desc) * splits, groups.tile(desc).warps
    return [*launches, *(launch(k, programs, given, warps, **constants) for k in which)]


for _cls in (GroupNormDescriptor, GroupNormBackwardDescriptor):
    for _op in _cls.ops():
        kernel(
            op=_op,
            name="split",
            elements=ELEMENTS,
            supports=supports,
            rank=rank,
            guarantee=guarantee,
            workspace=workspace,
            version=3 if _cls is GroupNormBackwardDescriptor else 1,  # sums of planes
            layout=layout,
        )(build)
