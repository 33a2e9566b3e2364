"""Args and plans of rotary. An Args' fields are the operands of its descriptor."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from triplan.descriptors import CachedRotaryDescriptor, NormedRotaryDescriptor, RotaryDescriptor
from triplan.facade.plan import Plan

__all__ = ["NormedRotaryArgs", "NormedRotaryPlan", "RotaryArgs", "RotaryPlan"]
__all__ += ["CachedRotaryArgs", "CachedRotaryPlan"]


@dataclass(frozen=True, slots=True)
class RotaryArgs:
    """Pass those that the descriptor has, else None; ``scale`` is a Python number, None is 1."""

    q: Tensor
    q_out: Tensor
    k: Tensor | None = None
    k_out: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    inv_freq: Tensor | None = None
    scale: float | None = None
    positions: Tensor | None = None
    status: Tensor | None = None


class RotaryPlan(Plan[RotaryDescriptor, RotaryArgs]):
    descriptor_type, args_type = RotaryDescriptor, RotaryArgs


@dataclass(frozen=True, slots=True)
class NormedRotaryArgs:
    """Pass those that the descriptor has, else None; ``scale`` is a Python number, None is 1."""

    q: Tensor
    q_out: Tensor
    k: Tensor | None = None
    k_out: Tensor | None = None
    q_weight: Tensor | None = None
    q_rstd: Tensor | None = None
    k_weight: Tensor | None = None
    k_rstd: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    inv_freq: Tensor | None = None
    scale: float | None = None
    positions: Tensor | None = None
    status: Tensor | None = None


class NormedRotaryPlan(Plan[NormedRotaryDescriptor, NormedRotaryArgs]):
    descriptor_type, args_type = NormedRotaryDescriptor, NormedRotaryArgs


@dataclass(frozen=True, slots=True)
class CachedRotaryArgs:
    """Pass those that the descriptor has, else None; ``scale`` is a Python number, None is 1."""

    q: Tensor
    q_out: Tensor
    k: Tensor
    v: Tensor
    slots: Tensor
    k_cache: Tensor
    v_cache: Tensor
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    inv_freq: Tensor | None = None
    scale: float | None = None
    positions: Tensor | None = None
    status: Tensor | None = None


class CachedRotaryPlan(Plan[CachedRotaryDescriptor, CachedRotaryArgs]):
    descriptor_type, args_type = CachedRotaryDescriptor, CachedRotaryArgs
