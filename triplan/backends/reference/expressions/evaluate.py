"""Trees in plain torch, node by node, and the running error of every node at the actual values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from triplan.backends.reference.expressions.errors import propagated
from triplan.backends.reference.expressions.maths import FUNCTIONS as MATHS
from triplan.descriptors.expressions.expression import FUNCTIONS, arguments, number_of
from triplan.descriptors.expressions.inputs import ExpressionProblem
from triplan.descriptors.expressions.tree import OF_BOOL
from triplan.sku import ElementKind

BOOL, F32, F64 = ElementKind.BOOL, ElementKind.F32, ElementKind.F64


def held(element: ElementKind) -> torch.dtype:
    """The dtype in which values of ``element`` are computed: float64, or the integer's own type."""
    return torch.float64 if element.is_floating_point else element.torch


def converted(value: Tensor, element: ElementKind, exact: bool) -> Tensor:
    """``value`` in the compute element of ``element``. A leaf is rounded to it: the op's definition starts there."""
    if exact and element.is_floating_point:
        value = value.to(element.compute.torch)
    return value != 0 if element is BOOL else value.to(held(element))


def evaluated(desc: ExpressionProblem, given: Mapping[str, Any], errors: bool) -> list[tuple[Tensor, Tensor | None]]:
    """(value, bound on its error or None) of each result, broadcast."""
    tree, values, bounds = desc.tree, [], []
    inputs = {i.name: i for i in desc.inputs_read()}
    zero = torch.zeros((), dtype=torch.float64)
    for node, typed in zip(tree.nodes, tree.types, strict=True):
        name, element = str(node[0]), typed.element
        if name == "operand":
            i = inputs[str(node[1])]
            value = given.get(i.name)
            value = i.default if value is None else value
            if not isinstance(value, Tensor):
                value = torch.tensor(value, dtype=i.element.torch)
            values.append(converted(value, element, True))
            bounds.append(zero)
            continue
        if name == "number":
            value = torch.tensor(number_of(str(node[1])))
            values.append(value.to(torch.float64) if isinstance(number_of(str(node[1])), float) else value)
            bounds.append(zero)
            continue
        function, args, error = FUNCTIONS[name], [], []
        for position, a in enumerate(arguments(node)):
            wanted = typed.common
            if function.result == "truth" or (function.result == "select" and position == 0):
                wanted = BOOL
            assert wanted is not None
            was = tree.types[a].element
            leaf = tree.nodes[a][0] not in FUNCTIONS or not was.is_floating_point
            if tree.nodes[a][0] == "number":
                value = torch.tensor(
                    number_of(str(tree.nodes[a][1])), dtype=torch.float64 if wanted.is_floating_point else None
                )
                value = (
                    value.to(torch.int64).to(wanted.torch)
                    if not wanted.is_floating_point and wanted is not BOOL
                    else value
                )
            else:
                value = values[a]
            args.append(converted(value, wanted, leaf))
            narrows = not leaf and was is F64 and wanted.compute is F32
            error.append(bounds[a] + value.abs() * F32.unit_roundoff if narrows else bounds[a])
        whole = function.result == "same" and typed.common is BOOL
        call = MATHS[OF_BOOL.get(name, name) if whole else name]
        value = call(*(a.to(torch.int8) for a in args)) if whole else call(*args)
        value = converted(value, element, False)
        values.append(value)
        bounds.append(propagated(name, call, args, error, value, typed) if errors else zero)
    found = []
    for at, _ in tree.results:
        value, bound = values[at], bounds[at]
        found.append((value.broadcast_to(desc.shape), bound.broadcast_to(desc.shape) if errors else None))
    return found


def values(desc: ExpressionProblem, given: Mapping[str, Any], names: Sequence[str]) -> dict[str, Tensor]:
    """The results by name; ``names``: in the tree's order."""
    return {name: value for name, (value, _) in zip(names, evaluated(desc, given, False), strict=True)}


def running(desc: ExpressionProblem, given: Mapping[str, Any], names: Sequence[str]) -> dict[str, Tensor]:
    """The running error of each result, in units of roundoff of its compute element; infinite where it is unbounded."""
    found = {}
    for name, (at, _), (_, bound) in zip(names, desc.tree.results, evaluated(desc, given, True), strict=True):
        assert bound is not None
        found[name] = bound / (desc.tree.types[at].element.compute.unit_roundoff or F32.unit_roundoff)
    return found
