"""Reductions in plain torch, from their definitions: shares no computation with the kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from triplan.backends.reference.expressions.evaluate import evaluated
from triplan.backends.table import CheckRules, reference
from triplan.backends.triton.common import accuracy, bounds
from triplan.backends.triton.reductions.entries import summed
from triplan.descriptors import ExpressionReductionDescriptor, Operand
from triplan.descriptors.reductions import OF_FLOATS, PAIRS, ReductionProblem
from triplan.sku import ElementKind, MathPrecision, PrecisionGuarantee

FLOATS = ("f16", "bf16", "f32", "f64")
INTEGERS = ("i8", "i16", "i32", "i64", "u8", "bool")
Tensors = Mapping[str, Tensor]


def lines(desc: ReductionProblem, x: Tensor) -> Tensor:
    """x with its kept axes first and the reduced axes merged into one last axis."""
    kept = desc.kept_axes
    return x.permute([*kept, *desc.reduce_axes]).reshape([*(x.shape[a] for a in kept), desc.reduced])


# --- what checks must know ---


def _doubtful(desc: ReductionProblem, x: Tensors) -> Tensors:
    """0, or infinite where the product of some subset of the elements leaves the accumulator's normal range."""
    t = lines(desc, x["x"])
    if not desc.element.is_floating_point or t.numel() == 0:
        return {"out": torch.zeros(t.shape[:-1], dtype=torch.float64)}
    logs = torch.where((t == 0) | ~t.isfinite(), 1.0, t).abs().double().log()
    info = torch.finfo(desc.element.compute.torch)
    over = logs.clamp(min=0).sum(-1) > math.log(info.max) - 0.1
    return {
        "out": torch.where(over | (-logs.clamp(max=0).sum(-1) > -math.log(info.smallest_normal) - 0.1), math.inf, 0.0)
    }


def _spread(desc: ReductionProblem, x: Tensors) -> Tensors:
    """The condition of a variance or standard deviation: its error in units of roundoff.

    A variance s**2 of elements of mean square q is off by about s * sqrt(q) units, plus the square of the mean's own
    rounding error (Chan, Golub and LeVeque, Algorithms for computing the sample variance, 1983).
    """
    t = lines(desc, x["x"]).double()
    u, n = desc.element.compute.unit_roundoff, t.shape[-1]
    scale = n / max(n - desc.correction, 1e-300)
    square = t.square().mean(-1)
    variance = t.var(-1, correction=0)
    means = {"second": t.abs().mean(-1)} if desc.op in PAIRS else {}
    if desc.op in ("var", "var_mean"):
        return {"out": scale * ((variance * square).sqrt() + 64 * u * square), **means}
    return {"out": math.sqrt(scale) * square.sqrt(), **means}


def _logarithm(desc: ReductionProblem, x: Tensors) -> Tensors:
    """Sum|terms|, where the logarithm turns the relative error of the sum of exponentials into an absolute one."""
    t = lines(desc, x["x"])
    return {"out": 1 + math.log(max(desc.reduced, 1)) + torch.logsumexp(t.double(), -1).abs().nan_to_num(posinf=0.0)}


# --- ops ---


def _guarantee(desc: ReductionProblem) -> Mapping[str, PrecisionGuarantee]:
    """Elements may be added one by one. Never batch-invariant: how torch divides sums may depend on the batch."""
    if desc.op not in ("sum", "prod", *OF_FLOATS) or not desc.result.is_floating_point:
        return {o.name: _exactly(desc, o) for o in desc.operands() if o.is_written}
    compute = ElementKind.F64 if ElementKind.F64 in (desc.element, desc.result) else ElementKind.F32
    depth = desc.reduced + 4
    return summed(desc, compute, depth, depth)


def _exactly(desc: ReductionProblem, o: Operand) -> PrecisionGuarantee:
    if not o.element.is_floating_point:
        order = o.name != "indices" and desc.op not in ("argmax", "argmin")
        return bounds.guarantee(o.element, bounds.EXACT, math_precision=MathPrecision.EXACT, order=order)
    return bounds.guarantee(o.element.compute, bounds.EXACT, order=desc.op in ("amax", "amin", "aminmax"))


