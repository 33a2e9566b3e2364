"""Pooling: channels last, whose elements go in vectors, and first; strides and gaps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triplan as tp
from matrix import VECTORS, Build, Patterns, compiles, planned

LAST = tp.Layout.strided(unit_axis=1, alignment=16, stride_multiple=8)
SIZES: dict[str, Any] = {"batch": 64, "channels": 256, "height": 56, "width": 56}
OPS = tuple(f"{name}_pool2d{suffix}" for name in ("max", "avg", "adaptive_avg") for suffix in ("", "_backward"))


def problems(op: str) -> Iterator[tp.Descriptor]:
    cls: Any = tp.descriptor_types()[op]
    how: dict[str, Any] = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1)}
    for element in ("f16", "bf16", "f32", "f64"):
        desc = cls(element=element, **SIZES, **({"out_size": (7, 7)} if "adaptive" in op else how))
        yield desc.replace(layouts={o.name: LAST for o in desc.operands()})
        yield desc
    if op.startswith("avg"):
        yield desc.replace(divisor=2, count_include_pad=False)
        yield desc.replace(count_include_pad=False)


def asks(desc: Any, entry: str, name: str) -> Patterns:
    last = all(o.layout == LAST for o in desc.operands())
    return ((VECTORS,) if last and desc.element.itemsize <= 4 else ()), ()


@compiles(*OPS)
def builds(op: str, entry: str, target: tp.Target) -> Iterator[Build]:
    return planned(op, entry, target, problems(op), asks)
