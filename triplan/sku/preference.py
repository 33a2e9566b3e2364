"""PlanPreference: what the caller requires of a plan."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, NonNegativeInt

from triplan.sku.kinds import BackendKind
from triplan.sku.model import FrozenModel

__all__ = ["PlanPreference"]


def _features(value: Any) -> Any:
    if isinstance(value, (list, set, frozenset, tuple)) and all(isinstance(v, str) for v in value):
        return tuple(sorted(set(value)))
    return value


class PlanPreference(FrozenModel):
    """Requirements on select; False or None means "not required". ``Unsupported`` is raised if no kernel meets them.

    Attributes:
        deterministic: the same bits on every run. None follows ``torch.are_deterministic_algorithms_enabled()``.
        batch_invariant: a row's bits do not depend on the batch around it.
        order_invariant: bits do not depend on the order of contributions.
        max_workspace_bytes: upper bound on the workspace.
        backend: only this backend.
        kernel: only the kernel of this name.
        exclude: features that the kernel may not use, such as ``"tma"``.
    """

    deterministic: bool | None = None
    batch_invariant: bool = False
    order_invariant: bool = False
    max_workspace_bytes: NonNegativeInt | None = None
    backend: BackendKind | None = None
    kernel: str | None = None
    exclude: Annotated[tuple[str, ...], BeforeValidator(_features)] = ()

    def resolved(self) -> PlanPreference:
        """This preference with ``deterministic`` decided. Select begins with it."""
        if self.deterministic is not None:
            return self
        on = torch.are_deterministic_algorithms_enabled()
        # One object for each value, so that its key is computed once.
        cache = self.__dict__.setdefault("_resolved", {})
        if on not in cache:
            cache[on] = self.replace(deterministic=on)
        found: PlanPreference = cache[on]
        return found


#: No requirements.
NO_PREFERENCE = PlanPreference()
