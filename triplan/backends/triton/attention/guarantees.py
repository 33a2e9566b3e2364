"""Guarantees of attention, and the error analysis behind them.

Let s be the scaled scores, p their probabilities, u the roundoff of the compute element, and e the roundoff of the
element to which probabilities are rounded before they multiply values (0 if it is the compute element). The error of a
score is relative to

    E = |scale| * sum(|q| * |k|) + |mask| + softcap

Tensor cores truncate: each addend is off by 2u, not by u (see gemm's tolerance).

- A score is off by at most ``of_scores * E``. This counts D products and D/4 sums, the truncation of both factors to
  tf32, and the roundings of scale, softcap, mask and the exponent, which is a difference of two numbers of at most 2E.
  Of f32 factors in parts it counts the products that are omitted. The five small products are below 2**-7 of the large
  one, and so are their errors; D/16 sums of 16 products, not D/4, leave more room than that.
- So p has a relative error of twice that, because the sum of exponentials has an error as well. Where a running maximum
  rescales the accumulators, the sum and the results get the same factor; its rounding is counted in ``of_terms``.
  Where exponentials have an earlier maximum as their base (``wgmma``), they are up to 2**8 times as large, as are both
  sums: errors relative to them are the same, and fewer of them underflow.
- A result is a sum of n terms p * v. It is off by ``of_terms * sum(p * |v|)``, which counts e, the n products and sums,
  and the additions of the sum of exponentials.

Together: |error| <= of_terms * sum(p * |v| * (1 + 2 * weight * E)), with weight = of_scores / of_terms. The reference
computes this sum; the tolerance's ``ctol`` is ``of_terms``.

In the backward op, dv has |dout| in place of |v|. For dq and dk, ds is off by ``(of_terms - e) * p * b``, where b =
|dout| @ |v| + sum(|dout * out|), whose products of_terms counts too; the rounding of ds itself is relative to |ds|.
With ``share`` = (of_terms - e) / of_terms, the terms are (|ds| + (share + 2 * weight * E) * p * b) * |k|.

``lost``: what p or ds may lose by underflow, of itself and of the products that make it up. ``flushed``: what the
accumulated products may lose by underflow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from triplan.backends.triton.common import bounds
from triplan.descriptors import AttentionBackwardDescriptor
from triplan.descriptors.attention import AttendingDescriptor
from triplan.sku import ElementKind, MathPrecision, PrecisionGuarantee
from triplan.sku.facts import fact

#: Products of parts of f32 factors that are omitted, relative to the factors' product: a second part is at most 2**-8
#: of the number, a third one 2**-17.
PARTS_OMITTED = 2.0**-24 + 2.0**-33
#: Roundings of scale, softcap, mask and exponent.
SCORE_ROUNDINGS = 16
#: Roundings of an exponential, the normalisation, and the other steps of a term.
TERM_ROUNDINGS = 32
#: Roundings of 1 - dropout_p, of its inverse, and of the product with that.
DROPOUT_ROUNDINGS = 3
#: Roundings of a product and a quarter of an addition, which truncate (2u each).
PER_PRODUCT = 2.5
#: Other roundings for each key: 1 for the sum of exponentials, and the rest for rescaling.
PER_KEY = 1.5


class Errors(NamedTuple):
    """The constants of the error analysis."""

    of_terms: float
    of_scores: float
    share: float
    lost: float
    flushed: float

    @property
    def weight(self) -> float:
        return self.of_scores / self.of_terms


@fact
def errors(desc: AttendingDescriptor, output: str) -> Errors:
    """The constants for ``output``: a sum over keys (``out``, ``lse``, ``dq``) or over queries (``dk``, ``dv``)."""
    compute = desc.element.compute
    u, narrow = compute.unit_roundoff, bounds.narrowing(desc.element, compute)
    factors = 0.0
    if compute is ElementKind.F32 and desc.element is compute:
        tf32 = desc.multiplicands is MathPrecision.TF32
        factors = 2 * bounds.TRUNCATION[MathPrecision.TF32] * 1.001 if tf32 else PARTS_OMITTED
    n = desc.queries * desc.group if output in ("dk", "dv") else desc.keys
    if isinstance(desc, AttentionBackwardDescriptor):
        n += desc.values
    rounded = 1.25 * desc.head_dim + SCORE_ROUNDINGS
    scores = bounds.compounded(rounded * math.log1p(2 * u)) + factors
    once = TERM_ROUNDINGS + (DROPOUT_ROUNDINGS if desc.dropout else 0)
    terms = bounds.compounded(((PER_PRODUCT + PER_KEY) * n + once) * u)
    share = 1.0
    if output != "lse":  # lse: no exponential is rounded to be multiplied
        terms += factors
        share = terms / (terms + narrow) * 1.01  # 1.01: second-order terms of the rounding
        terms += narrow
    own = 2.0 if compute is ElementKind.F64 else 1.0  # the float64 oracle has as large an error
    flushed = bounds.flushed(compute)
    lost = bounds.smallest_subnormal(desc.element) + (desc.values + TERM_ROUNDINGS) * flushed
    return Errors(own * terms, own * scores, share, lost, (n + TERM_ROUNDINGS) * flushed)


@fact
def guarantee(desc: AttendingDescriptor, batch: bool = True) -> Mapping[str, PrecisionGuarantee]:
    """The guarantee of each output. ``batch``: the bits of a sequence and head do not depend on the others; in the
    forward op neither do those of a query. With dropout they depend on where in the batch they stand."""
    found = {}
    batch = batch and not desc.dropout
    for o in desc.operands():
        if o.is_written:
            compute = desc.element.compute
            known = errors(desc, o.name)
            # lse's terms have no weight: both errors count as they are.
            terms = max(known.of_terms, known.of_scores) if o.name == "lse" else known.of_terms
            tolerance = bounds.tolerance(o.element, compute, per_term=terms, lost=(known.flushed,))
            found[o.name] = bounds.guarantee(compute, tolerance, math_precision=desc.multiplicands, batch=batch)
    return found
