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
#: Relative error of a multiplicand that is truncated: tf32 keeps 11 bits, the two parts of tf32x3 keep 22.
TRUNCATION = {MathPrecision.TF32: 2.0**-10, MathPrecision.TF32X3: 2.0**-20}
#: Relative error of a tf32x3 product without the product of both second parts.
TF32X3_OMITTED = 2.0**-20
#: By how much the magnitudes of the two parts of a tf32x3 multiplicand exceed its own.
TF32X3_PARTS = 2.0**-8
#: Largest |alpha| and |beta| for which the tolerance covers underflow: both scale the absolute loss.
MAX_SCALE = 4


@fact
def tolerance(element: ElementKind, out: ElementKind, math_precision: MathPrecision, k: int) -> Tolerance:
    """Worst case of k products accumulated by tensor cores, then alpha, beta, bias and an activation.

    Accumulation. Tensor cores add the products of one step (k at least 4) to the accumulator: they align all addends to
    the largest one and truncate below its last bit. Each addend, and the sum, is off by one unit in the last place, not
    by half of one (Fasi, Higham, Mikaitis, Pranesh: Numerical behavior of NVIDIA tensor cores, 2021). So the relative
    error is (1 + 2u)^n - 1 with n = k + k / 4 and a few for the epilogue. It also covers fused multiply-adds, which
    round.

    Multiplicands. tf32 truncates each to 11 bits, and subnormal ones to multiples of 2**-136. tf32x3 truncates twice,
    which leaves 22 bits, omits the product of the two second parts, and accumulates three times as many products; a
    multiplicand below 2**-116, whose second part is subnormal, counts as if it were 2**-116. Elsewhere a subnormal
    multiplicand counts as the smallest normal one, because tensor cores align products that are not normalised.

    In f64 the oracle is no more precise than the kernel: its own error doubles the bound.
    """
    compute = element.compute
    u = compute.unit_roundoff
    x3 = math_precision is MathPrecision.TF32X3
    addends = 3 * k if x3 else k
    accumulated = bounds.compounded((addends + addends // 4 + EPILOGUE_ROUNDINGS) * math.log1p(2 * u))
    if compute is ElementKind.F64:
        accumulated *= 2
    if x3:
        accumulated *= 1 + TF32X3_PARTS
    truncated = TRUNCATION.get(math_precision, 0.0)
    omitted = TF32X3_OMITTED if x3 else 0.0
    multiplied = ((1 + truncated) ** 2 + omitted) * (1 + accumulated) - 1
    return bounds.tolerance(
        out,
        compute,
        per_term=ACTIVATION_SLOPE * multiplied + ACTIVATION_ROUNDINGS * u,
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
