"""Pooling and resizing in plain torch, from the definitions: one step for each element of a window."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from triplan.backends.table import CheckRules, reference
from triplan.backends.triton.common import bounds
from triplan.descriptors import (
    AdaptiveAvgPool2dBackwardDescriptor,
    AdaptiveAvgPool2dDescriptor,
    AvgPool2dBackwardDescriptor,
    AvgPool2dDescriptor,
    Descriptor,
    MaxPool2dBackwardDescriptor,
    MaxPool2dDescriptor,
    UpsampleBilinear2dBackwardDescriptor,
    UpsampleBilinear2dDescriptor,
    UpsampleNearest2dBackwardDescriptor,
    UpsampleNearest2dDescriptor,
)
from triplan.descriptors.pooling import (
    AdaptiveProblem,
    AvgProblem,
    BilinearProblem,
    MaxProblem,
    NearestProblem,
    PoolProblem,
    ResizeProblem,
    WindowsProblem,
)
from triplan.sku import ElementKind, MathPrecision, PrecisionGuarantee

ELEMENTS = ("f16", "bf16", "f32", "f64")
Tensors = Mapping[str, Any]


def _windows(desc: PoolProblem, axis: int) -> list[list[int]]:
    """The positions of each window along an axis, including those outside x (below 0 or beyond the extent)."""
    extent, n = (desc.height, desc.width)[axis], desc.out_extents[axis]
    if isinstance(desc, AdaptiveProblem):
        return [list(range(i * extent // n, -(-(i + 1) * extent // n))) for i in range(n)]
    assert isinstance(desc, WindowsProblem)
    taps = range(desc.kernel[axis])
    return [[i * desc.stride[axis] - desc.padding[axis] + t * desc.dilation[axis] for t in taps] for i in range(n)]


def _taps(desc: PoolProblem, axis: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each tap: the windows whose element at that tap exists, and the positions of these elements."""
    extent, windows = (desc.height, desc.width)[axis], _windows(desc, axis)
    for t in range(max(map(len, windows))):
        found = [(i, w[t]) for i, w in enumerate(windows) if t < len(w) and 0 <= w[t] < extent]
        yield (
            torch.tensor([i for i, _ in found], dtype=torch.long),
            torch.tensor([p for _, p in found], dtype=torch.long),
        )


def _steps(desc: PoolProblem) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """For each element of a window, row by row: (windows, positions) of the rows, and of the columns."""
    columns = list(_taps(desc, 1))
    for rows, ys in _taps(desc, 0):
        for across, zs in columns:
            yield rows, ys, across, zs


def _divisors(desc: PoolProblem, like: Tensor) -> Tensor:
    """The divisor of each window's sum, (output rows, output columns)."""

    def elements(axis: int) -> Tensor:
        extent, padded = (desc.height, desc.width)[axis], 0
        if isinstance(desc, AvgProblem) and desc.count_include_pad:
            padded = desc.padding[axis]
        counts = [sum(-padded <= p < extent + padded for p in window) for window in _windows(desc, axis)]
        return torch.tensor(counts, dtype=like.dtype)

    if isinstance(desc, AvgProblem) and desc.divisor:
        return like.new_full(desc.out_extents, desc.divisor)
    return elements(0)[:, None] * elements(1)


# --- ops ---


def max_pool(desc: MaxProblem, x: Tensors) -> Tensors:
    shape = (desc.batch, desc.channels, *desc.out_extents)
    out, indices = x["x"].new_full(shape, -math.inf), torch.full(shape, -1)
    for rows, ys, across, zs in _steps(desc):
        v, at = x["x"][..., ys, :][..., zs], (ys[:, None] * desc.width + zs).expand(*shape[:2], -1, -1)
        own = (..., rows[:, None], across)
        better = (v > out[own]) | v.isnan() | (indices[own] < 0)
        out[own], indices[own] = torch.where(better, v, out[own]), torch.where(better, at, indices[own])
    return {"out": out, "indices": indices}


