"""Kernel ``join``: one launch for tensors side by side; each program moves a tile of one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import triton.language as tl

from triplan.backends.runtime.launch import Arg, Int, Launch, Ptr, power_of_two_in
from triplan.backends.table import kernel
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.offsets import I32_LIMIT, RANKS, ceil_power
from triplan.backends.triton.common.strides import Along, known_strides, row_tile, stride_arg
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.copies import join_kernels as kernels
from triplan.backends.triton.copies.geometry import ELEMENTS, layout
from triplan.backends.triton.copies.rows import THREADS, elements
from triplan.descriptors import JoinDescriptor, Operand
from triplan.sku import PrecisionGuarantee, Support, Target

#: Columns of a tile whose columns may come from several inputs, at most: each thread has one then, if a program has 128
#: threads. Untuned.
COLUMNS = 128
#: Elements of a thread at most in such tiles: registers spill with 16 elements of rows at any distance.
MIXED = 8
#: Such tiles are used if the others have so many times as many elements, and if vectors have one. Untuned.
IDLE = 1.25


class Tiles(NamedTuple):
    """(rows, columns) of a program's tile, the programs, and whether the columns of a tile may come from several
    inputs."""

    height: int
    width: int
    programs: int
    mixed: bool


def _tiles(desc: JoinDescriptor) -> Tiles:
    """Tiles of as many bytes as those of ``rows``."""
    size = elements(desc.operand("out"), desc.element.itemsize)
    height, width = row_tile(size, desc.rows, *desc.widths)
    own = Tiles(height, width, -(-desc.rows // height) * sum(-(-n // width) for n in desc.widths), False)
    total, size = sum(desc.widths), min(size, MIXED * THREADS)
    widest = min(ceil_power(total), COLUMNS, size)
    across = min((widest, max(widest // 2, 1)), key=lambda n: -(-total // n) * n)
    mixed = Tiles(size // across, across, -(-desc.rows // (size // across)) * -(-total // across), True)
    fewer = own.programs * height * width > IDLE * mixed.programs * size
    return mixed if _has_no_vectors(desc) and fewer else own


def _has_no_vectors(desc: JoinDescriptor) -> bool:
    """Whether no vectors of several elements begin where all rows and all inputs do."""
    bits = [power_of_two_in(n) for n in desc.widths if n]
    for o in desc.operands():
        stride = known_strides(o, 2)[0]
        bits.append(o.layout.stride_multiple if isinstance(stride, Along) else power_of_two_in(stride))
        bits.append(o.alignment // desc.element.itemsize)
    return min(bits) <= 1


def applies(desc: JoinDescriptor, target: Target) -> Support:
    for o in desc.operands():
        if o.shape[1] > 1 and known_strides(o, 2)[1] != 1:
            return Support.no(f"{o.name} is not promised contiguous along its columns")
    return fits_grid(_tiles(desc).programs)


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
    tiles = _tiles(desc)
    given = [o for o in inputs if o.numel]
    # Fewer distinct signatures, so fewer binaries: the last input again, of no columns.
    count = next(n for n in RANKS if n >= len(given))
    extents = [o.shape[1] for o in given] + [0] * (count - len(given))
    given += given[-1:] * (count - len(given))

    def pointer(o: Operand) -> Ptr:
        return Ptr(o.name, o.element.bits, o.element.itemsize if tiles.mixed else o.alignment)

    def stride(o: Operand) -> Arg:
        return stride_arg(o, known_strides(o, 2)[0], wide)  # (offsets of 64 bits take twice as many instructions)

    args: dict[str, Arg] = {
        "inputs": tuple(map(pointer, given)),
        "widths": tuple(Int(n, wide, 1 if tiles.mixed else power_of_two_in(n)) for n in extents),
        "strides": tuple(map(stride, given)),
        "out": pointer(out),
        "out_stride": stride(out),
        "rows": Int(desc.rows, wide),
    }
    if tiles.mixed:
        args["columns"] = Int(sum(desc.widths), wide)
    constants = {
        "POINT_TYPE": tl.int64 if wide else tl.int32,
        "BLOCK_ROWS": tiles.height,
        "BLOCK_COLUMNS": tiles.width,
    }
    which = kernels.join_columns_kernel if tiles.mixed else kernels.join_kernel
    return [Launch(which, tiles.programs, args, constants, num_warps=THREADS // 32)]
