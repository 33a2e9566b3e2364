"""Cumulative sums and products for the proofs: ``n`` rows, short ones and some that are divided into blocks."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import triplan as tp
from proofs import Kind, draw, follows, joins
from proofs.rows import Rows, size


class Scans(Rows):
    moves_rows = False


def near_one(n: int, length: int, element: tp.ElementKind, g: torch.Generator) -> Tensor:
    """Factors of both signs, each followed by about its reciprocal: no product of neighbours leaves the range."""
    if not element.is_floating_point:
        return 2 * torch.randint(-(2**62), 2**62, (n, length), generator=g) + 1  # odd, so that no product becomes 0
    x = (torch.randn(n, length, generator=g, dtype=torch.float64) * 0.3).exp()
    x[:, 1::2] = 1 / x[:, : length - 1 : 2]
    return (x * (torch.randint(0, 2, x.shape, generator=g) * 2 - 1)).to(element.torch)


def scan_values(desc: tp.Descriptor, n: int, length: int, element: tp.ElementKind, kind: Kind) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    if desc.op == "cumsum":
        x = draw((n, length), element, kind, length, g)
        if kind == "cancelling" and element.is_floating_point:
            x[:, length // 2 : length // 2 * 2] = -x[:, : length // 2]
        return {"x": x}
    values = {"x": near_one(n, length, element, g)}
    if desc.op == "cumprod_backward":
        values["out"] = torch.empty_like(values["x"])
        values["dout"] = draw((n, length), element, "cancelling", length, g)
        values |= follows(desc, values)
    return values


def scan_problem(
    op: str, n: int, element: tp.ElementKind, kind: Kind, long: bool = False, reverse: bool = False
) -> Scans:
    n, length = size(n, long)
    if op == "cumprod_backward":  # the interpreter takes 70 microseconds an element
        n, length = max(n // 8, 3), 2200 if long else length // 2
    options = {"reverse": reverse} if op != "cumprod_backward" else {}
    desc = tp.descriptor_types()[op](op=op, input_shape=(n, length), scan_axis=1, element=element, **options)
    return Scans(desc, partial(scan_values, desc, n, length, element, kind))


for _op in tp.ScanDescriptor.ops():
    joins(_op, {}, {"long": True, "reverse": True})(partial(scan_problem, _op))
joins("cumprod_backward", {}, {"long": True})(partial(scan_problem, "cumprod_backward"))
