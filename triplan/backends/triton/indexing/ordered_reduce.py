"""Entry ``ordered_reduce``: products and extremes in ascending order of position, without scratch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common.bounds import EXACT, guarantee, of_outputs
from triplan.backends.triton.common.offsets import values
from triplan.backends.triton.indexing import ordered, steps_kernels as steps
from triplan.backends.triton.indexing.registration import ADDED, entry
from triplan.descriptors import ScatterReduceDescriptor
from triplan.sku import Duplicates, MathPrecision, PrecisionGuarantee, Target


def result_guarantee(desc: ScatterReduceDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """Exact, and in any order the same; of NaN not the bits."""
    compute = desc.element.compute
    precision = MathPrecision(compute.value) if compute.is_floating_point else MathPrecision.EXACT
    found = guarantee(compute, EXACT, math_precision=precision, batch=True, order=True, duplicates=Duplicates.SUM)
    return of_outputs(desc, found)


def numerics(desc: ScatterReduceDescriptor) -> str:
    return f"{desc.op}.{desc.element}.v1"


def _register(op: str, elements: tuple[str, ...], step: Any) -> None:
    @entry(
        "ordered_reduce",
        (op,),
        elements=elements,
        supports=ordered.applies,
        rank=ordered.rank,
        priority=1,
        guarantee=result_guarantee,
        numerics=numerics,
    )
    def launches(desc: ScatterReduceDescriptor, target: Target) -> list[Launch]:
        return ordered.ordered_launches(desc, step, values, desc.element.compute)


_register("scatter_prod", ("i32", "i64"), steps.multiply_step)
_register("scatter_amax", ADDED, steps.max_step)
_register("scatter_amin", ADDED, steps.min_step)
