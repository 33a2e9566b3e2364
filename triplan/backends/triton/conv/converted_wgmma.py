"""Kernel ``converted_wgmma``: ``wgmma`` over copies of the operands that TMA cannot map as they lie.

Where several taps read the channels that are summed, or of which there are gradients, their copies have whole blocks of
them: TMA fills what it does not find more slowly than it reads zeros. This also gains where TMA could map the operands.
Gradients of weight of several taps have several tiles that read the same of dout; its copy has at most twice the bytes.
"""

from __future__ import annotations

from triplan.backends.triton.conv import shared, wgmma
from triplan.backends.triton.conv.converted import entries
from triplan.backends.triton.conv.wgmma_tiles import CHANNELS, depth_of, reduced
from triplan.descriptors import Operand
from triplan.descriptors.conv import Conv2dProblem


def _source(desc: Conv2dProblem) -> str:
    return "dout" if shared.of_input(desc) else "x"


def _depth(desc: Conv2dProblem) -> int:
    """Channels of a block; the gradient of weight has no narrow ones."""
    return CHANNELS if shared.of_weight(desc) else depth_of(desc)


def _fills(desc: Conv2dProblem) -> bool:
    """Whether the rows that several taps read end within a block, and it can be filled."""
    if desc.groups > 1 or desc.taps == 1 or reduced(desc) % _depth(desc) == 0:
        return False
    found = {o.name for o in wgmma.unmapped(desc)}
    return not found or _source(desc) in found


def _wanted(desc: Conv2dProblem) -> dict[Operand, int]:
    found = wgmma.unmapped(desc)
    if _fills(desc):
        names = (_source(desc),) if shared.of_weight(desc) else (_source(desc), "weight")
        found |= {desc.operand(name): wgmma.channel_axis(desc, desc.operand(name)) for name in names}
    return found


def _filled(desc: Conv2dProblem) -> dict[str, int]:
    """Of what is summed, by operands whose channels these are."""
    if not _fills(desc):
        return {}
    n = -(-reduced(desc) // _depth(desc)) * _depth(desc)
    if shared.of_weight(desc):
        filters = -(-desc.filters // CHANNELS) * CHANNELS
        return {"x": n, **({"dout": filters} if filters <= 2 * desc.filters else {})}
    within = shared.of_input(desc) == (wgmma.channel_axis(desc, desc.operand("weight")) == 0)
    return {_source(desc): n, **({"weight": n} if within else {})}


entries(
    wgmma,
    "converted_wgmma",
    _wanted,
    whole=True,
    filled=_filled,
    elements=(*wgmma.HALF, "f32"),
    version=3,
    weight={"version": 3},
    **wgmma.HOPPER,
)
