"""Normalisation of images: of one pixel, whose channels go in vectors, and of many; gaps; parameters of f32; groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triplan as tp
from matrix import VECTORS, Build, Patterns, compiles, planned

LAST = {"batch": 64 * 56 * 56, "channels": 256, "pixels": 1}
#: Several pixels are one row, which begins at a vector; the last ones fill none.
JOINED = {**LAST, "batch": 64 * 56 * 56 + 3, "channels": 211}
FIRST = {"batch": 64, "channels": 256, "pixels": 56 * 56}
ODD = {"batch": 64, "channels": 100, "pixels": 49}
OPS = ("batch_norm", "batch_norm_backward")


def problems(op: str) -> Iterator[tp.Descriptor]:
    cls: Any = tp.descriptor_types()[op]
    for element in ("f16", "bf16", "f32", "f64"):
        yield cls(element=element, **LAST)
        yield cls(element=element, **FIRST)
        yield cls(element=element, **JOINED)
    yield cls(element="bf16", **LAST, parameter_element="f32")
    yield cls(element="bf16", **LAST, training=False)
    yield cls(element="f32", **FIRST, training=False, weight=False, bias=False)
    for sizes in (LAST, FIRST, JOINED):
        yield cls(element="bf16", **sizes, relu=True)
        yield cls(element="bf16", **sizes, relu=True, residual=True)
    odd = cls(element="bf16", **ODD, weight=False, bias=False)
    yield odd
    yield cls(element="bf16", **ODD, training=False)
    for layout in (tp.Layout.strided(), tp.Layout.strided(unit_axis=1, alignment=16, stride_multiple=4)):
        yield odd.replace(layouts={o.name: layout for o in odd.operands() if len(o.shape) == 3})


def groups(op: str) -> Iterator[tp.Descriptor]:
    cls: Any = tp.descriptor_types()[op]
    for element in ("f16", "bf16", "f32", "f64"):
        yield cls(element=element, **FIRST, groups=32)
    yield cls(element="bf16", **ODD, groups=20, weight=False, bias=False)
    yield cls(element="bf16", **FIRST, groups=32, parameter_element="f32")
    for element in ("f16", "bf16", "f32", "f64"):  # of which several programs share one
        yield cls(element=element, **{**FIRST, "batch": 2}, groups=2)
        if op == "group_norm_backward":
            yield cls(element=element, **{**FIRST, "batch": 2, "channels": 4096}, groups=2)  # too many for their sums


def asks(desc: Any, entry: str, name: str) -> Patterns:
    reads = "merge" not in name and "fold" not in name and desc.channels in (256, 211, 4096)
    return ((VECTORS,) if reads else ()), ()


@compiles(*OPS)
def builds(op: str, entry: str, target: tp.Target) -> Iterator[Build]:
    return planned(op, entry, target, problems(op), asks)


@compiles("group_norm", "group_norm_backward")
def builds_of_groups(op: str, entry: str, target: tp.Target) -> Iterator[Build]:
    return planned(op, entry, target, groups(op), asks)
