"""Registration of the reductions' kernels: each is an entry of every op. Their guarantees."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from triplan.backends.runtime.launch import power_of_two_in
from triplan.backends.table import kernel
from triplan.backends.triton.common import accuracy, bounds, expressions
from triplan.backends.triton.common.offsets import layout
from triplan.backends.triton.reductions import shared_kernels as do
from triplan.backends.triton.reductions.dims import line_distance
from triplan.backends.triton.reductions.shared import Plan, plan_of
from triplan.descriptors import (
    ExpressionReductionDescriptor,
    ExtremumDescriptor,
    Operand,
    ReduceDescriptor,
    ReducePairDescriptor,
)
from triplan.descriptors.reductions import DEVIATIONS, OF_FLOATS, ReductionProblem
from triplan.sku import ElementKind, MathPrecision, PrecisionGuarantee, Support, Target

FLOATS = ("f16", "bf16", "f32", "f64")
INTEGERS = ("i8", "i16", "i32", "i64", "u8", "bool")
OPS = (
    *ReduceDescriptor.ops(),
    *ExtremumDescriptor.ops(),
    *ReducePairDescriptor.ops(),
    *ExpressionReductionDescriptor.ops(),
)


def guarantee(desc: ReductionProblem) -> Mapping[str, PrecisionGuarantee]:
    """One rounding for each addition on the path of a term, and some for what precedes and follows the additions.

    Variance (Chan, Golub and LeVeque, 1983): the mean of each accumulator is rounded four times per element, and
    squared deviations are relative to these means. Logsumexp: each step rescales the sum of exponentials, whose
    arguments are rounded once.
    """
    found = plan_of(desc)
    out, batch, roundings = desc.result, invariant(found), depth(found)
    if found.tree is not None:
        return bounds.of_outputs(desc, accuracy.of_reduction(found.tree.tree, desc.reduction, out, roundings, batch))
    if desc.op not in ("sum", "prod", *OF_FLOATS) or not out.is_floating_point:
        return {o.name: exactly(desc, o, batch) for o in desc.operands() if o.is_written}
    # A mean that follows the elements is rounded four times per element, each time relative to what it is of.
    return summed(desc, found.compute, roundings, 4 * roundings + 32, batch)


def invariant(found: Plan) -> bool:
    """Whether the tile and the width of loads, and so the bits, depend only on a line's length and layout."""
    whole = all(o.shape in ((), tuple(found.desc.input_shape)) for o in found.reads)
    # Lines of several axes are visited in the order of memory, which only packed operands have in common.
    ordered = len(found.desc.reduce_axes) > 1 and any(o.layout.order for o in found.reads)
    return (
        (found.unit or found.own)
        and whole
        and not ordered
        and all(
            o.shape == () or (not o.layout.zero_axes and found.reduced[0].reads[i] == 1)
            for i, o in enumerate(found.reads)
        )
    )


def depth(found: Plan) -> float:
    """Roundings on the path of a term of a sum."""
    most = min(found.chunk, max(found.n, 1))
    if found.rowed:  # the ends of each row take a block more
        most += most // found.reduced[-1].size * 2 * found.tile.block
    within = found.tile.additions(most)
    return within + (found.merging().additions(found.chunks) + 2 if found.chunks > 1 else 0)


def numerics(found: Plan, entry: str) -> str | None:
    """What the bits of a line depend on, where they do not depend on other lines."""
    if not invariant(found):
        return None
    desc = found.desc
    promised = ".".join(
        f"{min(o.alignment, 16)}.{min(power_of_two_in(line_distance(desc, o)), 16)}" for o in found.reads
    )
    version = 1 if found.tree is not None else 3 if found.constants(found.tile)["SHIFT"] > 1 else 2
    if found.single and found.kind.accumulates in (do.MOMENTS, do.EXPONENTIALS):
        version = 4
    if found.unit and found.tree is None and found.constants(found.tile)["GROUP"] > 1:
        version = 5  # several blocks of moments are accumulated together
    text = f"reductions.{entry}.{desc.op}.{desc.element}.{desc.result}.v{version}"
    text += f".{found.tile.text}.{found.chunk}.{promised}"
    if found.chunks > 1:
        text += f".{found.merging().text}"
    if desc.op == "vector_norm":
        text += f".{desc.order!r}"
    if found.tree is not None:
        text += f".{expressions.digest(found.tree, False)}"
    return f"{text}.{desc.correction!r}" if desc.op in DEVIATIONS else text


