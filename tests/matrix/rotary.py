"""Rotary embedding: heads of three sizes, both kinds of pairs, tables and angles, vectors and single elements; caches
of keys and values, whose pages are of tokens or of heads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import triplan as tp
from matrix import VECTORS, Build, Patterns, compiles, planned

HEADS = tp.Layout.strided(alignment=16, unit_axis=3, stride_multiple=8)
SHARED = tp.Layout.strided(alignment=16, unit_axis=2, zero_axes=(0,), stride_multiple=4)


def problems(op: str) -> Iterator[tp.Descriptor]:
    cls: Any = tp.descriptor_types()[op]
    keys: dict[str, int] = {}
    if cached := op == "cached_rotary":
        cls, keys = partial(cls, pages=1024, page_size=16), {"k_heads": 1}
    for element in ("f16", "bf16", "f32", "f64"):
        pairs = "interleaved" if element in ("bf16", "f64") else "half"
        desc = cls(element=element, q_shape=(4, 4096, 32, 128), k_heads=8, pairs=pairs)
        yield desc.replace(table_rows=4096, layouts={"cos": SHARED, "sin": SHARED})
        if op == "rotary":
            yield desc.replace(positions=True, layouts=dict.fromkeys(("q", "q_out", "k", "k_out"), HEADS))
        if cached:
            caches = dict.fromkeys(("k_cache", "v_cache"), HEADS)
            yield desc.replace(positions=True, slot_element="i32", eps=1e-6, layouts=caches)
    desc = cls(element="bf16", q_shape=(4, 4096, 32, 96), rotary_dim=32, positions=True, **keys)
    yield desc
    yield desc.replace(layouts={o.name: "strided" for o in desc.operands() if o.is_tensor})
    yield cls(element="f64", q_shape=(1, 64, 1, 4096), table_rows=64, **keys, out_of_bounds="error")


def asks(desc: Any, entry: str, name: str) -> Patterns:
    unit = all(o.layout.packed or o.layout.unit_axis == 3 for o in desc.operands() if o.name[0] in "qkv")
    return ((VECTORS,) if unit and name == "rotary_kernel" and desc.q_shape[3] % 32 == 0 else (), ())


@compiles("rotary", "normed_rotary", "cached_rotary")
def builds(op: str, entry: str, target: tp.Target) -> Iterator[Build]:
    return planned(op, entry, target, problems(op), asks, proofs_spill=False)
