"""Random numbers: packed tensors of vectors, any strides, seeds on either side, 64-bit offsets."""

from __future__ import annotations

from collections.abc import Iterator

import triplan as tp
from matrix import Build, Patterns, compiles, planned

#: The elements of a counter leave together; those of 8 bytes and more as a vector.
VECTOR = r"st\.global\.v[24]\.b(32|64)"
#: What may differ between architectures. (f64 takes libdevice's logarithm. What follows a reciprocal root makes of it
#: the root that is rounded to nearest, as tests/families/random shows of every f32.)
INEXACT = r"(?<!rsqrt)\.approx|(?<!rsqrt\.approx)\.ftz|div\.full"


def problems(op: str, entry: str) -> Iterator[tp.Descriptor]:
    every = op == "normal" or (entry == "groups" and op in ("uniform", "dropout"))
    for element in ("f16", "bf16", "f32", "f64") if every else ("bf16", "f32"):
        yield tp.RandomDescriptor(op=op, element=element, out_shape=(2**24,), state="device")
    yield tp.RandomDescriptor(op=op, element="f32", out_shape=(2**32,), keeps_state=op == "dropout")
    block = tp.RandomDescriptor(op=op, element="bf16", out_shape=(64, 100), global_shape=(64, 400))
    for desc in (block, block.replace(global_shape=None)):
        yield desc.replace(layouts={o.name: "strided" for o in desc.operands() if o.name in ("x", "out")})
    padded = {o.name: tp.Layout.strided(unit_axis=1) for o in block.operands() if o.name in ("x", "out")}
    for element in ("bf16", "f64") if op in ("normal", "dropout") else ("bf16",):
        yield block.replace(global_shape=None, element=element, out_shape=(2**14, 1000), layouts=padded)
    turned = {o.name: tp.Layout.strided(unit_axis=0) for o in block.operands() if o.name in ("x", "out")}
    for element in ("bf16", "f32", "f64") if op == "normal" else ("bf16",):
        desc = tp.RandomDescriptor(op=op, element=element, out_shape=(2**12, 1001), layouts=turned)
        yield desc
        yield desc.replace(layouts={"out": turned["out"]} if "x" not in turned else {"x": turned["x"]})
    if op == "normal":  # more counters a thread
        yield desc.replace(out_shape=(2**15, 1001))
    for element in {"randint": ("i64", "u8"), "bernoulli_p": ("bool",)}.get(op, ()):
        yield tp.RandomDescriptor(op=op, element=element, out_shape=(2**24,))


def asks(desc: tp.RandomDescriptor, entry: str, name: str) -> Patterns:
    out = desc.operand("out")
    together = out.element.itemsize * (2 if desc.is_wide else 4)
    is_vector = out.layout.packed and entry == "groups" and together >= 8
    return (VECTOR,) if is_vector else (), () if desc.element == "f64" else (INEXACT,)


@compiles(*tp.RandomDescriptor.ops())
def builds(op: str, entry: str, target: tp.Target) -> Iterator[Build]:
    return planned(op, entry, target, problems(op, entry), asks, proofs_spill=False)
