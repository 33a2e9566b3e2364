"""What the elementwise entries share: guarantees, arguments and the cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triplan.backends.runtime.launch import Arg
from triplan.backends.triton.common import bounds
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.offsets import TL, values
from triplan.backends.triton.elementwise import maths_kernels as maths
from triplan.descriptors import UnaryBackwardDescriptor, UnaryDescriptor
from triplan.sku import ElementKind, PrecisionGuarantee, Target

ELEMENTS = ("f16", "bf16", "f32", "f64")

ElementwiseDescriptor = UnaryDescriptor | UnaryBackwardDescriptor
OPS = (*UnaryDescriptor.ops(), *UnaryBackwardDescriptor.ops())


def guarantee(desc: ElementwiseDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """Each result depends on its own element alone, so neither batch nor order changes its bits."""
    compute, roundings = desc.element.compute, maths.ROUNDINGS[desc.op]
    if compute is ElementKind.F64:
        roundings *= 2  # the float64 oracle's own roundings
    tolerance = bounds.tolerance(
        desc.element,
        compute,
        relative=bounds.compounded(roundings * compute.unit_roundoff),
        lost=(2 * roundings * bounds.smallest_subnormal(compute),),
    )
    return bounds.of_outputs(desc, bounds.guarantee(compute, tolerance, batch=True, order=True))


def numerics(desc: ElementwiseDescriptor) -> str:
    """Equal for all entries: each evaluates the same function."""
    return f"{desc.op}.{desc.element}.v1"


def layout(desc: ElementwiseDescriptor) -> str:
    return "packed" if all(o.layout.packed for o in desc.operands()) else "strided"


def bytes_us(desc: ElementwiseDescriptor, target: Target) -> float:
    """Microseconds of a kernel that reads each input and writes the output once."""
    return LAUNCH_US + sum(o.nbytes for o in desc.operands()) / BYTES_PER_US


def pointers(desc: ElementwiseDescriptor) -> tuple[dict[str, Arg], tuple[str, str | None, str]]:
    """The kernels' pointer arguments, and the operands' names behind them: first, second (or None), out."""
    *inputs, out = desc.operands()
    first, second = inputs[0], inputs[1] if len(inputs) > 1 else None
    found: dict[str, Arg] = {
        "first": values(first),
        "second": None if second is None else values(second),
        "out": values(out),
    }
    return found, (first.name, None if second is None else second.name, out.name)


def constants(desc: ElementwiseDescriptor) -> dict[str, Any]:
    return {"FUNCTION": getattr(maths, desc.op), "COMPUTE": TL[desc.element.compute]}
