"""Copies: packed, transposed and strided operands, conversions, maps of positions, numbers, 64-bit offsets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from proofs.copies import AMOUNTS

import triplan as tp
from matrix import VECTORS, Build, Patterns, compiles, planned

SHAPES = ((64, 1024, 4096), (3, 1001, 4095), (64, 2**14, 2**14))
#: By itemsize: transposed operands of whole vectors.
TURNED = {n: tp.Layout.strided(unit_axis=1, alignment=16, stride_multiple=16 // n) for n in (1, 2, 4, 8)}
CONVERTED = {
    "f64": ("f16", "i32"),
    "f32": ("bf16", "bool"),
    "bf16": ("f32", "f16"),
    "i64": ("f16", "i8"),
    "u8": ("bf16",),
}
NUMBERS = ("bf16", "f64", "i64", "u8", "bool")


def problems(op: str) -> Iterator[tp.Descriptor]:
    cls: Any = tp.descriptor_types()[op]
    if op in ("fill", "arange"):
        for element in NUMBERS:
            for n in (2**20, 1001, 2**32):
                found = cls(op=op, element=element, **({"count": n} if op == "arange" else {"out_shape": (n,)}))
                yield found
                yield found.replace(layouts={"out": "strided"})
                yield found.replace(layouts={"out": tp.Layout(alignment=found.element.itemsize)})
        return
    if op == "join":
        for element in ("i8", "bf16", "f32", "f64"):
            for widths in ((4096, 1024), (4095, 7, 33), (8195, 7), (20, 3, 2), (2**14,) * 5, (1, 1), (1,) * 8):
                rows = 2**17 if len(widths) == 5 else 1001
                found = cls(element=element, rows=rows, widths=widths)
                yield found
                yield found.replace(layouts={"x0": tp.Layout.strided(unit_axis=1)})
        return
    for element in ("i8", "bf16", "f32", "f64", "bool") if op in ("copy", "pad") else ("bf16",):
        for shape in SHAPES if op == "copy" else SHAPES[:2]:
            found = cls(op=op, element=element, input_shape=shape, amounts=AMOUNTS[op])
            yield found
            yield found.replace(layouts={"x": TURNED[found.element.itemsize]})
            yield found.replace(layouts={"x": "strided", "out": "strided"})
    if op == "copy":
        for element, others in CONVERTED.items():
            for other in others:
                yield cls(op=op, element=element, input_shape=SHAPES[0], out_element=other)
        narrow = cls(op=op, element="bf16", input_shape=(4, 3, 2**20))
        yield narrow.replace(layouts={"x": tp.Layout.strided(unit_axis=1)})
        yield narrow.replace(input_shape=(4, 2**20, 9), layouts={"x": tp.Layout.strided(unit_axis=1)})


def asks(desc: Any, entry: str, name: str) -> Patterns:
    if desc.op == "join":
        whole = all(o.layout.packed for o in desc.operands()) and not any(n % 16 for n in desc.widths)
        if name == "interleave_kernel":
            return (rf"st\.global(?:{VECTORS})",), ("shared",)
        return ((rf"ld\.global(?:{VECTORS})", rf"st\.global(?:{VECTORS})") if whole else (), ())
    if desc.op in ("fill", "arange"):
        o = desc.operand("out")
        return ((rf"st\.global(?:{VECTORS})",) if o.layout.packed and o.numel >= 2**20 else (), ())
    if desc.op != "copy":
        return (), ()
    whole = desc.input_shape == SHAPES[0] and desc.result is desc.element and desc.operand("out").layout.packed
    x = desc.operand("x").layout
    fits = x.packed if entry == "rows" else x.stride_multiple > 1
    return ((rf"ld\.global(?:{VECTORS})", rf"st\.global(?:{VECTORS})") if whole and fits else (), ())


@compiles(*AMOUNTS, "fill", "arange", "join")
def builds(op: str, entry: str, target: tp.Target) -> Iterator[Build]:
    return planned(op, entry, target, problems(op), asks, proofs_spill=False)
