"""Elementwise ops: packed, broadcast, transposed and strided operands, vectors and single elements, 64-bit offsets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from proofs.elementwise import OPS, described

import triplan as tp
from matrix import VECTORS, Build, Patterns, compiles, planned

SIZES = (4096 * 4096, 4095 * 1001, 2**32)


def problems(op: str) -> Iterator[tp.Descriptor]:
    for element in ("f16", "bf16", "f32", "f64"):
        for n in SIZES:
            desc = described(op, n, tp.ElementKind(element))
            yield desc
            yield desc.replace(layouts={o.name: "strided" for o in desc.operands() if o.is_tensor})
    yield described(op, 4096, tp.ElementKind("bf16"), turned=True)


def asks(desc: Any, entry: str, name: str) -> Patterns:
    return ((VECTORS,) if entry == "flat" and desc.shape[-1] % 16 == 0 else (), ())


@compiles(*OPS)
def builds(op: str, entry: str, target: tp.Target) -> Iterator[Build]:
    return planned(op, entry, target, problems(op), asks, proofs_spill=False)
