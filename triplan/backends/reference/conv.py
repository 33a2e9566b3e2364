"""Convolution in plain torch, from the definition: one product for each tap of the filters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from triplan.backends.table import CheckRules, reference
from triplan.backends.triton.common import bounds
from triplan.descriptors import Conv2dDescriptor
from triplan.descriptors.conv import Conv2dProblem
from triplan.sku import ElementKind, MathPrecision, PrecisionGuarantee
from triplan.sku.facts import fact

ELEMENTS = ("f16", "bf16", "f32", "f64")
#: The smallest positive tf32 number: what is smaller may become 0, and 0 times an infinity is NaN.
TF32_SMALLEST = 2.0**-136


def addends(desc: Conv2dProblem) -> int:
    """The largest number of products that are summed for an element of the result."""
    if desc.op == "conv2d_backward_weight":
        return desc.batch * math.prod(desc.out_extents)
    return (desc.channels if desc.op == "conv2d" else desc.filters) * desc.taps


@fact
def _guarantee(desc: Conv2dProblem) -> Mapping[str, PrecisionGuarantee]:
    """Products are added in any order, and then a bias."""
    compute, n = desc.element.compute, addends(desc) + 2
    error = bounds.compounded(n * math.log1p(compute.unit_roundoff))
    if compute is ElementKind.F64:
        error *= 2  # the float64 oracle has as large an error
    lost = (n * bounds.smallest_subnormal(compute),)
    tolerance = bounds.tolerance(desc.element, compute, per_term=error, lost=lost)
    # The library behind torch.einsum may cut a sum into as many pieces as there are threads.
    return bounds.of_outputs(desc, bounds.guarantee(compute, tolerance, bit_stable=False))


def _windows(desc: Conv2dProblem, padded: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """For each tap (r, s) of the filters, the view of ``padded`` (..., height, width) that it is multiplied with."""

    def along(axis: int, tap: int) -> slice:
        start, step = desc.dilation[axis] * tap, desc.stride[axis]
        return slice(start, start + step * (desc.out_extents[axis] - 1) + 1, step)

    for r in range(desc.kernel[0]):
        for s in range(desc.kernel[1]):
            yield r, s, padded[..., along(0, r), along(1, s)]


def _padded(desc: Conv2dProblem, x: Tensor) -> Tensor:
    """``x`` with its padding of zeros: (batch, groups, channels, height, width)."""
    above, below, left, right = desc.padding
    x = torch.nn.functional.pad(x, (left, right, above, below))
    return x.reshape(desc.batch, desc.groups, desc.channels, *x.shape[2:])


def _weights(desc: Conv2dProblem, weight: Tensor) -> Tensor:
    return weight.reshape(desc.groups, desc.filters, desc.channels, *desc.kernel)


def _results(desc: Conv2dProblem, dout: Tensor) -> Tensor:
    return dout.reshape(desc.batch, desc.groups, desc.filters, *desc.out_extents)


# --- what checks must know ---

#: What multiplies what, by op.
FACTORS = {
    "conv2d": ("x", "weight"),
    "conv2d_backward_input": ("dout", "weight"),
    "conv2d_backward_weight": ("x", "dout"),
}


def _terms(desc: Conv2dProblem, x: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Sum|terms|. Tensor cores align products before they normalise them, so that a subnormal factor loses as many bits
    as the smallest normal number would: it counts as that one. The same holds for f32 in tf32."""
    found = dict(x)
    if desc.element.itemsize == 2 or desc.multiplicands is MathPrecision.TF32:
        least = torch.finfo(desc.element.torch).tiny
        found |= {name: torch.where(x[name] > 0, x[name].clamp(min=least), x[name]) for name in FACTORS[desc.op]}
    most = torch.finfo(desc.element.compute.torch).max / 2
    return {name: torch.where(t > most, torch.inf, t) for name, t in COMPUTE[desc.op](desc, found).items()}


def _inputs(desc: Conv2dProblem, x: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Beside infinities, 0 for numbers that tf32 may flush: whether infinity times these is NaN is not defined."""
    if desc.multiplicands is not MathPrecision.TF32:
        return {}
    found = {name: x[name] for name in FACTORS[desc.op]}
    if all(bool(t.isfinite().all()) for t in found.values()):
        return {}
    return {name: torch.where(t.abs() < TF32_SMALLEST, 0.0, t) for name, t in found.items()}


# --- ops ---


def conv2d(desc: Conv2dDescriptor, x: Mapping[str, Any]) -> Mapping[str, Tensor]:
    weight = _weights(desc, x["weight"])
    out = weight.new_zeros((desc.batch, desc.groups, desc.filters, *desc.out_extents))
    for r, s, window in _windows(desc, _padded(desc, x["x"])):
        out += torch.einsum("ngcpq,gkc->ngkpq", window, weight[..., r, s])
    out = out.reshape(desc.batch, desc.out_channels, *desc.out_extents)
    return {"out": out + x["bias"][:, None, None] if desc.has_bias else out}


def backward_input(desc: Conv2dProblem, x: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """For each tap, adds ``dout * weight`` to the rows and columns of dx that it reaches.

    Those have one remainder modulo the strides. dout is taken as 0 beyond its borders.
    """
    weight, dout = _weights(desc, x["weight"]), _results(desc, x["dout"])
    size = (desc.height, desc.width)
    dx = dout.new_zeros((desc.batch, desc.groups, desc.channels, *size))

    def reached(axis: int, tap: int) -> tuple[slice, Tensor]:
        """(rows of dx, the row of dout that each reads): one past dout's last row, which is 0, where there is none."""
        step, ahead = desc.stride[axis], desc.padding[2 * axis] - desc.dilation[axis] * tap
        rows = slice(-ahead % step, size[axis], step)
        read = (torch.arange(size[axis], device=dout.device)[rows] + ahead) // step
        end = desc.out_extents[axis]
        return rows, torch.where((read < 0) | (read > end), end, read)

    around = torch.nn.functional.pad(dout, (0, 1, 0, 1))  # zeros
    for r in range(desc.kernel[0]):
        rows, read_rows = reached(0, r)
        for s in range(desc.kernel[1]):
            columns, read_columns = reached(1, s)
            window = around[..., read_rows, :][..., read_columns]
            dx[..., rows, columns] += torch.einsum("ngkhw,gkc->ngchw", window, weight[..., r, s])
    return {"dx": dx.reshape(desc.batch, desc.in_channels, *size)}


def backward_weight(desc: Conv2dProblem, x: Mapping[str, Any]) -> Mapping[str, Tensor]:
    dout = _results(desc, x["dout"])
    dweight = dout.new_zeros((desc.groups, desc.filters, desc.channels, *desc.kernel))
    for r, s, window in _windows(desc, _padded(desc, x["x"])):
        dweight[..., r, s] = torch.einsum("ngcpq,ngkpq->gkc", window, dout)
    return {"dweight": dweight.reshape(desc.out_channels, desc.channels, *desc.kernel)}


COMPUTE: dict[str, Callable[[Any, Mapping[str, Any]], Mapping[str, Tensor]]] = {
    "conv2d": conv2d,
    "conv2d_backward_input": backward_input,
    "conv2d_backward_weight": backward_weight,
}
for _op, _compute in COMPUTE.items():
    rules = CheckRules(_terms, _inputs, integers=lambda desc: True)
    reference(op=_op, elements=ELEMENTS, guarantee=_guarantee, checks=rules)(_compute)
