"""Optimizer steps: each rule with f32, and with halves whose states are f32. Norms of each kind, clipping."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import triplan as tp
from matrix import VECTORS, Build, Patterns, compiles, planned

SIZES = (4096 * 4096, 5)
#: More tensors than ``FEW``: addresses are in tables, with a column for each program, and for each tensor.
TABLES = ((4096 * 4096, 5, 5, 5, 5), (2**27, 5, 5, 5, 5))


def problems(op: str) -> Iterator[tp.Descriptor]:
    cls: Any = tp.descriptor_types()[op]
    for element in ("f32", "bf16", "f16"):
        yield cls(element=element, sizes=SIZES, state_element="f32", scaled=element == "bf16")
    yield cls(element="f32", sizes=SIZES, grad_element="bf16", copy_element="bf16")
    yield cls(element="bf16", sizes=SIZES, stochastic=True)
    yield from (cls(element="f32", sizes=sizes) for sizes in TABLES)


def asks(desc: Any, entry: str, name: str) -> Patterns:
    return ((VECTORS,) if name == "update_kernel" else (), ())


def lists(op: str) -> Iterator[tp.Descriptor]:
    cls: Any = tp.descriptor_types()[op]
    options: Any = [{"op": name} for name in cls.ops()]
    if op == "total_norm":
        options = [{"order": order} for order in (2.0, 1.0, 3.0, math.inf, -math.inf)] + [{"each": True}]
    for element in ("f32", "bf16", "f16"):
        yield from (cls(element=element, sizes=SIZES, **option) for option in options)
    yield from (cls(element="f32", sizes=sizes, **options[-1]) for sizes in TABLES)


def asks_of_lists(desc: Any, entry: str, name: str) -> Patterns:
    return ((VECTORS,) if name in ("chunk_kernel", "clip_kernel") else (), ())


@compiles("total_norm", "clip_norm")
def builds_of_lists(op: str, entry: str, target: tp.Target) -> Iterator[Build]:
    return planned(op, entry, target, lists(op), asks_of_lists, proofs_spill=False)


def expressions() -> Iterator[tp.Descriptor]:
    x, y, s = (tp.expr.operand(name) for name in "xys")
    for element in ("f32", "bf16", "f64", "i64"):
        lists: Any = {"x": (element, "list"), "y": ("f32", "list"), "s": ("f32", "one")}
        for sizes in (SIZES, *TABLES) if element == "bf16" else (SIZES,):
            yield tp.ListExpressionDescriptor.of({"x": x * 2, "z": x * s + y}, sizes, **lists)


def asks_of_expressions(desc: Any, entry: str, name: str) -> Patterns:
    return (VECTORS,), ()


@compiles("list_expression")
def builds_of_expressions(op: str, entry: str, target: tp.Target) -> Iterator[Build]:
    return planned(op, entry, target, expressions(), asks_of_expressions, proofs_spill=False)


@compiles("adam", "sgd", "lion")
def builds(op: str, entry: str, target: tp.Target) -> Iterator[Build]:
    return planned(op, entry, target, problems(op), asks, proofs_spill=False)
