"""Dimensions of an elementwise problem, as few as the layouts allow, and its operands as kernel arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton.language as tl

from triplan.backends.runtime.launch import Arg, Int, Ptr, Scalar, Stride, power_of_two_in
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.offsets import I32_LIMIT, padded
from triplan.backends.triton.elementwise.fused import fused
from triplan.descriptors import Operand, packed_strides
from triplan.descriptors.elementwise.problems import ElementwiseDescriptor
from triplan.sku import ElementKind
from triplan.sku.facts import fact


class Along(NamedTuple):
    """A stride that only the tensor tells: that of its axis."""

    axis: int


@dataclass(frozen=True, slots=True)
class Dim:
    """A dimension of the result, and each operand's stride along it: 0 where it is broadcast."""

    size: int
    strides: tuple[int | Along, ...]


def _strides(o: Operand, rank: int) -> list[int | Along]:
    """The stride of ``o`` along each axis of a result of ``rank`` axes."""
    known = packed_strides(o.shape)
    found: list[int | Along] = [0] * (rank - len(o.shape))
    for axis, n in enumerate(o.shape):
        if n == 1 or axis in o.layout.zero_axes:
            found.append(0)
        elif o.layout.packed:
            found.append(known[axis])
        else:
            found.append(1 if axis == o.layout.unit_axis else Along(axis))
    return found


def tensors(desc: ElementwiseDescriptor) -> tuple[Operand, ...]:
    """The tensors: those that are read, then the results."""
    return tuple(o for o in desc.operands() if o.is_tensor)


@fact
def dims(desc: ElementwiseDescriptor) -> tuple[Dim, ...]:
    """The dimensions, innermost last: without those of extent 1, adjacent ones merged where every operand allows it.

    The axis along which the first result has unit stride is innermost.
    """
    shape, operands = desc.shape, tensors(desc)
    strides = [_strides(o, len(shape)) for o in operands]
    found = [Dim(n, tuple(s[a] for s in strides)) for a, n in enumerate(shape) if n != 1]
    first = next(i for i, o in enumerate(operands) if o.is_written)
    found.sort(key=lambda d: d.strides[first] == 1)
    merged: list[Dim] = []
    for dim in found:
        outer = merged[-1] if merged else None
        if outer is not None and all(
            isinstance(s, int) and s == t * dim.size if isinstance(t, int) else False
            for s, t in zip(outer.strides, dim.strides, strict=True)
        ):
            merged[-1] = Dim(outer.size * dim.size, dim.strides)
        else:
            merged.append(dim)
    return tuple(merged)


def blank(desc: ElementwiseDescriptor) -> Dim:
    """A dimension of one element."""
    return Dim(1, (0,) * len(tensors(desc)))


def stride_args(desc: ElementwiseDescriptor, along: Sequence[Dim]) -> tuple[tuple[Arg, ...], ...]:
    """For each tensor its strides along ``along``, innermost first."""
    found = []
    for i, o in enumerate(tensors(desc)):
        strides: list[Arg] = []
        for dim in along:
            s = dim.strides[i]
            multiple = o.layout.stride_multiple
            strides.append(
                Stride(o.name, s.axis, divisibility=multiple)
                if isinstance(s, Along)
                else Int(s, True, power_of_two_in(s))
            )
        found.append(padded(strides, Int(0, True, 16)))
    return tuple(found)


def base_args(desc: ElementwiseDescriptor) -> dict[str, Arg]:
    """The arguments ``inputs``, ``scalars`` and ``outputs``."""
    pointers = {
        o.name: Ptr(o.name, ElementKind.I8 if o.element is ElementKind.BOOL else o.element, o.alignment)
        for o in tensors(desc)
    }
    scalars = tuple(
        Scalar(i.name, i.element, 0 if i.default is None else i.default) for i in desc.inputs_read() if i.shape is None
    )
    return {
        "inputs": tuple(pointers[o.name] for o in tensors(desc) if not o.is_written),
        "scalars": scalars or None,
        "outputs": tuple(pointers[o.name] for o in tensors(desc) if o.is_written),
    }


def is_wide(desc: ElementwiseDescriptor) -> bool:
    """Whether points are numbered in 64 bits."""
    return desc.operands()[-1].numel >= I32_LIMIT


def constants(desc: ElementwiseDescriptor) -> dict[str, Any]:
    return {"FUNCTION": fused(desc), "POINT_TYPE": tl.int64 if is_wide(desc) else tl.int32}


#: 16-byte loads of the narrowest operand per thread: 1 and 2 are equal for flat operands, 2 is best for rows (H200).
LOADS = 2
#: Elements that a thread may hold of all operands together. Untuned.
HELD = 64


def lanes(desc: ElementwiseDescriptor) -> int:
    """Elements of each operand per thread: some 16-byte vectors of the narrowest of those as large as the result."""
    full = [o.element.itemsize for o in tensors(desc) if o.numel == desc.operands()[-1].numel]
    found, count = LOADS * 16 // min(full), len(tensors(desc))
    while found * count > HELD and found > 1:
        found //= 2
    return found


def bytes_us(desc: ElementwiseDescriptor, slowdown: float = 1.0) -> float:
    """Microseconds of a kernel that moves each operand once, ``slowdown`` times as slowly as ``flat``."""
    return LAUNCH_US + slowdown * sum(o.nbytes for o in tensors(desc)) / BYTES_PER_US
