"""Kernel ``fill``: results that are computed from numbers alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import triton.language as tl

from triplan.backends.runtime.launch import Arg, Int, Launch, Ptr, Scalar, power_of_two_in
from triplan.backends.table import kernel
from triplan.backends.triton.common import bounds
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.offsets import I32_LIMIT, ceil_power, divisor, ranked
from triplan.backends.triton.common.strides import Along, continues, in_memory, known_strides, row_tile, stride_arg
from triplan.backends.triton.copies import fill_kernels as kernels
from triplan.backends.triton.copies.geometry import BOOL, ELEMENTS, F32, F64, I8, TYPES
from triplan.descriptors import ArangeDescriptor, FillDescriptor, Operand
from triplan.sku import PrecisionGuarantee, Target

#: Roundings of an element of arange: a product and a sum in f64, and as many in the oracle.
ROUNDINGS = 4
#: Bytes per program of 4 warps: the best, or within 4 % of it, on an H200 for 2**12 to 2**24 elements of 1, 2, 4 bytes.
BYTES = 4096
#: Programs of small results, at least, unless they have fewer than FEWEST elements each: a thread of few programs would
#: compute and store many elements one after the other. Untuned.
PROGRAMS, FEWEST = 64, 128
#: Bytes of a contiguous row from which on its vectors are stored as such wherever it begins or ends. Untuned.
LONG = 128


def guarantee(desc: FillDescriptor | ArangeDescriptor) -> Mapping[str, PrecisionGuarantee]:
    element = desc.element
    if isinstance(desc, FillDescriptor) or not element.is_floating_point:
        return {"out": PrecisionGuarantee.exact(element)}
    relative = F32.unit_roundoff if element.compute is not element else 0.0
    tolerance = bounds.tolerance(element, F64, relative=relative, per_term=ROUNDINGS * F64.unit_roundoff)
    return {"out": bounds.guarantee(F64, tolerance, batch=True, order=True)}


def numerics(desc: FillDescriptor | ArangeDescriptor) -> str:
    return f"copies.{desc.op}.{desc.element}.v1"


def rank(desc: FillDescriptor | ArangeDescriptor, target: Target) -> float:
    return LAUNCH_US + desc.operand("out").nbytes / BYTES_PER_US


def dims(o: Operand) -> list[tuple[int, int | Along]]:
    """(extent, stride) of the dimensions of ``o``, in the order of its memory. Adjacent ones are merged."""
    merged: list[tuple[int, int | Along]] = []
    known = [(n, s) for n, s in zip(o.shape, known_strides(o, len(o.shape)), strict=True) if n != 1]
    for n, s in sorted(known, key=lambda d: in_memory(d[1])):
        if merged and continues([merged[-1][1]], [s], n):
            merged[-1] = (merged[-1][0] * n, s)
        else:
            merged.append((n, s))
    return merged or [(1, 1)]


def fill(desc: FillDescriptor | ArangeDescriptor, target: Target) -> list[Launch]:
    out, start, *step = desc.operands()
    if out.numel == 0:
        return []
    *outer, (columns, stride) = dims(out)
    rows = math.prod(n for n, _ in outer)
    item = out.element.itemsize
    elements = min(BYTES // item, max(ceil_power(out.numel) // PROGRAMS, FEWEST))
    between, vector = item * (out.layout.stride_multiple if outer else 16), 16 // item
    odd = min(out.alignment, between) < 16 or (rows > 1 and columns % vector != 0)
    shifts = stride == 1 and vector > 1 and columns * item >= LONG and odd
    if shifts:
        height, vectors = row_tile(BYTES // 16, rows, -(-columns // vector))
        width = vectors * vector
    else:
        height, width = row_tile(elements, rows, columns)
    wide, half = out.numel >= I32_LIMIT, out.element.compute is not out.element
    args: dict[str, Arg] = {
        "start": Scalar(start.name, start.element, 0),
        "step": Scalar(step[0].name, step[0].element, 0) if step else None,
        "out": Ptr("out", I8 if out.element is BOOL else out.element, out.alignment),
        "sizes": ranked([divisor(n, wide) for n, _ in outer], divisor(1, wide)) if outer else None,
        "strides": ranked([stride_arg(out, s) for _, s in outer], Int(0, True, 16)) if outer else None,
        "along": None if stride == 1 else stride_arg(out, stride),
        "rows": Int(rows, wide, power_of_two_in(rows)) if rows > 1 else None,
        "columns": Int(columns, wide, power_of_two_in(columns)),
    }
    constants: dict[str, Any] = {
        "NUMBER_TYPE": TYPES[start.element],
        "CAST": "bool" if out.element is BOOL else "f32" if half else "direct",
        "POINT_TYPE": tl.int64 if wide else tl.int32,
        "SHIFTS": shifts,
        "BLOCK_ROWS": height,
        "BLOCK_COLUMNS": width,
    }
    return [Launch(kernels.numbers_kernel, -(-rows // height) * -(-columns // width), args, constants)]


for _op in ("fill", "arange"):
    kernel(op=_op, name="fill", elements=ELEMENTS, guarantee=guarantee, rank=rank, numerics=numerics)(fill)
