"""Support: a yes, or a no that carries its reason and the error it would raise."""

from __future__ import annotations

from dataclasses import dataclass

from triplan.errors import TriplanError, Unsupported

__all__ = ["Candidate", "Support"]


@dataclass(frozen=True, slots=True)
class Support:
    """Truthy, or falsy with ``reason`` and ``error``."""

    reason: str = ""
    error: TriplanError | None = None

    def __bool__(self) -> bool:
        return self.error is None

    @classmethod
    def no(cls, error: TriplanError | str) -> Support:
        """A refusal; a plain string becomes ``Unsupported``."""
        if isinstance(error, str):
            error = Unsupported(error)
        return cls(str(error), error)


#: The one truthy value.
SUPPORTED = Support()


@dataclass(frozen=True, slots=True)
class Candidate:
    """One kernel that select considered. ``cost_us`` is its rank, in estimated microseconds; None if refused."""

    kernel: str
    reason: str
    cost_us: float | None = None
    chosen: bool = False
