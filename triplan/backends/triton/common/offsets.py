"""Operands as kernel arguments: addresses, sizes and strides, and when their offsets need 64 bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import triton.language as tl

from triplan.backends.runtime.launch import Arg, Int, Ptr, Stride, power_of_two_in
from triplan.descriptors import Descriptor, Operand, packed_strides
from triplan.sku import ElementKind

T = TypeVar("T")
#: Triton's type of each element that kernels compute in.
TL = {
    ElementKind.F32: tl.float32,
    ElementKind.F64: tl.float64,
    ElementKind.I8: tl.int8,
    ElementKind.I16: tl.int16,
    ElementKind.I32: tl.int32,
    ElementKind.I64: tl.int64,
}
#: Lengths to which tuples of dimensions are padded: fewer distinct signatures, so fewer binaries and launchers.
RANKS = (2, 4, 8)
#: From this many elements on, offsets have 64 bits. Below 2**31, so that the last block's lanes may run past the end.
I32_LIMIT = 2**31 - 2**16


def bits(operand: Operand) -> Ptr:
    """The operand's address, read as integers of its element's width."""
    return Ptr(operand.name, operand.element.bits, operand.alignment)


def values(operand: Operand) -> Ptr:
    """The operand's address, read as its element."""
    return Ptr(operand.name, operand.element, operand.alignment)


def layout(desc: Descriptor) -> str:
    """The SKU's layout: whether all tensors are promised packed."""
    return "packed" if all(o.layout.packed for o in desc.operands() if o.is_tensor) else "strided"


def extent_int(n: int) -> Int:
    """An extent that indices are compared with: 64 bits only where it needs them."""
    return Int(n, wide=n >= 2**31)


def divisible_extent(n: int) -> Int:
    """An extent with the power of two that divides it: rows of that length begin at vectors. Of 64 bits where the lanes
    of a last block may run past 31."""
    return Int(n, n >= I32_LIMIT, power_of_two_in(n))


def padded(items: Iterable[Arg], filler: Arg) -> tuple[Arg, ...]:
    """``items`` (outermost first) in reverse, innermost first, followed by ``filler`` up to a length of RANKS."""
    found = tuple(items)[::-1] or (filler,)
    width = next(r for r in RANKS if r >= len(found))
    return (*found, *(filler,) * (width - len(found)))


def divisor(n: int, wide: bool) -> tuple[Arg, ...]:
    """(n, multiplier, shift), with which kernels divide points below 2**31 by a product in place of a quotient.

    With ``l = ceil(log2(n))`` the multiplier ``m = floor(2**(31 + l) / n) + 1`` is below 2**32, and
    ``point // n == (point * m) >> (31 + l)`` for every such point (Granlund & Montgomery, "Division by invariant
    integers using multiplication", 1994, theorem 4.2).
    """
    shift = max(n - 1, 0).bit_length()
    multiplier = (1 << 31 + shift) // n + 1 if 0 < n < 2**31 else 0
    return Int(n, wide), Int(multiplier - (1 << 32 if multiplier >= 1 << 31 else 0)), Int(shift)


def extents(shape: Iterable[int], wide: bool) -> tuple[Arg, ...]:
    """``sizes`` of kernels that find an element's coordinates from its number: ``wide`` if that needs 64 bits."""
    return padded((divisor(n, wide) for n in shape), divisor(1, wide))


def strides(operand: Operand, axes: Sequence[int | None], wide_offsets: bool, item: int | None = None) -> list[Arg]:
    """The operand's stride along each of ``axes``: known if it is packed, else read from the tensor at run time.

    0 where the axis is None. ``wide_offsets``: known strides have 64 bits. ``item``: which tensor of a list.
    """
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


def ranked(dims: Sequence[T], blank: T) -> tuple[T, ...]:
    """``dims`` (outermost first) innermost first, followed by ``blank`` up to a length of 1 or of RANKS."""
    found = (*reversed(dims),)
    width = next(r for r in (1, *RANKS) if r >= len(found))
    return (*found, *(blank,) * (width - len(found)))


def ceil_power(n: int) -> int:
    """The smallest power of two >= ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def padded_bytes(n: int) -> int:
    """``n`` rounded up to 16 bytes, the alignment of arrays within a workspace."""
    return -(-n // 16) * 16
