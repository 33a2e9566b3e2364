"""Operands as kernel arguments: addresses, sizes and strides, and when their offsets need 64 bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import triton.language as tl

from triplan.backends.runtime.launch import Arg, Int, Ptr, Stride
from triplan.descriptors import Operand, packed_strides
from triplan.sku import ElementKind

TL = {
    ElementKind.F32: tl.float32,
    ElementKind.F64: tl.float64,
    ElementKind.I8: tl.int8,
    ElementKind.I16: tl.int16,
    ElementKind.I32: tl.int32,
    ElementKind.I64: tl.int64,
}
#: Widths to which lists of dimensions are padded: fewer distinct signatures, so fewer binaries and launchers.
RANKS = (2, 4, 8)
I32_LIMIT = 2**31 - 2**16  # room for the last block's lanes to run past the end without wrapping


def bits(operand: Operand) -> Ptr:
    """The operand's address, read as integers of its element's width."""
    return Ptr(operand.name, operand.element.bits, operand.alignment)


def values(operand: Operand) -> Ptr:
    """The operand's address, read as its element."""
    return Ptr(operand.name, operand.element, operand.alignment)


def extent_int(n: int) -> Int:
    return Int(n, wide=n >= 2**31)


def padded(items: Iterable[Arg], filler: Arg) -> tuple[Arg, ...]:
    """``items`` innermost first, filled outwards to one of RANKS."""
    found = tuple(items)[::-1] or (filler,)
    width = next(r for r in RANKS if r >= len(found))
    return (*found, *(filler,) * (width - len(found)))


def strides(operand: Operand, axes: Sequence[int | None], wide_offsets: bool, item: int | None = None) -> list[Arg]:
    """The operand's stride along each of ``axes``: a number if it is packed, else read at run time."""
    known = packed_strides(operand.shape)
    out: list[Arg] = []
    for axis in axes:
        if axis is None:
            out.append(Int(0, wide_offsets))
        elif operand.layout.packed:
            out.append(Int(known[axis], wide_offsets))
        else:
            out.append(Stride(operand.name, axis, item))
    return out


def ceil_power(n: int) -> int:
    """The smallest power of two that is not below ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def padded_bytes(n: int) -> int:
    """``n`` rounded up to where another array in a workspace may begin."""
    return -(-n // 16) * 16
