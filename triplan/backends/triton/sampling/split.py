"""Kernel ``split`` of sampling: chunks of a row have programs of their own; of few tokens, one program finds one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch
from triplan.backends.table import kernel
from triplan.backends.triton.common.card import BYTES_PER_US, L2_BYTES_PER_US, LAUNCH_US, OVERLAPPED_LAUNCH_US
from triplan.backends.triton.common.offsets import ceil_power, layout
from triplan.backends.triton.sampling import levels_kernels, narrow_kernels, split_kernels
from triplan.backends.triton.sampling.looped import BLOCK
from triplan.backends.triton.sampling.shared import (
    SM_EXPONENTIALS_PER_US,
    STEPS,
    guarantee,
    logits_args,
    numerics,
    row_args,
)
from triplan.descriptors import SampleDescriptor
from triplan.sku import SUPPORTED, ArchSku, ElementKind, Support, Target

#: Tokens of a chunk at most. Untuned.
CHUNK = 4096
#: Chunks of one program where there are many, one for each warp. From so many programs a multiprocessor on. Untuned.
SPAN, SPANS = 4, 3
#: Tokens that the 4 warps of a program take at a time, one a thread, so that they store some without an exchange. Tiles
#: of masses in one block of code, at most 16: more share the coefficients of the exponential. And tiles that are loaded
#: ahead of estimates: with 16, registers leave room for 4 programs on every multiprocessor; with 5 on some, the launch
#: lasts as long as those (seen on an H200). Untuned.
TILE, UNROLL, AHEAD = 128, 16, 16
#: Tokens of a row in the sample that levels come from, and neighbours among them: a sector of f32. Untuned.
SAMPLE, RUN = 2048, 8
#: Logits between two levels for which a chunk has places; how many of all chunks the search takes at a time; and how
#: many the slow search does, for a bucket of many values or a chunk with more logits than places. Untuned.
PLACES, SOUGHT, MANY = 1024, 2048, 2048
#: Tokens of a group at least: a sector or two; and at most, so that top-k looks at 64 groups or more.
GROUP, MOST = 16, 64
#: Elements of the workspace; of other parts, i32.
ELEMENTS = {
    **dict.fromkeys(("sums", "buckets"), ElementKind.I64),
    **dict.fromkeys(("levels", "masses", "between", "bracket", "few"), ElementKind.F32),
}
#: Microseconds of the program that finds thresholds and the token of a row. Untuned.
ROW_US = 10.0
#: The same without a search for what is kept. Fitted to 20,480 rows of 127 tokens on an H200.
FREE_ROW_US = 1.0


def few_of(target: Target) -> int:
    """Groups of a row, tokens that are sampled, tokens of which few are left, keys between two bounds: at most, in
    registers."""
    return 8192 if target.arch is ArchSku.SM90A else 4096  # for sm80, Triton 3.9 spills with more


class Parts(NamedTuple):
    """How a row is divided, and where the parts of the workspace begin, in bytes."""

    chunk: int
    chunks: int
    group: int
    places: int
    span: int
    width: int
    many: int
    offsets: Mapping[str, int]
    size: int

    @property
    def groups(self) -> int:
        return self.chunks * (self.chunk // self.group)


def parts_of(desc: SampleDescriptor, target: Target) -> Parts:
    """By the vocabulary and the architecture alone."""
    n, few = desc.vocabulary, few_of(target)
    chunk = min(ceil_power(max(n, 1)), CHUNK)
    chunks = max(-(-n // chunk), 1)
    group = min(max(ceil_power(-(-n // few)), GROUP), chunk)
    places = min(PLACES, chunk)
    width, many = (min(places, max(of_all // ceil_power(chunks), 16)) for of_all in (SOUGHT, MANY))
    span = SPAN if desc.rows * chunks >= SPANS * SPAN * target.sm_count and chunk == CHUNK else 1
    found = Parts(chunk, chunks, group, places, span, width, max(ceil_power(chunks) * many, 16), {}, 0)
    sizes = {
        "sums": 8 * 3 * chunks,
        "tops": 4 * chunks,
        "largest": 4 * found.groups * desc.top_k,
        "chosen": 4 * (few // group) * desc.top_k,
        "state": 4 * desc.top_k,
        "levels": 4 * levels_kernels.OF_ROW.value * desc.top_p,
        "masses": 4 * levels_kernels.OF_ROW.value * chunks * desc.top_p,
        "counts": 4 * chunks * desc.top_p,
        "between": 4 * chunks * found.places * desc.top_p,
        "buckets": 8 * levels_kernels.BUCKETS.value * desc.top_p,
        "bracket": 4 * levels_kernels.OF_BRACKET.value * desc.top_p,
        "few": 4 * found.many * desc.top_p,
    }
    offsets, end = {}, 0
    for name, size in sizes.items():
        if size:
            offsets[name], end = end, end + -(-desc.rows * size // 16) * 16
    return found._replace(offsets=offsets, size=end)


def supports(desc: SampleDescriptor, target: Target) -> Support:
    most = MOST * few_of(target)
    if desc.vocabulary > most:
        return Support.no(f"a vocabulary of {desc.vocabulary}; its groups fit no program from {most} tokens on")
    programs = desc.rows * parts_of(desc, target).chunks
    if programs >= 2**31:
        return Support.no(f"needs {programs} programs; a grid holds fewer than 2**31")
    return SUPPORTED


def rank(desc: SampleDescriptor, target: Target) -> float:
    """A read of the rows; of wide rows (all may be), another, with exponentials; two programs of each row. Untuned."""
    multiprocessors, tokens = target.sm_count, desc.rows * desc.vocabulary
    size = tokens * desc.element.itemsize
    masses = max(size / L2_BYTES_PER_US, tokens / (multiprocessors * SM_EXPONENTIALS_PER_US))
    each = (1 + desc.top_p) * ROW_US if desc.top_k or desc.top_p else FREE_ROW_US
    finds = -(-desc.rows // multiprocessors) * each
    launches = LAUNCH_US + (2 + desc.top_k + desc.top_p) * OVERLAPPED_LAUNCH_US
    return launches + size / BYTES_PER_US + masses + finds


@kernel(
    op="sample",
    name="split",
    elements=STEPS,
    guarantee=guarantee,
    supports=supports,
    rank=rank,
    numerics=numerics,
    version=4,
    workspace=lambda desc, target: parts_of(desc, target).size if desc.rows else 0,
    layout=layout,
)
def split(desc: SampleDescriptor, target: Target) -> list[Launch]:
    if desc.rows == 0:
        return []
    parts = parts_of(desc, target)
    logits, each = logits_args(desc), row_args(desc)

    def scratch(*names: str) -> dict[str, Arg]:
        """None of what the filters do not need."""
        found = {n: parts.offsets.get(n) for n in names}
        return {n: None if at is None else Scratch(at, ELEMENTS.get(n, ElementKind.I32)) for n, at in found.items()}

    launch = partial(Launch, overlaps=True, num_warps=8)
    chunks: dict[str, Arg] = {"chunks": Int(parts.chunks)}
    sizes = {"CHUNK": parts.chunk}
    few, wide = few_of(target), ceil_power(parts.chunks)
    tile = min(TILE // parts.span, parts.chunk)
    found = {**logits, **each, **scratch("tops", "state", "sums", "counts", "between", "buckets", "bracket"), **chunks}
    exact = {**sizes, "PLACES": parts.places}
    looped = {"STEPS": STEPS[desc.element], "BLOCK": min(BLOCK, parts.chunk)}
    spans = -(-parts.chunks // parts.span)
    estimated = {**logits, **each, **scratch("levels", "tops", "masses", "buckets"), **chunks}
    grouped = {"GROUP": parts.group if desc.top_k else parts.chunk}
    estimates = parts.chunks
    if desc.top_p and not desc.top_k:
        estimates = spans
        first = launch(
            split_kernels.estimates_kernel,
            desc.rows * spans,
            estimated,
            {**sizes, "SPAN": parts.span, "TILE": tile, "AHEAD": min(AHEAD, parts.chunk // tile)},
            num_warps=4,
            max_registers=128,
        )
    else:
        first = launch(
            split_kernels.chunks_kernel,
            desc.rows * parts.chunks,
            {**estimated, **scratch("largest")},
            {**sizes, **grouped, "TILE": min(TILE, parts.chunk)},
            num_warps=4,
            max_registers=255,
        )
    found["parts"] = Int(estimates)
    exact["PARTS"] = ceil_power(estimates)
    launches = [
        first,
        launch(
            split_kernels.masses_kernel,
            desc.rows * spans,
            {**found, **scratch("levels", "masses")},
            {**exact, "SPAN": parts.span, "TILE": tile, "UNROLL": min(UNROLL, parts.chunk // tile)},
            num_warps=4,
            max_registers=128,
        ),
        launch(
            split_kernels.finish_kernel,
            desc.rows,
            {**found, **scratch("few")},
            {**exact, "CHUNKS": wide, "WIDTH": parts.width, "MANY": parts.many, **looped},
            num_warps=16,
            max_registers=128,
        ),
    ]
    if desc.top_p:
        sampled, levels = {"SAMPLE": SAMPLE, "RUN": RUN}, {**logits, **each, **scratch("levels")}
        launches.insert(0, launch(levels_kernels.levels_kernel, desc.rows, levels, sampled, num_warps=4))
    if desc.top_k:
        of_groups = {**scratch("largest", "chosen", "state"), "groups": Int(parts.groups)}
        narrow = launch(
            narrow_kernels.narrow_kernel,
            desc.rows,
            {**logits, **each, **of_groups},
            {"GROUP": parts.group, "FEW": few},
            max_registers=255,
        )
        launches.insert(-2, narrow)
    return launches
