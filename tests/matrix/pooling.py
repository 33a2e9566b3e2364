"""Pooling: channels last, whose elements go in vectors (bytes in short ones), and first; both; strides, gaps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triplan as tp
from matrix import VECTORS, Build, Patterns, compiles, planned

LAST = tp.Layout.strided(unit_axis=1, alignment=16, stride_multiple=8)
ORDERED, ROWS = (tp.Layout.strided(order=order, alignment=16) for order in ((0, 2, 3, 1), (0, 2, 1, 3)))
SIZES: dict[str, Any] = {"batch": 64, "channels": 256, "height": 56, "width": 56}
NAMES = ("max_pool", "avg_pool", "adaptive_avg_pool", "upsample_nearest", "upsample_bilinear")
OPS = tuple(f"{name}2d{suffix}" for name in NAMES for suffix in ("", "_backward"))


def _short(o: tp.Operand, step: int) -> tp.Layout:
    return tp.Layout.strided(unit_axis=1, alignment=min(step * o.element.itemsize, 16), stride_multiple=step)


def problems(op: str) -> Iterator[tp.Descriptor]:
    cls: Any = tp.descriptor_types()[op]
    how: dict[str, Any] = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1)}
    if "_pool" not in op or "adaptive" in op:
        how = {"out_size": (7, 7) if "adaptive" in op else (112, 112)}
    for element in ("f16", "bf16", "f32", "f64", *["u8"] * (op == "upsample_nearest2d")):
        desc = cls(element=element, **SIZES, **how)
        yield desc.replace(layouts={o.name: LAST for o in desc.operands()})
        yield desc
        yield desc.replace(layouts={o.name: LAST for o in desc.operands() if o.is_written})
        if op == "max_pool2d" or op.endswith("avg_pool2d_backward"):  # of single elements, and in short vectors
            size = how | ({"out_size": (5, 5)} if "adaptive" in op else {})
            for channels, step in ((59, 1), (101, 1), (386, 2)):
                other = cls(element=element, **{**SIZES, "channels": channels}, **size)
                yield other.replace(layouts={o.name: _short(o, step) for o in other.operands()})
        if op.startswith("upsample") and op.endswith("_backward"):  # of single elements, which few results read
            other = cls(element=element, **{**SIZES, "channels": 59}, out_size=(28, 112 if "nearest" in op else 56))
            yield other.replace(layouts={o.name: _short(o, 1) for o in other.operands()})
        if "kernel" in how:  # many windows of a pixel, of known strides
            many = cls(element=element, **SIZES, kernel=(7, 7), padding=(3, 3))
            yield many.replace(layouts={o.name: ROWS for o in many.operands() if o.name != "dout"})
            yield many.replace(layouts={o.name: ORDERED for o in many.operands()})
    if "nearest" in op:
        yield desc.replace(exact=True)
    if "bilinear" in op:
        yield desc.replace(align_corners=True)
        yield desc.replace(out_size=(56, 112))
        yield desc.replace(out_size=(112, 56))
    if op.startswith("avg"):
        yield desc.replace(divisor=2, count_include_pad=False)
        yield desc.replace(count_include_pad=False)


def asks(desc: Any, entry: str, name: str) -> Patterns:
    last = all(o.layout == LAST for o in desc.operands())
    return ((VECTORS,) if last and 2 <= desc.element.itemsize <= 4 else ()), ()


@compiles(*OPS)
def builds(op: str, entry: str, target: tp.Target) -> Iterator[Build]:
    return planned(op, entry, target, problems(op), asks)
