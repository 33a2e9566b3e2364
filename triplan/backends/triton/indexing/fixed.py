"""Order-invariant sums: rows of the kernel table that accumulate in 64-bit fixed point.

Integer addition is associative, so integer atomics give the same bits in any order (the idea is old; for floating-point
sums see Demmel and Nguyen, "Parallel reproducible summation", IEEE Trans. Computers 64(7), 2015, whose bins this
replaces by one bin a destination).

``fixed_f16``: every finite f16 is a multiple of 2**-24 below 2**16, so x * 2**24 is an integer below 2**40. With fewer
than 2**23 contributions to a destination the 64-bit sum is *exact*, and it is rounded once.

``fixed_scaled``: a first pass finds, by an integer maximum, the largest biased exponent E of the contributions of each
destination; a second adds them as integers in units of q = 2**(E - 127 - (V - 1)), V value bits being what the count
of contributions leaves of 63. A term is below 2**(E - 126) = 2**V q and is rounded to a multiple of q, so it is off by
at most q / 2 = 2**-V * 2**(E - 127), and 2**(E - 127) is at most the largest |x| of that destination (where E = 1, all
are multiples of 2**-149, and so of q: nothing is off). Together n terms are off by at most n * 2**-V * max|x|. V is 40
for fewer than 2**23 contributions (f32 has 24 bits: whatever is within a factor of 2**16 of the largest is exact), else
32 for fewer than 2**31. Between these two classes bits may differ, and ``numerics_id`` names the class; within
one, nothing depends on the count.

The finished sum is converted to f64, multiplied by alpha there (once, rather than every term: a product per term would
be rounded, and could overflow), added to the table's former value and rounded into the element: three roundings of
2**-53 and the last one. Infinities and NaN reach the result as they would by floating-point additions in any order.

Sums of the whole table lie in the workspace: they are cleared, added to, and converted. Where every element has an
index of its own and they do not fit in the cache, a sample of the indices chooses the order of the additions, which
shows in no bit: ``stripes_kernels`` says which orders there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl

from triplan.backends.runtime.launch import Arg, Int, Launch, Scalar, Scratch, power_of_two_in
from triplan.backends.table import kernel
from triplan.backends.triton.common.fill import fill_launch
from triplan.backends.triton.common.offsets import I32_LIMIT, padded, strides, values
from triplan.backends.triton.indexing import costs
from triplan.backends.triton.indexing import fixed_kernels as fixed
from triplan.backends.triton.indexing.entries import HALF, INDICES, SUMS, both, layout, only_if, outputs, zeroed
from triplan.backends.triton.indexing.geometry import geometry, keeps
from triplan.backends.triton.indexing.launches import elements_launch, fits_rows, rows_launch, status_launch
from triplan.backends.triton.indexing.stripes import PANEL, sample_launch, stripes, stripes_launch
from triplan.sku import (
    SUPPORTED,
    Duplicates,
    ElementKind,
    MathPrecision,
    PrecisionGuarantee,
    Support,
    Target,
    Tolerance,
)

#: Bits of headroom that a sum of fewer than 2**bits terms needs: the classes of counts.
HEADROOM = (23, 31)
F16_EXPONENT = -24  # of the smallest subnormal of f16
#: Elements and warps of a program that folds sums into the table.
FOLD_ELEMENTS, FOLD_WARPS = 256, 1


def headroom(desc: Any) -> int:
    """The class of the descriptor's count of contributions: the bits of headroom above each term."""
    return next((bits for bits in HEADROOM if geometry(desc).duplicates_possible < 2**bits), HEADROOM[-1])


# --- what may be said of it ---


