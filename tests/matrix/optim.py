"""Optimizer steps: each rule with f32, and with halves whose states are f32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triplan as tp
from matrix import VECTORS, Build, Patterns, compiles, planned

SIZES = (4096 * 4096, 5)


def problems(op: str) -> Iterator[tp.Descriptor]:
    cls: Any = tp.descriptor_types()[op]
    for element in ("f32", "bf16", "f16"):
        yield cls(element=element, sizes=SIZES, state_element="f32", scaled=element == "bf16")


def asks(desc: Any, entry: str, name: str) -> Patterns:
    return ((VECTORS,) if name == "update_kernel" else (), ())


@compiles("adam", "sgd", "lion")
def builds(op: str, entry: str, target: tp.Target) -> Iterator[Build]:
    return planned(op, entry, target, problems(op), asks, proofs_spill=False)
