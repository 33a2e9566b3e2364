"""Kernel ``split``: gradients of few long groups of channels, of which several programs share one.

One launch sums parts of each group, the next adds the parts and writes the gradients, beside those of ``groups`` for
weight and bias.
"""

from __future__ import annotations

from collections.abc import Mapping

from triplan.backends.runtime.launch import Int, Launch, Scratch
from triplan.backends.table import kernel
from triplan.backends.triton.batch_norm import groups, groups_kernels as kernels
from triplan.backends.triton.batch_norm.channels import ELEMENTS, PROGRAMS_BACKWARD, array, launch
from triplan.backends.triton.common import bounds, card
from triplan.backends.triton.common.offsets import TL, ceil_power, layout, padded_bytes
from triplan.descriptors import GroupNormBackwardDescriptor
from triplan.sku import PrecisionGuarantee, Support, Target

#: Programs that share a group, at most. Untuned.
MOST_SPLITS = 256


def parts(desc: GroupNormBackwardDescriptor) -> tuple[int, int]:
    """(blocks that a program walks, programs that share a group)."""
    blocks = max(-(-desc.count // groups.tile(desc).block), 1)
    shared = min(max(PROGRAMS_BACKWARD // max(groups.rows(desc), 1), 1), MOST_SPLITS)
    each = -(-blocks // shared)
    return each, -(-blocks // each)


def supports(desc: GroupNormBackwardDescriptor, target: Target) -> Support:
    found = groups.supports(desc, target)
    if found and parts(desc)[1] < 2:
        return Support.no("a program has a whole group: groups are short or many")
    return found


def rank(desc: GroupNormBackwardDescriptor, target: Target) -> float:
    """Estimated microseconds."""
    moved = sum(o.nbytes * (1 if o.is_written else 3) for o in desc.operands() if len(o.shape) == 3)
    return card.LAUNCH_US * (4 if groups.sums(desc) else 2) + moved / card.BYTES_PER_US


def sizes(desc: GroupNormBackwardDescriptor) -> tuple[int, int]:
    """Bytes of what ``groups`` stores, and of the partial sums of one kind."""
    partials = groups.rows(desc) * parts(desc)[1]
    stored = 2 * array(desc, groups.by_channel(desc)) if groups.sums(desc) else 0
    return stored, padded_bytes(partials * desc.element.compute.itemsize)


def workspace(desc: GroupNormBackwardDescriptor, target: Target) -> int:
    before, each = sizes(desc)
    return before + 2 * each


def guarantee(desc: GroupNormBackwardDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """As of ``groups``, but a batch decides how many programs share a group, and with it bits."""
    found = dict(groups.guarantee(desc))
    depth = groups.tile(desc).additions(desc.count) + ceil_power(parts(desc)[1]).bit_length()
    found["dx"] = bounds.rounded(desc.element, desc.element.compute, 8, depth + 32)
    return found


def build(desc: GroupNormBackwardDescriptor, target: Target) -> list[Launch]:
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
    version=2,  # pixels of a channel in vectors
    layout=layout,
)(build)
