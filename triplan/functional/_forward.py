"""Forward mode (torch.func.jvp, dual tensors) of our ops.

The tangents of a linear op are the op itself on tangents. Those of others come from the backward of their backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

Tensor = torch.Tensor


class Linearity(NamedTuple):
    """What makes an op linear, for forward mode: result = product(factors) + sum(terms), by positions of arguments.

    Each factor alone, and all terms together, enter linearly. Without factors, the op is linear in the terms.
    """

    terms: tuple[int, ...] = ()
    factors: tuple[int, ...] = ()


def save_for_forward(ctx: Any, inputs: Any, output: Any) -> None:
    """Keep in ``ctx`` of an autograd.Function what ``derivative`` needs."""
    leaves, ctx.given = tree_flatten(inputs)
    ctx.save_for_forward(*(a if isinstance(a, Tensor) else None for a in leaves))
    ctx.options = [None if isinstance(a, Tensor) else a for a in leaves]
    results, constant = output if isinstance(output, tuple) else (), ctx.non_differentiable or ()
    ctx.is_constant = [any(r is c for c in constant) for r in results]


def derivative(op: Callable[..., Any], linearity: Linearity | None, ctx: Any, tangents: Sequence[Any]) -> Any:
    """The tangents of the results of ``op``; None of those that are not differentiable."""
    # Without their own tangents, which would send the ops below through forward mode again.
    unpack: Any = forward_ad.unpack_dual  # untyped in torch
    tensors = (None if t is None else unpack(t).primal for t in ctx.saved_tensors)
    leaves = [o if t is None else t for t, o in zip(tensors, ctx.options, strict=True)]
    args = tree_unflatten(leaves, ctx.given)
    if linearity is not None:
        return _tangent_of_linear(op, linearity, args, tangents)
    if not ctx.is_constant:
        return _tangent(op, args, tangents)

    def moving(*given: Any) -> Any:
        return tuple(t for t, c in zip(op(*given), ctx.is_constant, strict=True) if not c)

    found = iter(_tangent(moving, args, tangents))
    return tuple(None if c else next(found) for c in ctx.is_constant)


def _tangent(op: Callable[..., Any], args: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """The derivative of the op's results along ``tangents``.

    The backward is linear in the gradient g that it is given. Its own backward, with the tangents for gradients, is
    the transpose of that linear map at any g: the derivative that is wanted.
    """
    moving = [i for i, t in enumerate(tangents) if t is not None]

    def call(*values: Tensor) -> Any:
        given = list(args)
        for at, value in zip(moving, values, strict=True):
            given[at] = value
        return op(*given)

    vjp: Any = torch.func.vjp  # typed as what it returns with has_aux
    result, backward = vjp(call, *(args[at] for at in moving))
    zeros = tree_map(torch.zeros_like, result)
    _, transposed = vjp(backward, zeros)
    return transposed(tuple(tangents[at] for at in moving))[0]


def _tangent_of_linear(
    op: Callable[..., Any], linearity: Linearity, args: Sequence[Any], tangents: Sequence[Any]
) -> Any:
    """The sum of the op's results with one factor at a time replaced by its tangent, and the terms by theirs."""
    terms, factors = linearity
    given = list(args)
    moving = [f for f in factors if tangents[f] is not None] or factors[:1]
    result = None
    for factor in moving or (None,):
        for at in (*terms, *(() if factor is None else (factor,))):
            known = tangents[at] is not None and (result is None or at == factor)
            given[at] = tangents[at] if known else None if args[at] is None else torch.zeros_like(args[at])
        part = op(*given)
        result = part if result is None else result + part
        if factor is not None:
            given[factor] = args[factor]
    return result


def refuse_forward_mode(name: str) -> None:
    """In a compiled graph the registered op would silently drop tangents."""
    if forward_ad._current_level >= 0:
        raise NotImplementedError(
            f"{name} has no jvp in a compiled graph: call it eagerly, or use reverse mode (torch.func.vjp, jacrev)"
        )
