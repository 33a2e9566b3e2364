"""Kernel ``total``: one launch reduces each chunk of each tensor, one program adds up the chunks and takes the root; of
a norm of each tensor, one program a tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import triton.language as tl

from triplan.backends.runtime.launch import Arg, Float, Int, Launch, Ptr, Scratch
from triplan.backends.table import kernel
from triplan.backends.triton.common import bounds
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.tables import applies, chunk_of, chunks, tables
from triplan.backends.triton.optim import total_kernels as kernels
from triplan.backends.triton.optim.update import ELEMENTS, TYPES
from triplan.descriptors.optim import TotalNormDescriptor
from triplan.sku import ElementKind, PrecisionGuarantee, Target

WARPS = 4
#: Elements of one iteration: as many f64 accumulators, 8 a thread. Untuned.
BLOCK = 1024
#: Partial results of one iteration of the second launch, and its warps. Untuned.
ROOT_BLOCK, ROOT_WARPS = 2048, 8
#: |log| of the largest and the smallest f64: what multiplies the relative error of a power's exponent.
MOST_LOG = 746


def kind(order: float) -> tl.constexpr:
    """What the kernels accumulate."""
    named = {1.0: kernels.MAGNITUDES, 2.0: kernels.SQUARES, math.inf: kernels.LARGEST, -math.inf: kernels.SMALLEST}
    return named.get(order, kernels.POWERS)


def powers_error(order: float, depth: int) -> float:
    """Roundings, relative to the norm, of sums of powers ``depth`` deep; the root divides those before it."""
    return MOST_LOG / 4 + 8 + (2 * MOST_LOG + depth + 8) / abs(order)


def guarantee(desc: TotalNormDescriptor) -> Mapping[str, PrecisionGuarantee]:
    wide, order = ElementKind.F64, desc.order
    if math.isinf(order):
        return {"norm": bounds.guarantee(wide, bounds.EXACT, order=True)}
    each, partials = chunk_of(desc.sizes) // BLOCK, -(-chunks(desc.sizes) // ROOT_BLOCK)
    depth = each + partials + BLOCK.bit_length() + ROOT_BLOCK.bit_length()
    return {"norm": of_order(order, depth)}


def of_order(order: float, depth: int) -> PrecisionGuarantee:
    """Sums in f64 that are ``depth`` deep. The oracle is no more precise, and its error doubles the bound."""
    wide, roundings = ElementKind.F64, depth + 8 if order in (1.0, 2.0) else powers_error(order, depth)
    relative = 2 * bounds.compounded(roundings * wide.unit_roundoff)
    return bounds.guarantee(wide, bounds.tolerance(wide, wide, relative=relative))


def workspace(desc: TotalNormDescriptor, target: Target) -> int:
    table = tables(desc.sizes, 1)
    return table.nbytes + 8 * table.programs


def rank(desc: TotalNormDescriptor, target: Target) -> float:
    return 2 * LAUNCH_US + desc.operand("x").nbytes / BYTES_PER_US


def total(desc: TotalNormDescriptor, target: Target) -> list[Launch]:
    table, norm, how = tables(desc.sizes, 1), desc.operand("norm"), kind(desc.order)
    order = Float(desc.order if how is kernels.POWERS else 0.0, ElementKind.F64)
    partials = Scratch(table.nbytes, ElementKind.F64) if table.programs else None
    args: dict[str, Arg] = {**table.args(desc), "partials": partials, "order": order}
    constants: dict[str, Any] = {"TYPE": TYPES[desc.element], "KIND": how.value, "CHUNK": table.chunk, "BLOCK": BLOCK}
    launches = []
    if table.programs:
        launches.append(Launch(kernels.chunk_kernel, table.programs, args, constants, num_warps=WARPS, overlaps=True))
    args = {"partials": partials, "count": Int(table.programs), "order": order}
    args["norm"] = Ptr("norm", norm.element, norm.alignment)
    constants = {"KIND": how.value, "BLOCK": ROOT_BLOCK}
    if desc.each:
        args = {"sizes": table.args(desc)["sizes"], "tensors": None if table.is_few else Int(len(desc.sizes)), **args}
        constants |= {"CHUNK": table.chunk}
    which, roots = (kernels.roots_kernel, len(desc.sizes)) if desc.each else (kernels.root_kernel, 1)
    if roots:
        launches.append(Launch(which, roots, args, constants, num_warps=ROOT_WARPS, overlaps=True))
    return launches


kernel(
    op="total_norm",
    name="total",
    elements=ELEMENTS,
    guarantee=guarantee,
    supports=applies,
    workspace=workspace,
    rank=rank,
)(total)
