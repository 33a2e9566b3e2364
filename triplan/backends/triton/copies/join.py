"""Kernel ``join``: one launch for tensors side by side; each program moves a tile of one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import triton.language as tl

from triplan.backends.runtime.launch import Arg, Int, Launch, Ptr, power_of_two_in
from triplan.backends.table import kernel
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US, SECTOR
from triplan.backends.triton.common.offsets import I32_LIMIT, RANKS, ceil_power, divisor
from triplan.backends.triton.common.strides import Along, known_strides, row_tile, stride_arg
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.copies import join_kernels as kernels
from triplan.backends.triton.copies.geometry import ELEMENTS, layout
from triplan.backends.triton.copies.rows import STORED, THREADS, WORD, elements, flat_block
from triplan.descriptors import JoinDescriptor, Operand
from triplan.sku import PrecisionGuarantee, Support, Target

#: Columns of a tile whose columns may come from several inputs, at most: each thread has one then, if a program has 128
#: threads. Untuned.
COLUMNS = 128
#: Elements of a thread at most in such tiles: registers spill with 16 elements of rows at any distance.
MIXED = 8
#: Such tiles are used if the others have so many times as many elements. Untuned.
IDLE = 1.25
#: Bytes of a vector, and integers of fewer.
VECTOR = 16
WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
#: Inputs between which elements choose in less time than they take in tiles of one input, if rows are odd and elements
#: narrow; for bytes from more inputs, a choice for each column of a tile is faster: from 7 of 1 to 7 columns, H200.
CHOICES = 4
#: Bytes of a row of the widest input, at least, where programs look whether all of their elements are of one row of one
#: input, and have twice as many. Untuned.
WIDE = 8192


class Tiles(NamedTuple):
    """(rows, columns) of a program's tile, the programs, and how a tile is filled: "own" by one input, "mixed": its
    columns may come from several, "flat": as many elements of a packed result, "interleave": rows of one such."""

    height: int
    width: int
    programs: int
    kind: str


def _tiles(desc: JoinDescriptor) -> Tiles:
    """Tiles of as many bytes as those of ``rows``."""
    out, item, word = desc.operand("out"), desc.element.itemsize, _word(desc)
    if interleaved := _interleaved_bytes(desc):
        # A thread stores vectors even where few have any.
        block = max(elements(out, interleaved), THREADS * VECTOR // interleaved) // len(desc.widths)
        return Tiles(block, len(desc.widths), -(-desc.rows // block), "interleave")
    size = elements(out, item)
    height, width = row_tile(size, desc.rows, *desc.widths)
    own = Tiles(height, width, -(-desc.rows // height) * sum(-(-n // width) for n in desc.widths), "own")
    total, size = sum(desc.widths), min(size, MIXED * THREADS)
    widest = min(ceil_power(total), COLUMNS, size)
    across = min((widest, max(widest // 2, 1)), key=lambda n: -(-total // n) * n)
    mixed = Tiles(size // across, across, -(-desc.rows // (size // across)) * -(-total // across), "mixed")
    fewer = own.programs * height * width > IDLE * mixed.programs * size
    count, numbered = sum(n > 0 for n in desc.widths), _is_numbered(desc) and word < VECTOR
    few = word < WORD and count <= CHOICES
    narrow = fewer or (numbered and total * item < SECTOR * count)
    many = word == 1 and count > CHOICES
    if numbered and (few or (narrow and not many)):
        block = flat_block(out, word) * (2 if _is_wide(desc, word) else 1)
        return Tiles(1, block, -(-out.numel * item // (word * block)), "flat")
    return mixed if (narrow if many else fewer) and word == item else own


def _word(desc: JoinDescriptor) -> int:
    """Bytes of the longest vectors, if not longer, that begin where all rows and all inputs do."""
    item = desc.element.itemsize
    found = [n * item for n in desc.widths if n]
    for o in desc.operands():
        stride = known_strides(o, 2)[0]
        found.append((o.layout.stride_multiple if isinstance(stride, Along) else stride) * item)
        found.append(o.alignment)
    return min(VECTOR, *(n & -n for n in found if n))


def _is_wide(desc: JoinDescriptor, word: int) -> bool:
    """Whether programs look for elements that are all of one row of one input, to copy words of WORD bytes."""
    return word < WORD <= desc.operand("out").alignment and max(desc.widths) * desc.element.itemsize >= WIDE


def _is_numbered(desc: JoinDescriptor) -> bool:
    """Whether the elements of the result can be numbered, in 32 bits, and offsets within the inputs too."""
    small = all(o.numel < I32_LIMIT and not isinstance(known_strides(o, 2)[0], Along) for o in desc.operands())
    return small and _row_stride(desc.operand("out")) == sum(desc.widths)


def _row_stride(o: Operand) -> int:
    """The known distance of rows; as if packed where there is one."""
    stride = known_strides(o, 2)[0]
    assert isinstance(stride, int)
    return stride if o.shape[0] > 1 else o.shape[1]


def _interleaved_bytes(desc: JoinDescriptor) -> int:
    """Bytes of a row of each input if the inputs can be interleaved in registers: they are packed, their rows are
    integers, and one of each make a vector at most; else 0."""
    item, count = desc.widths[0] * desc.element.itemsize, len(desc.widths)
    if count not in (2, 4, 8) or len({*desc.widths}) > 1 or item not in WORDS or count * item > VECTOR:
        return 0
    operands = desc.operands()
    if not _is_numbered(desc) or any(_row_stride(o) != o.shape[1] or o.alignment < item for o in operands):
        return 0
    return item


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
    if tiles.kind == "interleave":
        return [_interleave(desc, tiles)]
    is_mixed = tiles.kind == "mixed"
    given = [o for o in inputs if o.numel]
    if tiles.kind == "flat":
        return [_flat(desc, tiles, given)]
    # Fewer distinct signatures, so fewer binaries: the last input again, of no columns.
    count = next(n for n in RANKS if n >= len(given))
    extents = [o.shape[1] for o in given] + [0] * (count - len(given))
    given += given[-1:] * (count - len(given))

    def pointer(o: Operand) -> Ptr:
        return Ptr(o.name, o.element.bits, o.element.itemsize if is_mixed else o.alignment)

    def stride(o: Operand) -> Arg:
        return stride_arg(o, known_strides(o, 2)[0], wide)  # (offsets of 64 bits take twice as many instructions)

    args: dict[str, Arg] = {
        "inputs": tuple(map(pointer, given)),
        "widths": tuple(Int(n, wide, 1 if is_mixed else power_of_two_in(n)) for n in extents),
        "strides": tuple(map(stride, given)),
        "out": pointer(out),
        "out_stride": stride(out),
        "rows": Int(desc.rows, wide),
    }
    if is_mixed:
        args["columns"] = Int(sum(desc.widths), wide)
    constants = {
        "POINT_TYPE": tl.int64 if wide else tl.int32,
        "BLOCK_ROWS": tiles.height,
        "BLOCK_COLUMNS": tiles.width,
    }
    which = kernels.join_columns_kernel if is_mixed else kernels.join_kernel
    return [Launch(which, tiles.programs, args, constants, num_warps=THREADS // 32)]


def _flat(desc: JoinDescriptor, tiles: Tiles, given: Sequence[Operand]) -> Launch:
    out, word = desc.operand("out"), _word(desc)
    each = word // desc.element.itemsize
    extents, strides = [o.shape[1] // each for o in given], [_row_stride(o) // each for o in given]
    numel = out.numel // each
    args: dict[str, Arg] = {
        "inputs": tuple(Ptr(o.name, o.element.bits, word) for o in given),
        "widths": tuple(Int(n) for n in extents),
        "strides": tuple(Int(n) for n in (strides[:1] if len({*strides}) == 1 else strides)),
        "out": Ptr("out", out.element.bits, min(out.alignment, max(STORED, word))),
        "columns": divisor(sum(extents), False),
        "numel": Int(numel, False, power_of_two_in(numel)),
    }
    constants = {"WORD": WORDS[word], "WIDE": _is_wide(desc, word), "BLOCK": tiles.width}
    return Launch(kernels.join_flat_kernel, tiles.programs, args, constants, num_warps=THREADS // 32)


def _interleave(desc: JoinDescriptor, tiles: Tiles) -> Launch:
    *inputs, out = desc.operands()
    word = _interleaved_bytes(desc)
    # Wider loads than fill a vector of out would be exchanged between threads.
    most = max(VECTOR // len(inputs), word)
    args: dict[str, Arg] = {
        "inputs": tuple(Ptr(o.name, o.element.bits, min(o.alignment, most)) for o in inputs),
        "out": Ptr("out", out.element.bits, out.alignment),
        "count": Int(desc.rows, False, power_of_two_in(desc.rows)),
    }
    constants = {"WORD": WORDS[word], "BLOCK": tiles.height}
    return Launch(kernels.interleave_kernel, tiles.programs, args, constants, num_warps=THREADS // 32)
