"""Order-invariant sums in 64-bit fixed point: what ``fixed_f16`` and ``fixed_scaled`` share.

Integer addition is associative, so integer atomics give the same bits in any order. (The idea is old; for
floating-point sums see Demmel and Nguyen, "Parallel reproducible summation", IEEE Trans. Computers 64(7), 2015. Where
they keep several bins for each destination, one is enough here.)

The sums of the whole table lie in the workspace: they are cleared, added to, and converted. The finished sum is
converted to f64, multiplied by alpha there (once: a product per term would be rounded, and could overflow), added to
the table's former value and rounded into the element: three roundings of 2**-53 and the last one. Infinities and NaN
reach the result as they would by floating-point additions in any order.

Where every element has an index of its own and the sums do not fit in the cache, ``stripes`` chooses the order in which
points are visited. No bit depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import triton.language as tl

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch, power_of_two_in
from triplan.backends.triton.common.bounds import compounded, guarantee, of_outputs, tolerance
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.fill import fill_launch
from triplan.backends.triton.common.offsets import I32_LIMIT, extents, padded, padded_bytes, strides, values
from triplan.backends.triton.indexing import fixed_point_kernels as kernels
from triplan.backends.triton.indexing.arguments import alpha
from triplan.backends.triton.indexing.costs import FILL_US, folded_us, index_us, miss_rate, turns_us
from triplan.backends.triton.indexing.geometry import geometry
from triplan.backends.triton.indexing.points import Point
from triplan.backends.triton.indexing.stripes import PANEL, Stripes, sample_launches, stripes, stripes_launch
from triplan.backends.triton.indexing.sums import first_launches
from triplan.backends.triton.indexing.traversals import scratch_launch, status_launches
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import SUPPORTED, Duplicates, ElementKind, MathPrecision, PrecisionGuarantee, Support
from triplan.sku.facts import fact

#: Bits of a sum's magnitude.
SUM_BITS = 63
#: Classes of headroom: a sum of fewer than 2**bits terms needs that many bits above each term.
HEADROOM = (23, 31)
#: Elements per program that converts sums. Untuned.
FOLD_ELEMENTS = 256
#: Warps per program that converts sums. Untuned.
FOLD_WARPS = 1
#: Bytes of scratch for the sum of a table element.
SUM_BYTES = 8
#: Bytes of scratch for the flags of a table element, if sums are exact.
FLAG_BYTES = 1
#: Bytes of scratch for the word of exponent and flags of a table element, if sums are scaled.
EXPONENT_BYTES = 4

#: Fitted: cost of an addition, in bytes of traffic, where neighbours share a slot.
SHARED_BYTES = 16
#: Fitted: the same where each neighbour has another slot.
SCATTERED_BYTES = 48
#: Fitted: the fraction by which additions to shared slots slow down if every access misses the cache.
SHARED_MISS = 0.2
#: Fitted: the same for scattered slots.
SCATTERED_MISS = 0.5


def headroom(desc: IndexingDescriptor) -> int:
    """The descriptor's class of headroom, in bits. Between classes the bits of results may differ."""
    terms = geometry(desc).most_contributions
    return next((bits for bits in HEADROOM if terms < 2**bits), HEADROOM[-1])


def fewer_than(bits: int, desc: IndexingDescriptor) -> Support:
    """Whether fewer than 2**bits contributions can meet in one element."""
    terms = geometry(desc).most_contributions
    if terms < 2**bits:
        return SUPPORTED
    return Support.no(f"{terms} contributions can meet in one element; a 64-bit sum has room for fewer than 2**{bits}")


# --- guarantee ---


@fact
def _fixed_guarantee(element: ElementKind, terms: int, value_bits: int | None) -> PrecisionGuarantee:
    # bf16 is rounded from f64 by way of f32: (1 + u_bf16) * (1 + u_f32) - 1 = u_bf16 + ``twice``.
    twice = ElementKind.F32.unit_roundoff * (1 + element.unit_roundoff) if element is ElementKind.BF16 else 0.0
    # In f64: the sum's conversion, alpha's product and the former value's addition; and the float64 reference, with
    # which the tolerance compares, rounds each of its terms and each of its sums.
    per_term = compounded((2 * terms + 3) * math.log1p(ElementKind.F64.unit_roundoff))
    if value_bits is not None:
        per_term += terms * 2.0**-value_bits
    return guarantee(
        ElementKind.I64,
        tolerance(element, ElementKind.F64, relative=twice, per_term=per_term, last=element.unit_roundoff + twice),
        math_precision=MathPrecision(element.compute.value),
        batch=True,
        order=True,
        duplicates=Duplicates.SUM,
    )


def fixed_guarantee(desc: IndexingDescriptor, value_bits: int | None) -> Mapping[str, PrecisionGuarantee]:
    """``value_bits``: those of a rounded term; None where terms are exact."""
    return of_outputs(desc, _fixed_guarantee(desc.element, geometry(desc).most_contributions, value_bits))


# --- scratch ---