def _one_zero(t: Tensor) -> Tensor:
    """-0 becomes 0: which of the two an extremum returns would depend on their order."""
    return t + 0.0 if t.is_floating_point() else t


def _extremum(largest: bool) -> Callable[[ReductionProblem, Tensor], tuple[Tensor, Tensor]]:
    def find(desc: ReductionProblem, t: Tensor) -> tuple[Tensor, Tensor]:
        """The first NaN, or else the first of the largest."""
        if t.dtype is torch.bool:
            t = t.to(torch.uint8)
        value = t.amax(-1, keepdim=True) if largest else t.amin(-1, keepdim=True)
        is_it = (t == value) | (t != t)
        at = is_it.to(torch.uint8).argmax(-1, keepdim=True)
        return t.gather(-1, at).squeeze(-1), at.squeeze(-1)

    return find


def _norm(desc: ReductionProblem, t: Tensor) -> Tensor:
    return t.abs().pow(desc.order).sum(-1).pow(1 / desc.order)


def _sum(desc: ReductionProblem, t: Tensor) -> Tensor:
    return t.sum(-1, dtype=None if t.is_floating_point() else torch.int64)


def _prod(desc: ReductionProblem, t: Tensor) -> Tensor:
    return t.prod(-1, dtype=None if t.is_floating_point() else torch.int64)


def _logsumexp(desc: ReductionProblem, t: Tensor) -> Tensor:
    if t.shape[-1] == 0:
        return t.new_full(t.shape[:-1], -math.inf)
    top = t.amax(-1, keepdim=True)
    shift = torch.where(top.abs() == math.inf, 0, top)
    return ((t - shift).exp().sum(-1, keepdim=True).log() + shift).squeeze(-1)


def _variance(desc: ReductionProblem, t: Tensor) -> Tensor:
    n = t.shape[-1]
    squares = (t - t.mean(-1, keepdim=True)).square().sum(-1)
    return squares / max(n - desc.correction, 0)


def _mean(desc: ReductionProblem, t: Tensor) -> Tensor:
    return t.sum(-1) / t.shape[-1] if t.shape[-1] else t.sum(-1) * math.nan


def _deviation(desc: ReductionProblem, t: Tensor) -> Tensor:
    return _variance(desc, t).sqrt()


def _least(desc: ReductionProblem, t: Tensor) -> Tensor:
    return _one_zero(t.amin(-1))


def _most(desc: ReductionProblem, t: Tensor) -> Tensor:
    return _one_zero(t.amax(-1))


def _both(*of: Callable[[ReductionProblem, Tensor], Tensor]) -> Callable[[ReductionProblem, Tensor], Any]:
    return lambda desc, t: tuple(compute(desc, t) for compute in of)


Compute = Callable[[ReductionProblem, Tensor], Any]
FUNCTIONS: dict[str, tuple[Compute, CheckRules]] = {
    "sum": (_sum, CheckRules()),
    "mean": (_mean, CheckRules()),
    "prod": (_prod, CheckRules(_doubtful, signed=True)),
    "amax": (_most, CheckRules(CheckRules.no_terms)),
    "amin": (_least, CheckRules(CheckRules.no_terms)),
    "aminmax": (_both(_least, _most), CheckRules(CheckRules.no_terms)),
    "max": (_extremum(True), CheckRules(CheckRules.no_terms)),
    "min": (_extremum(False), CheckRules(CheckRules.no_terms)),
    "argmax": (lambda desc, t: _extremum(True)(desc, t)[1], CheckRules(CheckRules.no_terms)),
    "argmin": (lambda desc, t: _extremum(False)(desc, t)[1], CheckRules(CheckRules.no_terms)),
    "any": (lambda desc, t: (t != 0).any(-1), CheckRules(CheckRules.no_terms)),
    "all": (lambda desc, t: (t != 0).all(-1), CheckRules(CheckRules.no_terms)),
    "count_nonzero": (lambda desc, t: (t != 0).sum(-1), CheckRules(CheckRules.no_terms)),
    "var": (_variance, CheckRules(_spread, passes=("unit",), signed=True)),
    "std": (_deviation, CheckRules(_spread, passes=("unit",), signed=True)),
    "var_mean": (_both(_variance, _mean), CheckRules(_spread, passes=("unit",), signed=True)),
    "std_mean": (_both(_deviation, _mean), CheckRules(_spread, passes=("unit",), signed=True)),
    "vector_norm": (_norm, CheckRules(CheckRules.no_terms, passes=("unit",))),
    "logsumexp": (_logsumexp, CheckRules(_logarithm, signed=True)),
}


