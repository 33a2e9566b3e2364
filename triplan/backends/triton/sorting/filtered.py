"""Kernel ``filtered`` of topk and kthvalue: one read of each row, and a second of the columns that can hold the result.

Long rows are divided between programs, if they are few; a second launch takes the first of what these have taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triplan.backends.runtime.launch import Arg, Int, Launch, Ptr, Scratch, power_of_two_in
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US, SM_BYTES_PER_US
from triplan.backends.triton.common.offsets import padded_bytes
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.sorting import filtered_kernels as kernels
from triplan.backends.triton.sorting.shared import (
    MOST,
    SELECTIONS,
    Selection,
    bits,
    descending,
    integers,
    key_constants,
    key_element,
    row_strides,
    sorting_kernel,
)
from triplan.descriptors import KthValueDescriptor
from triplan.sku import ElementKind, Support, Target

#: The most groups of a program.
GROUPS = 4096
#: Groups for each element that is taken: with many, few groups hold more than one of these.
GROUPS_TAKEN = 4
#: Groups of a program that does not need more. Each group that is read again costs a sector for each of its columns, so
#: many groups are good; but few programs with many registers cannot read while others bisect. Untuned.
GROUPS_WANTED = 2048
#: Columns of a group at least, where there are enough. Untuned.
COLUMNS = 4
#: Groups of a thread. Untuned.
THREAD_GROUPS = 8
#: Elements of the chosen groups that a thread reads at a time. With 4, registers spill where there are 16 warps.
THREAD_READS = 2
#: Elements that are ranked at a time, and for each warp so many others that they are compared with at a time. Untuned.
OWN, WARP_OTHERS = 128, 2
#: Registers of a thread at most: four programs of 8 warps share a multiprocessor. Left alone, ptxas takes 40 in some
#: binaries of few warps, and spills two.
REGISTERS = 64
#: Columns that parts are multiples of, so that they are read in vectors.
ALIGNED = 64
#: Columns of a part at least. Untuned.
SPAN = 16384
#: Programs for each multiprocessor that are worth a division of the rows. Untuned.
PROGRAMS = 2
# Fitted to ``bench anywhere sorting``, seeds 1 (H100) and 2 (H200):
#: Microseconds that a program alone takes besides its reads: the bisection waits for each sum.
LATENCY_US = 4.8
#: Microseconds of a multiprocessor for each program.
PROGRAM_US = 0.11
#: Keys that a multiprocessor compares with the first ones of their groups in a microsecond, by bytes of an element.
SM_KEYS_PER_US = {1: 1400, 2: 2700, 4: 6750, 8: 1000}
#: Microseconds of a multiprocessor that a warp takes to bisect over 32 bits.
BISECTION_US = 0.094
#: Microseconds for each pair of elements that are ranked: of a multiprocessor with many programs, and of one alone.
PAIR_US, PAIR_ALONE_US = 8.3e-5, 1.9e-4


@dataclass(frozen=True)
class Stage:
    """One launch: the first ``k`` of each part of each row.

    Attributes:
        n: columns.
        parts, span: parts of a row, and columns of each; the last part has all that are left.
        groups: groups of columns of a program.
        capacity: elements of the k groups that a program reads again, at most.
    """

    n: int
    k: int
    parts: int

    @property
    def span(self) -> int:
        return self.n if self.parts == 1 else self.n // self.parts // ALIGNED * ALIGNED

    @property
    def longest(self) -> int:
        return self.n - (self.parts - 1) * self.span

    @property
    def groups(self) -> int:
        """A power of two, at most the span: no group is empty."""
        wanted = max(min(self.span // COLUMNS, GROUPS_WANTED), min(2 * GROUPS_TAKEN * self.k, GROUPS))
        return 1 << (max(min(wanted, self.span), 1).bit_length() - 1)

    @property
    def capacity(self) -> int:
        return self.k * -(-self.longest // self.groups)

    @property
    def warps(self) -> int:
        return min(max(self.groups // (32 * THREAD_GROUPS), 1), 16)

    def scratch(self, programs: int, element: ElementKind) -> tuple[int, int, int]:
        """Bytes of groups, keys and places."""
        kept = programs * self.capacity
        return padded_bytes(4 * programs * self.k), padded_bytes(kept * element.itemsize), padded_bytes(4 * kept)


def stages(desc: Selection, target: Target) -> list[Stage]:
    """One launch, or two where rows are few and long."""
    wanted = -(-PROGRAMS * target.sm_count // max(desc.rows, 1))
    parts = max(min(wanted, desc.n // max(SPAN, GROUPS_TAKEN * desc.k)), 1)
    first = Stage(desc.n, desc.k, parts)
    return [first] if parts == 1 else [first, Stage(parts * desc.k, desc.k, 1)]


def supports(desc: Selection, target: Target) -> Support:
    if desc.n > MOST:
        return Support.no(f"rows of {desc.n} elements; positions are i32, up to {MOST}")
    if desc.k > (most := GROUPS // GROUPS_TAKEN):
        return Support.no(f"k = {desc.k}: at most {most} are ranked; sort the rows instead")
    first = stages(desc, target)[0]
    if desc.k > first.groups:
        return Support.no(f"k = {desc.k}: each is found in a group of columns of its own, and there are {first.groups}")
    return fits_grid(desc.rows * first.parts)


def rank(desc: Selection, target: Target) -> float:
    """Each stage reads its elements once, and finds and ranks what is taken: by bytes, instructions, or latency."""
    found, sms, itemsize = 0.0, target.sm_count, desc.element.itemsize
    for stage in stages(desc, target):
        programs = desc.rows * stage.parts
        # (Keys of 64 bits are compared in two steps.)
        size, pairs = stage.longest * itemsize, stage.k**2 * max(itemsize // 4, 1)
        each = PROGRAM_US + stage.longest / SM_KEYS_PER_US[itemsize] + stage.warps * BISECTION_US * itemsize / 4
        each += pairs * PAIR_US
        alone = size / SM_BYTES_PER_US + LATENCY_US + pairs * PAIR_ALONE_US
        found += LAUNCH_US + max(programs * size / BYTES_PER_US, -(-programs // sms) * each, alone)
    return found


def _ends(desc: Selection, target: Target) -> tuple[list[int], int]:
    """(where scratch begins: groups, keys and places of the first stage, then its values and positions; the end)."""
    first, *second = stages(desc, target)
    sizes = list(first.scratch(desc.rows * first.parts, key_element(desc)))
    if second:
        (stage,) = second
        # (The second stage uses the scratch of the first again.)
        sizes = [max(a, b) for a, b in zip(sizes, stage.scratch(desc.rows, key_element(desc)), strict=True)]
        sizes += [padded_bytes(desc.rows * stage.n * size) for size in (desc.element.itemsize, 4)]
    return [sum(sizes[:i]) for i in range(len(sizes))], sum(sizes)


def workspace(desc: Selection, target: Target) -> int:
    return _ends(desc, target)[1] if desc.rows * desc.k else 0


def _filtered(desc: Selection, target: Target) -> list[Launch]:
    if desc.rows * desc.k == 0:
        return []
    x, values, indices = desc.operands()
    at, _ = _ends(desc, target)
    source: dict[str, Any] = {"x": bits(x), "order": None, "x_strides": row_strides(x), "order_strides": None}
    found: list[Launch] = []
    for i, stage in enumerate(plan := stages(desc, target)):
        to: dict[str, Ptr | Scratch | Arg]
        if i == len(plan) - 1:
            to = {"values": bits(values), "indices": bits(indices)}
            to |= {"values_strides": row_strides(values), "indices_strides": row_strides(indices)}
        else:
            within = (Int(stage.parts * stage.k, True), None)
            to = {"values": Scratch(at[3], integers(desc.element)), "indices": Scratch(at[4], ElementKind.I32)}
            to |= {"values_strides": within, "indices_strides": within}
        args = {
            **source,
            **to,
            "groups": Scratch(at[0], ElementKind.I32),
            "keys": Scratch(at[1], key_element(desc)),
            "places": Scratch(at[2], ElementKind.I32),
            "n": Int(stage.n, divisibility=power_of_two_in(stage.n)),
            "k": Int(stage.k),
            "parts": None if stage.parts == 1 else Int(stage.parts),
            "span": None if stage.parts == 1 else Int(stage.span, divisibility=ALIGNED),
            "capacity": Int(stage.capacity),
        }
        constants = {**key_constants(desc), "DESCENDING": descending(desc), "GROUPS": stage.groups}
        constants |= {"BLOCK": 32 * THREAD_READS * stage.warps, "OWN": OWN, "OTHERS": WARP_OTHERS * stage.warps}
        constants["ONLY_KTH"] = isinstance(desc, KthValueDescriptor) and i == len(plan) - 1
        each = desc.rows * stage.parts
        found.append(
            Launch(kernels.filtered_kernel, each, args, constants, num_warps=stage.warps, max_registers=REGISTERS)
        )
        source = {"x": to["values"], "order": to["indices"]}
        source |= {"x_strides": to["values_strides"], "order_strides": to["indices_strides"]}
    return found


for _op in SELECTIONS:
    sorting_kernel(op=_op, name="filtered", supports=supports, rank=rank, workspace=workspace)(_filtered)
