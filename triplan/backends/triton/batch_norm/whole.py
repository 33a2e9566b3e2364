"""Kernel ``whole``: one launch for the gradient of channels of few elements, of which a program has all."""

from __future__ import annotations

from collections.abc import Mapping

from triplan.backends.runtime.launch import Int, Launch
from triplan.backends.table import kernel
from triplan.backends.triton.batch_norm.channels import (
    ELEMENTS,
    TILE_BYTES,
    WARPS,
    Geometry,
    arguments,
    channels_guarantee,
    geometry,
    launch,
    sector_bytes,
    supports as channels_support,
)
from triplan.backends.triton.batch_norm.whole_kernels import batch_norm_whole_kernel
from triplan.backends.triton.common import card
from triplan.backends.triton.common.offsets import TL, ceil_power, layout
from triplan.descriptors import BatchNormBackwardDescriptor
from triplan.sku import PrecisionGuarantee, Support, Target
from triplan.sku.facts import fact

#: Bytes of neighbouring channels of a tile, where they are adjacent: fewer than of ``channels``, so that programs are
#: more; of these the most with which walks are shortest, or the fewest if all programs run at once. Untuned.
CHANNEL_BYTES = (64, 32, 16)
#: Elements of a thread, and warps of a program at most, where few programs leave the card idle: each thread then waits
#: for fewer elements, one after another. Untuned.
FEW_ELEMENTS, MOST_WARPS = 4, 8
#: Tiles of a program at most. Untuned.
MOST_TILES = 16
#: Microseconds that a program takes for one tile in both walks, at least, and for each element of a thread. (From drawn
#: problems on an H200.) Running statistics need one walk, in which no tile waits; a lone tile stays in registers.
TILE_US, ELEMENT_US = 2.0, 0.25
#: Warps of a multiprocessor at a time, by their registers.
RESIDENT_WARPS = 24


def across_channels(desc: BatchNormBackwardDescriptor, found: Geometry, nbytes: int) -> Geometry:
    """``found`` with tiles of ``nbytes`` of neighbouring channels."""
    size = TILE_BYTES // desc.element.itemsize
    block = min(ceil_power(desc.channels), nbytes // desc.element.itemsize)
    height = min(size // block, ceil_power(found.rows))
    warps = max(height * block * WARPS // size, 1)
    blocks, groups = -(-desc.channels // block), -(-found.rows // height)
    return found._replace(height=height, block=block, warps=warps, blocks=blocks, groups=groups, each=groups)


def waves(found: Geometry, sms: int) -> int:
    """How often a multiprocessor is filled with programs."""
    return -(-found.blocks // (max(RESIDENT_WARPS // found.warps, 1) * sms))


def in_more_warps(found: Geometry) -> Geometry:
    """``found`` with more warps, if there is a multiprocessor for each program."""
    if found.blocks > card.SMS:
        return found
    most = min(found.height * found.block // (32 * FEW_ELEMENTS), MOST_WARPS)
    return found._replace(warps=max(most, found.warps))


@fact
def tiles(desc: BatchNormBackwardDescriptor) -> Geometry:
    """As of ``channels``, but a program has all rows: ``each`` is the number of its tiles."""
    found = geometry(desc)
    if not found.last:
        return in_more_warps(found._replace(blocks=desc.channels, each=found.groups * found.across, parts=1))
    each = [across_channels(desc, found, nbytes)._replace(parts=1) for nbytes in CHANNEL_BYTES]
    walks = [waves(one, card.SMS) * one.each for one in each]
    shortest = [one for one, n in zip(each, walks, strict=True) if n == min(walks)]
    return in_more_warps(shortest[-1] if shortest[-1].blocks <= card.SMS else shortest[0])


def supports(desc: BatchNormBackwardDescriptor, target: Target) -> Support:
    if not desc.sums:
        return Support.no("there are no sums: an element needs no other of its channel")
    if tiles(desc).each > MOST_TILES:
        return Support.no(f"a channel has {tiles(desc).each} tiles; a program walks at most {MOST_TILES}")
    return channels_support(desc, target)


def rank(desc: BatchNormBackwardDescriptor, target: Target) -> float:
    """Estimated microseconds."""
    found = tiles(desc)
    running, again = waves(found, target.sm_count), desc.training and found.each > 1
    moved = {o.name: sector_bytes(o, found) for o in desc.operands() if len(o.shape) == 3}
    us = sum(moved.values()) / card.BYTES_PER_US
    if again:  # from the L2 cache while the channels of the programs that run at a time fit
        read = sum(moved[o.name] for o in desc.operands() if o.name in moved and not o.is_written)
        us += read / (card.L2_BYTES_PER_US if read <= running * card.L2_BYTES else card.BYTES_PER_US)
    each_us = ELEMENT_US * found.height * found.block / (32 * found.warps) if desc.training else 0.0
    tile_us = max(TILE_US, each_us) / (1 if again else 2)
    return card.LAUNCH_US + max(running * found.each * tile_us, us)


def guarantee(desc: BatchNormBackwardDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """As of ``channels``, by the depth of one program's sums."""
    return channels_guarantee(desc, tiles(desc).depth)


def build(desc: BatchNormBackwardDescriptor, target: Target) -> list[Launch]:
    if desc.channels == 0:
        return []
    found = tiles(desc)
    steps = Int(found.each) if found.each > 1 else None
    given = {**arguments(desc, geometry(desc)), "across": Int(found.across), "steps": steps}
    tile = {"LAST": found.last, "COMPUTE": TL[desc.element.compute], "ROWS": found.height, "BLOCK": found.block}
    return [launch(batch_norm_whole_kernel, found.blocks, given, found.warps, TRAINING=desc.training, **tile)]


kernel(
    op="batch_norm_backward",
    name="whole",
    elements=ELEMENTS,
    supports=supports,
    rank=rank,
    guarantee=guarantee,
    version=3,  # more warps; each thread adds its own elements first
    layout=layout,
)(build)
