"""The registered ops of reductions: of one result, of values with their positions, and of two results."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from triplan.descriptors.reductions import DEVIATIONS, EXTREMA, INDEXED, PAIRS
from triplan.facade import plan_type
from triplan.functional._ops import Recorded
from triplan.functional._plans import run
from triplan.functional._shapes import axis, integer
from triplan.functional._sharding.axes import reduced
from triplan.functional.reductions.gradients import gradient

Tensor = torch.Tensor
Axes = int | Sequence[int] | None
#: A tensor of more axes is viewed with one for each run of neighbouring axes that are reduced alike.
_MAX_AXES = 8


def dims(name: str, rank: int, dim: Axes) -> list[int]:
    """The axes as they are given, perhaps negative; all for None and ()."""
    dim = integer(dim)
    if isinstance(dim, int):
        return [dim]
    if dim is None or len(dim) == 0:
        # torch takes no axes for all axes, but in any and all.
        return [] if dim is not None and name in ("any", "all") else list(range(rank))
    return list(dim)


def axes_of(rank: int, dims: Sequence[int]) -> list[int]:
    """The axes to reduce, in order. Raises ``IndexError``, and ``RuntimeError`` for one that is given twice."""
    given = [axis(d, rank) for d in dims]
    for d in given:
        if given.count(d) > 1:
            raise RuntimeError(f"dim {d} appears multiple times in the list of dims")
    return [a for a in range(rank) if a in given]


def kept_of(shape: Sequence[int], axes: Sequence[int]) -> list[int]:
    return [n for a, n in enumerate(shape) if a not in axes]


def fewer_axes(input: Tensor, axes: Sequence[int]) -> tuple[Tensor, list[int]]:
    if input.dim() == 0:
        return input.reshape(1), [0]
    if input.dim() <= _MAX_AXES:
        return input, list(axes)
    shape: list[int] = []
    reduced: list[int] = []
    for a, n in enumerate(input.shape):
        if a and (a in axes) == (a - 1 in axes):
            shape[-1] *= n
        else:
            reduced += [len(shape)] if a in axes else []
            shape.append(n)
    return input.reshape(shape), reduced


def _compute(op: str, input: Tensor, dims: Sequence[int], *how: Any) -> list[Tensor]:
    outs, (_, _, correction, order) = _empty(op, input, dims, *how), how
    x, axes = fewer_axes(input, axes_of(input.dim(), dims))
    kept = kept_of(x.shape, axes)
    names = ("out", "second" if op in PAIRS else "indices")[: len(outs)]
    operands = {"x": x, **{name: t.view(kept) for name, t in zip(names, outs, strict=True)}}
    options: dict[str, Any] = {"op": op, "reduce_axes": tuple(axes)}
    if op in DEVIATIONS:
        options["correction"] = correction
    if op == "vector_norm":
        options["order"] = order
    run(plan_type(op), operands, **options)
    return outs


def _empty(
    op: str, input: Tensor, dims: Sequence[int], keepdim: bool, dtype: torch.dtype | None, *_: float
) -> list[Tensor]:
    """New tensors for the results, without values."""
    axes = axes_of(input.dim(), dims)
    if op in EXTREMA and 0 in [input.shape[a] for a in axes] and 0 not in kept_of(input.shape, axes):
        raise IndexError(f"{op}(): Expected reduction dim {list(dims)} to have non-zero size.")
    shape = [1 if a in axes else n for a, n in enumerate(input.shape)] if keepdim else kept_of(input.shape, axes)
    found = [input.new_empty(shape, dtype=dtype or input.dtype)]
    if op in PAIRS or op in INDEXED:
        found.append(torch.empty_like(found[0], dtype=None if op in PAIRS else torch.int64))
    return found


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.op, input, dims, keepdim, _, ctx.correction, ctx.order = inputs
    ctx.axes, ctx.shape, ctx.dtype = axes_of(input.dim(), dims), input.shape, input.dtype
    ctx.gone = [] if keepdim else ctx.axes
    output = (output,) if isinstance(output, Tensor) else tuple(output)
    for t in output:
        if not t.is_floating_point():
            ctx.mark_non_differentiable(t)
    ctx.save_for_backward(*(() if ctx.op in ("sum", "mean") else (input, *output)))


def _backward(ctx: Any, *grads: Any) -> Any:
    def mean(x: Tensor, dtype: torch.dtype) -> Tensor:
        return _compute("mean", x, ctx.axes, True, dtype, 1.0, 2.0)[0]

    return None, gradient(ctx, grads, mean), None, None, None, None, None


def _axes_of_op(op: str, input: Any, dims: Sequence[int], keepdim: bool, *_: Any) -> str:
    axes, kept, sums = reduced(op, (input,), dims, keepdim)
    return f"{axes} -> {kept}+{sums}"


def _axes_of_both(op: str, input: Any, dims: Sequence[int], keepdim: bool, *_: Any) -> str:
    axes, kept, _sums = reduced(op, (input,), dims, keepdim)
    return f"{axes} -> {kept}, {kept}"


def _setup_pair(ctx: Any, inputs: Any, output: Any) -> None:
    _setup(ctx, inputs, output)
    ctx.set_materialize_grads(False)


def _backward_of_pair(ctx: Any, *grads: Any) -> Any:
    """The sum of the gradients of both results."""
    x, *outs = ctx.saved_tensors
    shared = {name: getattr(ctx, name) for name in ("axes", "shape", "dtype", "gone", "correction", "order")}
    total: Tensor | None = None
    for op, out, grad in zip(PAIRS[ctx.op], outs, grads, strict=True):
        if grad is not None:
            found: Tensor = _backward(SimpleNamespace(**shared, op=op, saved_tensors=(x, out)), grad)[1]
            total = found if total is None else total + found
    return None, total, None, None, None, None, None


_PARAMETERS = "str op, Tensor input, int[] dims, bool keepdim, ScalarType? dtype, float correction, float order"
reduce = Recorded(
    "reduce",
    f"({_PARAMETERS}) -> Tensor",
    lambda *args: _compute(*args)[0],
    lambda *args: _empty(*args)[0],
    axes=_axes_of_op,
    setup=_setup,
    backward=_backward,
)
extremum = Recorded(
    "extremum",
    f"({_PARAMETERS}) -> (Tensor, Tensor)",
    lambda *args: tuple(_compute(*args)),
    lambda *args: tuple(_empty(*args)),
    axes=_axes_of_both,
    setup=_setup,
    backward=_backward,
)
reduce_pair = Recorded(
    "reduce_pair",
    f"({_PARAMETERS}) -> (Tensor, Tensor)",
    lambda *args: tuple(_compute(*args)),
    lambda *args: tuple(_empty(*args)),
    axes=_axes_of_both,
    setup=_setup_pair,
    backward=_backward_of_pair,
)
