"""Copies that move elements along axes, or keep a triangle: the gradient is the move back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from triplan.facade import CopyPlan, PadPlan
from triplan.functional._ops import Op
from triplan.functional._plans import run
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import axis, integer
from triplan.functional._sharding.axes import but
from triplan.functional.copies.conversions import clone
from triplan.functional.copies.engine import MAX_RANK, Number, Tensor, as_bits, check_fillable, known, number

__all__ = ["flip", "pad", "roll", "tril", "tril_", "triu", "triu_"]


def _check_rank(name: str, x: Tensor) -> None:
    most = MAX_RANK - (x.itemsize > 8)
    if x.dim() > most:
        raise NotImplementedError(f"{name}(): {x.dim()} axes are not supported, only up to {most} of {x.dtype}")


def _moved_shape(x: Tensor, op: str, amounts: Sequence[int], value: Number) -> Sequence[int]:
    _check_rank(op, x)
    if op != "pad":
        return x.shape
    check_fillable("pad", x.dtype)
    found = [n + amounts[2 * a] + amounts[2 * a + 1] for a, n in enumerate(x.shape)]
    if not torch.compiler.is_compiling() and any(n < 0 for n in found):
        raise RuntimeError(f"pad(): of {list(x.shape)}, the padding {list(amounts)} leaves {found}")
    return found


def _fill_moved(out: Tensor, x: Tensor, op: str, amounts: Sequence[int], value: Number) -> None:
    if op == "pad":
        value = number(value, x.dtype)
    x, out = as_bits(x.resolve_conj().resolve_neg()), as_bits(out)
    # The real and imaginary parts of complex128 are an axis more.
    amounts = [*amounts, *[0] * ((2 if op == "pad" else 1) * x.dim() - len(amounts))]
    if op == "pad":
        run(PadPlan, {"x": x, "out": out}, scalars={"value": value}, amounts=tuple(amounts))
    else:
        run(CopyPlan, {"x": x, "out": out}, op=op, amounts=tuple(amounts))


def _moved_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.op, ctx.amounts = inputs[1:3]


def _moved_back(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    amounts = ctx.amounts if ctx.op == "flip" else [-a for a in ctx.amounts]
    return _move(g, ctx.op, amounts, 0), None, None, None


def _moved_axes(x: Any, op: str, amounts: Sequence[int], *_: Any) -> str:
    each = 2 if op == "pad" else 1
    moved = [a for a in range(len(x.shape)) if any(amounts[each * a : each * a + each])]
    axes = but(len(x.shape), *moved)
    return f"{axes} -> {axes}"


_move = Op(
    "move",
    "Tensor x, str op, SymInt[] amounts, Scalar value",
    axes=_moved_axes,
    shape=_moved_shape,
    fill=_fill_moved,
    setup=_moved_setup,
    backward=_moved_back,
)


def _axes(dims: int | Sequence[int], rank: int) -> list[int]:
    dims = integer(dims)
    return [axis(d, rank) for d in ([dims] if isinstance(dims, int) else dims)]


@replayed
def flip(input: Tensor, dims: Sequence[int]) -> Tensor:
    """A copy of ``input``, reversed along ``dims``: as ``torch.flip``. Raises ``RuntimeError`` if one is repeated."""
    axes = _axes(dims, input.dim())
    if len(set(axes)) < len(axes):
        raise RuntimeError(f"flip(): a dim appears multiple times in the list of dims {list(dims)}")
    if not input.dim():
        return clone(input)
    return _move(input, "flip", [int(a in axes) for a in range(input.dim())], 0)


@replayed
def roll(input: Tensor, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Tensor:
    """A copy of ``input``, moved by ``shifts`` along ``dims``, where what leaves one end enters at the other.

    As ``torch.roll``: without ``dims``, of the flattened tensor.
    """
    shifts, dims = integer(shifts), integer(dims)
    by = [shifts] if isinstance(shifts, int) else list(map(integer, shifts))
    if not by:
        raise RuntimeError("`shifts` required")
    if dims is None or (not isinstance(dims, int) and not dims):
        if len(by) != 1:
            raise RuntimeError(f"shifts and dimensions must align. shifts: {len(by)}, dims:0")
        return _move(input.reshape(-1), "roll", by, 0).view(input.shape)
    axes = _axes(dims, input.dim())
    if len(axes) != len(by):
        raise RuntimeError(f"shifts and dimensions must align. shifts: {len(by)}, dims:{len(axes)}")
    if not input.dim():
        return clone(input)
    amounts = [sum(s for s, a in zip(by, axes, strict=True) if a == at) for at in range(input.dim())]
    return _move(input, "roll", amounts, 0)


@replayed
def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: Number | None = None) -> Tensor:
    """``input`` between elements of ``value`` (None is 0): ``torch.nn.functional.pad`` of mode "constant".

    ``pad``: (before, after) of the last axis, then of the one before it, and so on; negative counts leave elements out.
    Other modes raise ``NotImplementedError``; counts that do not fit, ``RuntimeError``.
    """
    if mode != "constant":
        raise NotImplementedError(f"pad(): mode {mode!r} is not supported, only 'constant'")
    if len(pad) % 2 or len(pad) > 2 * input.dim():
        raise RuntimeError(f"pad(): {len(pad)} counts for {input.dim()} axes: at most two for each, in pairs")
    if not input.dim():
        return clone(input)
    pairs = [*zip(pad[::2], pad[1::2], strict=True), *[(0, 0)] * (input.dim() - len(pad) // 2)]
    return _move(input, "pad", [n for pair in reversed(pairs) for n in pair], 0 if value is None else value)


def _triangle_shape(x: Tensor, upper: bool, diagonal: int) -> Sequence[int]:
    if x.dim() < 2:
        raise RuntimeError(f"{'triu' if upper else 'tril'}(): input tensor must have at least 2 dimensions")
    _check_rank("triu" if upper else "tril", x)
    return x.shape


def _fill_triangle(out: Tensor, x: Tensor, upper: bool, diagonal: int) -> None:
    if not known(x.dtype) and x.itemsize > 8:
        raise NotImplementedError(f"{'triu' if upper else 'tril'}(): {x.dtype} is not supported")
    x, out = as_bits(x.resolve_conj().resolve_neg()), as_bits(out)
    run(CopyPlan, {"x": x, "out": out}, op="triu" if upper else "tril", amounts=(int(diagonal),))


def _keep_triangle(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.how = inputs[1:]


def _triangle_back(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    return _triangle(g, *ctx.how), None, None


_triangle = Op(
    "triangle",
    "Tensor x, bool upper, SymInt diagonal",
    axes="*.. -> *..",
    shape=_triangle_shape,
    fill=_fill_triangle,
    update=lambda out, upper, diagonal: _fill_triangle(out, out, upper, diagonal),
    setup=_keep_triangle,
    backward=_triangle_back,
)


@replayed
def tril(input: Tensor, diagonal: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Matrices without what is above ``diagonal``, as ``torch.tril``."""
    return _triangle.into(out, input, False, diagonal)


@replayed
def triu(input: Tensor, diagonal: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Matrices without what is below ``diagonal``, as ``torch.triu``."""
    return _triangle.into(out, input, True, diagonal)


@replayed
def tril_(input: Tensor, diagonal: int = 0) -> Tensor:
    """``tril`` in place, as ``Tensor.tril_``."""
    return _triangle.in_place(input, False, diagonal)


@replayed
def triu_(input: Tensor, diagonal: int = 0) -> Tensor:
    """``triu`` in place, as ``Tensor.triu_``."""
    return _triangle.in_place(input, True, diagonal)
