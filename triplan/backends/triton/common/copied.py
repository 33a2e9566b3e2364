"""Launches that read and write copies in the workspace in place of operands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from triplan.backends.runtime.launch import Arg, Copy, Int, Launch, Ptr, Scratch, Stride, TensorMap, power_of_two_in


def on_copies(launches: Iterable[Launch], copies: Mapping[str, Copy], end: int) -> list[Launch]:
    """``launches`` on ``copies``, by operand. What the launches themselves have in the workspace begins at ``end``."""

    def placed(arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return tuple(map(placed, arg))
        if isinstance(arg, Scratch):
            return replace(arg, offset=arg.offset + end)
        if isinstance(arg, TensorMap) and arg.copy is not None:
            return replace(arg, copy=replace(arg.copy, offset=arg.copy.offset + end))
        if not isinstance(arg, (Ptr, Stride, TensorMap)) or arg.operand not in copies:
            return arg
        copy = copies[arg.operand]
        if isinstance(arg, TensorMap):
            return replace(arg, copy=copy)
        if isinstance(arg, Ptr):
            return Scratch(copy.offset, arg.element)
        step = copy.strides[arg.axis]
        return Int(step, wide=True, divisibility=power_of_two_in(step))

    return [replace(x, args={name: placed(arg) for name, arg in x.args.items()}) for x in launches]
