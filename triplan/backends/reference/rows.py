"""What the references of softmax and norms share: their guarantee."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch

from triplan.backends.table import Compute, reference
from triplan.sku import ElementKind, MathPrecision, PrecisionGuarantee, Tolerance

Tensor = torch.Tensor
Outputs = Mapping[str, Tensor]
FLOATS = ("f16", "bf16", "f32", "f64")
#: The largest exponent of which an exponential is not yet 0: its relative error is so many times that of its argument.
EXPONENT = {ElementKind.F32: 104.0, ElementKind.F64: 746.0}


@lru_cache(maxsize=1024)
def _guarantee(
    element: ElementKind, compute: ElementKind, additions: int, exponential: bool, squares: int
) -> PrecisionGuarantee:
    """Roundings: ``additions`` of a sum, a dozen of other operations, and those of an exponential's argument. A root of
    so many ``squares`` is without those that vanish."""
    u, final = compute.unit_roundoff, element.unit_roundoff
    roundings = additions + 12 + (3 * EXPONENT[compute] if exponential else 0)
    error = math.expm1(min(roundings * u, 700.0))
    info, small = torch.finfo(element.torch), torch.finfo(compute.torch)
    return PrecisionGuarantee(
        math_precision=MathPrecision(compute.value),
        accumulator=compute,
        deterministic=True,
        bit_stable_on_same_hardware=True,
        batch_invariant=False,  # torch's sums may be blocked by the batch
        order_invariant=False,
        tolerance=Tolerance(
            rtol=error + (final if compute is not element else 0.0),
            ctol=error * (1 + final),
            underflow=float(
                info.smallest_normal * info.eps
                + (additions + 12) * small.smallest_normal
                + math.sqrt(squares * small.smallest_normal)
            ),
        ),
    )


def _rows(exponential: bool) -> Callable[[Any], Mapping[str, PrecisionGuarantee]]:
    def guarantee(desc: Any) -> Mapping[str, PrecisionGuarantee]:
        outputs = [o for o in desc.operands() if o.is_written]
        # Of a row, and for parameters of all rows.
        terms = max(desc.input_shape) if hasattr(desc, "softmax_axis") else math.prod(desc.input_shape)
        squares = desc.input_shape[-1]
        return {
            o.name: _guarantee(o.element, desc.element.compute, terms, exponential, squares if o.name == "norm" else 0)
            for o in outputs
        }

    return guarantee


def rows_reference(op: str, exponential: bool) -> Callable[[Compute], Compute]:
    return reference(op=op, elements=FLOATS, guarantee=_rows(exponential))
