"""Expressions: what Python's operators and the functions of the maths table build from operands and numbers.

An ``Expr`` is a node of an acyclic graph. No function here recurses, so long chains of nodes cannot overflow the stack.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from triplan.errors import InvalidProblem, shown

Number = bool | int | float
#: A node of a frozen tree: a function's name and the positions of its arguments, ("operand", name) or ("number", text).
Node = tuple[str | int, ...]


def _unary(name: str) -> Callable[[Expr], Expr]:
    return lambda x: call(name, x)


def _binary(name: str) -> Callable[[Expr, Operand], Expr]:
    return lambda x, y: call(name, x, y)


def _reversed(name: str) -> Callable[[Expr, Operand], Expr]:
    return lambda x, y: call(name, y, x)


class Expr:
    """An immutable node. ``==`` compares identities; ``tp.expr.eq`` builds the comparison of values."""

    __slots__ = ("args", "name")

    def __init__(self, name: str, *args: Any) -> None:
        self.name, self.args = name, args

    def __repr__(self) -> str:
        return f"<Expr {self.name}>"

    def __bool__(self) -> bool:
        raise InvalidProblem("an expression has no truth value; use tp.expr.where, & and |")

    __add__, __radd__ = _binary("add"), _reversed("add")
    __sub__, __rsub__ = _binary("sub"), _reversed("sub")
    __mul__, __rmul__ = _binary("mul"), _reversed("mul")
    __truediv__, __rtruediv__ = _binary("div"), _reversed("div")
    __floordiv__, __rfloordiv__ = _binary("floor_divide"), _reversed("floor_divide")
    __mod__, __rmod__ = _binary("remainder"), _reversed("remainder")
    __pow__, __rpow__ = _binary("pow"), _reversed("pow")
    __and__ = _binary("bitwise_and")
    __or__ = _binary("bitwise_or")
    __xor__ = _binary("bitwise_xor")
    __lshift__ = _binary("bitwise_left_shift")
    __rshift__ = _binary("bitwise_right_shift")
    __lt__ = _binary("lt")
    __le__ = _binary("le")
    __gt__ = _binary("gt")
    __ge__ = _binary("ge")
    __neg__ = _unary("neg")
    __abs__ = _unary("abs")
    __invert__ = _unary("bitwise_not")


Operand = Expr | bool | int | float
#: Maps (gradient of the result, result, *arguments) to the gradient of each argument, None where that is 0.
Gradient = Callable[..., tuple["Expr | int | None", ...]]


@dataclass(frozen=True)
class Function:
    """A function of the maths table: its facts, and what builds a node of it.

    Attributes:
        arity: number of its arguments.
        takes: the kinds of elements it takes: ``f`` floats, ``i`` integers, ``b`` bool.
        result: its element. ``same``: the arguments' promoted element; ``float``: the same, but f32 for integers and
            bool; ``bool``: bool, computed from the promoted arguments; ``truth``: bool, computed from the truth value
            of each argument; ``select``: as ``same``, leaving out the first argument, which is a bool.
        slope: a bound on its derivative. None if it is monotone or convex along each argument: then its largest change
            over an interval is at an end of the interval. (Running errors need this.)
        gradient: None if it is 0 everywhere, or if the function takes no floats.
        body: of a composed function, which has a gradient of its own: what builds its tree, of functions that are not
            composed. Kernels and the reference meet that tree alone.
    """

    name: str
    arity: int
    takes: str
    result: str
    slope: float | None = None
    gradient: Gradient | None = field(default=None, compare=False)
    body: Callable[..., Expr] | None = field(default=None, compare=False)

    def __call__(self, *args: Operand) -> Expr:
        if len(args) != self.arity:
            raise InvalidProblem(f"{self.name} takes {self.arity} arguments, not {len(args)}")
        return Expr(self.name, *map(leaf, args))


FUNCTIONS: dict[str, Function] = {}
#: The composed functions.
COMPOSED: dict[str, Function] = {}


def function(
    name: str,
    takes: str,
    result: str,
    gradient: Gradient | None = None,
    *,
    slope: float | None = None,
    arity: int = 0,
    body: Callable[..., Expr] | None = None,
) -> Function:
    """Add a function to the maths table. Its arity is that of ``gradient``, if it has one."""
    if gradient is not None:
        arity = len(inspect.signature(gradient).parameters) - 2
    found = Function(name, arity, takes, result, slope, gradient, body)
    (FUNCTIONS if body is None else COMPOSED)[name] = found
    return found


def named(name: str) -> Function:
    """The function ``name``, composed or not."""
    return FUNCTIONS[name] if name in FUNCTIONS else COMPOSED[name]


def call(name: str, *args: Operand) -> Expr:
    return named(name)(*args)


def operand(name: str) -> Expr:
    """The operand ``name`` of Args: a tensor, or a number that may differ from run to run."""
    if not isinstance(name, str) or not name.isidentifier():
        raise InvalidProblem(f"an operand's name must be an identifier, not {shown(name)}")
    return Expr("operand", name)


def leaf(value: Any) -> Expr:
    """``value`` as a node; a number becomes a constant of the kernel."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, (bool, int, float)):
        return Expr("number", repr(value))
    raise InvalidProblem(f"{shown(value)} is neither an expression nor a number")


def number_of(text: Any) -> Number | None:
    """The number that ``repr`` wrote as ``text``; None if it is not of that form."""
    if text in ("True", "False"):
        return bool(text == "True")
    try:
        value: Number = int(text) if text.lstrip("-").isdigit() and len(text) < 30 else float(text)
    except (ValueError, AttributeError):
        return None
    return value if repr(value) == text else None


def flattened(roots: Iterable[Expr]) -> tuple[tuple[Node, ...], tuple[int, ...]]:
    """The nodes of ``roots``, each distinct one once and arguments before functions, and the positions of ``roots``."""
    at: dict[int, int] = {}  # by identity
    interned: dict[Node, int] = {}
    kept = list(roots)
    stack = kept[::-1]
    while stack:
        node = stack[-1]
        if id(node) in at:
            stack.pop()
            continue
        if missing := [a for a in node.args if isinstance(a, Expr) and id(a) not in at]:
            stack.extend(reversed(missing))
            continue
        frozen: Node = (node.name, *(at[id(a)] if isinstance(a, Expr) else a for a in node.args))
        at[id(node)] = interned.setdefault(frozen, len(interned))
        stack.pop()
    return tuple(interned), tuple(at[id(root)] for root in kept)


def rebuilt(nodes: Iterable[Node]) -> list[Expr]:
    """An Expr for each node."""
    found: list[Expr] = []
    for name, *args in nodes:
        found.append(Expr(str(name), *(found[a] if isinstance(a, int) else a for a in args)))
    return found


def arguments(node: Node) -> Iterator[int]:
    """The positions of a node's arguments."""
    return (a for a in node[1:] if isinstance(a, int))
