"""Frozen trees: lists of nodes, arguments first. Validates them and finds each node's element by torch's promotion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KINDS, elementwise_dtypes

from triplan.descriptors.expressions.expression import (
    COMPOSED,
    FUNCTIONS,
    Expr,
    Node,
    arguments,
    flattened,
    named,
    number_of,
)
from triplan.errors import shown
from triplan.sku import ElementKind

MAX_DEPTH = 200
MAX_NODES = 10_000
MAX_OPERANDS = 32
BOOL, I64, F32, F64 = ElementKind.BOOL, ElementKind.I64, ElementKind.F32, ElementKind.F64
PROMOTION = {"same": KINDS.DEFAULT, "float": KINDS.INT_TO_FLOAT, "bool": KINDS.ALWAYS_BOOL, "select": KINDS.DEFAULT}
#: On bool, a function computes as on the integers 0 and 1, except for these, which become another function.
OF_BOOL = {"bitwise_not": "logical_not"}
#: torch's ranks in type promotion: a Python number yields to a 0-dim tensor, and that to tensors with dimensions.
NUMBER, POINT, TENSOR = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Typed:
    """What a node holds.

    Attributes:
        element: its element, by torch's rules.
        rank: NUMBER, POINT or TENSOR.
        common: the element to which its arguments are converted; None: they are not converted. Values are kept in the
            compute elements of ``element`` and ``common``: nothing is rounded between nodes.
    """

    element: ElementKind
    rank: int
    common: ElementKind | None = None


@dataclass(frozen=True, slots=True)
class Tree:
    """A checked tree.

    Attributes:
        nodes: see ``expression.Node``.
        types: the type of each node.
        results: (position of the node, element) of each result.
    """

    nodes: tuple[Node, ...]
    types: tuple[Typed, ...]
    results: tuple[tuple[int, ElementKind], ...]


def checked(
    nodes: Sequence[Node],
    operands: Mapping[str, tuple[ElementKind, int]],
    results: Sequence[tuple[int, ElementKind | None]],
) -> Tree:
    """The tree of ``nodes`` over ``operands`` (element and rank by name). Raises ``ValueError`` if it is malformed.

    A result whose element is None has that of its node.
    """
    for at, _ in results:
        if not 0 <= at < len(nodes):
            raise ValueError(f"a result is at node {shown(at)}; there are {len(nodes)} nodes")
    if any(node and node[0] in COMPOSED for node in nodes):
        nodes, roots = spelled_out(nodes, [at for at, _ in results])
        results = [(at, element) for at, (_, element) in zip(roots, results, strict=True)]
    if not 0 < len(nodes) <= MAX_NODES:
        raise ValueError(f"{len(nodes)} nodes: a tree must have 1 to {MAX_NODES}")
    wide = any(element is F64 and rank for element, rank in operands.values())
    types: list[Typed] = []
    depths: list[int] = []
    for at, node in enumerate(nodes):
        args = _arguments(at, node)
        depths.append(1 + max((depths[a] for a in args), default=0))
        if depths[-1] > MAX_DEPTH:
            raise ValueError(f"nodes[{at}] = {shown(node)}: nested more than {MAX_DEPTH} deep")
        if node[0] == "operand":
            if node[1] not in operands:
                raise ValueError(f"nodes[{at}] names operand {shown(node[1])}; the operands are {', '.join(operands)}")
            types.append(Typed(*operands[str(node[1])]))
        elif node[0] == "number":
            value = number_of(node[1])
            types.append(Typed(_number(value, wide), NUMBER))
        else:
            types.append(_typed(str(node[0]), tuple(types[a] for a in args), wide))
    found = tuple((at, element or types[at].element) for at, element in results)
    for at, element in found:
        if element.is_floating_point < types[at].element.is_floating_point:
            raise ValueError(
                f"a result of {types[at].element} cannot be stored as {element}; round and convert it first"
            )
    return Tree(tuple(nodes), tuple(types), found)


def spelled_out(nodes: Sequence[Node], roots: Sequence[int]) -> tuple[tuple[Node, ...], tuple[int, ...]]:
    """The nodes below ``roots`` with the trees of composed functions in their place, and the positions of ``roots``."""
    values: list[Expr] = []
    for at, node in enumerate(nodes):
        name, args = str(node[0]), [values[a] for a in _arguments(at, node)]
        body = COMPOSED[name].body if name in COMPOSED else None
        values.append(Expr(name, *(args or node[1:])) if body is None else body(*args))
    return flattened([values[at] for at in roots])


def _arguments(at: int, node: Any) -> tuple[int, ...]:
    """The positions of a node's arguments. Raises ``ValueError`` if the node is malformed."""
    name = node[0] if node else None
    if name in ("operand", "number"):
        good = len(node) == 2 and isinstance(node[1], str) and (name == "operand" or number_of(node[1]) is not None)
        if not good:
            raise ValueError(f"nodes[{at}] = {shown(node)}: a leaf must be (operand, name) or (number, text)")
        return ()
    if name not in FUNCTIONS and name not in COMPOSED:
        known = ", ".join((*FUNCTIONS, *COMPOSED))
        raise ValueError(f"nodes[{at}] = {shown(node)}: not in the maths table, which has {known}")
    args, arity = tuple(arguments(node)), named(name).arity
    if len(args) != len(node) - 1 or len(args) != arity or not all(0 <= a < at for a in args):
        raise ValueError(f"nodes[{at}] = {shown(node)}: {name} takes {arity} earlier nodes")
    return args


def _number(value: Any, wide: bool) -> ElementKind:
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        return I64
    return F64 if wide else F32


@cache
def _typed(name: str, args: tuple[Typed, ...], wide: bool) -> Typed:
    function, rank = FUNCTIONS[name], max(a.rank for a in args)
    if function.result == "truth":
        return Typed(BOOL, rank)
    if function.result == "select":
        if args[0].element is not BOOL:
            raise ValueError(f"{name} selects by bool, not {args[0].element}")
        args = args[1:]
    common, element = promoted(PROMOTION[function.result], tuple((a.element, a.rank) for a in args))
    if rank == NUMBER and element.is_floating_point:
        common = element = F64 if wide else F32
    elif rank == NUMBER and common is F32 and wide:
        common = F64
    taken = {a.element for a in args} if function.result == "float" else {common}
    for e in taken:
        kind = "f" if e.is_floating_point else "b" if e is BOOL else "i"
        if kind not in function.takes:
            raise ValueError(f"{name} does not take {e}")
    return Typed(element, rank, common)


@cache
def promoted(kind: Any, operands: tuple[tuple[ElementKind, int], ...]) -> tuple[ElementKind, ElementKind]:
    """(the element that torch converts arguments to, the element of torch's result).

    f32 stands for torch's default dtype: a descriptor must not change its meaning when the default changes.
    """
    real = any(e.is_floating_point for e, _ in operands)
    if (real or kind is KINDS.INT_TO_FLOAT) and not any(e.is_floating_point and rank for e, rank in operands):
        return F32, BOOL if kind is KINDS.ALWAYS_BOOL else F32
    stand_ins = [
        torch.empty((1,) * (rank == TENSOR), dtype=e.torch, device="meta")
        if rank != NUMBER
        else (1.0 if e.is_floating_point else False if e is BOOL else 1)
        for e, rank in operands
    ]
    common, result = elementwise_dtypes(*stand_ins, type_promotion_kind=kind)
    return ElementKind.of(common), ElementKind.of(result)
