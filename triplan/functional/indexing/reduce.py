"""scatter and scatter_reduce: contributions to one element replace what it holds, or are summed, averaged,
multiplied or compared, as in torch.

Sums are ``scatter_add``; means are a sum and a count. Products and extremes are an op of their own, of
which torch itself computes products of floats. i8, u8, i16 and bool are computed in i32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from triplan.errors import shown
from triplan.facade import ScatterPlan, ScatterReducePlan
from triplan.functional._forward import Linearity
from triplan.functional._ops import Op, composed
from triplan.functional._plans import run
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import NARROW, axis
from triplan.functional._sharding import any_dtensor
from triplan.functional._watching import needs_grad, transformed
from triplan.functional.indexing.gather import (
    _checked_scatter,
    _filled,
    _gather,
    _grad_of_src,
    _padded,
    _scatter_add,
    _scatter_axes,
    _scatter_operands,
    _scatter_setup,
)
from triplan.sku import ElementKind

__all__ = ["scatter", "scatter_", "scatter_reduce", "scatter_reduce_"]

Tensor = torch.Tensor
_REDUCTIONS = ("sum", "prod", "mean", "amax", "amin")


# --- the op scatter ---


def _put_shape(
    input: Tensor, dim: int, index: Tensor, src: Tensor, check_indices: bool = False, wrap_negative: bool = False
) -> Sequence[int]:
    return _checked_scatter("scatter", input, dim, index, src)


def _put_update(
    out: Tensor, dim: int, index: Tensor, src: Tensor, check_indices: bool = False, wrap_negative: bool = False
) -> None:
    dim = axis(dim, out.dim())
    options: dict[str, Any] = {"scatter_dim": dim, "wrap_negative": wrap_negative}
    run(ScatterPlan, _scatter_operands(out, dim, index, src), check_indices=check_indices, **options)


def _put_grad(ctx: Any, grad: Tensor) -> Any:
    to_input, _, _, to_src = ctx.needs_input_grad[:4]
    (index,) = ctx.saved_tensors  # once: a checkpoint refuses a second time
    kept = None
    if to_input:
        kept = _scatter(grad, ctx.dim, index, _filled(grad, 0, index), False, ctx.wrap_negative)
    return kept, None, None, _grad_of_src(ctx, index, grad) if to_src else None, None, None


_scatter = Op(
    "scatter",
    "Tensor input, int dim, Tensor index, Tensor src, bool check_indices=False, bool wrap_negative=False",
    axes=_scatter_axes,
    shape=_put_shape,
    update=_put_update,
    setup=_scatter_setup,
    backward=_put_grad,
    linearity=Linearity((0, 3)),
)


# --- scatter_reduce ---


def _identity(reduce: str, dtype: torch.dtype) -> float:
    """What leaves another operand of ``reduce`` as it is."""
    if reduce == "prod":
        return 1
    lowest: float = -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min
    highest: float = torch.inf if dtype.is_floating_point else torch.iinfo(dtype).max
    return lowest if reduce == "amax" else highest


def _shape(
    input: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    include_self: bool = True,
    check_indices: bool = False,
) -> Sequence[int]:
    return _checked_scatter("scatter_reduce", input, dim, index, src)


def _update(
    out: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    include_self: bool = True,
    check_indices: bool = False,
) -> None:
    dim = axis(dim, out.dim())
    if reduce == "prod" and out.is_floating_point():
        if torch.are_deterministic_algorithms_enabled():
            _ordered_product(out, dim, index, src, include_self, check_indices)
            return
        out.scatter_reduce_(dim, index.long(), src, reduce, include_self=include_self)
        return
    if not include_self:
        start = _filled(out, _identity(reduce, out.dtype), index)
        run(ScatterPlan, _scatter_operands(out, dim, index, start), check_indices=check_indices, scatter_dim=dim)
    operands = _scatter_operands(out, dim, index, src)
    run(ScatterReducePlan, operands, check_indices=check_indices, scatter_dim=dim, op=f"scatter_{reduce}")


def _ordered_product(
    out: Tensor, dim: int, index: Tensor, src: Tensor, include_self: bool, check_indices: bool
) -> None:
    """``out`` times the factors of each element, in an order that positions decide; torch's own has none on CUDA."""
    operands = _scatter_operands(out, dim, index, src)
    at, order = operands["index"].movedim(dim, -1).contiguous().sort(stable=True)
    part = operands["src"].movedim(dim, -1).gather(-1, order).to(ElementKind.of(out.dtype).compute.torch)
    distance = 1
    while distance < part.size(-1):  # each position's product of the last ``distance`` factors of its element
        is_same = at[..., distance:] == at[..., :-distance]
        joined = torch.where(is_same, part[..., distance:] * part[..., :-distance], part[..., distance:])
        part = torch.cat([part[..., :distance], joined], -1)
        distance *= 2
    whole = part.gather(-1, torch.searchsorted(at, at, right=True) - 1)
    # Factors of one element now write the same product: the last of their writes is any of them.
    at, whole = at.movedim(-1, dim), whole.movedim(-1, dim)
    if include_self:
        whole = whole * _gather(operands["out"], dim, at, check_indices, False)
    operands |= {"index": at, "src": whole.to(out.dtype)}
    run(ScatterPlan, operands, check_indices=check_indices, scatter_dim=dim)


