"""Entry ``scanned_sum``: the sums of ``sorted_sum`` for few contributions, in one launch, without a sort."""

from __future__ import annotations

from triplan.backends.runtime.launch import Launch, Scratch
from triplan.backends.triton.common.card import LAUNCH_US, SECTOR
from triplan.backends.triton.common.offsets import padded_bytes
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.indexing import scanned_sum_kernels as kernels, segments, sorted_sum
from triplan.backends.triton.indexing.arguments import policy, status
from triplan.backends.triton.indexing.costs import zero_us
from triplan.backends.triton.indexing.geometry import geometry
from triplan.backends.triton.indexing.registration import ADDED, SLICE_SUMS, entry
from triplan.backends.triton.indexing.sorting import key_arguments, sorted_view
from triplan.backends.triton.indexing.sums import first_launches
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import SUPPORTED, ElementKind, Support, Target

#: Most contributions: every program reads the keys of all of them.
SCANNED = 512
#: Fitted: microseconds of a program.
PROGRAM_US = 2.0
# Fitted to ``bench anywhere indexing --seed 1`` on an H200:
#: Microseconds of a program that is alone, and microseconds for each key and for each contribution that it adds.
FIRST_US, KEY_US, TERM_US = 0.6, 0.0024, 0.045
#: Time relative to packed operands, of wide rows; and to adjacent lanes, where each lane of a contribution is in a
#: sector of its own. The latter from seeds 3 and 51.
WALKED = 3.0
#: Fitted: programs that a multiprocessor holds at a time.
RESIDENT = 8


def programs(desc: IndexingDescriptor) -> int:
    s = sorted_view(desc)
    return s.count * segments.lanes_tile(desc, s).programs(s.outer, s.inner)


def applies(desc: IndexingDescriptor, target: Target) -> Support:
    s = sorted_view(desc)
    if s.g.full:
        return Support.no("takes one index per slice; here the index differs between elements of a slice")
    if s.count > SCANNED:
        return Support.no(f"takes at most {SCANNED} contributions; the problem has {s.count}")
    if not (support := sorted_sum.applies(desc, target)):
        return support
    return SUPPORTED if s.g.idle else fits_grid(programs(desc))


def rank(desc: IndexingDescriptor, target: Target) -> float:
    g, s = geometry(desc), sorted_view(desc)
    waves = programs(desc) / (RESIDENT * target.sm_count)
    summed = max(PROGRAM_US * waves, FIRST_US + KEY_US * s.count + TERM_US * s.count / max(s.slots, 1))
    wide = s.inner >= segments.WIDE_COLS and not g.packed
    apart = s.outer > 1 and s.inner * desc.element.itemsize < SECTOR
    return zero_us(g) + LAUNCH_US + (WALKED * summed if wide or apart else summed)


def workspace(desc: IndexingDescriptor, target: Target) -> int:
    return 0 if geometry(desc).idle else padded_bytes(4 * sorted_view(desc).count)


@entry(
    "scanned_sum",
    SLICE_SUMS,
    elements=ADDED,
    supports=applies,
    rank=rank,
    guarantee=segments.guarantee,
    numerics=segments.numerics,
    workspace=workspace,
)
def launches(desc: IndexingDescriptor, target: Target) -> list[Launch]:
    before = first_launches(desc)
    if geometry(desc).idle:
        return before
    s = sorted_view(desc)
    args, constexprs = segments.lane_arguments(desc, s)
    keys = key_arguments(desc, s, status(desc))
    del keys["lane_strides"]  # None: one index serves a slice
    t = segments.lanes_tile(desc, s)
    # ptxas spills an address of strided operands if more than one contribution is in flight.
    unroll = segments.UNROLL if constexprs["FLAT"] else 1
    launch = Launch(
        kernels.scanned_kernel,
        programs(desc),
        {
            **args,
            **keys,
            **segments.table_arguments(s, constexprs["FLAT"]),
            "order": Scratch(0, ElementKind.I32),
        },
        {
            **constexprs,
            **policy(desc, s.g),
            "KEEP": s.g.keeps,
            "ROWS": t.rows,
            "COLS": t.cols,
            "UNROLL": unroll,
            "BLOCK": SCANNED,
        },
        num_warps=4,
    )
    return [*before, launch]
