"""Error types. Every message quotes what was asked for, what was found, and what would be accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "InvalidProblem",
    "KernelInternal",
    "LeafOverwritten",
    "MisalignedOperand",
    "TriplanError",
    "Unsupported",
    "WorkspaceTooSmall",
]


def shown(value: object, most: int = 200) -> str:
    """``repr(value)`` for a message, cut to ``most`` characters. Never fails."""
    try:
        text = repr(value)
    except Exception:  # such as an integer of more digits than Python prints, or a repr of the caller's
        text = f"<{type(value).__name__} without a repr>"
    return text if len(text) <= most else f"{text[: most - 3]}..."


class TriplanError(Exception):
    """Base class of every error that triplan raises on purpose."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel that select considered. ``cost_us``: estimated or measured microseconds; None if it was refused."""

    kernel: str
    reason: str
    cost_us: float | None = None
    chosen: bool = False


class Unsupported(TriplanError, NotImplementedError):  # noqa: N818 (the standard name of this error)
    """No kernel can meet the request. ``candidates`` holds every kernel that was considered, and why it was refused."""

    def __init__(self, message: str, candidates: Sequence[Candidate] = ()) -> None:
        self.candidates = tuple(candidates)
        lines = [message, *(f"  - {c.kernel}: {c.reason}" for c in self.candidates)]
        super().__init__("\n".join(lines))
        self.message = message

    def __reduce__(self) -> tuple[type[Unsupported], tuple[str, tuple[Candidate, ...]]]:
        return type(self), (self.message, self.candidates)


class InvalidProblem(TriplanError, ValueError):  # noqa: N818
    """A descriptor, preference or argument is malformed; the message names field, value and rule."""


class LeafOverwritten(InvalidProblem, RuntimeError):  # noqa: N818
    """A leaf that requires grad would be written while autograd records: RuntimeError in torch."""


class MisalignedOperand(TriplanError, ValueError):  # noqa: N818
    """An operand's address breaks the alignment that its layout promises."""


class WorkspaceTooSmall(TriplanError, ValueError):  # noqa: N818
    """The workspace that ``run`` was given is missing or too small. ``needed`` and ``got`` are bytes."""

    def __init__(self, message: str, needed: int, got: int) -> None:
        super().__init__(message)
        self.message, self.needed, self.got = message, needed, got

    def __reduce__(self) -> tuple[type[WorkspaceTooSmall], tuple[str, int, int]]:
        return type(self), (self.message, self.needed, self.got)


class KernelInternal(TriplanError, RuntimeError):  # noqa: N818
    """A kernel failed to compile, load or launch: a fault of triplan or of its toolchain, not of the request."""
