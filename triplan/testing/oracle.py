"""The float64 oracle, and what |got - ref| <= rtol * |ref| + ctol * sum|terms| + underflow means at the edges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from triplan.backends.reference.run import inputs_of
from triplan.backends.table import TABLE, KernelTable
from triplan.descriptors import Descriptor
from triplan.errors import InvalidProblem
from triplan.sku import ElementKind, MathPrecision, PrecisionGuarantee

__all__ = ["magnitudes", "oracle"]

Outputs = Mapping[str, torch.Tensor]


def oracle(desc: Descriptor, args: Any, *, table: KernelTable = TABLE) -> Outputs:
    """The outputs of the op's reference by name, computed in float64 from CPU ``args`` (``PlacedArgs.host()``).

    Integers are not converted. Raises ``KeyError`` if the op has no reference.
    """
    return computed(desc, args, torch.float64, table=table)


def bit_oracle(desc: Descriptor, args: Any, *, table: KernelTable = TABLE) -> Outputs:
    """The reference in the operands' own elements: exact in every bit for ops that only move elements."""
    return computed(desc, args, None, table=table)


def computed(desc: Descriptor, args: Any, wide: torch.dtype | None, *, table: KernelTable = TABLE) -> Outputs:
    """The reference, its floats computed in ``wide``, or (None) in the operands' own elements."""
    compute = table.reference(desc.op).compute
    assert compute is not None
    with torch.no_grad():
        found: Outputs = compute(desc, inputs_of(desc, args, wide=wide, as_is=wide is None))
    return found


def magnitudes(desc: Descriptor, args: Any, *, table: KernelTable = TABLE) -> Outputs:
    """sum|terms| of every output that has terms, over the finite terms: what the ``CheckRules`` of the op say.

    By default the reference, given absolute values, sums absolute terms. Raises ``InvalidProblem`` if its sums of
    these are negative: the op is not linear then, and needs rules.
    """
    rules = table.reference(desc.op).checks
    if rules.signed and rules.terms is not None:
        return rules.terms(desc, inputs_of(desc, args, wide=torch.float64))
    inputs: dict[str, Any] = {}
    indices = {o.name for o in desc.operands() if o.index_extents}
    for name, value in inputs_of(desc, args, wide=torch.float64).items():
        inputs[name] = value if name in indices else _absolute(value)
    if rules.terms is not None:
        return rules.terms(desc, inputs)
    found = oracle(desc, SimpleNamespace(**{o.name: inputs.get(o.name) for o in desc.operands()}), table=table)
    for name, total in found.items():
        if total.is_floating_point() and bool((total < 0).any()):
            raise InvalidProblem(
                f"{desc.op}: of absolute inputs the reference gives a {name} below 0, so this is no sum of products; "
                "its reference must say what sum|terms| is: @triplan.reference(..., checks=CheckRules(terms=...))"
            )
    return found


def _absolute(value: Any) -> Any:
    if isinstance(value, list):
        return [_absolute(v) for v in value]
    if isinstance(value, torch.Tensor):
        return torch.nan_to_num(value, 0.0, 0.0, 0.0).abs() if value.is_floating_point() else value
    return abs(value) if isinstance(value, (int, float)) else value


@dataclass(frozen=True)
class Verdict:
    """The comparison of one output: which elements are wrong, the bound of each, how many had to be exact."""

    wrong: torch.Tensor
    bound: torch.Tensor
    exact: int

    def describe(self, name: str, got: torch.Tensor, ref: torch.Tensor) -> str:
        """A message on the first wrong element: position, result, expected value, bound."""
        at = tuple(int(i) for i in self.wrong.nonzero()[0])
        bound = float(self.bound[at])
        rule = "exactly" if bound == 0 else f"within {bound:.6g}"
        return (
            f"{name}[{', '.join(map(str, at))}]: got {_show(got[at])}, expected {_show(ref[at])} {rule} "
            f"(|difference| {abs(float(got[at]) - float(ref[at])):.6g}); {int(self.wrong.sum())} of {got.numel()} "
            "elements are wrong"
        )


