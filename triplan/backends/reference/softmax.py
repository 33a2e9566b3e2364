"""softmax and log_softmax in plain torch, from their definitions: shares no computation with the kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from triplan.backends.table import CheckRules, Compute, reference
from triplan.backends.triton.common import bounds
from triplan.descriptors.softmax import AnySoftmaxDescriptor
from triplan.sku import PrecisionGuarantee

FLOATS = ("f16", "bf16", "f32", "f64")
Tensors = Mapping[str, Tensor]


# --- what checks must know: sum|terms|, from absolute values ---


def _log_softmax_terms(desc: AnySoftmaxDescriptor, x: Tensors) -> Tensors:
    """The logarithm's argument is a sum of exponentials, the largest of which is 1."""
    return {"out": torch.ones_like(x["x"])}


def _softmax_backward_terms(desc: AnySoftmaxDescriptor, x: Tensors) -> Tensors:
    y, dy = x["out"], x["dout"]
    return {"dx": y * (dy + (y * dy).sum(desc.softmax_axis, keepdim=True))}


def _log_softmax_backward_terms(desc: AnySoftmaxDescriptor, x: Tensors) -> Tensors:
    """``out`` is a logarithm of at most 1."""
    return {"dx": x["dout"] + (-x["out"]).exp() * x["dout"].sum(desc.softmax_axis, keepdim=True)}


def _result(desc: AnySoftmaxDescriptor, x: Tensors) -> Tensors:
    """``out`` is a result of the forward op."""
    function = torch.log_softmax if desc.op.startswith("log_") else torch.softmax
    return {"out": function(x["out"].double(), desc.softmax_axis).to(x["out"].dtype)}


RULES = {
    "softmax": CheckRules(CheckRules.no_terms, passes=("unit", "wide", "special")),
    "log_softmax": CheckRules(_log_softmax_terms, passes=("unit", "wide", "special")),
    # Products of wide values would leave the range of f32.
    "softmax_backward": CheckRules(_softmax_backward_terms, _result, ("unit",)),
    "log_softmax_backward": CheckRules(_log_softmax_backward_terms, _result, ("unit",)),
}


# --- ops ---


def _declare(op: str, exponential: bool) -> Callable[[Compute], Compute]:
    """Register a reference. Its roundings: one per addition along a row, 12, and those that an exponential amplifies.

    Never batch-invariant: torch may divide sums into blocks that depend on the batch.
    """

    def guarantee(desc: AnySoftmaxDescriptor) -> Mapping[str, PrecisionGuarantee]:
        compute, others = desc.element.compute, desc.input_shape[desc.softmax_axis] + 12
        roundings = others + (3 * bounds.MOST_EXPONENT[compute] if exponential else 0)
        found = bounds.rounded(desc.element, compute, relative=roundings, per_term=roundings, flushes=others)
        return bounds.of_outputs(desc, found)

    return reference(op=op, elements=FLOATS, guarantee=guarantee, checks=RULES[op])


def _shifted(x: Tensor, axis: int) -> Tensor:
    """``x - max(x)`` by rows: exponentials of ``x`` itself would overflow."""
    if x.numel() == 0:
        return x
    return x - x.max(axis, keepdim=True).values


@_declare("softmax", exponential=True)
def softmax(desc: AnySoftmaxDescriptor, x: Tensors) -> Tensors:
    e = _shifted(x["x"], desc.softmax_axis).exp()
    return {"out": e / e.sum(desc.softmax_axis, keepdim=True)}


@_declare("log_softmax", exponential=True)
def log_softmax(desc: AnySoftmaxDescriptor, x: Tensors) -> Tensors:
    v = _shifted(x["x"], desc.softmax_axis)
    return {"out": v - v.exp().sum(desc.softmax_axis, keepdim=True).log()}


@_declare("softmax_backward", exponential=False)
def softmax_backward(desc: AnySoftmaxDescriptor, x: Tensors) -> Tensors:
    dout, out = x["dout"], x["out"]
    return {"dx": out * (dout - (dout * out).sum(desc.softmax_axis, keepdim=True))}


@_declare("log_softmax_backward", exponential=True)
def log_softmax_backward(desc: AnySoftmaxDescriptor, x: Tensors) -> Tensors:
    dout, out = x["dout"], x["out"]
    return {"dx": dout - out.exp() * dout.sum(desc.softmax_axis, keepdim=True)}
