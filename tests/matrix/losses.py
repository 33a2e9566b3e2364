"""Losses: short rows, rows that fill registers, long ones; with all that a kernel may be asked for, and with little."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cases.losses import build, strided
from proofs.losses import ALL, OPTIONS

import triplan as tp
from matrix import VECTORS, Build, Patterns, compiles, planned

CONFIGURATIONS: tuple[tuple[tuple[int, int], str, dict[str, Any]], ...] = (
    ((4096, 100), "bf16", ALL),
    ((4096, 4096), "f32", ALL),
    ((8192, 32768), "bf16", ALL),
    ((4096, 256), "f32", {"gradient": True}),
    ((4096, 4096), "bf16", {"gradient": True}),
    ((8192, 32768), "f32", {"gradient": True}),
    ((256, 32768), "bf16", {"gradient": True, "in_place": True}),
    ((4096, 10_000), "f16", {"gradient": True}),
    ((8192, 131072), "bf16", {"gradient": True}),
    ((8192, 32768), "bf16", {}),
    ((8192, 32768), "f64", {"gradient": True}),
    ((640, 1030), "f64", ALL),
    ((512, 30_001), "bf16", {"gradient": True}),
    ((512, 50_257), "bf16", {"gradient": True, "label_smoothing": 0.1}),
)


def problems(op: str) -> Iterator[tp.Descriptor]:
    yield from (build(op, size, 1, element, **options) for size, element, options in CONFIGURATIONS)
    yield strided(build(op, (64, 1024), 1, "bf16"))
    yield build(op, (64, 100, 304), 1, "bf16")


def asks(desc: Any, entry: str, name: str) -> Patterns:
    n = desc.input_shape[-1]
    packed = all(o.layout.packed for o in desc.operands()) and n >= 4096 and n % 16 == 0
    whole = "cross_entropy" in name and ("finish" not in name or getattr(desc, "gradient", False))
    return ((VECTORS,) if packed and whole else (), ())


@compiles(*OPTIONS)
def builds(op: str, entry: str, target: tp.Target) -> Iterator[Build]:
    return planned(op, entry, target, problems(op), asks)
