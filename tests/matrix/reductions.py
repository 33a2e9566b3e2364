"""Reductions: of rows and of columns, short and long, packed and strided, several axes, 64-bit offsets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from proofs.reductions import described
from samples import REDUCED_EXPRESSIONS, REDUCTIONS

import triplan as tp
from matrix import VECTORS, Build, Patterns, compiles, planned

A, B, C = (tp.expr.operand(name) for name in "abc")
ROWS = (8192, 8192)
#: Short lines of several points side by side.
FLAT = (2**20, 2, 16)
TYPES: dict[str, Any] = tp.descriptor_types()
#: By op, the elements that it is compiled for: all where kernels differ by element, one or two elsewhere.
ELEMENTS = {"sum": ("bf16", "f32", "f64", "i8", "i64"), "amax": ("bf16", "f32", "i8"), "max": ("f32", "bf16", "i64")}
OTHERS = ("f32", "bf16")
#: The ops for which ``sum`` stands, with an element of each.
ALIKE = {"mean": "f16", "prod": "f32", "amin": "f64", "min": "f16", "argmax": "bf16", "argmin": "u8", "any": "bool",
         "all": "f32", "count_nonzero": "bf16", "std": "f64", "std_mean": "f64"}  # fmt: skip


def problems(op: str) -> Iterator[tp.Descriptor]:
    full = op in ("sum", "max", "var")
    for element in ELEMENTS.get(op, OTHERS):
        make = TYPES[op](op=op, element=element, input_shape=ROWS, reduce_axes=(1,))
        yield make
        yield make.replace(reduce_axes=(0,))
        if op in ELEMENTS and element in ("i8", "bf16"):
            yield make.replace(input_shape=(2**16, 201))  # short odd lines
        if op == "var":
            yield make.replace(input_shape=(8192, 5001))  # groups of blocks of rows that begin between vectors
        if not full:
            continue
        yield make.replace(input_shape=(2**16, 40), layouts={"x": "strided"})
        yield make.replace(input_shape=(64, 300, 1001), reduce_axes=(0, 2))
        yield make.replace(input_shape=(64, 300, 1001), reduce_axes=(1,), layouts={"x": "strided"})  # a slice
        if element == "f32":
            yield make.replace(input_shape=FLAT, reduce_axes=(1,))
    if op == "sum":
        yield tp.ReduceDescriptor(op=op, element="bf16", input_shape=(3, 2**31), reduce_axes=(1,))
        yield tp.ReduceDescriptor(op=op, element="bf16", input_shape=(2**31, 3), reduce_axes=(1,))
        for other, element in ALIKE.items():  # they have no problems of their own
            yield TYPES[other](op=other, element=element, input_shape=ROWS, reduce_axes=(1,))
            yield TYPES[other](op=other, element=element, input_shape=ROWS, reduce_axes=(0,))
    if op == "vector_norm":
        for order in (1.0, 3.0):
            yield tp.ReduceDescriptor(op=op, element="f32", input_shape=ROWS, reduce_axes=(1,), order=order)


def expressions(op: str) -> Iterator[tp.Descriptor]:
    for element in ("f16", "bf16", "f32", "f64") if op == "sum_expression" else OTHERS:
        for axes in ((1,), (0,), (0, 1)):
            yield described(op, ROWS, tp.ElementKind(element), axes=axes)
        if op != "sum_expression":
            continue
        yield described(op, ROWS, tp.ElementKind(element)).replace(layouts={"a": "strided", "b": "strided"})
        yield described(op, (64, 300, 1001), tp.ElementKind(element), axes=(0, 2))
        slices = {"a": "strided", "b": "strided"}
        yield described(op, (64, 300, 1001), tp.ElementKind(element)).replace(layouts=slices)
        x, row, column = (element, ROWS), ("f32", (ROWS[1],)), ("f32", (ROWS[0], 1))
        root = tp.expr.square(tp.expr.gelu(A * B) - C)
        for axes in ((1,), (0,), (0, 1)):
            yield tp.ExpressionReductionDescriptor.of(op, root, axes, a=x, b=row, c=column)
    if op == "sum_expression":
        yield described(op, (3, 2**31), tp.ElementKind("bf16"))
        yield described(op, (2**31, 3), tp.ElementKind("bf16"))
        for other, element in {"mean_expression": "f16", "amin_expression": "f32"}.items():
            yield described(other, ROWS, tp.ElementKind(element))


def asks(desc: Any, entry: str, name: str) -> Patterns:
    whole = name == "reduce_kernel" and desc.input_shape in (ROWS, FLAT)
    return ((VECTORS,) if whole else (), ())


@compiles(*REDUCTIONS)
def builds(op: str, entry: str, target: tp.Target) -> Iterator[Build]:
    return planned(op, entry, target, problems(op), asks, proofs_spill=False)


@compiles(*REDUCED_EXPRESSIONS)
def builds_of_expressions(op: str, entry: str, target: tp.Target) -> Iterator[Build]:
    return planned(op, entry, target, expressions(op), asks, proofs_spill=False)