@dataclass(frozen=True, slots=True)
class Scratchpad:
    """Where sums, exponents and flags lie in the workspace, and in which order points are visited.

    Attributes:
        stripes: widths of the stripes to visit; None: no stripes.
        rows, inner, panel: the sums are packed panel by panel of ``panel`` columns of a table (rows, inner).
        sums: the sums.
        marks: byte offset of the flags, or of the words of exponent and flags.
        stripe: where the device records the width of stripe that it chose.
        nbytes: bytes of the workspace.
    """

    stripes: Stripes | None
    rows: int
    inner: int
    panel: int
    sums: Scratch
    marks: int
    stripe: Scratch
    nbytes: int


@fact
def scratchpad(desc: IndexingDescriptor, exact: bool) -> Scratchpad:
    """The scratch of ``fixed_f16`` (``exact``) or ``fixed_scaled``."""
    g = geometry(desc)
    count = g.table.numel
    # Only infinities and NaN touch flags, so these need no room in the cache.
    found = stripes(g, SUM_BYTES if exact else SUM_BYTES + EXPONENT_BYTES)
    if found is None:
        rows, inner, panel = 1, count, count  # sums are numbered as the table's elements are: one row, one panel
    else:
        rows, inner, panel = g.fold[0] * g.extents[0], g.fold[2], PANEL
    marks = padded_bytes(SUM_BYTES * count)
    stripe = marks + padded_bytes((FLAG_BYTES if exact else EXPONENT_BYTES) * count)
    end = stripe if found is None else stripe + padded_bytes(4)
    return Scratchpad(
        stripes=found,
        rows=rows,
        inner=inner,
        panel=panel,
        sums=Scratch(0, ElementKind.I64),
        marks=marks,
        stripe=Scratch(stripe, ElementKind.I32),
        nbytes=0 if g.idle else end,
    )


# --- cost ---


def fixed_us(desc: IndexingDescriptor, exact: bool) -> float:
    """Microseconds to clear the sums, pass over the contributions (twice unless ``exact``) and convert the sums."""
    g, pad = geometry(desc), scratchpad(desc, exact)
    passes = 1 if exact else 2
    scratch = SUM_BYTES + (FLAG_BYTES if exact else EXPONENT_BYTES)
    added, miss = (SCATTERED_BYTES, SCATTERED_MISS) if g.scattered else (SHARED_BYTES, SHARED_MISS)
    added_us = max(g.numel * (g.dense.element.itemsize + added) / BYTES_PER_US, turns_us(g, SUM_BYTES))
    slower = 1 + miss_rate(g.table.numel * scratch) * miss
    launches = 1 + passes + (pad.stripes is not None)
    return FILL_US + launches * LAUNCH_US + passes * (added_us * slower + index_us(g)) + folded_us(g, scratch)


# --- launches ---


def fixed_launches(desc: IndexingDescriptor, exact: bool, scale: int, passes: list[tuple[Point, Arg]]) -> list[Launch]:
    """Clear the sums, run ``passes`` (point function and table) over the contributions, and convert the sums.

    ``scale``: the exponent of a sum's unit; where destinations have exponents, those are added to it on the device.
    """
    g = geometry(desc)
    if g.idle:
        return first_launches(desc)
    pad = scratchpad(desc, exact)
    found = [*status_launches(desc), fill_launch(pad.sums, pad.nbytes // SUM_BYTES, 0)]
    if pad.stripes is not None:
        found += sample_launches(desc, pad.stripes, pad.stripe)
    for point, table in passes:
        args = (desc, point, values(g.dense), table, ElementKind.F32)
        found.append(scratch_launch(*args) if pad.stripes is None else stripes_launch(*args, pad.stripes, pad.stripe))
    return [*found, _fold_launch(desc, pad, exact, scale)]


def _fold_launch(desc: IndexingDescriptor, pad: Scratchpad, exact: bool, scale: int) -> Launch:
    g = geometry(desc)
    flat = g.table.layout.packed
    wide = g.table.numel >= I32_LIMIT  # only strides, which are read off the tensor, are always wide
    # Sums of a strided table are one long row; the places of its elements follow from their numbers.
    shape = () if flat else g.table.shape
    block = FOLD_ELEMENTS if flat else FOLD_ELEMENTS // 2  # each offset of a strided element takes two registers
    cols = block if pad.rows == 1 else PANEL
    rows = block // cols
    return Launch(
        kernels.fixed_fold_kernel,
        -(-pad.rows // rows) * -(-pad.inner // pad.panel) * -(-pad.panel // cols),
        {
            "sums": pad.sums,
            "exponents": None if exact else Scratch(pad.marks, ElementKind.I32),
            "flags": Scratch(pad.marks, ElementKind.U8) if exact else None,
            "out": values(g.table),
            "alpha": alpha(desc, ElementKind.F32),
            "scale": Int(scale),
            "rows": Int(pad.rows, wide),
            "inner": Int(pad.inner, wide, power_of_two_in(pad.inner)),
            "panel": Int(pad.panel, wide, power_of_two_in(pad.panel)),
            "sizes": extents(shape, wide),
            "strides": padded(strides(g.table, range(len(shape)), True), Int(0, True)),
        },
        {
            "KEEP": g.keeps,
            "POINT_TYPE": tl.int64 if wide else tl.int32,
            "FLAT": flat,
            "BLOCK_ROWS": rows,
            "BLOCK_COLS": cols,
        },
        num_warps=FOLD_WARPS,
    )
