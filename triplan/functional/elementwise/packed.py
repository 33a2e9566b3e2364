"""Gates of the two halves of one tensor: the gradients of both are written into one buffer, by one launch.

As two operands they would be views, for each of which autograd allocates, clears and adds up a whole gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from triplan.functional._ops import Recorded
from triplan.functional._sharding.axes import along
from triplan.functional.elementwise.engine import fill, formula, gradient, new, op
from triplan.sku import ElementKind

Tensor = torch.Tensor
#: Of a formula of two tensors, x and y.
_HALVES = ("x", "y")


def halves(t: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    n = t.shape[dim] // 2
    return t.narrow(dim, 0, n), t.narrow(dim, n, n)


def _forward(run_it: bool, packed: Tensor, dim: int, text: str) -> Tensor:
    operands = halves(packed, dim)
    (out,) = new(text, operands, [])
    if run_it:
        fill([out], text, operands, [])
    return out


def _gradients(text: str, element: ElementKind) -> tuple[tuple[str, ...], str]:
    """The operands' names and the text of the formula of both gradients. Gates depend on both halves."""
    made, found, moving = gradient(text, tuple((name, element) for name in _HALVES))
    assert all(moving)
    return made.tensors, found


def _backward_of(run_it: bool, grad: Tensor, packed: Tensor, dim: int, text: str) -> Tensor:
    out = torch.empty_like(packed, memory_format=torch.contiguous_format)
    if run_it and out.numel():
        names, of_both = _gradients(text, ElementKind.of(packed.dtype))
        given = dict(zip((*_HALVES, "dout"), (*halves(packed, dim), grad), strict=True))
        fill(halves(out, dim), of_both, [given[n] for n in names], [])
    return out


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    packed, ctx.dim, ctx.text = inputs
    ctx.save_for_backward(packed)


def _backward(ctx: Any, grad: Tensor) -> Any:
    (packed,) = ctx.saved_tensors
    return PACKED_BACKWARD(grad, packed, ctx.dim, ctx.text), None, None


def _setup_again(ctx: Any, inputs: Any, output: Any) -> None:
    grad, packed, ctx.dim, ctx.text = inputs
    ctx.save_for_backward(grad, packed)


def _backward_again(ctx: Any, incoming: Tensor) -> Any:
    """By the formulas of the halves, which are joined: second derivatives are rare."""
    grad, packed = ctx.saved_tensors
    element = ElementKind.of(packed.dtype)
    names, of_both = _gradients(ctx.text, element)
    given = dict(zip((*_HALVES, "dout"), (*halves(packed, ctx.dim), grad), strict=True))
    results = [name for name, _, _ in formula(of_both).results]
    given |= {f"d{name}": g for name, g in zip(results, halves(incoming, ctx.dim), strict=True)}
    made, text, moving = gradient(of_both, tuple((name, element) for name in names))
    tensors = [given[n] for n in made.tensors]
    found = op(len(tensors), len(made.results))(*tensors, text, [])
    parts = iter(found if isinstance(found, tuple) else (found,))
    of = {name: next(parts) if moves else torch.zeros_like(grad) for name, moves in zip(names, moving, strict=True)}
    zero = torch.zeros_like(grad)
    joined = torch.cat([of.get(name, zero) for name in _HALVES], ctx.dim)
    return of.get("dout", zero), joined, None, None


def _partial(compute: Any, run_it: bool) -> Any:
    return lambda *args: compute(run_it, *args)


PACKED = Recorded(
    "packed_gate",
    "(Tensor packed, int dim, str formula) -> Tensor",
    _partial(_forward, True),
    _partial(_forward, False),
    axes=along(1),
    setup=_setup,
    backward=_backward,
)
PACKED_BACKWARD = Recorded(
    "packed_gate_backward",
    "(Tensor grad, Tensor packed, int dim, str formula) -> Tensor",
    _partial(_backward_of, True),
    _partial(_backward_of, False),
    axes=along(2),
    setup=_setup_again,
    backward=_backward_again,
)
