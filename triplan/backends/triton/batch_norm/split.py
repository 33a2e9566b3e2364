"""Kernel ``split`` of ``group_norm``: long groups of channels, of which several programs share one.

One launch has mean and squared deviations of parts of each group; the next merges them and writes the result, so that x
is read twice.
"""

from __future__ import annotations

from collections.abc import Mapping

from triplan.backends.runtime.launch import Int, Launch, Scratch
from triplan.backends.table import kernel
from triplan.backends.triton.batch_norm import groups, groups_kernels as kernels
from triplan.backends.triton.batch_norm.channels import ELEMENTS, PROGRAMS_FORWARD, launch
from triplan.backends.triton.common import bounds, card
from triplan.backends.triton.common.offsets import TL, ceil_power, layout, padded_bytes
from triplan.descriptors import GroupNormDescriptor
from triplan.sku import PrecisionGuarantee, Support, Target

#: Programs that share a group, at most. Untuned.
MOST_SPLITS = 256
#: Blocks that a program walks, if MOST_SPLITS allow it: beside these merging takes little, and programs are many more
#: than run at once, so that the last of them leave few multiprocessors idle. Untuned.
BLOCKS = 16
#: Microseconds in which a program reads partial statistics and merges them. Untuned.
MERGE_US = 1.5


def parts(desc: GroupNormDescriptor) -> tuple[int, int]:
    """(blocks that a program walks, programs that share a group): one where those of all groups fill the card."""
    blocks, rows = groups.blocks(desc), max(groups.rows(desc), 1)
    shared = max(PROGRAMS_FORWARD // rows, blocks // BLOCKS) if rows < PROGRAMS_FORWARD else 1
    each = -(-blocks // min(max(shared, 1), MOST_SPLITS))
    return each, -(-blocks // each)


def supports(desc: GroupNormDescriptor, target: Target) -> Support:
    found = groups.supports(desc, target)
    if found and parts(desc)[1] < 2:
        return Support.no("a program has a whole group: groups are short or many")
    return found


def rank(desc: GroupNormDescriptor, target: Target) -> float:
    """Estimated microseconds."""
    each, splits = parts(desc)
    moved = sum(o.nbytes * (1 if o.is_written else 2) for o in desc.operands())
    walks = groups.walks_us(desc, each, groups.rows(desc) * splits, moved, target)
    return 2 * card.LAUNCH_US + MERGE_US + walks


def statistics_bytes(desc: GroupNormDescriptor) -> int:
    """Of one kind of statistics of all parts."""
    return padded_bytes(groups.rows(desc) * parts(desc)[1] * desc.element.compute.itemsize)


def workspace(desc: GroupNormDescriptor, target: Target) -> int:
    return 2 * statistics_bytes(desc)


def guarantee(desc: GroupNormDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """As of ``groups``, but a batch decides how many programs share a group, and with it bits."""
    depth = groups.tile(desc).additions(desc.count) + ceil_power(parts(desc)[1]).bit_length()
    compute, written = desc.element.compute, (o for o in desc.operands() if o.is_written)
    return {o.name: bounds.rounded(o.element, compute, 8, 8 * depth + 48) for o in written}


def build(desc: GroupNormDescriptor, target: Target) -> list[Launch]:
    launches, given = groups.prepared(desc)
    (each, splits), compute, nbytes = parts(desc), desc.element.compute, statistics_bytes(desc)
    given |= {"each": Int(each), "splits": Int(splits)}
    given |= {"means": Scratch(0, compute), "squares": Scratch(nbytes, compute)}
    constants = {"COMPUTE": TL[compute], "BLOCK": groups.tile(desc).block, "SPLITS": ceil_power(splits)}
    programs, warps = groups.rows(desc) * splits, groups.tile(desc).warps
    which = (kernels.group_norm_statistics_kernel, kernels.group_norm_of_statistics_kernel)
    return [*launches, *(launch(k, programs, given, warps, **constants) for k in which)]


kernel(
    op="group_norm",
    name="split",
    elements=ELEMENTS,
    supports=supports,
    rank=rank,
    guarantee=guarantee,
    workspace=workspace,
    layout=layout,
)(build)
