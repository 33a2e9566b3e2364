"""From an indexing geometry to launches of ``stripes_kernels``: how wide stripes are, how many programs they need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton.language as tl

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch, power_of_two_in
from triplan.backends.triton.common.offsets import TL, extent_int
from triplan.backends.triton.indexing import stripes_kernels as kernels
from triplan.backends.triton.indexing.geometry import Geometry, geometry
from triplan.backends.triton.indexing.launches import L2_SHARE, common, fits_rows, index_pointers, policy, wide
from triplan.sku import ElementKind

#: Columns of a wide stripe, and of a panel: rows of a panel are what a wide stripe's additions to one slot cover, and
#: the whole panel is little enough that pages of memory change seldom while a narrow stripe is visited.
PANEL = 64
#: Narrower stripes would read the dense side in pieces below a 32-byte sector of memory.
NARROWEST = 16
SAMPLES = 1024
#: Of SAMPLES pairs: runs of 32 equal indices, which a warp's additions share, have as many.
ENOUGH = SAMPLES - SAMPLES // 32
#: Elements and warps of a program: two elements a thread.
BLOCK, WARPS = 128, 2


@dataclass(frozen=True, slots=True)
class Stripes:
    """Columns of the stripes that suit scattered indices, and of those that suit runs of equal ones: powers of two."""

    narrow: int
    wide: int


def stripes(g: Geometry, itemsize: int) -> Stripes | None:
    """How to visit a table of ``itemsize`` bytes an element. None if it fits in the cache or if rows have one index."""
    column = max(g.extents[0], 1) * itemsize
    if not (g.full and fits_rows(g)) or column * g.fold[2] <= L2_SHARE:
        return None
    widest = min(PANEL, 1 << (g.fold[2] - 1).bit_length())
    fitting = 1 << max(L2_SHARE // column, 1).bit_length() - 1
    return Stripes(min(max(fitting, NARROWEST), widest), widest)


def sample_launch(desc: Any, s: Stripes, stripe: Scratch) -> list[Launch]:
    """What chooses between the two widths; nothing where they are one."""
    if s.narrow == s.wide:
        return []
    g = geometry(desc)
    outer, count, inner = g.fold
    args: dict[str, Arg] = {
        "index": index_pointers(g)[0],
        "stripe": stripe,
        "n_rows": Int(outer * count, wide(g)),
        "inner": Int(inner, wide(g)),
        "enough": Int(ENOUGH),
        "wide": Int(_log2(s.wide)),
        "narrow": Int(_log2(s.narrow)),
    }
    return [Launch(kernels.sample_kernel, 1, args, {"SAMPLES": SAMPLES})]


def stripes_launch(
    desc: Any, point: Any, dense: Arg, table: Arg, compute: ElementKind, s: Stripes, stripe: Scratch
) -> Launch:
    """One launch of ``stripes_kernel``, after those of ``sample_launch``."""
    g = geometry(desc)
    outer, count, inner = g.fold
    offsets_wide = wide(g)
    return Launch(
        kernels.stripes_kernel,
        max(-(-inner // w) * -(-outer * count // (BLOCK // w)) for w in (s.narrow, s.wide)),
        {
            **common(desc, g),
            "dense": dense,
            "table": table,
            "index": index_pointers(g)[0],
            "stripe": stripe if s.narrow < s.wide else Int(_log2(s.wide)),
            "n_rows": Int(outer * count, offsets_wide),
            "count": None if outer == 1 else Int(count, offsets_wide),
            "inner": Int(inner, offsets_wide, power_of_two_in(inner)),
            "slots": Int(outer * g.extents[0], offsets_wide),
            "extent": extent_int(g.extents[0]),
        },
        {
            **policy(desc, g),
            "POINT": point,
            "OFFSET": tl.int64 if offsets_wide else tl.int32,
            "COMPUTE": TL[compute],
            "PANEL": PANEL,
            "LOG_BLOCK": _log2(BLOCK),
        },
        num_warps=WARPS,
    )


def _log2(power: int) -> int:
    return power.bit_length() - 1
