"""Dropout, whose backward draws again: an element, or a whole channel, is kept or not by its index in the stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from triplan.errors import shown
from triplan.functional._forward import Linearity
from triplan.functional._ops import RECORDED, Op, Recorded, overwritten
from triplan.functional._replay.numbers import as_float
from triplan.functional._replay.replay import replayed
from triplan.functional._sharding import copied, is_dtensor, local_of, part, write
from triplan.functional._watching import needs_grad
from triplan.functional.random.engine import MAX_RANK, Tensor, next_state, require_floats, run_plan

__all__ = ["dropout", "dropout1d", "dropout2d", "dropout3d"]


def _drop(
    out: Tensor,
    x: Tensor,
    state: Tensor | None,
    seed: int,
    offset: int,
    p: float,
    first: int,
    whole: Sequence[int] | None = None,
) -> None:
    run_plan("dropout", {"x": x, "out": out}, (state, seed, offset), first, {"p": p}, whole)


def _droppable(x: Tensor, *how: Any) -> Sequence[int]:
    require_floats("dropout", x)
    return x.shape


def _drop_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, state, *ctx.how = inputs
    ctx.save_for_backward(state)


def _drop_grad(ctx: Any, g: Tensor) -> Any:
    return _dropped(g, *ctx.saved_tensors, *ctx.how), *(None,) * 6


_dropped = Op(
    "dropout",
    "Tensor x, Tensor? state, int seed, int offset, float p, SymInt first, SymInt[]? whole=None",
    axes=None,  # draws by the number of an element among all
    shape=_droppable,
    fill=_drop,
    update=lambda out, *how: _drop(out, out, *how),
    setup=_drop_setup,
    backward=_drop_grad,
    linearity=Linearity((0,)),
    keeps_strides=True,
)


def _drop_and_keep(x: Tensor, seed: int, offset: int, p: float, first: int) -> tuple[Tensor, Tensor]:
    out, kept = found = _empty_and_kept(x)
    if not x.numel():
        kept.zero_()
    else:
        run_plan("dropout", {"x": x, "out": out, "kept": kept}, (None, seed, offset), first, {"p": p})
    return found


def _empty_and_kept(x: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    _droppable(x)
    return torch.empty_like(x), x.new_empty(2, dtype=torch.int64)


def _keep_setup(ctx: Any, inputs: Any, output: Any) -> None:
    *_, ctx.p, ctx.first = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _keep_grad(ctx: Any, g: Tensor, _: Any) -> Any:
    return _dropped(g, *ctx.saved_tensors, 0, 0, ctx.p, ctx.first), *(None,) * 4


#: Of a seed and an offset on the host, which the kernel leaves in device memory for the backward: a replay of the call
#: keeps no number of it.
_dropped_and_kept = Recorded(
    "dropout_and_keep",
    "(Tensor x, int seed, int offset, float p, SymInt first) -> (Tensor, Tensor)",
    _drop_and_keep,
    _empty_and_kept,
    axes=None,  # draws by the number of an element among all
    setup=_keep_setup,
    backward=_keep_grad,
)


# --- calls ---


@replayed
def dropout(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    generator: torch.Generator | None = None,
    first: int = 0,
) -> Tensor:
    """``input / (1 - p)``, and 0 in its place with probability ``p``: as ``torch.nn.functional.dropout``.

    ``input``: f16, bf16, f32 or f64 of any shape and strides, which the result keeps. ``input`` itself is returned if
    not ``training``, or if ``p`` is 0. No mask is stored: the backward draws again. With ``p`` = 1, zeros, whatever
    ``input`` holds.
    ``first``: the index of the first element in a larger tensor, whose shards then drop what the whole drops. Raises
    ``ValueError`` for ``p`` outside [0, 1], ``NotImplementedError`` for other dtypes.
    """
    if not _draws(input, p, training):
        return input
    require_floats("dropout", input)
    state, seed, offset = next_state(input, generator)
    if is_dtensor(input):
        own = part(input, MAX_RANK)
        local = _dropped(own.local, local_of(state), seed, offset, as_float(p), first + own.first, own.whole)
        return write("dropout", input, own.joined(local)) if inplace else own.joined(local)
    if inplace:
        return _dropped.in_place(input, state, seed, offset, as_float(p), first)
    if state is None and needs_grad([input]):
        return _dropped_and_kept(input, seed, offset, as_float(p), first)[0]  # type: ignore[no-any-return]
    return _dropped(input, state, seed, offset, as_float(p), first)


def _draws(input: Tensor, p: float, training: bool) -> bool:
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {shown(p)}")
    return training and p != 0 and input.numel() > 0


def _drop_channels(
    input: Tensor, axes: int, p: float, training: bool, inplace: bool, generator: torch.Generator | None
) -> Tensor:
    """Whole channels of ``input``, which has ``axes`` axes (N, C, ...) or one less (C, ...)."""
    if input.dim() not in (axes - 1, axes):
        raise RuntimeError(f"dropout{axes - 2}d: expected {axes - 1} or {axes} axes, but got {input.dim()}")
    if not _draws(input, p, training):
        return input
    shape = input.shape[: input.dim() - axes + 2]
    ones = copied(torch.ones((*shape, *(1,) * (axes - 2)), dtype=input.dtype, device=input.device), input)
    chosen = dropout(ones, p, generator=generator)
    found: Tensor = RECORDED["expression_2_1"](input, chosen, "mul tt", [])
    return overwritten(input, found) if inplace else found


@replayed
def dropout1d(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """``dropout`` of whole channels of (N, C, L) or (C, L): as ``torch.nn.functional.dropout1d``."""
    return _drop_channels(input, 3, p, training, inplace, generator)


@replayed
def dropout2d(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """``dropout`` of whole channels of (N, C, H, W): as ``torch.nn.functional.dropout2d``; three axes are (N, C, L)."""
    return _drop_channels(input, 3 if input.dim() == 3 else 4, p, training, inplace, generator)


@replayed
def dropout3d(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """``dropout`` of whole channels of (N, C, D, H, W) or (C, D, H, W): as ``torch.nn.functional.dropout3d``."""
    return _drop_channels(input, 5, p, training, inplace, generator)
