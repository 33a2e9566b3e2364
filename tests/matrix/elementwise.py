"""Elementwise ops: packed and strided operands, vectors and single elements, 32- and 64-bit offsets."""

from __future__ import annotations

from collections.abc import Iterator

from proofs.elementwise import OPS

import triplan as tp
from matrix import VECTORS, Build, compiles, pinned, proved

SHAPES = ((4096, 4096), (4095, 1001), (2**16, 2**16))


def problems(op: str) -> Iterator[tp.Descriptor]:
    for element in ("f16", "bf16", "f32", "f64"):
        for shape in SHAPES:
            desc = tp.descriptor_types()[op](op=op, input_shape=shape, element=element)
            yield desc
            yield desc.replace(layouts={o.name: "strided" for o in desc.operands()})


@compiles(*OPS)
def builds(op: str, entry: str, target: tp.Target) -> Iterator[Build]:
    for desc in (*problems(op), *dict.fromkeys(proved(op, entry))):
        if plan := pinned(desc, entry, target):
            vectors = entry == "flat" and desc.input_shape[-1] % 16 == 0  # type: ignore[attr-defined]

            def asks(name: str, vectors: bool = vectors) -> tuple[tuple[str, ...], tuple[str, ...]]:
                return ((VECTORS,) if vectors else (), ())

            yield Build(desc, plan.launches, asks, plan.precision_guarantee())