def summed(
    desc: ReductionProblem, compute: ElementKind, depth: float, of_mean: float, batch: bool = False
) -> Mapping[str, PrecisionGuarantee]:
    """Of sums, products and what is computed from them, in ``compute``: a term takes part in ``depth`` additions. The
    mean beside a deviation has ``of_mean`` roundings for each term."""
    out, n, lost, power = desc.result, desc.reduced, 0.0, 0.0
    if desc.order not in (1, 2):
        # d(2**y) / 2**y = ln(2) * dy: an error of y is amplified by |y|, at most the largest exponent; so for the root.
        power = (256 if compute is ElementKind.F32 else 2200) * (1 + 1 / desc.order)
    relative, per_term = {
        "prod": (n, 1),
        **dict.fromkeys(DEVIATIONS, (depth + 8, 8 * depth + 32)),
        "vector_norm": (8 + (depth + 8) / desc.order + power, 0),
        "logsumexp": (2, 6 * depth + 16),
    }.get(desc.op, (3, depth))
    if desc.op == "vector_norm":
        lost = (max(n, 1) * bounds.smallest_normal(compute)) ** (1 / desc.order)
    if desc.op in ("std", "std_mean"):
        # Squares that underflow, and a subnormal variance that the root flushes.
        lost = math.sqrt(
            bounds.smallest_normal(compute) * (1 + n / (n - desc.correction if n > desc.correction else 1))
        )

    def each(o: Operand) -> PrecisionGuarantee:
        if o.name == "second":
            return bounds.rounded(out, compute, 3, of_mean, flushes=4 * depth, batch=batch)
        return bounds.rounded(out, compute, relative, per_term, flushes=4 * depth, lost=lost, batch=batch)

    return bounds.of_outputs(desc, each)


def exactly(desc: ReductionProblem, o: Operand, batch: bool) -> PrecisionGuarantee:
    """The guarantee of an exact result: an element, a position, a count, or a sum modulo 2**64.

    Only positions depend on the order of elements. An extremum equals the reference's; among zeros of both signs or
    NaN of different bits it may be another one.
    """
    order = o.name != "indices" and desc.op not in ("argmax", "argmin")
    if not o.element.is_floating_point:
        return bounds.guarantee(o.element, bounds.EXACT, math_precision=MathPrecision.EXACT, batch=batch, order=order)
    return bounds.guarantee(o.element.compute, bounds.EXACT, batch=batch, order=order)


def reductions(
    name: str,
    supports: Callable[[Any, Target], Support],
    rank: Callable[[Any, Target], float],
    workspace: Any = None,
    priority: int = 0,
) -> Callable[[Any], Any]:
    """Register the decorated function, which builds the launches, as the entry ``name`` of every reduction op."""

    def register(build: Any) -> Any:
        for op in OPS:
            kernel(
                op=op,
                name=name,
                elements=FLOATS if op.removesuffix("_expression") in OF_FLOATS else (*FLOATS, *INTEGERS),
                guarantee=guarantee,
                supports=supports,
                rank=rank,
                numerics=lambda desc: numerics(plan_of(desc), name),
                priority=priority,
                version=14,  # larger tiles of long lines
                layout=layout,
                **({} if workspace is None else {"workspace": workspace}),
            )(build)
        return build

    return register