def max_backward(desc: MaxProblem, x: Tensors) -> Tensors:
    dx = x["dout"].new_zeros((desc.batch, desc.channels, desc.height, desc.width))
    for rows, ys, across, zs in _steps(desc):
        own = (..., rows[:, None], across)
        chosen = x["indices"][own] == ys[:, None] * desc.width + zs
        dx[..., ys[:, None], zs] += torch.where(chosen, x["dout"][own], 0)
    return {"dx": dx}


def average(desc: PoolProblem, x: Tensors) -> Tensors:
    out = x["x"].new_zeros((desc.batch, desc.channels, *desc.out_extents))
    for rows, ys, across, zs in _steps(desc):
        out[..., rows[:, None], across] += x["x"][..., ys, :][..., zs]
    return {"out": out / _divisors(desc, out).clamp(min=1)}


def average_backward(desc: PoolProblem, x: Tensors) -> Tensors:
    shares = x["dout"] / _divisors(desc, x["dout"]).clamp(min=1)
    dx = shares.new_zeros((desc.batch, desc.channels, desc.height, desc.width))
    for rows, ys, across, zs in _steps(desc):
        # Adaptive windows may start at the same pixel, so positions repeat and an assignment would lose terms.
        part = shares.new_zeros((*dx.shape[:2], len(rows), desc.width))
        dx.index_add_(2, ys, part.index_add_(3, zs, shares[..., rows, :][..., across]))
    return {"dx": dx}


def _averages(desc: PoolProblem, x: Tensors) -> Tensors:
    """Sum|terms|; infinite, so that any result passes, where the sum overflows before it is divided."""
    out = average(desc, x)["out"]
    sums = out * _divisors(desc, out).clamp(min=1)
    return {"out": torch.where(sums > torch.finfo(desc.element.compute.torch).max / 2, math.inf, out)}


def _indices(desc: MaxPool2dBackwardDescriptor, x: Tensors) -> Tensors:
    """Indices as max_pool2d writes them, for values of x drawn here."""
    shape = (desc.batch, desc.channels, desc.height, desc.width)
    values = (torch.arange(math.prod(shape)) * 2654435761 % 1009).double().reshape(shape)
    return {"indices": max_pool(desc, {"x": values})["indices"]}


# --- resizing ---


def _sources(desc: ResizeProblem, axis: int) -> Tensor:
    """``source(p)`` of each position of the result along an axis, in ``desc.position``."""
    at = torch.arange(desc.out_size[axis]).to(desc.position.torch)
    aligned = desc.align_corners if isinstance(desc, BilinearProblem) else not getattr(desc, "exact", False)
    return (at if aligned else at + 0.5) * desc.steps[axis]


def _nearest(desc: NearestProblem, axis: int) -> Tensor:
    """The pixel of ``x`` of which each pixel of the result is a copy, along an axis."""
    if not desc.resized[axis]:
        return torch.arange(desc.out_size[axis])
    return _sources(desc, axis).clamp(max=(desc.height, desc.width)[axis] - 1).long()


