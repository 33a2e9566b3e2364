"""Kernel ``flat``: packed operands, read and written as consecutive elements."""

from __future__ import annotations

import triton.language as tl

from triplan.backends.runtime.launch import Int, Launch, power_of_two_in
from triplan.backends.table import kernel
from triplan.backends.triton.common.offsets import I32_LIMIT
from triplan.backends.triton.elementwise import flat_kernels as kernels, shared
from triplan.backends.triton.elementwise.shared import ElementwiseDescriptor
from triplan.sku import SUPPORTED, Support, Target

#: Bytes of each operand per program: two 16-byte loads per thread of four warps. Untuned.
BLOCK_BYTES = 4096


def applies(desc: ElementwiseDescriptor, target: Target) -> Support:
    for o in desc.operands():
        if not o.layout.packed:
            return Support.no(f"{o.name} is not promised packed")
    blocks = -(-desc.operands()[0].nbytes // BLOCK_BYTES)
    return SUPPORTED if blocks < 2**31 else Support.no(f"needs {blocks} programs; a grid holds fewer than 2**31")


def flat(desc: ElementwiseDescriptor, target: Target) -> list[Launch]:
    numel = desc.operands()[0].numel
    if numel == 0:
        return []
    block, wide = BLOCK_BYTES // desc.element.itemsize, numel >= I32_LIMIT
    return [
        Launch(
            kernels.flat_kernel,
            -(-numel // block),
            {**shared.pointers(desc)[0], "numel": Int(numel, wide, power_of_two_in(numel))},
            {**shared.constants(desc), "POINT_TYPE": tl.int64 if wide else tl.int32, "BLOCK": block},
        )
    ]


for _op in shared.OPS:
    kernel(
        op=_op,
        name="flat",
        elements=shared.ELEMENTS,
        guarantee=shared.guarantee,
        supports=applies,
        rank=shared.bytes_us,
        numerics=shared.numerics,
        layout=shared.layout,
    )(flat)
