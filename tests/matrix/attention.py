"""Attention: the usual widths of heads, causal or not, with all that a kernel may be asked for; strided operands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import triplan as tp
from matrix import Build, Patterns, compiles, planned

HOPPER = ("wgmma", "realigned")
SIZES: dict[str, Any] = {"batch": 4, "queries": 4096, "keys": 4096, "heads": 32, "key_heads": 8, "causal": True}


def problems(op: str) -> Iterator[tp.Descriptor]:
    cls = tp.descriptor_types()[op]
    base = cls(**SIZES, head_dim=128, element="bf16")
    yield from (base, base.replace(head_dim=64), base.replace(head_dim=256, element="f16"))
    precise = base.replace(element="f32", math="tf32x3")
    yield from (precise, precise.replace(head_dim=64), precise.replace(dropout=True), precise.replace(head_dim=32))
    yield precise.replace(head_dim=64, causal=False)
    # Whose last chunk of columns is narrower.
    yield from (base.replace(head_dim=80), base.replace(head_dim=146, element="f64"), precise.replace(head_dim=80))
    if op == "attention":
        yield precise.replace(head_dim=160)
    packed = base.replace(batch=1, sequences=64, slopes=True, **({"sink": True} if op == "attention" else {}))
    yield from (base.replace(head_dim=192, value_dim=128), packed)
    yield base.replace(dropout=True)
    yield base.replace(dropout=True, element="f64", mask="f64", softcap=2.0)
    unit = tp.Layout.strided(unit_axis=3, alignment=16, stride_multiple=8)
    shaped = {o.name: unit for o in base.operands() if len(o.shape) == 4}
    yield base.replace(head_dim=96, causal=False, keys=4099, window_left=512, layouts=shaped)


def copied(op: str) -> Iterator[tp.Descriptor]:
    """What the kernels on copies are for."""
    base = tp.descriptor_types()[op](**SIZES, head_dim=128, element="bf16")
    columns = {o.name: tp.Layout.strided(unit_axis=2) for o in base.operands() if len(o.shape) == 4}
    for element in ("bf16", "f16"):
        yield base.replace(head_dim=47, element=element)
        yield base.replace(head_dim=190, element=element)
        yield base.replace(causal=False, element=element, layouts=columns | {"lse": "strided", "q": "strided"})


def asks(desc: Any, entry: str, name: str) -> Patterns:
    if name in ("attention_rows_kernel", "matrices_copy_kernel"):
        return (), ()
    if entry.startswith(HOPPER):
        return (r"wgmma\.mma_async", r"cp\.async\.bulk\.tensor"), ()
    if entry == "large_tiles":
        return (r"wgmma\.mma_async",), ()
    return ((r"wgmma\.mma_async|mma\.sync",) if desc.element != "f64" else (), ())


@compiles("attention", "attention_backward")
def builds(op: str, entry: str, target: tp.Target) -> Iterator[Build]:
    found = copied(op) if entry.startswith("realigned") else problems(op)
    for build in planned(op, entry, target, found, asks):
        # Where a tile ends, the Hopper kernels spill a few addresses; never in their loops over keys.
        # Where no mask hides keys, ``large_tiles`` spills with heads of 64; it is faster than ``tiles`` all the same.
        desc: Any = build.desc
        large = entry == "large_tiles" and (desc.head_dim > 128 or (desc.head_dim == 64 and not desc.causal))
        # Of f32 heads wider than 32 and of f64 wider than 128, the fastest tiles spill on Hopper, without dropout;
        # forward those of f64 up to 192.
        least = {"f32": 33, "f64": 129}.get(desc.element, 257)
        wide = (op, entry) == ("attention_backward", "tiles") and desc.head_dim >= least
        wide |= (op, entry, desc.element) == ("attention", "tiles", "f64") and 128 < desc.head_dim <= 192
        wide = wide and not desc.dropout and target.arch is tp.ArchSku.SM90A
        yield replace(build, may_spill=build.may_spill or entry.startswith(HOPPER) or large or wide)
