"""What an index outside its axis does, and how the lowest bad position is read back; for every family with indices."""

from __future__ import annotations

from typing import Any, Literal

from triplan.descriptors.base import Descriptor
from triplan.descriptors.operand import OperandKind
from triplan.errors import InvalidProblem

#: What an index outside its axis does. ``skip``: the update is dropped, a gathered element becomes zero. ``clamp``:
#: the nearest valid position. ``error``: as skip, and the lowest bad position is recorded in ``status``.
OutOfBounds = Literal["skip", "clamp", "error"]
#: What ``status`` holds where no index was bad; else the lowest bad position, counted row-major over the index.
NO_BAD_INDEX = 2**63 - 1


def check_bad_index(desc: Descriptor, policy: OutOfBounds, args: Any) -> None:
    """Synchronise and raise ``IndexError`` for what ``args.status`` recorded; ``InvalidProblem`` if it does not."""
    if policy != "error":
        raise InvalidProblem(f"{desc.op}: out_of_bounds is {policy!r}; only 'error' records bad indices")
    (position,) = args.status.tolist()  # synchronises: what check is for
    if position == NO_BAD_INDEX:
        return
    o = next(o for o in desc.operands() if o.index_extents)
    tensors = getattr(args, o.name) if o.kind is OperandKind.TENSOR_LIST else [getattr(args, o.name)]
    at: list[int] = []
    for n in reversed(o.shape):
        position, coordinate = divmod(position, n)
        at.insert(0, coordinate)
    values = [t[tuple(at)].tolist() for t in tensors]
    shown = values[0] if len(values) == 1 else tuple(values)
    extents = o.index_extents[0] if len(values) == 1 else o.index_extents
    raise IndexError(f"{desc.op}: {o.name}[{', '.join(map(str, at))}] = {shown} is out of bounds for extent {extents}")