@lru_cache(maxsize=1024)
def _guarantee(element: ElementKind, terms: int, value_bits: int | None) -> PrecisionGuarantee:
    """``value_bits``: those of a rounded term, None where terms are exact."""
    info = torch.finfo(element.torch)
    rounding = element.unit_roundoff
    if element is ElementKind.BF16:  # by way of f32
        rounding = (1 + rounding) * (1 + ElementKind.F32.unit_roundoff) - 1
    # In f64: the sum's conversion, alpha's product and the former value's addition; and the float64 reference, with
    # which the tolerance compares, rounds each of its terms and each of its sums.
    double = ElementKind.F64.unit_roundoff
    ctol = math.expm1((2 * terms + 3) * math.log1p(double)) + (0.0 if value_bits is None else terms * 2.0**-value_bits)
    return PrecisionGuarantee(
        math_precision=MathPrecision(element.compute.value),
        accumulator=ElementKind.I64,
        deterministic=True,
        bit_stable_on_same_hardware=True,
        batch_invariant=True,
        order_invariant=True,
        duplicates=Duplicates.SUM,
        tolerance=Tolerance(
            rtol=rounding, ctol=ctol * (1 + rounding), underflow=float(info.smallest_normal * info.eps)
        ),
    )


def exact_guarantee(desc: Any) -> Mapping[str, PrecisionGuarantee]:
    return outputs(desc, _guarantee(desc.element, geometry(desc).duplicates_possible, None))


def scaled_guarantee(desc: Any) -> Mapping[str, PrecisionGuarantee]:
    return outputs(desc, _guarantee(desc.element, geometry(desc).duplicates_possible, 63 - headroom(desc)))


def exact_numerics(desc: Any) -> str:
    return f"fixed-sum.{desc.element}.exact.v1"


def scaled_numerics(desc: Any) -> str:
    return f"fixed-sum.{desc.element}.{63 - headroom(desc)}.v1"


# --- when it applies and what it costs ---


def _fewer_than(bits: int, desc: Any) -> Support:
    count = geometry(desc).duplicates_possible
    if count < 2**bits:
        return SUPPORTED
    return Support.no(f"{count} contributions can meet in one element; a 64-bit sum has room for fewer than 2**{bits}")


def exact_applies(desc: Any, target: Target) -> Support:
    return _fewer_than(HEADROOM[0], desc)


def scaled_applies(desc: Any, target: Target) -> Support:
    return _fewer_than(HEADROOM[-1], desc)


def exact_rank(desc: Any, target: Target) -> float:
    return _rank(desc, exact=True)


def scaled_rank(desc: Any, target: Target) -> float:
    return _rank(desc, exact=False)


def _rank(desc: Any, exact: bool) -> float:
    pad = Scratchpad(desc, exact)
    passes = 1 if exact else 2
    return costs.fixed_rank(desc, passes, pad.each, 2 + passes + (pad.stripes is not None))


# --- launches ---


