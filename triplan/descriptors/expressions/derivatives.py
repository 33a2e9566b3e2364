"""Reverse-mode differentiation of expressions. Gradients are expressions too; they recompute values from operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from triplan.descriptors.expressions.expression import Expr, arguments, flattened, leaf, named, operand, rebuilt


def gradients(results: Mapping[str, Expr], wrt: Sequence[str]) -> dict[str, Expr]:
    """The gradients ``d<name>`` with respect to the operands ``wrt``; operands ``d<result>`` are those of the results.

    The sum over broadcast axes is left to the caller. An operand on which no result depends has gradient 0.
    """
    nodes, roots = flattened(results.values())
    values = rebuilt(nodes)
    incoming: list[Expr | None] = [None] * len(nodes)
    needed = [False] * len(nodes)
    for i, node in enumerate(nodes):
        needed[i] = (node[0] == "operand" and node[1] in wrt) or any(needed[a] for a in arguments(node))
    for name, root in zip(results, roots, strict=True):
        given, before = operand(f"d{name}"), incoming[root]
        incoming[root] = given if before is None else before + given
    found = {name: leaf(0) for name in wrt}
    for i in reversed(range(len(nodes))):
        g, node = incoming[i], nodes[i]
        if g is None or not needed[i]:
            continue
        if node[0] == "operand":
            found[str(node[1])] = g
            continue
        function, at = named(str(node[0])), list(arguments(node))
        parts = () if function.gradient is None else function.gradient(g, values[i], *(values[a] for a in at))
        for a, part in zip(at, parts, strict=False):
            if part is not None and needed[a]:
                before = incoming[a]
                incoming[a] = leaf(part) if before is None else before + leaf(part)
    return {f"d{name}": g for name, g in found.items()}
