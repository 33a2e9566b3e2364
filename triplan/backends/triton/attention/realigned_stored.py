"""Kernel ``realigned_stored`` of the backward op: ``wgmma_stored`` on copies of what TMA cannot map, as
``realigned``."""

from __future__ import annotations

from triplan.backends.triton.attention import realigned, wgmma_stored

realigned.enter("realigned_stored", wgmma_stored.wgmma_stored)
