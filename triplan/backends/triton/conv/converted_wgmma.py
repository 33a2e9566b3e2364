"""Kernel ``converted_wgmma``: ``wgmma`` over copies of the operands that TMA cannot map as they lie."""

from __future__ import annotations

from triplan.backends.triton.conv import wgmma
from triplan.backends.triton.conv.converted import entries

entries(
    wgmma,
    "converted_wgmma",
    wgmma.unmapped,
    whole=True,
    elements=(*wgmma.HALF, "f32"),
    weight={"elements": wgmma.HALF},
    **wgmma.HOPPER,
)
