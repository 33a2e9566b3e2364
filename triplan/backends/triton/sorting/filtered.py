"""Kernel ``filtered`` of topk and kthvalue: one read of each row, and a second of the columns that can hold the result.

Long rows are divided between programs, if they are few; a second launch takes the first of what these have taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import log2

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch, power_of_two_in
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US, SM_BYTES_PER_US
from triplan.backends.triton.common.offsets import ceil_power, padded_bytes
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.sorting import filtered_kernels as kernels, turned
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
from triplan.descriptors import KthValueDescriptor, TopKDescriptor
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
#: Elements of a thread in the second bisection: with 8 of 64 bits, registers spill.
THREAD_TILE = 4
#: Elements of the chosen groups that a thread reads at a time. With 4, registers spill where there are 16 warps.
THREAD_READS = 2
#: The most elements that are ranked by comparing all pairs where their order is not needed: of more a second bisection
#: finds the first k. Untuned.
MOST_RANKED = 96
#: Elements that are ranked at a time, and for each warp so many others that they are compared with at a time. Untuned.
OWN, WARP_OTHERS = 128, 2
#: Registers of a thread at most: four programs of 8 warps share a multiprocessor. Left alone, ptxas takes 40 in some
#: binaries of few warps, and spills two.
REGISTERS = 64
#: How often x is read; the columns that are read again are few.
READS = 1
#: Columns that parts are multiples of, so that they are read in vectors.
ALIGNED = 64
#: Columns of a part at least. Untuned.
SPAN = 16384
#: Programs for each multiprocessor that are worth a division of the rows. Untuned.
PROGRAMS = 2
# Fitted to ``bench anywhere sorting``, seeds 2, 3 and 51, and to other problems of such sizes, whose results are not
# kept, on an H200, by a script that is not published. PROGRAM_US, LATENCY_US and TIES_US are then moved so that short
# rows are ranked rightly.
#: Microseconds of a multiprocessor for each program.
PROGRAM_US = 0.055
#: Keys that a multiprocessor compares with the first ones of their groups in a microsecond, by bytes of an element.
SM_KEYS_PER_US = {1: 6200, 2: 6200, 4: 3200, 8: 2850}
#: Microseconds of a multiprocessor for each step of a bisection: of a warp, which sums and waits at a barrier, and as
#: many for each 256 elements. Scans and copies of what a second bisection finds take as long as so many steps.
STEP_US, COPIED_STEPS = 0.0088, 5
#: Steps that a bisection takes more than if its elements lay evenly: the first one, and the second. As counted for
#: normally distributed elements.
UNEVEN_STEPS, UNEVEN_STEPS_AGAIN = 5, 2
#: Microseconds that a program alone takes besides what follows; and where places decide among equal keys.
LATENCY_US, TIES_US = 0.15, 0.45
#: Microseconds of a bisection's step that a program alone waits for, and for each of its warps: a step sums over all.
STEP_LATENCY_US, WARP_LATENCY_US = 0.028, 0.039
#: Microseconds that a program alone waits for each read of its groups, and for each block that it keeps elements of, or
#: reads and stores again: a read, a scan, barriers.
READ_US, BLOCK_US = 0.18, 0.67
#: Microseconds for each pair of elements that are ranked, of a multiprocessor with many programs. And for each block of
#: pairs that one alone waits for, and for each of its warps. (From drawn problems on an H200.)
PAIR_US, PAIRS_BLOCK_US, PAIRS_WARP_US = 6.9e-5, 0.075, 0.014


@dataclass(frozen=True)
class Stage:
    """One launch: the first ``k`` of each part of each row.

    Attributes:
        n: columns.
        is_ordered: whether they are stored in order. Otherwise they are stored as they lie in the row.
        parts, span: parts of a row, and columns of each; the last part has all that are left.
        groups: groups of columns of a program.
        capacity: elements of the k groups that a program reads again, at most.
    """

    n: int
    k: int
    parts: int
    is_ordered: bool

    @property
    def tile(self) -> int:
        """Elements that a second bisection holds: few more than k are kept, where columns are random. 0: none."""
        return 0 if self.is_ordered or self.k <= MOST_RANKED else 2 * ceil_power(self.k)

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
        return min(max(self.groups // (32 * THREAD_GROUPS), self.tile // (32 * THREAD_TILE), 1), 16)

    def scratch(self, programs: int, element: ElementKind) -> tuple[int, int, int]:
        """Bytes of groups, keys and places."""
        kept = programs * self.capacity
        return padded_bytes(4 * programs * self.k), padded_bytes(kept * element.itemsize), padded_bytes(4 * kept)


def stages(desc: Selection, target: Target, is_ordered: bool = True) -> list[Stage]:
    """One launch, or two where rows are few and long. ``is_ordered``: of what topk takes."""
    wanted = -(-PROGRAMS * target.sm_count // max(desc.rows, 1))
    parts = max(min(wanted, desc.n // max(SPAN, GROUPS_TAKEN * desc.k)), 1)
    last = is_ordered and isinstance(desc, TopKDescriptor)
    if parts == 1:
        return [Stage(desc.n, desc.k, 1, last)]
    return [Stage(desc.n, desc.k, parts, False), Stage(parts * desc.k, desc.k, 1, last)]


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
    return filtered_us(desc, stages(desc, target), target) + turned.across_us(desc, READS)


def filtered_us(desc: Selection, found: list[Stage], target: Target) -> float:
    """Each stage reads its elements once, and finds and ranks what is taken: by bytes, instructions, or latency."""
    total, itemsize = 0.0, desc.element.itemsize
    wide = max(itemsize // 4, 1)  # keys of 64 bits are compared in two steps
    has_ties = not desc.element.is_floating_point or itemsize < 4
    for stage in found:
        programs, warps, k = desc.rows * stage.parts, stage.warps, stage.k
        groups, longest, size = stage.groups, max(stage.longest, 1), stage.longest * itemsize
        # (Of integers, of which many are often equal, a few steps find the key, and others the place.)
        steps = log2(groups) + UNEVEN_STEPS
        each = PROGRAM_US + longest / SM_KEYS_PER_US[itemsize] + steps * (warps + groups / 256) * STEP_US
        alone = LATENCY_US + has_ties * TIES_US + size / SM_BYTES_PER_US + longest / groups * READ_US
        alone += stage.capacity / (32 * THREAD_READS * warps) * BLOCK_US
        if stage.tile:
            # (No step finds anything among equal keys, as of integers; and where each group is one column, k are kept.)
            is_spread = desc.element.is_floating_point and longest > groups
            again = log2(k) + UNEVEN_STEPS_AGAIN if is_spread else 0
            each += (again + COPIED_STEPS) * (warps + stage.tile / 256) * STEP_US
            steps += again
            alone += stage.tile / (32 * THREAD_READS * warps) * BLOCK_US
        else:
            kept = k * (1 + k * (1 / groups - 1 / longest) / 2)  # of random columns
            each += kept**2 * wide * PAIR_US
            # (Half a block more: the last one is not full.)
            blocks = (kept / OWN + 0.5) * (kept / (WARP_OTHERS * warps) + 0.5)
            alone += blocks * wide * (PAIRS_BLOCK_US + warps * PAIRS_WARP_US)
        alone += steps * (STEP_LATENCY_US + warps * WARP_LATENCY_US)
        total += LAUNCH_US + max(programs * size / BYTES_PER_US, -(-programs // target.sm_count) * each, alone)
    return total


@dataclass(frozen=True)
class Buffers:
    """Where the parts of the workspace begin, in bytes.

    Attributes:
        scratch: groups, keys and places of a stage; each stage uses them again.
        taken: values and positions that each stage but the last one stores.
        size: the end.
    """

    scratch: tuple[int, ...]
    taken: tuple[tuple[int, int], ...]
    size: int


def buffers_of(desc: Selection, found: list[Stage]) -> Buffers:
    each = (stage.scratch(desc.rows * stage.parts, key_element(desc)) for stage in found)
    sizes = [max(of) for of in zip(*each, strict=True)]
    for stage in found:
        numel = desc.rows * stage.parts * stage.k
        sizes += [padded_bytes(numel * desc.element.itemsize), padded_bytes(4 * numel)]
    at = [0, *accumulate(sizes)]
    return Buffers(tuple(at[:3]), tuple(zip(at[3:-1:2], at[4:-1:2], strict=True)), at[-1])


def workspace(desc: Selection, target: Target) -> int:
    """Up to where the last stage would store: it stores to the results."""
    return _stages_bytes(desc, target) + turned.nbytes(desc, READS) if desc.rows * desc.k else 0


def _stages_bytes(desc: Selection, target: Target) -> int:
    return buffers_of(desc, stages(desc, target)).taken[-1][0]


def _filtered(desc: Selection, target: Target) -> list[Launch]:
    if desc.rows * desc.k == 0:
        return []
    return turned.launches(desc, partial(_launches, target), _stages_bytes(desc, target), READS)


def _launches(target: Target, desc: Selection) -> list[Launch]:
    _, values, indices = desc.operands()
    to: dict[str, Arg] = {"values": bits(values), "indices": bits(indices)}
    to |= {"values_strides": row_strides(values), "indices_strides": row_strides(indices)}
    return filter_launches(desc, stages(desc, target), to)[0]


def filter_launches(
    desc: Selection, found: list[Stage], to: dict[str, Arg] | None
) -> tuple[list[Launch], dict[str, Arg]]:
    """The launches of stages, the last of which stores to ``to``, or as the ones before if that is None; where what it
    has stored can be read."""
    x = desc.operand("x")
    buffers = buffers_of(desc, found)
    source: dict[str, Arg] = {"x": bits(x), "order": None, "x_strides": row_strides(x), "order_strides": None}
    launches: list[Launch] = []
    for i, (stage, taken) in enumerate(zip(found, buffers.taken, strict=True)):
        is_last = i == len(found) - 1
        within = (Int(stage.parts * stage.k, True), None)
        own: dict[str, Arg] = {"values": Scratch(taken[0], integers(desc.element))}
        own |= {"indices": Scratch(taken[1], ElementKind.I32), "values_strides": within, "indices_strides": within}
        own = to if is_last and to is not None else own
        args = {
            **source,
            **own,
            "groups": Scratch(buffers.scratch[0], ElementKind.I32),
            "keys": Scratch(buffers.scratch[1], key_element(desc)),
            "places": Scratch(buffers.scratch[2], ElementKind.I32),
            "n": Int(stage.n, divisibility=power_of_two_in(stage.n)),
            "k": Int(stage.k),
            "parts": None if stage.parts == 1 else Int(stage.parts),
            "span": None if stage.parts == 1 else Int(stage.span, divisibility=ALIGNED),
            "capacity": Int(stage.capacity),
        }
        constants = {**key_constants(desc), "DESCENDING": descending(desc), "GROUPS": stage.groups, "TILE": stage.tile}
        constants |= {"BLOCK": 32 * THREAD_READS * stage.warps, "OWN": OWN, "OTHERS": WARP_OTHERS * stage.warps}
        constants["ONLY_KTH"] = isinstance(desc, KthValueDescriptor) and is_last
        each = desc.rows * stage.parts
        launches.append(
            Launch(kernels.filtered_kernel, each, args, constants, num_warps=stage.warps, max_registers=REGISTERS)
        )
        source = {"x": own["values"], "order": own["indices"]}
        source |= {"x_strides": own["values_strides"], "order_strides": own["indices_strides"]}
    return launches, source


for _op in SELECTIONS:
    sorting_kernel(op=_op, name="filtered", supports=supports, rank=rank, workspace=workspace)(_filtered)
