"""The numbers of a replayed call: which may differ, and what of them must not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from triplan.functional._replay.recording import Recording, TorchOp, recording

#: Scales that ops may treat specially.
SPECIAL = (0.0, 1.0, -1.0)


class Noted(float):
    """A float of a recorded call. The recording notes how comparisons of it come out, and whether anything else is made
    of it: calls with another float are like this one only if all of them come out the same.

    What reads it in C, as ``math`` does, is not noted: an op must not decide by such a function of a scale.
    """

    __slots__ = ()


def _compared(symbol: str, compare: Callable[[float, Any], Any]) -> Callable[[Noted, Any], Any]:
    def method(self: Noted, other: Any) -> Any:
        found = compare(self, other)
        if (record := recording()) is not None and found is not NotImplemented:
            record.comparisons.append((self, symbol, other, found))
        return found

    return method


def _used(make: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Noted, *others: Any) -> Any:
        if (record := recording()) is not None:
            record.used += [self, *(other for other in others if type(other) is Noted)]
        return make(self, *others)

    return method


for _symbol, _name in {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne"}.items():
    setattr(Noted, f"__{_name}__", _compared(_symbol, getattr(float, f"__{_name}__")))
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow")
_MADE = (*_ARITHMETIC, *(f"r{name}" for name in _ARITHMETIC), "neg", "abs", "bool", "int", "float", "round", "hash")
for _name in (*_MADE, "trunc", "floor", "ceil"):
    setattr(Noted, f"__{_name}__", _used(getattr(float, f"__{_name}__")))
Noted.__name__ = "float"  # what Python's errors say


def plain(value: Any) -> Any:
    """``value``, or the floats in it, as floats that nothing notes."""
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return float.__float__(value) if type(value) is Noted else value


def as_float(value: bool | int | float) -> float:
    """A float itself: replays tell those of a call by identity."""
    return value if isinstance(value, float) else float(value)


def is_scale(value: Any, given: Sequence[Any], record: Recording) -> bool:
    """Whether ``value`` is a float that a plan was ``given``, and that decided nothing but comparisons.

    An op of torch that was given an equal float may have been given this one, which is a constant of its repetition.
    """
    if type(value) is not Noted or any(value is used for used in record.used):
        return False
    number = plain(value)
    if number in SPECIAL or not any(value is s for s in given):
        return False
    ops = [step for step in record.steps if isinstance(step, TorchOp)]
    return all(number not in numbers_in((*op.args, *op.kwargs.values())) for op in ops)


def numbers_in(values: Sequence[Any]) -> set[float]:
    """The floats among ``values``, and in lists of these."""
    lists = [numbers_in(v) for v in values if isinstance(v, (list, tuple))]
    return {v for v in values if isinstance(v, float)}.union(*lists)


def other_outcomes(scales: Mapping[int, str], record: Recording) -> Iterator[tuple[str, dict[str, Any]]]:
    """Expressions: whether a comparison of floats that may differ comes out otherwise; and the constants they name.

    scales: what reads such a float, by the identity of the recorded one.
    """
    for i, (value, symbol, other, outcome) in enumerate(record.comparisons):
        if id(value) in scales or id(other) in scales:
            left, right = scales.get(id(value), f"left{i}"), scales.get(id(other), f"right{i}")
            yield f"({left} {symbol} {right}) is not {outcome}", {f"left{i}": plain(value), f"right{i}": plain(other)}


def differs(read: str, name: str, value: Any) -> str:
    """An expression: whether what ``read`` reads is another value than ``value``, the constant ``name``.

    True, 1 and 1.0 are equal but not the same scale or axis, and 0.0 equals -0.0; so it is with those in lists. Small
    integers, bools and None are one object each, and are told by that. A list may have changed since.
    """
    tests = [f"type({read}) is not type_{name}", f"{read} != {name}", *_alike(read, name, value)]
    return " or ".join(tests) if isinstance(value, list) else f"{read} is not {name} and ({' or '.join(tests)})"


def _alike(read: str, name: str, value: Any) -> Iterator[str]:
    """Expressions: whether what ``read`` reads, which equals ``value``, is another number, or has another in it."""
    if isinstance(value, float) and value == 0:
        yield f"repr({read}) != {repr(value)!r}"
    for i, item in enumerate(value if isinstance(value, (list, tuple)) else ()):
        if not isinstance(item, str):  # which equals nothing else
            yield f"type({read}[{i}]) is not type({name}[{i}])"
            yield from _alike(f"{read}[{i}]", f"{name}[{i}]", item)
