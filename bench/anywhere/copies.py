"""Draws of copies: converted, rolled, flipped and padded tensors of any rank, triangles, joins, and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import triplan as tp
from bench.anywhere.drawing import Draw, Peer, Tensors, described, placed
from triplan.descriptors import CopyDescriptor

#: Conversions that ``copy`` is drawn with: of these elements, to the others.
CONVERTED = {"f32": ("bf16", "f16"), "bf16": ("f32",), "f16": ("f32",), "f64": ("f32",), "i64": ("i32", "f32")}


def draw(op: str, d: Draw) -> tp.Descriptor:
    element = d.element(op)
    numel = max(d.bytes // element.itemsize, 1)
    if op == "arange":
        return described(op, element=element, count=d.extent(numel * 4 // 5, numel))
    if op == "fill":
        rows, n = d.matrix(numel)
        return described(op, element=element, out_shape=(*d.folded(rows), n))
    rows, n = d.matrix(max(numel // 2, 1))
    if op == "join":
        return described(op, element=element, rows=rows, widths=_parts(d, n))
    shape = (*d.folded(rows), n)
    fields: dict[str, Any] = {}
    if op == "copy" and d.chance(0.4):
        fields["out_element"] = d.one_of((element.value, *CONVERTED.get(element.value, ())))
    elif op == "flip":
        fields["amounts"] = tuple(int(d.chance(0.5)) for _ in shape)
    elif op == "roll":
        fields["amounts"] = tuple(d.extent(1, m) for m in shape)
    elif op == "pad":
        fields["amounts"] = (0, 0) * (len(shape) - 2) + tuple(d.extent(0, 8) for _ in range(4))
    elif op in ("tril", "triu"):
        fields["amounts"] = (d.extent(0, max(shape[-1] // 2, 1)),)
    return described(op, element=element, input_shape=shape, **fields)


def _parts(d: Draw, n: int) -> tuple[int, ...]:
    """Widths of up to 8 matrices that have ``n`` columns together."""
    count = min(d.extent(2, 8), n)
    if d.chance(0.5):
        return (n // count,) * count
    ends = sorted(d.extent(0, n) for _ in range(count - 1))
    return tuple(stop - start for start, stop in zip((0, *ends), (*ends, n), strict=True))


def peers(desc: Any) -> dict[str, Peer]:
    if desc.op == "fill":
        return {"torch": lambda t: {"out": t["out"].fill_(t["value"])}}
    if desc.op == "arange":
        return {"torch": lambda t: {"out": _arange(t, desc.count)}}
    if desc.op == "join":
        count = len(desc.widths)
        return {"torch": lambda t: {"out": torch.cat([t[f"x{i}"] for i in range(count)], 1, out=t["out"])}}
    axes, amounts = range(len(desc.input_shape)), desc.by_axis
    pairs = [n for a in reversed(axes) for n in amounts[2 * a : 2 * a + 2]]
    functions: dict[str, Callable[[Tensors], torch.Tensor]] = {
        "copy": lambda t: t["out"].copy_(t["x"]),
        "flip": lambda t: t["x"].flip([a for a in axes if amounts[a]]),
        "roll": lambda t: t["x"].roll(amounts, list(axes)),
        "pad": lambda t: torch.constant_pad_nd(t["x"], pairs, t["value"]),
        "tril": lambda t: torch.tril(t["x"], amounts[0], out=t["out"]),
        "triu": lambda t: torch.triu(t["x"], amounts[0], out=t["out"]),
    }
    assert functions.keys() == {*CopyDescriptor.ops(), "pad"}
    return {"torch": placed(lambda t: {"out": functions[desc.op](t)})}


def _arange(t: Tensors, count: int) -> torch.Tensor:
    start, step, out = t["start"], t["step"], t["out"]
    if out.dtype is torch.bool:  # torch has none of these
        return torch.arange(count, device=out.device).mul_(step).add_(start).bool()
    return torch.arange(start, start + count * step, step, dtype=out.dtype, device=out.device)
