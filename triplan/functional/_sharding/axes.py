"""How a registered op states its axes, from which follow the ways in which ranks can divide it; ``engine`` reads it.

A pattern names the axes of an op's tensors, as an einsum does: ``"*k, nk, n+k -> *n+k"`` of linear says that its input
(..., k) and weight (n, k) share k, and that bias and result have an axis n. ``*`` is any number of axes, which tensors
share from the right, as they broadcast; ``.`` is an axis that cannot be divided. Dividing an axis divides every tensor
that has its letter, and ranks hold copies of the others: of each letter, one way. Behind ``+`` stand axes over which a
tensor is summed: if one of them is divided, ranks hold terms, which torch adds when the sum is read. What an argument
names in elements (sizes, positions, padding) is right for a part only if the axis is whole: such axes are ``.``.

An op whose axes depend on its arguments has a function of them that returns the pattern. The tensors among them are
described by their ``shape`` and ``tensor_meta``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

#: The axes from the arguments.
Rule = Callable[..., "str | None"]
#: What an op states. None, also from a rule: whole tensors, which is right for every op, and as slow as on one rank.
Axes = str | Rule | None
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def but(rank: int, *whole: int) -> str:
    """A letter for each axis, ``.`` for those in ``whole``."""
    at = {d % rank for d in whole} if rank else set()
    return "".join("." if i in at else _LETTERS[i] for i in range(rank))


def dots(axes: int) -> str:
    return "." * axes


def along(count: int) -> Rule:
    """``count`` tensors of one shape and a result of it, whose lines along the argument ``dim`` stay whole."""

    def rule(*args: Any) -> str:
        axes = but(len(args[0].shape), args[count])
        return f"{', '.join([axes] * count)} -> {axes}"

    return rule


def shared(dim: int, *tensors: Any) -> str | None:
    """Axes beside ``dim`` on which all ``tensors`` have one extent; None if their ranks differ."""
    rank = len(tensors[0].shape)
    if not rank or any(len(t.shape) != rank for t in tensors):
        return None
    apart = [d for d in range(rank) if len({t.shape[d] for t in tensors}) > 1]
    return but(rank, dim, *apart)


def put(axes: str, dim: int, letter: str) -> str:
    """``axes`` with ``letter`` for the axis ``dim``."""
    at = dim % len(axes)
    return axes[:at] + letter + axes[at + 1 :]


def reduced(op: str, tensors: Sequence[Any], dims: Sequence[int], keepdim: bool) -> tuple[str, str, str]:
    """The axes of ``tensors``, which broadcast, of their reduction along ``dims``, and those over which a sum of parts
    is the result of the whole."""
    rank = max(len(t.shape) for t in tensors)
    gone = {d % max(rank, 1) for d in dims}
    axes = but(rank) if op == "sum" else but(rank, *dims)
    kept = [("." if i in gone else c) for i, c in enumerate(axes) if keepdim or i not in gone]
    sums = "".join(axes[i] for i in sorted(gone) if i < rank and op == "sum")
    return axes, "".join(kept), sums
