"""Sorting: short rows, long ones, few and many of them, packed and of any strides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triplan as tp
from matrix import Build, compiles, planned

#: (rows, elements of each)
SIZES = ((4096, 100), (300, 2048), (64, 32768))
#: The same of operands that lie across rows, which are copied: by square tiles, and by long ones in both directions.
TURNED, ACROSS = ((4096, 300), (300000, 3), (9, 200000)), tp.Layout.strided(unit_axis=0)
OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "topk": ({"k": 12}, {"k": 64, "largest": False}),
    "kthvalue": ({"k": 64},),
    "sort": ({}, {"descending": True}),
    "argsort": ({"descending": True},),
    "searchsorted": ({"m": 4096}, {"m": 7, "right": True, "sorter": True, "out_int32": True}),
}


def problems(op: str) -> Iterator[tp.Descriptor]:
    cls: Any = tp.descriptor_types()[op]
    options = OPTIONS[op]
    for i, element in enumerate(("bf16", "f32", "f64", "u8", "i64")):
        for j, (rows, n) in enumerate(SIZES):
            yield cls(op=op, element=element, rows=rows, n=n, **options[(i + j) % len(options)])
        if op == "topk":  # programs of 16 warps
            yield cls(op=op, element=element, rows=64, n=32768, k=512)
        if op in ("topk", "kthvalue"):
            yield cls(op=op, element=element, rows=4096, n=9000, layouts={"x": ACROSS}, **options[0])
        if op in ("sort", "argsort"):  # threads of whole rows
            yield from (cls(op=op, element=element, rows=4096, n=n) for n in (1, 2, 3))
            across = dict.fromkeys(("values", "indices") if op == "sort" else ("indices",), ACROSS)
            yield from (cls(op=op, element=element, rows=r, n=n, layouts=across) for r, n in TURNED)
        if op == "searchsorted":  # threads of several elements, and of several rows
            many = cls(op=op, element=element, rows=40000, n=100, m=1024)
            yield many
            yield many.replace(layouts={name: tp.Layout.strided(unit_axis=0) for name in ("x", "out")})
    desc = cls(op=op, element="f32", rows=64, n=1000, **options[-1])
    yield desc.replace(layouts={o.name: "strided" for o in desc.operands()})


@compiles("topk", "kthvalue", "sort", "argsort", "searchsorted")
def builds(op: str, entry: str, target: tp.Target) -> Iterator[Build]:
    return planned(op, entry, target, problems(op), proofs_spill=False)
