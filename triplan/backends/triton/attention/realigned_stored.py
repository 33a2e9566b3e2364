"""Kernel ``realigned_stored`` of the backward op: ``wgmma_stored`` on copies of what TMA cannot map, as
``realigned``."""

from __future__ import annotations

from triplan.backends.triton.attention import wgmma_stored
from triplan.backends.triton.attention.realigned import Way, register

register(
    "attention_backward",
    "realigned_stored",
    Way(
        wgmma_stored.wgmma_stored,
        wgmma_stored.supports,
        wgmma_stored.rank,
        wgmma_stored.numerics,
        wgmma_stored.workspace,
    ),
    priority=1,
)