class Scratchpad:
    """Where sums, exponents and flags of the table lie in the workspace, and in which order points are visited."""

    def __init__(self, desc: Any, exact: bool) -> None:
        g = geometry(desc)
        self.each = 9 if exact else 12
        self.stripes = stripes(g, 8 if exact else 12)  # flags alone are hardly ever touched
        count = g.table.numel
        if self.stripes is None:
            # Sums are numbered as the table's elements are: one row, one panel.
            self.rows, self.inner, self.panel = 1, count, count
        else:
            self.rows, self.inner, self.panel = g.fold[0] * g.extents[0], g.fold[2], PANEL
        self.sums = Scratch(0, ElementKind.I64)
        end = _aligned(8 * count)
        #: A byte of flags each, or a word of flags and exponent.
        self.marks = end
        end += _aligned((self.each - 8) * count)
        #: The chosen stripe.
        self.stripe = Scratch(end, ElementKind.I32)
        end += 0 if self.stripes is None else _aligned(4)
        self.nbytes = 0 if g.idle else end


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def _fold(desc: Any, pad: Scratchpad, exact: bool, scale: int) -> Launch:
    table = geometry(desc).table
    flat = table.layout.packed
    big = table.numel >= I32_LIMIT  # only strides, which are read off the tensor, are always wide
    # Sums of a strided table are one long row; its elements' places follow from their numbers.
    shape = () if flat else table.shape
    has_alpha = any(o.name == "alpha" for o in desc.operands())
    block = FOLD_ELEMENTS if flat else FOLD_ELEMENTS // 2  # offsets of strided elements take a register pair each
    cols = block if pad.rows == 1 else PANEL
    rows = block // cols
    return Launch(
        fixed.fixed_fold_kernel,
        -(-pad.rows // rows) * -(-pad.inner // pad.panel) * -(-pad.panel // cols),
        {
            "sums": pad.sums,
            "exponents": None if exact else Scratch(pad.marks, ElementKind.I32),
            "flags": Scratch(pad.marks, ElementKind.U8) if exact else None,
            "out": values(table),
            "alpha": Scalar("alpha", ElementKind.F32, 1) if has_alpha else None,
            "scale": Int(scale),
            "rows": Int(pad.rows, big),
            "inner": Int(pad.inner, big, power_of_two_in(pad.inner)),
            "panel": Int(pad.panel, big, power_of_two_in(pad.panel)),
            "sizes": padded((Int(n, big) for n in shape), Int(1, big)),
            "strides": padded(strides(table, range(len(shape)), True), Int(0, True)),
        },
        {
            "KEEP": keeps(desc),
            "POINT_TYPE": tl.int64 if big else tl.int32,
            "FLAT": flat,
            "BLOCK_ROWS": rows,
            "BLOCK_COLS": cols,
        },
        num_warps=FOLD_WARPS,
    )


def _added(desc: Any, exact: bool) -> list[Launch]:
    g = geometry(desc)
    if g.idle:
        return [*status_launch(desc), *zeroed(desc)]
    pad = Scratchpad(desc, exact)
    room = 63 - headroom(desc) - 24
    marks = Scratch(pad.marks, ElementKind.I32)
    passes: list[tuple[Any, Arg]]
    if exact:
        scale = F16_EXPONENT
        passes = [(fixed.exact_point, (pad.sums, marks))]
    else:
        # m * 2**(E - 150), and the sum counts units of m * 2**-room.
        scale = -150 - room
        passes = [
            (fixed.largest_point, marks),
            (fixed.aligned_point, (pad.sums, marks, Int(room))),
        ]
    found = [*status_launch(desc), fill_launch(pad.sums, pad.nbytes // 8, 0)]
    if pad.stripes is not None:
        found += sample_launch(desc, pad.stripes, pad.stripe)
    found += [_traverse(desc, pad, point, table) for point, table in passes]
    return [*found, _fold(desc, pad, exact, scale)]


def _traverse(desc: Any, pad: Scratchpad, point: Any, table: Arg) -> Launch:
    g = geometry(desc)
    args = (desc, point, values(g.dense), table, ElementKind.F32)
    if pad.stripes is not None:
        return stripes_launch(*args, pad.stripes, pad.stripe)
    return rows_launch(*args) if fits_rows(g) else elements_launch(*args, packed_table=True)


def _fixed_f16(desc: Any, target: Target) -> list[Launch]:
    return _added(desc, exact=True)


def _fixed_scaled(desc: Any, target: Target) -> list[Launch]:
    return _added(desc, exact=False)


def _register() -> None:
    for op in (*SUMS, "index_put"):
        add = only_if(accumulate=True)
        common: dict[str, Any] = {"op": op, "index_elements": INDICES, "layout": layout}
        kernel(
            name="fixed_f16",
            elements=("f16",),
            supports=both(add, exact_applies),
            rank=exact_rank,
            priority=2,
            guarantee=exact_guarantee,
            workspace=lambda desc, target: Scratchpad(desc, exact=True).nbytes,
            numerics=exact_numerics,
            **common,
        )(_fixed_f16)
        kernel(
            name="fixed_scaled",
            elements=(*HALF, "f32"),
            supports=both(add, scaled_applies),
            rank=scaled_rank,
            priority=3,
            guarantee=scaled_guarantee,
            workspace=lambda desc, target: Scratchpad(desc, exact=False).nbytes,
            numerics=scaled_numerics,
            **common,
        )(_fixed_scaled)


_register()
