"""The dimensions of an elementwise problem, merged as far as layouts allow, and its operands as kernel arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import triton.language as tl

from triplan.backends.runtime.launch import Arg, Int, Ptr, Scalar
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.expressions import fused
from triplan.backends.triton.common.offsets import I32_LIMIT, padded
from triplan.backends.triton.common.strides import Along, continues, in_memory, known_strides, stride_arg
from triplan.descriptors import Operand
from triplan.descriptors.elementwise.problems import ElementwiseDescriptor
from triplan.sku import ElementKind
from triplan.sku.facts import fact


@dataclass(frozen=True, slots=True)
class Dim:
    """A dimension of the result, and the stride of each operand along it, 0 where it is broadcast."""

    size: int
    strides: tuple[int | Along, ...]


def tensors(desc: ElementwiseDescriptor) -> tuple[Operand, ...]:
    """The operands that are tensors: inputs, then results."""
    return tuple(o for o in desc.operands() if o.is_tensor)


@fact
def dims(desc: ElementwiseDescriptor) -> tuple[Dim, ...]:
    """The dimensions, innermost last, without those of extent 1. Adjacent ones are merged where all strides allow it.

    They are in the order of the first result's memory, as far as it is known: where it has unit stride is innermost.
    """
    shape, operands = desc.shape, tensors(desc)
    strides = [known_strides(o, len(shape)) for o in operands]
    found = [Dim(n, tuple(s[a] for s in strides)) for a, n in enumerate(shape) if n != 1]
    first = next(i for i, o in enumerate(operands) if o.is_written)
    found.sort(key=lambda d: in_memory(d.strides[first]))
    merged: list[Dim] = []
    for dim in found:
        if merged and continues(merged[-1].strides, dim.strides, dim.size):
            merged[-1] = Dim(merged[-1].size * dim.size, dim.strides)
        else:
            merged.append(dim)
    return tuple(merged)


def are_turned(desc: ElementwiseDescriptor, at: int) -> tuple[bool, ...]:
    """For each tensor, whether it is contiguous along dimension ``at`` instead of the innermost one."""
    found = dims(desc)
    return tuple(
        s == 1 and inner not in (0, 1) and not o.is_written
        for s, inner, o in zip(found[at].strides, found[-1].strides, tensors(desc), strict=True)
    )


def turned(desc: ElementwiseDescriptor) -> int | None:
    """The last dimension along which some input is contiguous that is not contiguous along the innermost one."""
    return next((at for at in reversed(range(len(dims(desc)) - 1)) if any(are_turned(desc, at))), None)


def blank(desc: ElementwiseDescriptor) -> Dim:
    """A dimension of extent 1."""
    return Dim(1, (0,) * len(tensors(desc)))


def stride_args(desc: ElementwiseDescriptor, along: Sequence[Dim]) -> tuple[tuple[Arg, ...], ...]:
    """The strides of each tensor along ``along``, innermost first; of 32 bits if its offsets need no more."""
    found, everywhere = [], dims(desc)
    for i, o in enumerate(tensors(desc)):
        wide = o.numel >= I32_LIMIT or any(isinstance(dim.strides[i], Along) for dim in everywhere)
        found.append(padded([stride_arg(o, dim.strides[i], wide) for dim in along], Int(0, wide, 16)))
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
    """Whether points need 64-bit numbers."""
    return desc.operands()[-1].numel >= I32_LIMIT


def constants(desc: ElementwiseDescriptor) -> dict[str, Any]:
    return {"FUNCTION": fused(desc), "POINT_TYPE": tl.int64 if is_wide(desc) else tl.int32}


#: Elements per thread at most, of all operands together. Untuned.
HELD = 64
#: (elements of a problem, those of a thread) at most: more threads have less to compute one after another. On an H200
#: tanh of 2**17 bf16 takes 1.4, 1.5, 1.9 and 2.4 us by 2, 4, 8 and 16 elements a thread, of 2**19 2.3, 1.9, 2.1, 2.7.
#: (More than 2**19: untuned.)
FEW = ((1 << 17, 2), (1 << 20, 4), (1 << 21, 8))


def lanes(desc: ElementwiseDescriptor, loads: int = 1, few: Sequence[tuple[int, int]] = FEW) -> int:
    """Elements of each operand per thread: ``loads`` 16-byte vectors of the widest operand that is not broadcast.

    Two vectors at least where the result is narrower, as that of a comparison is. Fewer elements where the problem has
    few: ``few``, as FEW has them.
    """
    numel, count = desc.operands()[-1].numel, len(tensors(desc))
    widest = max(o.element.itemsize for o in tensors(desc) if o.numel == numel)
    narrow = any(o.is_written and o.element.itemsize < widest for o in tensors(desc))
    found = 16 // widest * max(loads, 2 if narrow else 1)
    while found * count > HELD and found > 1:
        found //= 2
    return min([found, *(each for most, each in few if numel <= most)])


def bytes_us(desc: ElementwiseDescriptor, slowdown: float = 1.0) -> float:
    """Estimated microseconds of a kernel that moves each operand once, ``slowdown`` times as slowly as ``flat``."""
    return LAUNCH_US + slowdown * sum(o.nbytes for o in tensors(desc)) / BYTES_PER_US
