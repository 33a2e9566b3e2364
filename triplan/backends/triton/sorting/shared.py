"""What the kernels of sorting share on the host: operands as arguments, and what all of them guarantee."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from triplan.backends.runtime.launch import Arg, Int, Ptr
from triplan.backends.table import kernel
from triplan.backends.triton.common import bounds
from triplan.backends.triton.common.offsets import layout
from triplan.backends.triton.common.strides import known_strides, stride_arg
from triplan.descriptors import (
    ArgsortDescriptor,
    Descriptor,
    KthValueDescriptor,
    Operand,
    SortDescriptor,
    TopKDescriptor,
)
from triplan.descriptors.sorting import RowOrderProblem
from triplan.sku import ElementKind, MathPrecision, PrecisionGuarantee

#: Problems that order whole rows, and their ops.
Sorted = SortDescriptor | ArgsortDescriptor
SORTS = ("sort", "argsort")
#: Problems that choose elements of rows by their order, and their ops.
Selection = TopKDescriptor | KthValueDescriptor
SELECTIONS = ("topk", "kthvalue")
Ordered = Sorted | Selection
ELEMENTS = ("f16", "bf16", "f32", "f64", "i8", "i16", "i32", "i64", "u8", "bool")
#: The bits of infinity. Of integers there is none.
INFINITY = {
    ElementKind.F16: 0x7C00,
    ElementKind.BF16: 0x7F80,
    ElementKind.F32: 0x7F800000,
    ElementKind.F64: 0x7FF0000000000000,
}
#: Elements that have no sign.
UNSIGNED = (ElementKind.U8, ElementKind.BOOL)
#: Positions within a row are i32, also those of the last block's lanes, which may run past the end.
MOST = 2**31 - 2**16


def guarantee(desc: Descriptor) -> Mapping[str, PrecisionGuarantee]:
    """Elements are moved and compared, each row alone. Positions, and which of -0.0 and 0.0 comes first, depend on the
    order of the elements."""

    def of(o: Operand) -> PrecisionGuarantee:
        exact = MathPrecision.EXACT
        return bounds.guarantee(o.element.compute, bounds.EXACT, math_precision=exact, batch=True)

    return bounds.of_outputs(desc, of)


def numerics(desc: Descriptor) -> str:
    """The order is total, so that all kernels of an op give the same bits."""
    return f"sorting.{desc.op}.v1"


#: ``kernel`` with what all kernels of sorting have in common.
sorting_kernel = partial(kernel, elements=ELEMENTS, guarantee=guarantee, numerics=numerics, layout=layout)


def integers(element: ElementKind) -> ElementKind:
    """Integers of its width, which elements are read as."""
    return ElementKind.U8 if element in UNSIGNED else element.bits


def key_element(desc: RowOrderProblem) -> ElementKind:
    """What the kernels hold keys in."""
    return ElementKind.I64 if desc.element.itemsize == 8 else ElementKind.I32


def bits(o: Operand) -> Ptr:
    """The address of ``o``, read as integers of its width."""
    return Ptr(o.name, integers(o.element), o.alignment)


def row_strides(o: Operand) -> tuple[Arg, ...]:
    """The strides of ``o``, [rows, ...] or [rows], between rows and along one; None for one of 1 along a row."""
    known = known_strides(o, len(o.shape))
    if len(known) == 1:
        return (stride_arg(o, known[0]), None)
    step = None if known[1] == 1 or o.shape[1] == 1 else stride_arg(o, known[1])
    return (stride_arg(o, known[0]), step)


def row_args(desc: RowOrderProblem) -> dict[str, Arg]:
    """``x``, ``values`` and ``indices`` with their strides; None of values that the op does not return."""
    given = {o.name: o for o in desc.operands()}
    found: dict[str, Arg] = {}
    for name in ("x", "values", "indices"):
        o = given.get(name)
        found |= {name: None if o is None else bits(o), f"{name}_strides": None if o is None else row_strides(o)}
    return found


def key_constants(desc: RowOrderProblem) -> dict[str, Any]:
    return {"BITS": 8 * desc.element.itemsize, "INFINITY": INFINITY.get(desc.element, 0)}


def kept_of(desc: Ordered) -> tuple[int, int]:
    """The places in order that are kept: (the first, how many)."""
    if isinstance(desc, TopKDescriptor):
        return 0, desc.k
    return (desc.k - 1, 1) if isinstance(desc, KthValueDescriptor) else (0, desc.n)


def kept_args(desc: Ordered) -> tuple[Int | None, Int | None]:
    """``kept_of`` as the arguments of kernels that sort whole rows; None of sorts, which keep all."""
    first, kept = kept_of(desc)
    return (Int(first), Int(kept)) if isinstance(desc, Selection) else (None, None)


def descending(desc: RowOrderProblem) -> bool:
    """Whether the order that elements are taken in is descending."""
    found: bool = getattr(desc, "descending", getattr(desc, "largest", False))
    return found
