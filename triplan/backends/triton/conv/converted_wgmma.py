"""Kernel ``converted_wgmma``: ``wgmma`` over copies with channels last, of operands that have channels first."""

from __future__ import annotations

from triplan.backends.triton.conv import wgmma
from triplan.backends.triton.conv.converted import entries

entries(wgmma, "converted_wgmma", **wgmma.HOPPER)
