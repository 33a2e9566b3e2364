"""Entry ``scanned_sum``: the sums of ``sorted_sum`` for few contributions, in one launch, without a sort."""

from __future__ import annotations

import math

from triplan.backends.runtime.launch import Launch, Scratch
from triplan.backends.triton.common.card import LAUNCH_US, SECTOR
from triplan.backends.triton.common.offsets import padded_bytes
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.indexing import scanned_sum_kernels as kernels, segments, sorted_sum
from triplan.backends.triton.indexing.arguments import policy, status
from triplan.backends.triton.indexing.costs import most_meeting, reached, zero_us
from triplan.backends.triton.indexing.geometry import geometry
from triplan.backends.triton.indexing.registration import ADDED, SLICE_SUMS, entry
from triplan.backends.triton.indexing.sorting import key_arguments, sorted_view
from triplan.backends.triton.indexing.sums import first_launches
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import SUPPORTED, ElementKind, Support, Target

#: Most contributions: every program reads the keys of all of them.
SCANNED = 512
# Fitted to ``bench anywhere indexing``, seeds 1, 2, 3, 12, 13, 14 and 51, on an H200, by hand:
#: Microseconds of a program before it adds, and for each key that it reads.
FIRST_US, KEY_US = 0.6, 0.0024
#: Microseconds of an addition of a lane of each thread, of several in flight; it doubles once for four, and so on.
TERM_US = 0.045
#: The same of strided operands: before, and of an addition, of which only one is in flight.
STRIDED_US, STRIDED_TERM_US = 1.0, 0.55
#: Microseconds of the many addresses of wide rows of strided operands; and, of packed ones that are not read by
#: vectors, of an addition for each lane of a thread: programs wait for the slot that gets most. From ``bench anywhere
#: indexing``, seeds 2, 12, 14, 15, 16 and 17, on an H200.
WIDE_US, WIDE_TERM_US = 2.0, 0.08
#: Microseconds of programs that fill the card: which only read keys; and more of those that add, also where each lane
#: of a contribution is in a sector of its own.
KEYS_US, SUM_US, APART_US = 1.0, 2.5, 5.0
#: Fitted: programs that a multiprocessor holds at a time.
RESIDENT = 8
#: Threads of a program.
THREADS = 128


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
    g, s, size = geometry(desc), sorted_view(desc), desc.element.itemsize
    flat = segments.lane_arguments(desc, s)[1]["FLAT"]
    apart = s.outer > 1 and s.inner * size < SECTOR
    lanes = max(segments.lanes_tile(desc, s).cols / THREADS, 1)
    if flat:
        first, term = FIRST_US, TERM_US * (1 + math.log2(lanes)) * (1 + size / 4 if apart else 1)
    else:
        first, term = STRIDED_US, STRIDED_TERM_US
    vectors = flat and s.inner * size % 16 == 0 and min(g.dense.alignment, g.table.alignment) >= 16
    alone = first + KEY_US * s.count + term * max(s.count / max(s.slots, 1), 1)
    if s.inner >= segments.WIDE_COLS and not vectors:
        alone += WIDE_TERM_US * lanes * most_meeting(g) if flat else WIDE_US
    adding = reached(s.slots, s.count) / max(s.count, 1)
    waves = programs(desc) / (RESIDENT * target.sm_count)
    across = sorted_sum.apart_us(s) if g.table.layout.unit_axis in s.slot_axes else 0.0
    return zero_us(g) + LAUNCH_US + alone + across + waves * (KEYS_US + adding * (APART_US if apart else SUM_US))


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
