"""softmax and log_softmax in plain torch, from the definitions. Shares nothing with the kernels but the descriptors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triplan.backends.reference.rows import Outputs, Tensor
from triplan.backends.reference.rows import rows_reference as _declare


def _shifted(x: Tensor, axis: int) -> Tensor:
    """``x`` less its rows' maxima; the definition is the same without, but overflows."""
    if x.numel() == 0:
        return x
    return x - x.max(axis, keepdim=True).values


@_declare("softmax", exponential=True)
def softmax(desc: Any, x: Mapping[str, Any]) -> Outputs:
    e = _shifted(x["x"], desc.softmax_axis).exp()
    return {"out": e / e.sum(desc.softmax_axis, keepdim=True)}


@_declare("log_softmax", exponential=True)
def log_softmax(desc: Any, x: Mapping[str, Any]) -> Outputs:
    v = _shifted(x["x"], desc.softmax_axis)
    return {"out": v - v.exp().sum(desc.softmax_axis, keepdim=True).log()}


@_declare("softmax_backward", exponential=False)
def softmax_backward(desc: Any, x: Mapping[str, Any]) -> Outputs:
    dout, out = x["dout"], x["out"]
    return {"dx": out * (dout - (dout * out).sum(desc.softmax_axis, keepdim=True))}


@_declare("log_softmax_backward", exponential=True)
def log_softmax_backward(desc: Any, x: Mapping[str, Any]) -> Outputs:
    dout, out = x["dout"], x["out"]
    return {"dx": dout - out.exp() * dout.sum(desc.softmax_axis, keepdim=True)}
