"""The guarantees of elementwise ops, from the errors of the maths table's functions."""

from __future__ import annotations

from collections.abc import Mapping

from triplan.backends.triton.common import bounds
from triplan.backends.triton.common.accuracy import lost, static_errors
from triplan.descriptors.elementwise.problems import ElementwiseDescriptor
from triplan.sku import ElementKind, PrecisionGuarantee
from triplan.sku.facts import fact


@fact
def guarantee(desc: ElementwiseDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """Each result depends on its own element alone, so neither batch nor order changes its bits."""
    outputs = [o.name for o in desc.operands() if o.is_written]
    found = {}
    for name, (at, element), relative in zip(outputs, desc.tree.results, static_errors(desc.tree), strict=True):
        compute = desc.tree.types[at].element.compute
        if relative == 0.0:
            tolerance = bounds.EXACT
        elif relative is None:
            tolerance = bounds.running(element, compute)
        else:
            relative *= 2 if compute is ElementKind.F64 else 1  # the float64 oracle has as large an error
            tolerance = bounds.tolerance(element, compute, relative=relative, lost=(lost(compute),))
        found[name] = (
            bounds.guarantee(compute, tolerance, batch=True, order=True)
            if compute.is_floating_point
            else PrecisionGuarantee.exact(compute).replace(tolerance=tolerance)
        )
    return found
