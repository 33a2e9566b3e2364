"""Args and plan of sampling."""

from __future__ import annotations

from triplan.descriptors import SampleDescriptor
from triplan.facade.plan import NamedArgs, Plan

__all__ = ["SampleArgs", "SamplePlan"]


class SampleArgs(NamedArgs):
    """logits, temperature, top_k, top_p, min_p, seed, position, out: those that the descriptor has."""

    __slots__ = ()


class SamplePlan(Plan[SampleDescriptor, SampleArgs]):
    descriptor_type, args_type = SampleDescriptor, SampleArgs