def _declare(op: str, compute: Compute, checks: CheckRules) -> None:
    def outputs(desc: ReductionProblem, x: Tensors) -> Tensors:
        found = compute(desc, lines(desc, x["x"].double() if desc.result is ElementKind.F64 else x["x"]))
        if op in PAIRS:
            return {"out": found[0], "second": found[1]}
        if isinstance(found, tuple):
            return {"out": found[0].to(x["x"].dtype), "indices": found[1]}
        return {"out": found}

    elements = FLOATS if op in OF_FLOATS else (*FLOATS, *INTEGERS)
    reference(op=op, elements=elements, guarantee=_guarantee, checks=checks)(outputs)


for _op, (_compute, _checks) in FUNCTIONS.items():
    _declare(_op, _compute, _checks)


# --- expressions ---


def _of_expression(desc: ExpressionReductionDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """Values may be added one by one; as for other reductions nothing is promised of batches."""
    return bounds.of_outputs(
        desc, accuracy.of_reduction(desc.tree, desc.reduction, desc.result, desc.reduced + 4, False)
    )


def _errors(desc: ExpressionReductionDescriptor, x: Mapping[str, Any]) -> Tensors:
    """What stands for sum|terms|, from the running errors of the values: see ``accuracy.of_reduction``."""
    ((value, bound),) = evaluated(desc, x, True)
    assert bound is not None
    v, error = lines(desc, value).double(), lines(desc, bound)
    out = desc.result
    if desc.reduction in ("amax", "amin"):
        u = desc.element.compute.unit_roundoff or ElementKind.F32.unit_roundoff
        v = v if desc.reduction == "amax" else -v
        if v.numel() == 0:
            return {"out": v.new_zeros(v.shape[:-1])}
        top = v.amax(-1)
        apart = torch.maximum((v + error).amax(-1) - top, top - (v - error).amax(-1))
        return {"out": torch.where((error == 0).all(-1), 0.0, apart.nan_to_num(nan=math.inf) / u)}
    if not out.is_floating_point:
        return {"out": error.sum(-1) / ElementKind.F32.unit_roundoff}
    u = (ElementKind.F64 if ElementKind.F64 in (desc.element, out) else ElementKind.F32).unit_roundoff
    sizes = v.nan_to_num(0.0, 0.0, 0.0).abs() + error / (u * accuracy.halvings(desc.reduced))
    return {"out": sizes.sum(-1) / (max(desc.reduced, 1) if desc.reduction == "mean" else 1)}


def _declare_expression(op: str) -> None:
    reduce = FUNCTIONS[op.removesuffix("_expression")][0]

    def outputs(desc: ExpressionReductionDescriptor, x: Mapping[str, Any]) -> Tensors:
        ((value, _),) = evaluated(desc, x, False)
        given = [v.dtype for v in x.values() if isinstance(v, Tensor) and v.is_floating_point()]
        if desc.element.is_floating_point and any(dtype is not torch.float64 for dtype in given):
            wide = ElementKind.F64 in (desc.element, desc.result)
            value = value.to(torch.float64 if wide else torch.float32)  # as kernels accumulate
        return {"out": reduce(desc, lines(desc, value))}

    elements = FLOATS if op == "mean_expression" else (*FLOATS, *INTEGERS)
    reference(op=op, elements=elements, guarantee=_of_expression, checks=CheckRules(terms=_errors, signed=True))(
        outputs
    )


for _op in ExpressionReductionDescriptor.ops():
    _declare_expression(_op)
