"""Kernel ``banded``: the gradient of weight of depthwise convolutions on tensor cores.

With many taps ``depthwise`` is limited by its FMAs. Here a product of matrices sums 16 images, of 16 columns of dout
and 8 of x; of its 128 results a band is used, 56 for 7 columns of taps. See ``banded_kernels``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch
from triplan.backends.table import kernel
from triplan.backends.triton.common import card
from triplan.backends.triton.common.offsets import values
from triplan.backends.triton.common.strides import axis_strides, count
from triplan.backends.triton.conv import banded_kernels as kernels, shared
from triplan.descriptors import Conv2dBackwardWeightDescriptor
from triplan.descriptors.conv import Conv2dProblem
from triplan.sku import ArchSku, PrecisionGuarantee, Support, Target
from triplan.sku.facts import fact

#: Channels and columns of x of a program.
CHANNELS, WIDE = 32, int(kernels.COLUMNS.value)
#: Taps of a column that fit registers, and of a row: the band is no wider than the block.
MOST_ROWS, MOST_TAPS = 7, kernels.RESULTS.value - kernels.COLUMNS.value + 1
WARPS, STAGES = 8, 4
#: Parts that a program of the fold reads at once, so that it has few steps. Untuned.
FOLD_PARTS = 64
#: Rows of a piece at least, and pieces at most. Untuned.
LEAST_ROWS, MOST_PIECES = 8, 8
#: Microseconds of a step, which is a row of x, of 7 by 7 taps on an H200; fewer were not measured.
STEP_US = 0.93
#: Microseconds that a program takes beside its steps. Untuned.
BEGIN_US = 4.0


class Division(NamedTuple):
    """Blocks of channels, tiles of columns, pieces of the rows, groups of images, and the rows of a piece."""

    blocks: int
    tiles: int
    pieces: int
    groups: int
    each: int

    @property
    def programs(self) -> int:
        return self.blocks * self.tiles * self.pieces * self.groups


def _steps_us(desc: Conv2dProblem, d: Division, sms: int) -> float:
    """Estimated microseconds, of whole waves."""
    return -(-d.programs // max(sms, 1)) * (BEGIN_US + STEP_US * (d.each + desc.kernel[0] - 1))


@fact
def _division(desc: Conv2dProblem) -> Division:
    """The pieces of the rows with which the last wave is fullest."""
    rows, columns = desc.out_extents
    blocks, tiles = desc.in_channels // CHANNELS, -(-(columns + desc.kernel[1] - 1) // WIDE)
    groups = -(-desc.batch // kernels.IMAGES.value)
    found = []
    for pieces in range(1, max(min(rows // LEAST_ROWS, MOST_PIECES), 1) + 1):
        each = max(-(-rows // pieces), 1)
        found.append(Division(blocks, tiles, -(-rows // each), groups, each))
    return min(found, key=lambda d: (_steps_us(desc, d, card.SMS), d.pieces))


def _parts(desc: Conv2dProblem) -> int:
    """Sums of a tap and a channel: one of each column of x."""
    d = _division(desc)
    return d.groups * d.pieces * d.tiles * WIDE


def supports(desc: Conv2dProblem, target: Target) -> Support:
    if desc.channels != 1 or desc.filters != 1:
        return Support.no(f"groups of {desc.channels} channels and {desc.filters} filters; it takes one of each")
    if desc.stride != (1, 1) or desc.dilation != (1, 1):
        return Support.no(f"strides {desc.stride} and dilations {desc.dilation}; it takes 1")
    if desc.kernel[0] > MOST_ROWS or desc.kernel[1] > MOST_TAPS:
        return Support.no(f"a kernel of {desc.kernel}; it takes {MOST_ROWS} rows and {MOST_TAPS} columns at most")
    if desc.in_channels % CHANNELS:
        return Support.no(f"{desc.in_channels} channels; it takes multiples of {CHANNELS}")
    for name in ("x", "dout"):
        if not shared.in_vectors(desc.operand(name)):
            return Support.no(f"{name}: its channels are not read in vectors of 16 bytes")
    if math.prod(desc.out_extents) * desc.batch == 0:
        return Support.no("no pixels: there is nothing to multiply")
    return shared.counted(desc, _division(desc).programs)


def rank(desc: Conv2dProblem, target: Target) -> float:
    """Estimated microseconds."""
    moved = sum(o.nbytes for o in desc.operands()) + 2 * workspace(desc, target)
    work = _steps_us(desc, _division(desc), target.sm_count)
    return shared.launches_us(2) + max(work, moved / card.BYTES_PER_US)


def guarantee(desc: Conv2dProblem) -> Mapping[str, PrecisionGuarantee]:
    return shared.guaranteed(desc, desc.multiplicands, shared.pixels(desc), _parts(desc))


def workspace(desc: Conv2dProblem, target: Target) -> int:
    return shared.parts_bytes(desc, _parts(desc))


def build(desc: Conv2dProblem, target: Target) -> list[Launch]:
    """The launches for the sums of each column, and for the sum of these."""
    d, parts = _division(desc), _parts(desc)
    x, dout, out = (desc.operand(name) for name in ("x", "dout", "dweight"))
    args: dict[str, Arg] = {
        "x": values(x),
        "dout": values(dout),
        "out": Scratch(0, desc.element.compute),
        "x_strides": axis_strides(x),
        "dout_strides": axis_strides(dout),
        "part_stride": count(out.numel),
        "images": Int(desc.batch),
        "rows": Int(desc.out_extents[0]),
        "columns": Int(desc.out_extents[1]),
        "height": Int(desc.height),
        "width": Int(desc.width),
        "above": Int(desc.padding[0]),
        "left": Int(desc.padding[2]),
        "each": Int(d.each),
        "blocks": Int(d.blocks),
        "tiles": Int(d.tiles),
        "pieces": Int(d.pieces),
    }
    constants = {"ROWS": desc.kernel[0], "TAPS": desc.kernel[1], "STAGES": STAGES}
    early = shared.begins_early(d.programs, target)
    kernel = kernels.conv2d_weight_banded_kernel
    main = Launch(kernel, d.programs, args, constants, num_warps=WARPS, overlaps=early, max_registers=255)
    return [main, *shared.fold(desc, parts, target, FOLD_PARTS)]


kernel(
    op=Conv2dBackwardWeightDescriptor.ops()[0],
    name="banded",
    elements=("f16", "bf16"),
    archs=(ArchSku.SM90A,),
    features=("gluon",),
    interpretable=False,
    layout=shared.layout,
    supports=supports,
    rank=rank,
    workspace=workspace,
    guarantee=guarantee,
    priority=5,
)(build)