def _between(desc: BilinearProblem, axis: int, like: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(positions of the result, pixels of ``x`` that they read, weights like ``like``) along an axis.

    First the pixels at or before the sources, then the next ones, where there are such.
    """
    last, at = (desc.height, desc.width)[axis] - 1, torch.arange(desc.out_size[axis])
    if not desc.resized[axis]:
        return [(at, at, torch.ones(len(at), dtype=like.dtype))]
    s = _sources(desc, axis)
    s = s if desc.align_corners else (s - 0.5).clamp(min=0)
    i, inner = s.floor().clamp(max=last), s.floor() < last
    second = torch.where(inner, s - i, 0).to(like.dtype)
    return [(at, i.long(), 1 - second), (at[inner], i.long()[inner] + 1, second[inner])]


def nearest(desc: NearestProblem, x: Tensors) -> Tensors:
    return {"out": x["x"][..., _nearest(desc, 0), :][..., _nearest(desc, 1)]}


def nearest_backward(desc: NearestProblem, x: Tensors) -> Tensors:
    shape, rows, columns = (desc.batch, desc.channels), _nearest(desc, 0), _nearest(desc, 1)
    part = x["dout"].new_zeros((*shape, desc.out_size[0], desc.width)).index_add_(3, columns, x["dout"])
    return {"dx": part.new_zeros((*shape, desc.height, desc.width)).index_add_(2, rows, part)}


def bilinear(desc: BilinearProblem, x: Tensors) -> Tensors:
    each = x["x"].new_zeros((desc.batch, desc.channels, desc.height, desc.out_size[1]))
    for at, pixels, weights in _between(desc, 1, each):
        each[..., at] += weights * x["x"][..., pixels]
    out = each.new_zeros((desc.batch, desc.channels, *desc.out_size))
    for at, pixels, weights in _between(desc, 0, each):
        out[..., at, :] += weights[:, None] * each[..., pixels, :]
    return {"out": out}


def bilinear_backward(desc: BilinearProblem, x: Tensors) -> Tensors:
    dx = x["dout"].new_zeros((desc.batch, desc.channels, desc.height, desc.width))
    for p, rows, v in _between(desc, 0, dx):
        for q, columns, w in _between(desc, 1, dx):
            part = dx.new_zeros((*dx.shape[:2], len(rows), desc.width))
            terms = v[:, None] * w * x["dout"][..., p, :][..., q]
            dx.index_add_(2, rows, part.index_add_(3, columns, terms))
    return {"dx": dx}


# --- guarantees ---


def _of(desc: PoolProblem) -> Mapping[str, PrecisionGuarantee]:
    """Terms are added one by one, at most one for each window or element; then one division."""
    exact = bounds.guarantee(ElementKind.I64, bounds.EXACT, math_precision=MathPrecision.EXACT)
    if isinstance(desc, MaxPool2dDescriptor):
        return {"out": bounds.guarantee(desc.element.compute, bounds.EXACT), "indices": exact}
    if isinstance(desc, UpsampleNearest2dDescriptor):
        return {"out": PrecisionGuarantee.exact(desc.element)}
    terms = desc.height * desc.width + math.prod(desc.out_extents)
    if isinstance(desc, ResizeProblem):
        order = isinstance(desc, UpsampleBilinear2dDescriptor)
        return bounds.of_outputs(
            desc, bounds.rounded(desc.element, desc.element.compute, 0, 4 * terms + 6, order=order)
        )
    return bounds.of_outputs(desc, bounds.rounded(desc.element, desc.element.compute, 1, terms + 1))


Compute = Callable[[Any, Tensors], Tensors]
TABLE: dict[type[Descriptor], tuple[Compute, CheckRules]] = {
    MaxPool2dDescriptor: (max_pool, CheckRules(CheckRules.no_terms)),
    MaxPool2dBackwardDescriptor: (max_backward, CheckRules(inputs=_indices)),
    AvgPool2dDescriptor: (average, CheckRules(_averages)),
    AvgPool2dBackwardDescriptor: (average_backward, CheckRules()),
    AdaptiveAvgPool2dDescriptor: (average, CheckRules(_averages)),
    AdaptiveAvgPool2dBackwardDescriptor: (average_backward, CheckRules()),
    UpsampleNearest2dDescriptor: (nearest, CheckRules(CheckRules.no_terms)),
    UpsampleNearest2dBackwardDescriptor: (nearest_backward, CheckRules()),
    UpsampleBilinear2dDescriptor: (bilinear, CheckRules()),
    UpsampleBilinear2dBackwardDescriptor: (bilinear_backward, CheckRules()),
}
for _cls, (_compute, _checks) in TABLE.items():
    for _op in _cls.ops():
        _elements = (*ELEMENTS, "u8") if _cls is UpsampleNearest2dDescriptor else ELEMENTS
        reference(op=_op, elements=_elements, guarantee=_of, checks=_checks)(_compute)
