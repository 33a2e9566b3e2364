"""Reductions over any set of axes, as torch has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from triplan.functional._autocast import widened
from triplan.functional._ops import check_out
from triplan.functional._replay.recording import setting
from triplan.functional._replay.replay import repeats, replayed
from triplan.functional.reductions.engine import dims, extremum, reduce, reduce_pair

__all__ = [
    "all", "amax", "amin", "aminmax", "any", "argmax", "argmin", "count_nonzero", "logsumexp", "max", "mean", "min",
    "prod", "std", "std_mean", "sum", "var", "var_mean", "vector_norm",
]  # fmt: skip

Tensor = torch.Tensor
F = TypeVar("F", bound=Callable[..., Any])
Axes = int | Sequence[int] | None


def _refuse_complex(name: str, *dtypes: torch.dtype | None) -> None:
    for dtype in dtypes:
        if dtype is not None and dtype.is_complex:
            raise RuntimeError(f"{name}(): expected floats, integers or bool, but got {dtype}")


def _into(name: str, out: Tensor | None, result: Tensor, input: Tensor) -> Tensor:
    if out is None:
        return result
    like = input.to(result.dtype) if input.requires_grad else result.detach()
    check_out(name, out, (like,), lambda: result.shape)
    return out.copy_(result)


def _call(
    op: str,
    input: Tensor,
    dim: Axes,
    keepdim: bool,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    correction: float = 1.0,
    order: float = 2.0,
) -> Tensor:
    """``op`` of one result. ``dtype``: that of the result, and of what is reduced unless both are floats."""
    _refuse_complex(op, input.dtype, dtype)
    if dtype is None and out is not None and op in ("sum", "mean", "prod", "vector_norm"):
        dtype = out.dtype
    torchs = "linalg_vector_norm" if op == "vector_norm" else op
    wide = widened(torchs, input.new_empty(0))[0].dtype
    if dtype is None and wide is not input.dtype:
        dtype = wide
    floats = input.is_floating_point()
    if dtype is not None and not (floats and dtype.is_floating_point):
        input = input.to(dtype)
    elif dtype is not None and dtype.itemsize < input.dtype.itemsize:
        input = input.to(dtype)  # torch converts first
    computed: torch.dtype | None = dtype if dtype is not None and dtype.is_floating_point else None
    if op in ("argmax", "argmin", "count_nonzero") or (computed is None and not input.is_floating_point()):
        computed = torch.int64
    if op in ("any", "all"):
        computed = torch.bool
    if op in ("amax", "amin"):
        computed = None
    result = reduce(op, input, dims(op, input.dim(), dim), keepdim, computed, float(correction), float(order))
    if op in ("any", "all") and input.dtype is torch.uint8:
        result = result.to(torch.uint8)
    if dtype is not None and op in ("sum", "prod", "mean", "vector_norm"):
        result = result.to(dtype)
    return _into(op, out, result, input)


@replayed
def sum(
    input: Tensor,
    dim: Axes = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The sum over ``dim``: an axis, several, or None for all (torch.sum).

    ``input``: floats, integers or bool of any shape and strides; ``dtype``: that of the result, by default i64 for
    integers and bool. f16 and bf16 are accumulated in f32, integers in i64 modulo 2**64, always in the same order: the
    same bits in every run. Returns a tensor without ``dim``, or with extents 1 there with ``keepdim``. Differentiable,
    any number of times. Raises ``IndexError`` for ``dim``, ``RuntimeError`` for a repeated one and complex numbers.
    """
    return _call("sum", input, dim, keepdim, dtype=dtype, out=out)


