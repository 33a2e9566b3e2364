"""Launches of ``stripes_kernels``: how wide the stripes of a table are, and how many programs visit them."""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch, power_of_two_in
from triplan.backends.triton.common.card import L2_SHARE
from triplan.backends.triton.common.offsets import TL, ceil_power, extent_int
from triplan.backends.triton.indexing import stripes_kernels as kernels
from triplan.backends.triton.indexing.arguments import index_pointers, policy, traversal_arguments
from triplan.backends.triton.indexing.geometry import Geometry, geometry
from triplan.backends.triton.indexing.points import Point
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import ElementKind

#: Columns of a panel, and of a wide stripe at most. A wide stripe's additions to one slot then cover a whole row of a
#: panel, and a panel is small enough that the memory pages change seldom while its narrow stripes are visited.
PANEL = 64
#: Columns of the narrowest stripe: narrower ones would read the dense operand by less than a 32-byte sector.
NARROWEST = 16
#: Pairs of neighbouring indices that the sample compares.
SAMPLES = 1024
#: Equal pairs from which on stripes are wide: as many as in runs of 32 equal indices, one run per warp.
ENOUGH = SAMPLES - SAMPLES // 32
#: Elements per program of ``stripes_kernel``.
BLOCK = 128
#: Warps per program of ``stripes_kernel``: each thread has two elements.
WARPS = 2


@dataclass(frozen=True, slots=True)
class Stripes:
    """Columns, powers of two, of the stripes for scattered indices and of those for runs of equal indices."""

    narrow: int
    wide: int


def stripes(g: Geometry, itemsize: int) -> Stripes | None:
    """The stripes of a table of ``itemsize`` bytes per element; None if it fits in the cache or rows have one index."""
    column = max(g.extents[0], 1) * itemsize
    if not (g.full and g.fits_rows) or column * g.fold[2] <= L2_SHARE:
        return None
    widest = min(PANEL, ceil_power(g.fold[2]))
    fitting = 1 << _log2(max(L2_SHARE // column, 1))
    return Stripes(min(max(fitting, NARROWEST), widest), widest)


def sample_launches(desc: IndexingDescriptor, s: Stripes, stripe: Scratch) -> list[Launch]:
    """Let the device choose between the two widths; nothing where they are equal."""
    if s.narrow == s.wide:
        return []
    g = geometry(desc)
    outer, count, inner = g.fold
    args: dict[str, Arg] = {
        "index": index_pointers(g)[0],
        "stripe": stripe,
        "n_rows": Int(outer * count, g.wide),
        "inner": Int(inner, g.wide),
        "enough": Int(ENOUGH),
        "wide": Int(_log2(s.wide)),
        "narrow": Int(_log2(s.narrow)),
    }
    return [Launch(kernels.sample_kernel, 1, args, {"SAMPLES": SAMPLES})]


def stripes_launch(
    desc: IndexingDescriptor, point: Point, dense: Arg, table: Arg, compute: ElementKind, s: Stripes, stripe: Scratch
) -> Launch:
    """One launch of ``stripes_kernel``, after those of ``sample_launches``."""
    g = geometry(desc)
    outer, count, inner = g.fold
    return Launch(
        kernels.stripes_kernel,
        max(-(-inner // w) * -(-outer * count // (BLOCK // w)) for w in (s.narrow, s.wide)),
        {
            **traversal_arguments(desc, g),
            "dense": dense,
            "table": table,
            "index": index_pointers(g)[0],
            "stripe": stripe if s.narrow < s.wide else Int(_log2(s.wide)),
            "n_rows": Int(outer * count, g.wide),
            "count": None if outer == 1 else Int(count, g.wide),
            "inner": Int(inner, g.wide, power_of_two_in(inner)),
            "slots": Int(outer * g.extents[0], g.wide),
            "extent": extent_int(g.extents[0]),
        },
        {
            **policy(desc, g),
            "POINT": point.function,
            "OFFSET": tl.int64 if g.wide else tl.int32,
            "COMPUTE": TL[compute],
            "PANEL": PANEL,
            "LOG_BLOCK": _log2(BLOCK),
        },
        num_warps=WARPS,
    )


def _log2(n: int) -> int:
    """The logarithm of ``n``, base 2, rounded down."""
    return n.bit_length() - 1
