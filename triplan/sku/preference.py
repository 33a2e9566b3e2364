"""PlanPreference: what the caller requires of a plan."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import BeforeValidator, Field
from typing_extensions import TypedDict

from triplan.errors import InvalidProblem, shown
from triplan.sku.kinds import BackendKind
from triplan.sku.model import FrozenModel, field

if TYPE_CHECKING:
    from triplan.sku.model import Converted

__all__ = ["PlanPreference"]


def _features(value: Any) -> Any:
    if isinstance(value, (list, set, frozenset, tuple)) and all(isinstance(v, str) for v in value):
        return tuple(sorted(set(value)))
    return value


if TYPE_CHECKING:
    Features = Converted[tuple[str, ...], Collection[str]]
else:
    Features = Annotated[tuple[str, ...], BeforeValidator(_features)]


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
    max_workspace_bytes: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    backend: BackendKind | None = None
    kernel: str | None = None
    exclude: Features = field(default=())

    @classmethod
    def of(cls, preference: PlanPreference | None, requirements: Requirements) -> PlanPreference:
        """``preference`` (None: no requirement) with the fields that ``requirements`` names replaced by its values."""
        if preference is None:
            preference = NO_PREFERENCE
        elif not isinstance(preference, cls):
            raise InvalidProblem(f"preference is {shown(preference)}; a PlanPreference is expected")
        if not requirements:
            return preference
        values: dict[str, Any] = {**requirements}
        try:
            return _required(preference, **values)
        except TypeError:  # unhashable values
            return preference.replace(**values)

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


class Requirements(TypedDict, total=False):
    """Fields of ``PlanPreference`` as keywords of a request: ``tp.plan(desc, deterministic=True)``."""

    deterministic: bool | None
    batch_invariant: bool
    order_invariant: bool
    max_workspace_bytes: int | None
    backend: BackendKind | None
    kernel: str | None
    exclude: Collection[str]


# Typed: 1 equals True, but is no valid value.
@lru_cache(maxsize=256, typed=True)
def _required(preference: PlanPreference, **requirements: Any) -> PlanPreference:
    return preference.replace(**requirements)


#: No requirements.
NO_PREFERENCE = PlanPreference()