@replayed
def mean(
    input: Tensor,
    dim: Axes = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The mean over ``dim`` (torch.mean), of floats; else as ``sum``."""
    asked = dtype or input.dtype
    if not asked.is_floating_point and not asked.is_complex:
        raise RuntimeError(
            f"mean(): could not infer output dtype. Input dtype must be a floating point dtype. Got: {asked}"
        )
    return _call("mean", input, dim, keepdim, dtype=dtype, out=out)


@replayed
def prod(
    input: Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The product over one axis, or all (torch.prod); else as ``sum``. Its gradient divides by nothing."""
    return _call("prod", input, dim, keepdim, dtype=dtype, out=out)


@replayed
def amax(input: Tensor, dim: Axes = (), keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
    """The largest element over ``dim``, or NaN where there is one (torch.amax). Equal ones share the gradient."""
    return _call("amax", input, dim, keepdim, out=out)


@replayed
def amin(input: Tensor, dim: Axes = (), keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
    """The smallest element over ``dim``, or NaN where there is one (torch.amin). Equal ones share the gradient."""
    return _call("amin", input, dim, keepdim, out=out)


@replayed
def _both_ends(input: Tensor, dim: Axes, keepdim: bool) -> tuple[Tensor, Tensor]:
    return _pair("aminmax", input, dim, keepdim)


@repeats(_both_ends)
def aminmax(input: Tensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """``amin`` and ``amax``, by one launch, as a named tuple (min, max) (torch.aminmax)."""
    return torch.return_types.aminmax(_both_ends(input, dim, keepdim))


def _pair(op: str, input: Tensor, dim: Axes, keepdim: bool, correction: float = 1.0) -> tuple[Tensor, Tensor]:
    """``op`` of two results."""
    _refuse_complex(op, input.dtype)
    first, second = reduce_pair(op, input, dims(op, input.dim(), dim), keepdim, None, float(correction), 2.0)
    return first, second


def _extrema(op: str, input: Tensor, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    _refuse_complex(op, input.dtype)
    values, indices = extremum(op, input, [dim], keepdim, None, 1.0, 2.0)
    return values, indices


@replayed
def _largest(input: Tensor, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    return _extrema("max", input, dim, keepdim)


@replayed
def _smallest(input: Tensor, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    return _extrema("min", input, dim, keepdim)


def _named(
    op: str, found: Any, whole: Any, binary: Any, returns: Any, input: Tensor, dim: Any, keepdim: bool, out: Any
) -> Any:
    if dim is None:
        if input.numel() == 0:
            raise RuntimeError(f"{op}(): Expected reduction dim to be specified for input.numel() == 0.")
        return whole(input, out=out)
    if isinstance(dim, Tensor):
        return binary(input, dim, out=out)
    values, indices = found(input, dim, keepdim)
    if out is not None:
        values, indices = _into(op, out[0], values, input), _into(op, out[1], indices, input)
    return returns((values, indices))


@repeats(_largest)
def max(input: Tensor, dim: Any = None, keepdim: bool = False, *, out: Any = None) -> Any:
    """The largest element of all; with an axis ``dim``, those along it and their positions (torch.max).

    The first NaN, if there is one, and the first of equal elements. The gradient goes to that element alone; of the
    largest of all, equal ones share it. ``out``: a pair of tensors if there is a ``dim``. Given a second tensor,
    torch.maximum.
    """
    return _named("max", _largest, amax, torch.maximum, torch.return_types.max, input, dim, keepdim, out)


@repeats(_smallest)
def min(input: Tensor, dim: Any = None, keepdim: bool = False, *, out: Any = None) -> Any:
    """As ``max``, of the smallest element (torch.min)."""
    return _named("min", _smallest, amin, torch.minimum, torch.return_types.min, input, dim, keepdim, out)


@replayed
def argmax(input: Tensor, dim: int | None = None, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
    """The position of the largest element along ``dim``, or row-major among all (torch.argmax); else as ``max``."""
    return _call("argmax", input, dim, keepdim, out=out)


@replayed
def argmin(input: Tensor, dim: int | None = None, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
    """The position of the smallest element along ``dim``, or row-major among all (torch.argmin); else as ``max``."""
    return _call("argmin", input, dim, keepdim, out=out)


@replayed
def any(input: Tensor, dim: Axes = None, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
    """Whether some element over ``dim`` is not 0 (torch.any): bool, or u8 for u8."""
    return _call("any", input, dim, keepdim, out=out)


@replayed
def all(input: Tensor, dim: Axes = None, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
    """Whether no element over ``dim`` is 0 (torch.all): bool, or u8 for u8."""
    return _call("all", input, dim, keepdim, out=out)


@replayed
def count_nonzero(input: Tensor, dim: Axes = None) -> Tensor:
    """How many elements over ``dim`` are not 0, as i64 (torch.count_nonzero)."""
    return _call("count_nonzero", input, dim, False)


def _corrected(op: str, input: Tensor, dim: Any, unbiased: Any, correction: float | None) -> tuple[Any, float]:
    """The axes and the correction of a variance."""
    if isinstance(dim, bool):  # torch's older signature
        dim, unbiased = None, dim
    if not input.is_floating_point():
        raise RuntimeError(f"{op}(): only supports floating point dtypes, but got {input.dtype}")
    if correction is None:
        correction = 1.0 if unbiased is None else float(unbiased)
    return dim, correction


def _deviation(
    op: str, input: Tensor, dim: Any, unbiased: Any, keepdim: bool, correction: float | None, out: Tensor | None
) -> Tensor:
    over, how = _corrected(op, input, dim, unbiased, correction)
    return _call(op, input, over, keepdim, correction=how, out=out)


@replayed
def var(
    input: Tensor,
    dim: Any = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The variance over ``dim``: squared deviations from the mean over n - ``correction`` (torch.var), of floats.

    ``unbiased``: a correction of 1, the default, or 0. One pass: means and squares of parts are merged by the formulas
    of Chan, Golub and LeVeque (1983).
    """
    return _deviation("var", input, dim, unbiased, keepdim, correction, out)


@replayed
def std(
    input: Tensor,
    dim: Any = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The standard deviation, the root of ``var`` (torch.std)."""
    return _deviation("std", input, dim, unbiased, keepdim, correction, out)


def _beside_mean(
    op: str, input: Tensor, dim: Any, unbiased: Any, keepdim: bool, correction: float | None
) -> tuple[Tensor, Tensor]:
    over, how = _corrected(op, input, dim, unbiased, correction)
    return _pair(op, input, over, keepdim, how)


@replayed
def var_mean(
    input: Tensor, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: float | None = None
) -> tuple[Tensor, Tensor]:
    """``var`` and the mean that it is computed from, by one launch (torch.var_mean)."""
    return _beside_mean("var_mean", input, dim, unbiased, keepdim, correction)


@replayed
def std_mean(
    input: Tensor, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: float | None = None
) -> tuple[Tensor, Tensor]:
    """``std`` and the mean that it is computed from, by one launch (torch.std_mean)."""
    return _beside_mean("std_mean", input, dim, unbiased, keepdim, correction)


@replayed
def logsumexp(input: Tensor, dim: Axes, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
    """The logarithm of the sum of exponentials over ``dim`` (torch.logsumexp), in one pass that never overflows.

    Integers and bool are converted to torch's default dtype.
    """
    if not input.is_floating_point() and not input.is_complex():
        input = input.to(setting(torch.get_default_dtype))
    return _call("logsumexp", input, dim, keepdim, out=out)


@replayed
def vector_norm(
    x: Tensor,
    ord: float = 2,
    dim: Axes = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``(sum |x|**ord) ** (1 / ord)`` over ``dim`` (torch.linalg.vector_norm), of floats.

    ``ord`` 0 counts elements that are not 0, inf and -inf find the largest and smallest magnitude. Other negative ones
    are torch's own.
    """
    if not x.is_floating_point():
        raise RuntimeError(f"vector_norm(): Expected a floating point tensor as input. Got {x.dtype}")
    kept = dtype or x.dtype
    if torch.promote_types(x.dtype, kept) != kept:
        raise RuntimeError(f"vector_norm(): {x.dtype} cannot be converted to {kept} without narrowing")
    if ord == 0:
        return _into("vector_norm", out, _call("count_nonzero", x, dim, keepdim).to(kept), x)
    if ord in (math.inf, -math.inf):
        return _call("amax" if ord > 0 else "amin", x.to(kept).abs(), dim, keepdim, out=out)
    if ord < 0:
        found: Tensor = torch.linalg.vector_norm(x, ord, dim, keepdim, dtype=dtype, out=out)
        return found
    return _call("vector_norm", x, dim, keepdim, dtype=dtype, out=out, order=ord)