def _show(x: torch.Tensor) -> str:
    if not x.is_floating_point():
        return repr(x.item())
    bits = x.view(ElementKind.of(x.dtype).bits.torch).item()
    return f"{x.item()!r} (bits {bits & (2 ** (8 * x.element_size()) - 1):#x})"


def moved_bits(guarantee: PrecisionGuarantee) -> bool:
    """Whether the op only moves elements: nothing is computed, and every bit must be right."""
    return guarantee.math_precision is MathPrecision.EXACT and guarantee.tolerance.exact


def judge(
    got: torch.Tensor,
    ref: torch.Tensor,
    mag: torch.Tensor | None,
    guarantee: PrecisionGuarantee,
    *,
    integers: bool = False,
) -> Verdict:
    """Compare one output (CPU, packed) with its reference at the tolerance of ``guarantee``.

    ``ref`` is float64, or of the output's own element where bits are moved. NaN must match NaN, and an infinity the
    same infinity. Two cases allow other values:

    - the exact result exceeds the largest value of the element, or of a floating-point accumulator: the infinity of its
      sign is right;
    - sum|terms| exceeds the range of a floating-point accumulator, so that partial sums may overflow: any infinity or
      NaN is right. A fixed-point accumulator cannot overflow.

    With ``integers`` every term is a small integer: where the accumulator can count to sum|terms| exactly (in fixed
    point always), the result must be the reference, rounded once.
    """
    zero = torch.zeros(got.shape, dtype=torch.float64)
    if not got.is_floating_point():
        if mag is None or guarantee.tolerance.exact:
            return Verdict(got != ref.to(got.dtype), zero, got.numel())
        bound = guarantee.tolerance.ctol * mag
        return Verdict((got.to(torch.float64) - ref.to(torch.float64)).abs() > bound, bound, 0)
    if moved_bits(guarantee):
        bits = ElementKind.of(got.dtype).bits.torch
        return Verdict(got.view(bits) != ref.to(got.dtype).contiguous().view(bits), zero, got.numel())
    tolerance = guarantee.tolerance
    mag = zero if mag is None else mag.to(torch.float64)
    g, r = got.to(torch.float64), ref.to(torch.float64)
    # Without infinities, for which ``same`` decides: 0 * inf would make the bound NaN.
    finite = r.isfinite()
    bound = tolerance.rtol * torch.where(finite, r.abs(), 0.0) + tolerance.ctol * mag + tolerance.underflow
    close = g.isfinite() & finite & ((g - r).abs() <= bound)
    if not (integers or tolerance.exact) and bool(close.all()):
        return Verdict(~close, bound, 0)  # the usual case: what follows takes three times as long
    same = (g == r) | (g.isnan() & r.isnan())
    floating = guarantee.accumulator.is_floating_point
    reach = torch.finfo(guarantee.accumulator.torch).max if floating else math.inf
    top = min(torch.finfo(got.dtype).max, reach)
    overflow = finite & (r.abs() + bound > top) & (g == torch.copysign(torch.full_like(r, math.inf), r))
    partial = ~r.isnan() & ~g.isfinite() & (mag * (1 + tolerance.ctol) > reach)
    if tolerance.exact:
        rounded = ref.to(got.dtype)
        return Verdict(~((got == rounded) | (got.isnan() & rounded.isnan())), zero, got.numel())
    right = close | same | overflow | partial | mag.isinf()
    if not integers:
        return Verdict(~right, bound, 0)
    countable = mag <= (2 / torch.finfo(guarantee.accumulator.torch).eps if floating else math.inf)
    right = torch.where(countable, got == ref.to(got.dtype), right)
    return Verdict(~right, torch.where(countable, 0.0, bound), int(countable.sum()))
