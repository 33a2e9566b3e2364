"""Cumulative sums and products in plain torch, from their definitions: shares no computation with the kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from triplan.backends.table import CheckRules, Compute, reference
from triplan.backends.triton.common import bounds
from triplan.descriptors.scans import AnyScanDescriptor, CumprodBackwardDescriptor, ScanDescriptor
from triplan.sku import ElementKind, MathPrecision, PrecisionGuarantee

FLOATS = ("f16", "bf16", "f32", "f64")
Tensors = Mapping[str, Tensor]


# --- what checks must know ---


def _doubtful(desc: ScanDescriptor, x: Tensors) -> Tensors:
    """0, or infinite from where some product of consecutive elements leaves the accumulator's normal range.

    With L the cumulative logarithms, the largest product of consecutive elements that ends at k is exp(L[k] - min(L[i],
    i < k)).
    """
    if x["x"].numel() == 0 or not desc.element.is_floating_point:
        return {"out": torch.zeros(desc.input_shape, dtype=torch.float64)}
    t = x["x"].flip(desc.scan_axis) if desc.reverse else x["x"]
    logs = torch.where((t == 0) | ~t.isfinite(), 1.0, t).abs().double().log().cumsum(desc.scan_axis)
    info = torch.finfo(desc.element.compute.torch)
    largest, smallest = (torch.tensor(v, dtype=torch.float64).log() for v in (info.max, info.smallest_normal))

    def most(v: Tensor) -> Tensor:
        before = torch.cat([torch.zeros_like(v.narrow(desc.scan_axis, 0, 1)), v], desc.scan_axis)
        lowest = before.cummin(desc.scan_axis).values.narrow(desc.scan_axis, 0, v.shape[desc.scan_axis])
        return (v - lowest).cummax(desc.scan_axis).values

    # (0.1 less, because each product is rounded.)
    out = torch.where((most(logs) > largest - 0.1) | (most(-logs) > 0.1 - smallest), torch.inf, 0.0)
    return {"out": out.flip(desc.scan_axis) if desc.reverse else out}


def _forward(desc: CumprodBackwardDescriptor, x: Tensors) -> Tensors:
    """``out`` must be what the forward op returns."""
    return {"out": x["x"].double().cumprod(desc.scan_axis).to(x["x"].dtype)}


# --- ops ---


def _declare(op: str, elements: tuple[str, ...], checks: CheckRules) -> Callable[[Compute], Compute]:
    """Register a reference. Roundings on the path of a term: one for each element of a row, three in the backward.

    Never batch-invariant: torch may divide rows into blocks that depend on the batch.
    """

    def guarantee(desc: AnyScanDescriptor) -> Mapping[str, PrecisionGuarantee]:
        n, element = desc.input_shape[desc.scan_axis], desc.element
        if not element.is_floating_point:
            exact = bounds.guarantee(ElementKind.I64, bounds.EXACT, math_precision=MathPrecision.EXACT)
            return bounds.of_outputs(desc, exact)
        relative, per_term = {"cumsum": (0, n), "cumprod": (n, 1)}.get(op, (1, 3 * n))
        flushes = 3 * n if op == "cumprod_backward" else 0
        found = bounds.rounded(element, element.compute, relative, per_term, flushes=flushes)
        return bounds.of_outputs(desc, found)

    return reference(op=op, elements=elements, guarantee=guarantee, checks=checks)


def _scan(function: Callable[..., Tensor]) -> Callable[[ScanDescriptor, Tensors], Tensors]:
    def scan(desc: ScanDescriptor, x: Tensors) -> Tensors:
        axis, t = desc.scan_axis, x["x"]
        return {"out": function(t.flip(axis), axis).flip(axis) if desc.reverse else function(t, axis)}

    return scan


def _cumsum(t: Tensor, axis: int) -> Tensor:
    """Sums of blocks of 32, by recursion on the block sums: 32 roundings for each level instead of n."""
    if not t.is_floating_point() or t.shape[axis] <= 32:
        return t.cumsum(axis)
    last = t.movedim(axis, -1)
    n = last.shape[-1]
    blocks = pad(last, (0, -n % 32)).reshape(*last.shape[:-1], -1, 32).cumsum(-1)
    before = pad(_cumsum(blocks[..., -1], -1), (1, -1), value=-0.0)  # -0.0 changes no sum, also not -0.0
    sums: Tensor = (blocks + before.unsqueeze(-1)).flatten(-2)[..., :n].movedim(-1, axis)
    return sums


_declare("cumsum", (*FLOATS, "i64"), CheckRules())(_scan(_cumsum))
_declare("cumprod", (*FLOATS, "i64"), CheckRules(_doubtful, signed=True))(_scan(torch.cumprod))


@_declare("cumprod_backward", FLOATS, CheckRules(None, _forward, ("unit",)))
def cumprod_backward(desc: CumprodBackwardDescriptor, x: Tensors) -> Tensors:
    """``dx[k] = out[k - 1] * s[k]``. s is found by doubling: if s[k] covers d elements from k on, and a[k] is the
    product of the d factors after k, then ``s[k] += a[k] * s[k + d]`` and ``a[k] *= a[k + d]`` cover 2 * d."""
    s, t, out = (x[name].movedim(desc.scan_axis, -1) for name in ("dout", "x", "out"))
    n, d = s.shape[-1], 1
    a, before = (torch.ones_like(s) for _ in range(2))
    a[..., :-1], before[..., 1:] = t[..., 1:], out[..., :-1]
    while d < n:
        s = torch.cat([s[..., :-d] + a[..., :-d] * s[..., d:], s[..., -d:]], -1)
        a = torch.cat([a[..., :-d] * a[..., d:], a[..., -d:]], -1)
        d *= 2
    return {"dx": (before * s).movedim(-1, desc.scan_axis)}
