"""Support: yes, or no with the reason and the error to raise."""

from __future__ import annotations

from dataclasses import dataclass

from triplan.errors import Candidate, TriplanError, Unsupported

__all__ = ["Candidate", "Support"]


@dataclass(frozen=True, slots=True)
class Support:
    """Truthy if supported; otherwise falsy, with ``reason`` and ``error``."""

    reason: str = ""
    error: TriplanError | None = None

    def __bool__(self) -> bool:
        return self.error is None

    @classmethod
    def no(cls, error: TriplanError | str) -> Support:
        """A refusal. A plain string becomes the message of an ``Unsupported``."""
        if isinstance(error, str):
            error = Unsupported(error)
        return cls(str(error), error)


#: The one truthy value.
SUPPORTED = Support()
