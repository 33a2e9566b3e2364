"""Kernel ``strided``: operands of any strides, element by element."""

from __future__ import annotations

import triton.language as tl

from triplan.backends.runtime.launch import Arg, Int, Launch
from triplan.backends.table import kernel
from triplan.backends.triton.common.offsets import I32_LIMIT, padded, strides
from triplan.backends.triton.elementwise import shared, strided_kernels as kernels
from triplan.backends.triton.elementwise.shared import ElementwiseDescriptor
from triplan.sku import SUPPORTED, Support, Target

#: Elements per program: each offset takes two registers. Untuned.
BLOCK = 512
#: Time relative to ``flat``: offsets are computed, and loads may be narrow. Untuned.
SLOWDOWN = 1.5


def applies(desc: ElementwiseDescriptor, target: Target) -> Support:
    blocks = -(-desc.operands()[0].numel // BLOCK)
    return SUPPORTED if blocks < 2**31 else Support.no(f"needs {blocks} programs; a grid holds fewer than 2**31")


def rank(desc: ElementwiseDescriptor, target: Target) -> float:
    return SLOWDOWN * shared.bytes_us(desc, target)


def strided(desc: ElementwiseDescriptor, target: Target) -> list[Launch]:
    numel = desc.operands()[0].numel
    if numel == 0:
        return []
    wide = numel >= I32_LIMIT
    args, names = shared.pointers(desc)
    for argument, name in zip(("first", "second", "out"), names, strict=True):
        args[f"{argument}_strides"] = None if name is None else _strides(desc, name)
    args["sizes"] = padded((Int(n, wide) for n in desc.input_shape), Int(1, wide))
    args["numel"] = Int(numel, wide)
    constants = {**shared.constants(desc), "POINT_TYPE": tl.int64 if wide else tl.int32, "BLOCK": BLOCK}
    return [Launch(kernels.strided_kernel, -(-numel // BLOCK), args, constants)]


def _strides(desc: ElementwiseDescriptor, name: str) -> tuple[Arg, ...]:
    return padded(strides(desc.operand(name), range(len(desc.input_shape)), True), Int(0, True))


for _op in shared.OPS:
    kernel(
        op=_op,
        name="strided",
        elements=shared.ELEMENTS,
        guarantee=shared.guarantee,
        supports=applies,
        rank=rank,
        numerics=shared.numerics,
        layout=shared.layout,
    )(strided)
