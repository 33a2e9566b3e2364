"""Kernel ``realigned_wide`` of the backward op: ``wgmma_wide`` on copies of what TMA cannot map, as ``realigned``."""

from __future__ import annotations

from triplan.backends.triton.attention import realigned, wgmma_wide

realigned.enter("realigned_wide", wgmma_wide.wgmma_wide)