def _setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    input, ctx.dim, index, src, ctx.reduce, ctx.include_self, _ = inputs
    ctx.shape = src.shape
    ctx.save_for_backward(index, input, src, output)


def _equal(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """1 where ``a`` equals ``b``, of the same shape, and 0 elsewhere."""
    without_out = torch.is_grad_enabled() or transformed() or torch.compiler.is_compiling()
    if without_out or any_dtensor((a, b)):
        return (a == b).to(dtype)
    return torch.eq(a, b, out=torch.empty_like(a, dtype=dtype))


def _backward(ctx: Any, grad: Tensor) -> Any:
    """torch's formulas: an extreme's gradient is shared by all that are equal to it, input included."""
    index, input, src, output = ctx.saved_tensors
    used = src[tuple(slice(n) for n in index.shape)] if index.dim() else src.reshape(index.shape)

    def read(t: Tensor) -> Tensor:
        return _gather(t, ctx.dim, index, False, False)

    if ctx.reduce == "prod":
        # The gradient of a factor is the product of the others: of zeros, only one without another has a gradient.
        zero, own_zero = used == 0, input == 0
        counted = (own_zero if ctx.include_self else torch.zeros_like(own_zero)).to(grad.dtype)
        zeros = _scatter_add(counted, ctx.dim, index, zero.to(grad.dtype), False)
        table, factors = input.masked_fill(own_zero, 1), used.masked_fill(zero, 1)
        share = grad * _scatter_reduce(table, ctx.dim, index, factors, "prod", ctx.include_self, False)
        to_input = torch.where(zeros == counted, share / table, 0)
        to_used = torch.where(read(zeros) == zero.to(grad.dtype), read(share) / factors, 0)
    else:
        chosen, own = _equal(used, read(output), grad.dtype), _equal(input, output, grad.dtype)
        if not ctx.include_self:
            own = _scatter(own, ctx.dim, index, _filled(own, 0, index), False, False)
        share = grad / _scatter_add(own, ctx.dim, index, chosen, False)
        to_input, to_used = own * share, chosen * read(share)
    if ctx.reduce == "prod" and not ctx.include_self:
        to_input = _scatter(to_input, ctx.dim, index, _filled(grad, 0, index), False, False)
    needs_input, _, _, needs_src = ctx.needs_input_grad[:4]
    beyond = _padded(to_used, ctx.shape) if needs_src else None
    return to_input if needs_input else None, None, None, beyond, None, None, None


_scatter_reduce = Op(
    "scatter_reduce",
    "Tensor input, int dim, Tensor index, Tensor src, str reduce, bool include_self=True, bool check_indices=False",
    axes=_scatter_axes,
    shape=_shape,
    update=_update,
    setup=_setup,
    backward=_backward,
)


def _mean(input: Tensor, dim: int, index: Tensor, src: Tensor, include_self: bool, check_indices: bool) -> Tensor:
    wide = ElementKind.of(input.dtype).compute.torch
    total = _sum(input.to(wide), dim, index, src.to(wide), include_self, check_indices)
    ones = torch.ones_like(total, requires_grad=False)
    count = _sum(ones, dim, index, _filled(ones, 1, index), include_self, check_indices)
    if wide.is_floating_point:
        return (total / count).to(input.dtype)
    return total.div(count, rounding_mode="floor")


def _sum(input: Tensor, dim: int, index: Tensor, src: Tensor, include_self: bool, check_indices: bool) -> Tensor:
    if not include_self:
        input = _scatter(input, dim, index, _filled(input, 0, index), check_indices, False)
    return _scatter_add(input, dim, index, src, check_indices)


@replayed
def scatter_reduce(
    input: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
    out: Tensor | None = None,
    check_indices: bool = False,
) -> Tensor:
    """``input`` with ``out[..., index[..., j, ...], ...]`` reduced with ``src[..., j, ...]`` along ``dim``
    (torch.scatter_reduce).

    ``reduce``: ``"sum"``, ``"prod"``, ``"mean"`` (rounded down for integers), ``"amax"`` or ``"amin"``; NaN stays NaN.
    Without ``include_self``, elements that receive a contribution leave out what ``input`` holds. Shapes, dtypes and
    errors are those of ``scatter_add``; all integers and bool are taken. Differentiable in ``input`` and ``src``.

    Every result but a product of floats has a plan. That product is torch's own, on CUDA in no fixed order; under
    ``torch.use_deterministic_algorithms(True)`` its factors are sorted and multiplied in a tree, by torch's ops.
    """
    return composed(
        "scatter_reduce",
        out,
        (input, src),
        lambda: _reduced(input, dim, index, src, reduce, include_self, check_indices),
    )


def _reduced(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, include_self: bool, check_indices: bool
) -> Tensor:
    if reduce not in _REDUCTIONS:
        raise RuntimeError(f"scatter_reduce(): reduce must be one of {', '.join(_REDUCTIONS)}, but got {shown(reduce)}")
    if input.dtype in NARROW:
        _checked_scatter("scatter_reduce", input, dim, index, src)
        wide = _reduced(input.int(), dim, index, src.int(), reduce, include_self, check_indices)
        return wide.to(input.dtype)
    if reduce == "mean":
        _checked_scatter("scatter_reduce", input, dim, index, src)
        return _mean(input, dim, index, src, include_self, check_indices)
    if reduce == "sum":
        return _sum(input, dim, index, src, include_self, check_indices)
    return _scatter_reduce(input, dim, index, src, reduce, include_self, check_indices)


@replayed
def scatter_reduce_(
    input: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
    check_indices: bool = False,
) -> Tensor:
    """``scatter_reduce`` into ``input`` itself, which is returned. Raises as ``scatter_add_`` does."""
    args = (dim, index, src)
    if reduce == "sum" and include_self and input.dtype not in NARROW:
        return _scatter_add.in_place(input, *args, check_indices)
    # The gradients of a product or an extreme need what is overwritten.
    if reduce in ("prod", "amax", "amin") and input.dtype not in NARROW and not needs_grad((input, src)):
        return _scatter_reduce.in_place(input, *args, reduce, include_self, check_indices)
    return input.copy_(_reduced(input, *args, reduce, include_self, check_indices))


# --- scatter ---


def _given_src(input: Tensor, index: Tensor, src: Tensor | float | None, value: float | None) -> Tensor:
    """What is written: ``src`` or ``value``, of which one is given."""
    if (src is None) == (value is None):
        raise TypeError("scatter(): src or value must be given, and not both")
    found = value if src is None else src
    return found if isinstance(found, Tensor) else _filled(input, found, index)  # type: ignore[arg-type]


def _reduction(reduce: str) -> str:
    known = {"add": "sum", "multiply": "prod"}
    if reduce not in known:
        raise RuntimeError(f"scatter(): reduce argument must be either add or multiply, but got {shown(reduce)}")
    return known[reduce]


@replayed
def scatter(
    input: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor | float | None = None,
    *,
    value: float | None = None,
    reduce: str | None = None,
    out: Tensor | None = None,
    check_indices: bool = False,
) -> Tensor:
    """``input`` with ``out[..., index[..., j, ...], ...] = src[..., j, ...]`` along ``dim`` (torch.scatter).

    ``src``: a tensor or a number, or ``value``: a number. Shapes, dtypes and errors are those of ``scatter_add``; all
    integers and bool are taken. Where an index repeats, any one of the writes stays; under
    ``torch.use_deterministic_algorithms(True)`` the last. As in torch, the gradient of such an element goes to every
    element of ``src`` with that index. ``reduce``: ``"add"`` or ``"multiply"`` (see ``scatter_reduce``).
    """
    given = _given_src(input, index, src, value)
    if reduce is not None:
        return scatter_reduce(input, dim, index, given, _reduction(reduce), out=out, check_indices=check_indices)
    return _scatter.into(out, input, dim, index, given, check_indices, False)


@replayed
def scatter_(
    input: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor | float | None = None,
    *,
    value: float | None = None,
    reduce: str | None = None,
    check_indices: bool = False,
) -> Tensor:
    """``scatter`` into ``input`` itself, which is returned. Raises as ``scatter_add_`` does."""
    given = _given_src(input, index, src, value)
    if reduce is not None:
        return scatter_reduce_(input, dim, index, given, _reduction(reduce), check_indices=check_indices)
    return _scatter.in_place(input, dim, index, given, check_indices, False)
