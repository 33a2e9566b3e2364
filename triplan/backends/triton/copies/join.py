"""Kernel ``join``: one launch for tensors side by side; each program moves a tile of one of them."""

from __future__ import annotations

from collections.abc import Mapping

import triton.language as tl

from triplan.backends.runtime.launch import Arg, Int, Launch, Ptr, power_of_two_in
from triplan.backends.table import kernel
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.offsets import I32_LIMIT, RANKS
from triplan.backends.triton.common.strides import known_strides, row_tile, stride_arg
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.copies import join_kernels as kernels
from triplan.backends.triton.copies.geometry import ELEMENTS, layout
from triplan.backends.triton.copies.rows import THREADS, elements
from triplan.descriptors import JoinDescriptor, Operand
from triplan.sku import PrecisionGuarantee, Support, Target


def _tile(desc: JoinDescriptor) -> tuple[int, int]:
    """(rows, columns) of a program's tile, of as many bytes as that of ``rows``."""
    return row_tile(elements(desc.operand("out"), desc.element.itemsize), desc.rows, *desc.widths)


def _programs(desc: JoinDescriptor) -> int:
    height, width = _tile(desc)
    return -(-desc.rows // height) * sum(-(-n // width) for n in desc.widths)


def applies(desc: JoinDescriptor, target: Target) -> Support:
    for o in desc.operands():
        if o.shape[1] > 1 and known_strides(o, 2)[1] != 1:
            return Support.no(f"{o.name} is not promised contiguous along its columns")
    return fits_grid(_programs(desc))


def guarantee(desc: JoinDescriptor) -> Mapping[str, PrecisionGuarantee]:
    return {"out": PrecisionGuarantee.exact(desc.element)}


@kernel(
    op="join",
    name="join",
    elements=ELEMENTS,
    guarantee=guarantee,
    supports=applies,
    rank=lambda desc, target: LAUNCH_US + 2 * desc.operand("out").nbytes / BYTES_PER_US,
    numerics=lambda desc: f"copies.join.{desc.element}.v1",
    layout=layout,
)
def join(desc: JoinDescriptor, target: Target) -> list[Launch]:
    *inputs, out = desc.operands()
    if out.numel == 0:
        return []
    wide = out.numel >= I32_LIMIT
    height, width = _tile(desc)
    given = [o for o in inputs if o.numel]
    # Fewer distinct signatures, so fewer binaries: the last input again, of no columns.
    count = next(n for n in RANKS if n >= len(given))
    extents = [o.shape[1] for o in given] + [0] * (count - len(given))
    given += given[-1:] * (count - len(given))

    def pointer(o: Operand) -> Ptr:
        return Ptr(o.name, o.element.bits, o.alignment)

    def stride(o: Operand) -> Arg:
        return stride_arg(o, known_strides(o, 2)[0])

    args: dict[str, Arg] = {
        "inputs": tuple(map(pointer, given)),
        "widths": tuple(Int(n, wide, power_of_two_in(n)) for n in extents),
        "strides": tuple(map(stride, given)),
        "out": pointer(out),
        "out_stride": stride(out),
        "rows": Int(desc.rows, wide),
    }
    constants = {
        "POINT_TYPE": tl.int64 if wide else tl.int32,
        "BLOCK_ROWS": height,
        "BLOCK_COLUMNS": width,
    }
    return [Launch(kernels.join_kernel, _programs(desc), args, constants, num_warps=THREADS // 32)]
