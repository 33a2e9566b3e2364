"""Tolerances and guarantees from a few facts, for kernels and references alike.

A family says how large the relative error of its result and the error per term are, and how much may be flushed; the
narrowing of the result, the subnormal numbers of its element and the shape of a guarantee are decided here.

|got - ref| <= rtol * |ref| + ctol * sum|terms| + underflow, as ``Tolerance`` has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from triplan.descriptors import Descriptor, Operand
from triplan.sku import Duplicates, ElementKind, MathPrecision, PrecisionGuarantee, Tolerance
from triplan.sku.facts import fact

#: Smallest integer d for which exp(-d) rounds to 0. An argument x >= -d with relative error e is off by at most d * e,
#: which is the relative error of exp(x).
MOST_EXPONENT = {ElementKind.F32: 104, ElementKind.F64: 746}
#: The tolerance of elements that are copied, or added modulo 2^n.
EXACT = Tolerance()
#: Relative error of a multiplicand that is truncated: tf32 keeps 11 bits, the two parts of tf32x3 keep 22.
TRUNCATION = {MathPrecision.TF32: 2.0**-10, MathPrecision.TF32X3: 2.0**-20}
#: Relative error of a tf32x3 product without the product of both second parts.
TF32X3_OMITTED = 2.0**-20
#: By how much the magnitudes of the two parts of a tf32x3 multiplicand exceed its own.
TF32X3_PARTS = 2.0**-8


def compounded(exponent: float) -> float:
    """exp(exponent) - 1: the relative error of n roundings u is (1 + u)^n - 1, and ``exponent`` n * u or n * log1p(u).

    (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2.) Beyond 700 it would overflow; a tolerance
    that large accepts everything anyhow.
    """
    return math.expm1(min(exponent, 700.0))


@fact
def smallest_normal(element: ElementKind) -> float:
    """What a unit that flushes subnormal numbers may lose in one operation."""
    return float(torch.finfo(element.torch).smallest_normal)


@fact
def smallest_subnormal(element: ElementKind) -> float:
    """What rounding to ``element`` may lose of a result that is nearly 0."""
    info = torch.finfo(element.torch)
    return float(info.smallest_normal * info.eps)


def flushed(element: ElementKind) -> float:
    """What one operation in ``element`` may lose. In f32, approximations, atomics and tensor cores flush subnormals."""
    return smallest_normal(element) if element is ElementKind.F32 else smallest_subnormal(element)


def narrowing(out: ElementKind, compute: ElementKind) -> float:
    """The relative error of rounding a result of ``compute`` to ``out``; 0 if they are the same."""
    return out.unit_roundoff if out is not compute else 0.0


def product_error(element: ElementKind, math_precision: MathPrecision, k: int, roundings: int) -> float:
    """The error, relative to sum|terms|, of k products accumulated by tensor cores, and ``roundings`` more.

    Accumulation. Tensor cores add the products of one step (k at least 4) to the accumulator: they align all addends to
    the largest one and truncate below its last bit. Each addend, and the sum, is off by one unit in the last place, not
    by half of one (Fasi, Higham, Mikaitis, Pranesh: Numerical behavior of NVIDIA tensor cores, 2021). So the relative
    error is (1 + 2u)^n - 1 with n = k + k / 4 and ``roundings``. It also covers fused multiply-adds, which round.

    Multiplicands. tf32 truncates each to 11 bits. tf32x3 truncates twice, which leaves 22 bits, omits the product of
    the two second parts, and accumulates three times as many products.

    In f64 the oracle is no more precise than the kernel: its own error doubles the bound.
    """
    compute = element.compute
    x3 = math_precision is MathPrecision.TF32X3
    addends = 3 * k if x3 else k
    accumulated = compounded((addends + addends // 4 + roundings) * math.log1p(2 * compute.unit_roundoff))
    if compute is ElementKind.F64:
        accumulated *= 2
    if x3:
        accumulated *= 1 + TF32X3_PARTS
    truncated = TRUNCATION.get(math_precision, 0.0)
    return ((1 + truncated) ** 2 + (TF32X3_OMITTED if x3 else 0.0)) * (1 + accumulated) - 1


def tolerance(
    out: ElementKind,
    compute: ElementKind,
    *,
    relative: float = 0.0,
    per_term: float = 0.0,
    last: float | None = None,
    lost: tuple[float, ...] = (),
) -> Tolerance:
    """The tolerance of a result in ``out``, computed in ``compute``.

    Args:
        relative: error relative to the result.
        per_term: error relative to sum|terms|.
        last: by how much the rounding of the result enlarges ``per_term``; by default the narrowing to ``out``.
        lost: absolute losses by underflow on the way, in addition to that of the result.
    """
    narrowed = narrowing(out, compute)
    underflow = smallest_subnormal(out)
    for loss in lost:
        underflow += loss
    return Tolerance(
        rtol=relative + narrowed, ctol=per_term * (1 + (narrowed if last is None else last)), underflow=underflow
    )


def running(out: ElementKind, compute: ElementKind, *, directed: bool = False) -> Tolerance:
    """The tolerance of a result whose error is computed at the actual values, in units of roundoff: sum|terms|.

    ``directed``: it is rounded to a neighbour, not always to the nearest.
    """
    u = compute.unit_roundoff or ElementKind.F32.unit_roundoff
    return Tolerance(
        rtol=narrowing(out, compute) * (1 + directed),
        ctol=u * (1 + out.unit_roundoff),
        underflow=smallest_subnormal(out) if out.is_floating_point else 0.0,
    )


def rounded_down(out: ElementKind) -> Tolerance:
    """The tolerance of a sum of terms that is rounded down to ``out``, by less than a unit in the last place."""
    return Tolerance(ctol=2 * out.unit_roundoff, underflow=smallest_subnormal(out))


def guarantee(
    accumulator: ElementKind,
    tolerance: Tolerance,
    *,
    math_precision: MathPrecision | None = None,
    deterministic: bool = True,
    bit_stable: bool | None = None,
    batch: bool = False,
    order: bool = False,
    duplicates: Duplicates | None = None,
) -> PrecisionGuarantee:
    """The guarantee of one output.

    ``math_precision``: by default the accumulator's; ``bit_stable``: by default as ``deterministic``; ``batch`` and
    ``order``: whether the bits are invariant under them.
    """
    return PrecisionGuarantee(
        math_precision=MathPrecision(accumulator.value) if math_precision is None else math_precision,
        accumulator=accumulator,
        deterministic=deterministic,
        bit_stable_on_same_hardware=deterministic if bit_stable is None else bit_stable,
        batch_invariant=batch,
        order_invariant=order,
        duplicates=duplicates,
        tolerance=tolerance,
    )


def of_outputs(
    desc: Descriptor, found: PrecisionGuarantee | Callable[[Operand], PrecisionGuarantee]
) -> Mapping[str, PrecisionGuarantee]:
    """``found`` for each output of ``desc``, or what it returns for each. ``status``, the lowest bad position, is a
    minimum: no order changes it."""
    status, written = PrecisionGuarantee.exact(ElementKind.I64), [o for o in desc.operands() if o.is_written]
    each = found if callable(found) else lambda o: found
    return {o.name: status if o.name == "status" else each(o) for o in written}


@fact
def rounded(
    out: ElementKind,
    compute: ElementKind,
    relative: float,
    per_term: float = 0.0,
    *,
    flushes: float | None = None,
    lost: float = 0.0,
    batch: bool = False,
    order: bool = False,
    duplicates: Duplicates | None = None,
) -> PrecisionGuarantee:
    """The guarantee of a result in ``out`` that was computed in ``compute``, in a fixed order.

    Args:
        relative: roundings on its path that are relative to the result.
        per_term: roundings that are relative to its terms.
        flushes: operations that may flush a subnormal number; by default all roundings are of such.
        lost: a further absolute loss by underflow.
        batch: whether the bits are batch-invariant.
        order: whether the bits are order-invariant.
        duplicates: what writes to one element do; ``any`` is not deterministic.
    """
    u, final = compute.unit_roundoff, out.unit_roundoff
    flushes = relative + per_term if flushes is None else flushes
    return guarantee(
        compute,
        tolerance(
            out,
            compute,
            relative=compounded(relative * u),
            per_term=compounded(per_term * u),
            last=final,
            lost=(flushes * smallest_normal(compute), lost),
        ),
        deterministic=duplicates is not Duplicates.ANY,
        batch=batch,
        order=order,
        duplicates=duplicates,
    )


@fact
def stored(element: ElementKind, duplicates: Duplicates) -> PrecisionGuarantee:
    """The guarantee of a copy to elements that indices name: of several writes to one, ``last`` or ``any`` stays."""
    known = duplicates is Duplicates.LAST
    exact = MathPrecision.EXACT
    return guarantee(element, EXACT, math_precision=exact, deterministic=known, batch=known, duplicates=duplicates)
