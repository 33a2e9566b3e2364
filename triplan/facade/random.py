"""Args and plan of random numbers."""

from __future__ import annotations

from triplan.descriptors import RandomDescriptor
from triplan.facade.plan import NamedArgs, Plan

__all__ = ["RandomArgs", "RandomPlan"]


class RandomArgs(NamedArgs):
    """x, the op's parameters, seed and offset or state, first, out: those that the descriptor has."""

    __slots__ = ()


class RandomPlan(Plan[RandomDescriptor, RandomArgs]):
    descriptor_type, args_type = RandomDescriptor, RandomArgs
