"""Scans: short rows, rows that fill registers, long ones, and rows side by side, from either end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triplan as tp
from matrix import VECTORS, Build, Patterns, compiles, planned

SIZES = ((4096, 96), (4096, 4096), (512, 32768), (512, 30001), (4096, 1001), (1, 2**22))
#: Loads of vectors, and of words of two elements of 16 bits: of rows that begin anywhere they would fault.
VECTOR_LOADS, WORD_LOADS = r"ld\.global\S*\.v[24]", r"ld\.global\S*\.b32"


def problems(op: str) -> Iterator[tp.Descriptor]:
    cls: Any = tp.descriptor_types()[op]
    options = ({"reverse": False}, {"reverse": True}) if op != "cumprod_backward" else ({},)
    for i, element in enumerate(("bf16", "f32", "f64", *(("i64",) if op != "cumprod_backward" else ()))):
        for j, size in enumerate(SIZES):
            yield cls(op=op, input_shape=size, scan_axis=1, element=element, **options[(i + j) % len(options)])
        for n in (1000, 1001):
            crossed = cls(op=op, input_shape=(2**14, n), scan_axis=1, element=element, **options[-1])
            yield crossed.replace(layouts={crossed.operands()[-1].name: tp.Layout.strided(unit_axis=0)})
        desc = cls(op=op, input_shape=(64, 1000, 304), scan_axis=1, element=element, **options[-1])
        yield desc
        yield desc.replace(layouts={o.name: "strided" for o in desc.operands()})
        short = 64 // max(desc.element.itemsize, 4)
        yield cls(op=op, input_shape=(short, 2**15), scan_axis=0, element=element, **options[-1])


def asks(desc: Any, entry: str, name: str) -> Patterns:
    rows = desc.scan_axis == len(desc.input_shape) - 1
    packed = rows and all(o.layout.packed for o in desc.operands()) and desc.input_shape[-1] % 4096 == 0
    totals = entry == "split" and name in ("scan_looped_kernel", "carry_maps_kernel")  # there are few
    anywhere = rows and desc.input_shape[-1] % 2 == 1 and not totals
    words = desc.element.itemsize == 2 and entry != "split"  # which reads totals of f32
    forbidden = (VECTOR_LOADS, WORD_LOADS) if words else (VECTOR_LOADS,)
    return ((VECTORS,) if packed and not totals else (), forbidden if anywhere else ())


@compiles("cumsum", "cumprod", "cumprod_backward")
def builds(op: str, entry: str, target: tp.Target) -> Iterator[Build]:
    return planned(op, entry, target, problems(op), asks)
