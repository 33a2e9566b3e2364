"""Kernel ``fill``: results that are computed from numbers alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triplan.backends.runtime.launch import Arg, Launch, Ptr, Scalar
from triplan.backends.table import kernel
from triplan.backends.triton.common import bounds
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.fill import elements_launch
from triplan.backends.triton.copies import fill_kernels as kernels
from triplan.backends.triton.copies.geometry import BOOL, ELEMENTS, F32, F64, I8, TYPES
from triplan.descriptors import ArangeDescriptor, FillDescriptor
from triplan.sku import PrecisionGuarantee, Target

#: Roundings of an element of arange: a product and a sum in f64, and as many in the oracle.
ROUNDINGS = 4


def guarantee(desc: FillDescriptor | ArangeDescriptor) -> Mapping[str, PrecisionGuarantee]:
    element = desc.element
    if isinstance(desc, FillDescriptor) or not element.is_floating_point:
        return {"out": PrecisionGuarantee.exact(element)}
    relative = F32.unit_roundoff if element.compute is not element else 0.0
    tolerance = bounds.tolerance(element, F64, relative=relative, per_term=ROUNDINGS * F64.unit_roundoff)
    return {"out": bounds.guarantee(F64, tolerance, batch=True, order=True)}


def numerics(desc: FillDescriptor | ArangeDescriptor) -> str:
    return f"copies.{desc.op}.{desc.element}.v1"


def rank(desc: FillDescriptor | ArangeDescriptor, target: Target) -> float:
    return LAUNCH_US + desc.operand("out").nbytes / BYTES_PER_US


def fill(desc: FillDescriptor | ArangeDescriptor, target: Target) -> list[Launch]:
    out, start, *step = desc.operands()
    if out.numel == 0:
        return []
    half = out.element.compute is not out.element
    args: dict[str, Arg] = {
        "start": Scalar(start.name, start.element, 0),
        "step": Scalar(step[0].name, step[0].element, 0) if step else None,
        "out": Ptr("out", I8 if out.element is BOOL else out.element, out.alignment),
    }
    cast = "bool" if out.element is BOOL else "f32" if half else "direct"
    constants: dict[str, Any] = {"NUMBER_TYPE": TYPES[start.element], "CAST": cast}
    return [elements_launch(kernels.numbers_kernel, args, constants, out.numel, out)]


for _op in ("fill", "arange"):
    kernel(op=_op, name="fill", elements=ELEMENTS, guarantee=guarantee, rank=rank, numerics=numerics)(fill)
