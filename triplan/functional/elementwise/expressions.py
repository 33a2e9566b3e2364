"""Fused expressions of one's own on tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triplan.descriptors.expressions.expression import Expr, operand
from triplan.functional._replay.replay import replayed
from triplan.functional.elementwise.engine import Formula, op
from triplan.functional.elementwise.table import of_python, operands_of
from triplan.sku.facts import fact

__all__ = ["expression"]


@fact
def _resolved(tree: Any, names: tuple[str, ...], kinds: str) -> tuple[str, int, bool]:
    """The formula's text, its number of results, and whether they are a tuple."""
    made = tree(*map(operand, names)) if callable(tree) else tree
    roots = (made,) if isinstance(made, Expr) else tuple(made)
    if not roots or not all(isinstance(r, Expr) for r in roots):
        raise TypeError(f"expression(): an expression or a tuple of expressions is wanted, not {type(made).__name__}")
    by_kind = {k: tuple(n for n, kind in zip(names, kinds, strict=True) if kind == k) for k in "tn"}
    results = tuple(("out" if len(roots) == 1 else f"out{i}", root, None) for i, root in enumerate(roots))
    return Formula(by_kind["t"], by_kind["n"], results).text, len(roots), not isinstance(made, Expr)


def resolved(tree: Any, names: tuple[str, ...], kinds: str) -> tuple[str, int, bool]:
    return _resolved(tree, names, kinds)


# What torch.compiler.assume_constant_result does, which imports dynamo first: 0.9 s for those who compile nothing.
resolved._dynamo_marked_constant = True  # type: ignore[attr-defined]


@replayed
def _expression(tree: Any, names: tuple[str, ...], operands: list[Any]) -> Any:
    kinds, tensors, numbers = operands_of("expression", list(map(of_python, operands)))
    text, count, is_tuple = resolved(tree, names, kinds)
    found = op(len(tensors), count)(*tensors, text, numbers)
    return (found,) if is_tuple and count == 1 else found


def expression(
    tree: Expr | tuple[Expr, ...] | Callable[..., Expr | tuple[Expr, ...]], *operands: Any, **named: Any
) -> Any:
    """A fused expression of one's own, in one launch; its gradients in one more, of any order.

    ``tree`` is a function that builds it of its operands (``lambda a, b: tp.expr.silu(a) * b``), given in order; or an
    expression, whose operands are given by name. Operands are tensors, which broadcast and are promoted as in torch, or
    numbers, which may change from call to call. A function is called once for each kind of operands: define it once,
    not in a loop. Returns a tensor, or a tuple of as many as ``tree`` has. Raises ``InvalidProblem`` for a bad tree,
    ``NotImplementedError`` for dtypes that it does not take.
    """
    names = (*(f"x{i}" for i in range(len(operands))), *named)
    return _expression(tree, names, [*operands, *named.values()])


# So that it is forgotten with the others' replays.
expression.replays = _expression.replays  # type: ignore[attr-defined]
