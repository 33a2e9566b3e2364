"""Kernel ``split`` of sampling: chunks of a row have programs of their own; of few tokens, one program finds one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch
from triplan.backends.table import kernel
from triplan.backends.triton.common.card import BYTES_PER_US, L2_BYTES_PER_US, LAUNCH_US, OVERLAPPED_LAUNCH_US
from triplan.backends.triton.common.offsets import ceil_power, layout
from triplan.backends.triton.sampling import split_kernels as kernels
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
#: Lines of tokens, and tokens of a line, whose masses a program has in registers at a time: few, so that many programs
#: run at once. A line is loaded by 8 threads of one warp. Untuned.
LINES, LINE = 16, 32
#: Tokens of a group at least: a sector or two; and at most, so that top-k looks at 64 groups or more.
GROUP, MOST = 16, 64
#: Microseconds of the program that finds thresholds and the token of a row. Untuned.
ROW_US = 10.0


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
    offsets: Mapping[str, int]
    size: int

    @property
    def groups(self) -> int:
        return self.chunks * (self.chunk // self.group)

    @property
    def keys(self) -> int:
        """Keys between two bounds that are sought: so few that a chunk, of keys in any order, has places for its share
        and 5 deviations more.
        """
        if self.places == self.chunk:
            return self.chunk * self.chunks
        return self.chunks * (self.places - 5 * math.isqrt(self.places))


def parts_of(desc: SampleDescriptor, target: Target) -> Parts:
    """By the vocabulary and the architecture alone."""
    n, few = desc.vocabulary, few_of(target)
    chunk = min(ceil_power(max(n, 1)), CHUNK)
    chunks = max(-(-n // chunk), 1)
    group = min(max(ceil_power(-(-n // few)), GROUP), chunk)
    found = Parts(chunk, chunks, group, min(few // chunks, chunk), {}, 0)
    sizes = {
        "sums": 8 * 4 * chunks,
        "largest": 4 * found.groups,
        "chosen": 4 * (few // group),
        "state": 4 * 4,
        "counts": 4 * chunks,
        "between": 4 * chunks * found.places * desc.top_p,
    }
    offsets, end = {}, 0
    for name, size in sizes.items():
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
    multiprocessors, tokens = max(target.sm_count, 1), desc.rows * desc.vocabulary
    size = tokens * desc.element.itemsize
    masses = max(size / L2_BYTES_PER_US, tokens / (multiprocessors * SM_EXPONENTIALS_PER_US))
    finds = (1 + (desc.top_p or not desc.top_k)) * -(-desc.rows // multiprocessors) * ROW_US
    return LAUNCH_US + 3 * OVERLAPPED_LAUNCH_US + size / BYTES_PER_US + masses + finds


@kernel(
    op="sample",
    name="split",
    elements=STEPS,
    guarantee=guarantee,
    supports=supports,
    rank=rank,
    numerics=numerics,
    workspace=lambda desc, target: parts_of(desc, target).size if desc.rows else 0,
    layout=layout,
)
def split(desc: SampleDescriptor, target: Target) -> list[Launch]:
    if desc.rows == 0:
        return []
    parts = parts_of(desc, target)
    logits, each = logits_args(desc), row_args(desc)

    def scratch(*names: str) -> dict[str, Arg]:
        return {n: Scratch(parts.offsets[n], ElementKind.I64 if n == "sums" else ElementKind.I32) for n in names}

    launch = partial(Launch, overlaps=True, num_warps=8)
    chunks: dict[str, Arg] = {"chunks": Int(parts.chunks)}
    sizes = {"CHUNK": parts.chunk}
    rest = {**logits, **each, **scratch("state", "sums", "counts", "between"), **chunks}
    few = few_of(target)
    grouped = {"KEYS": parts.keys, "GROUP": parts.group, "FEW": few}
    looped = {"STEPS": STEPS[desc.element], "BLOCK": min(BLOCK, parts.chunk)}
    # On an H200, 64 rows: of top-k 20 us with 8 warps and 24 with 16; an estimate alone takes 26 and 19.
    warps, registers = (8, 255) if desc.top_k else (16, 128)
    line = min(LINE, parts.chunk)
    masses = {**sizes, "PLACES": parts.places, "LINES": min(LINES, parts.chunk // line), "LINE": line}
    places = {"CHUNKS": ceil_power(parts.chunks), "PLACES": parts.places, "BETWEEN": few}
    groups = {**scratch("largest", "chosen", "state"), "groups": Int(parts.groups)}
    return [
        launch(
            kernels.largest_kernel,
            desc.rows * parts.chunks,
            {**logits, **scratch("largest"), **chunks},
            {**sizes, "GROUP": parts.group},
        ),
        launch(
            kernels.narrow_kernel,
            desc.rows,
            {**logits, **each, **groups},
            grouped,
            num_warps=warps,
            max_registers=registers,
        ),
        launch(kernels.masses_kernel, desc.rows * parts.chunks, rest, masses, num_warps=4, max_registers=80),
        launch(kernels.finish_kernel, desc.rows, rest, {**sizes, **places, **looped}, num_warps=16, max_registers=128),
    ]
