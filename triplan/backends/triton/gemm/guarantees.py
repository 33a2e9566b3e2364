"""Guarantees of matrix products, and the error analysis behind them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from triplan.backends.triton.common import bounds
from triplan.backends.triton.gemm.products import gradient_products
from triplan.descriptors import GemmBackwardDescriptor
from triplan.descriptors.gemm import MatrixProductDescriptor
from triplan.sku import ElementKind, MathPrecision, PrecisionGuarantee, Tolerance
from triplan.sku.facts import fact

#: The steepest slope of an activation (1.129, of gelu): how much it amplifies the error of its argument.
ACTIVATION_SLOPE = 1.13
#: Roundings within an activation.
ACTIVATION_ROUNDINGS = 16
#: Roundings by alpha, beta, bias and their additions.
EPILOGUE_ROUNDINGS = 8
#: Largest |alpha| and |beta| for which the tolerance covers underflow: both scale the absolute loss.
MAX_SCALE = 4


@fact
def tolerance(element: ElementKind, out: ElementKind, math_precision: MathPrecision, k: int) -> Tolerance:
    """Worst case of k products accumulated by tensor cores (``bounds.product_error``), then alpha, beta, bias and an
    activation.

    tf32 makes subnormal multiplicands multiples of 2**-136. A multiplicand of tf32x3 below 2**-116, whose second part
    is subnormal, counts as if it were 2**-116. Elsewhere a subnormal multiplicand counts as the smallest normal one,
    because tensor cores align products that are not normalised.
    """
    compute = element.compute
    multiplied = bounds.product_error(element, math_precision, k, EPILOGUE_ROUNDINGS)
    return bounds.tolerance(
        out,
        compute,
        per_term=ACTIVATION_SLOPE * multiplied + ACTIVATION_ROUNDINGS * compute.unit_roundoff,
        # Tensor cores and approximations may flush results in f32.
        lost=(MAX_SCALE * (k + EPILOGUE_ROUNDINGS) * bounds.flushed(compute),),
    )


@fact
def _product_guarantee(
    element: ElementKind, out: ElementKind, math_precision: MathPrecision, k: int, invariant: bool
) -> PrecisionGuarantee:
    found = tolerance(element, out, math_precision, k)
    return bounds.guarantee(element.compute, found, math_precision=math_precision, batch=invariant)


def guarantee(desc: MatrixProductDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """For a kernel whose tile, or order of accumulation, depends on the number of rows."""
    return bounds.of_outputs(desc, _product_guarantee(desc.element, desc.out, desc.multiplicands, desc.k, False))


def invariant_guarantee(desc: MatrixProductDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """For a kernel that accumulates each row of C in the same order for every number of rows."""
    return bounds.of_outputs(desc, _product_guarantee(desc.element, desc.out, desc.multiplicands, desc.k, True))


def integer_guarantee(desc: MatrixProductDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """Addition modulo 2**32 is associative, so no order of accumulation changes a bit."""
    return bounds.of_outputs(desc, PrecisionGuarantee.exact(desc.sums))


@fact
def column_sum_tolerance(element: ElementKind, out: ElementKind, roundings: int) -> Tolerance:
    """A sum in the accumulator, each of whose terms is rounded at most ``roundings`` times; then once into ``out``."""
    compute = element.compute
    error = bounds.compounded(roundings * math.log1p(compute.unit_roundoff))
    if compute is ElementKind.F64:
        error *= 2  # the oracle's own error
    return bounds.tolerance(out, compute, per_term=error)


def backward_guarantee(
    desc: GemmBackwardDescriptor, roundings: int, invariant: bool = False
) -> Mapping[str, PrecisionGuarantee]:
    """The guarantee of each wanted gradient.

    Args:
        roundings: additions that an element of dc goes through on its way into dbias.
        invariant: whether each row of da is accumulated in the same order for every number of rows.
    """
    found = {
        name: _product_guarantee(desc.element, desc.out, desc.multiplicands, product.desc.k, invariant and name == "da")
        for name, product in gradient_products(desc).items()
    }
    if desc.wants_dbias:
        # Nothing is multiplied: dc keeps the precision of its element.
        found["dbias"] = bounds.guarantee(
            desc.element.compute,
            column_sum_tolerance(desc.element, desc.out, roundings),
            math_precision=MathPrecision(desc.element.value),
        )
    return found
