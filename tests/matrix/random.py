"""Random numbers: packed tensors of vectors, any strides, seeds on either side, 64-bit offsets."""

from __future__ import annotations

from collections.abc import Iterator

import triplan as tp
from matrix import Build, Patterns, compiles, planned

#: A thread's elements leave as 16 bytes, of integers of the widest kind as 8.
VECTOR = r"st\.global\.v[24]\.b(32|64)"
#: What may differ between architectures: approximations, and products that are contracted where the compiler likes.
#: (f64 takes libdevice's logarithm, and divides the parameters.)
INEXACT = r"\.approx|\.ftz|div\.full"


def problems(op: str, entry: str) -> Iterator[tp.Descriptor]:
    for element in ("f16", "bf16", "f32", "f64") if entry == "groups" or op in ("normal", "randint") else ("f32",):
        yield tp.RandomDescriptor(op=op, element=element, out_shape=(2**24,), state="device")
    yield tp.RandomDescriptor(op=op, element="f32", out_shape=(2**32,), keeps_state=op == "dropout")
    block = tp.RandomDescriptor(op=op, element="bf16", out_shape=(64, 100), global_shape=(64, 400))
    for desc in (block, block.replace(global_shape=None)):
        yield desc.replace(
            layouts={name: "strided" for name in ("x", "out") if name in {o.name for o in desc.operands()}}
        )
    if op in ("randint", "bernoulli_p"):
        yield from (tp.RandomDescriptor(op=op, element=e, out_shape=(2**24,)) for e in ("i64", "i32", "u8", "bool"))


def asks(desc: tp.RandomDescriptor, entry: str, name: str) -> Patterns:
    lacks = (
        (INEXACT,)
        if desc.element != "f64" and desc.op in ("uniform", "normal", "bernoulli", "bernoulli_p", "randint")
        else ()
    )
    return ((VECTOR,) if desc.operand("out").layout.packed and entry == "groups" else (), lacks)


@compiles(*tp.RandomDescriptor.ops())
def builds(op: str, entry: str, target: tp.Target) -> Iterator[Build]:
    return planned(op, entry, target, problems(op, entry), asks, proofs_spill=False)
