"""Cost model of the kernels that read through pointers: microseconds on an H200, which select compares.

Only the order of the estimates matters. Three limits bound such a kernel:

- compute: the tensor cores, and the loads that feed them;
- latency: every step along k waits for its operands, and ``stages - 1`` steps are in flight;
- memory: the operands' bytes.

Limits that are close to each other slow each other down, so a p-norm combines them.

The constants were fitted, by least squares of logarithms, to the times of all tiles in ``bench/results/gemm-*-sweep``
(``python -m bench gemm --sweep``); ``tests/families/gemm/test_costs.py`` holds the resulting choices against those
files.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from triplan.backends.triton.common.card import MAX_THREAD_REGISTERS, SM_REGISTERS
from triplan.backends.triton.common.tiles import combined
from triplan.backends.triton.gemm.matrices import (
    elements_per_load,
    has_elementwise_access,
    is_elementwise,
    is_row_major,
    lies_across_lines,
    loads_single_halves,
    unit_axis,
)
from triplan.backends.triton.gemm.tile_shapes import TILES_TF32_ALONG, Tile, is_turned, programs_of, tiles_of
from triplan.descriptors import Operand
from triplan.descriptors.gemm import MatrixProductDescriptor
from triplan.sku import ArchSku, ElementKind, MathPrecision, Target
from triplan.sku.facts import fact

#: Microseconds of a kernel outside its steps along k.
FIXED_US = 2.9
#: The same where all of k is one step: there is no pipeline to fill. From 186 products of up to 12 us, in
#: ``bench/results/anywhere-gemm-*``.
ONE_STEP_US = 2.0
#: Bytes per microsecond that the operands stream at where nothing else limits the kernel.
STREAM_BYTES_PER_US = 4.55e6
#: The same of a C without unit stride: threads that write together lie in rows of C. From 4e6 to 1.3e9 elements on H100
#: and H200.
STRAY_BYTES_PER_US = 1.25e5
#: Bytes of such a C that all multiprocessors write in a microsecond where neighbouring threads lie along its rows:
#: those of ``outer`` and of the second kernel of ``split_k``. From 6e6 and 2e7 elements of f32 on an H200.
ALONG_BYTES_PER_US = 5.2e5
#: Microseconds from a program's last step to the first step of the next one; only other programs on the same
#: multiprocessor hide them.
BETWEEN_PROGRAMS_US = 2.4
#: The same where halves are loaded one by one. From drawn products of odd extents on an H100.
BETWEEN_PROGRAMS_SINGLE_US = 1.2
#: Microseconds from requesting the operands of a step to having them, on a busy card.
LATENCY_US = 0.71
#: Microseconds that each 64 KiB of a step's operands add to its latency.
LATENCY_64K_US = 0.43
#: Bytes per microsecond that reach one multiprocessor through pointers while all load, by whether B is row-major.
FEED_BYTES_PER_US = {True: 2.36e5, False: 5.78e5}
#: Microseconds of loading 1000 elements one by one into one multiprocessor: addresses, masks, shared memory. Set by
#: hand from odd extents of about 2000 on an H200, which no sweep has.
ELEMENTWISE_US = 0.07
#: The same by 8 warps, of 2 bytes, and of f64. From drawn products of odd extents, k of 63 to 16384, on an H100.
ELEMENTWISE_WIDE_US = 0.037
#: The same of f32 for FMAs where k is the unit-stride axis: each row of a block is short. From a product of 432 rows on
#: an H100.
ELEMENTWISE_SHORT_US = 0.15
#: The same of f32 without unit stride for tensor cores: neighbouring threads then load from one row each. From runs on
#: an H200 that are not published.
ELEMENTWISE_STRAY_US = 0.6
#: The same where an element is transposed on its way into shared memory, for wgmma of tf32, by whether it is loaded
#: one by one anyhow. From cubes of about 4096 on an H200.
TRANSPOSED_US = {True: 0.18, False: 0.36}


class MFlop(NamedTuple):
    """Microseconds of 1e6 floating-point operations on one multiprocessor, by whether B is row-major."""

    rows: float
    columns: float


#: Those of f16 on sm90a were fitted; f32, tf32, tf32x3 and f64 were set by hand, from products of about 4096 by 4096 on
#: an H200. FMAs wait for shared memory, where a column-major B has conflicts between banks; each factor of tf32x3 is
#: split in registers. The others are scaled by peak rates, untuned.
MFLOP_US = {
    MathPrecision.F16: {ArchSku.SM90A: MFlop(0.122, 0.237), ArchSku.SM80: MFlop(0.244, 0.474)},
    MathPrecision.BF16: {ArchSku.SM90A: MFlop(0.122, 0.237), ArchSku.SM80: MFlop(0.244, 0.474)},
    MathPrecision.EXACT: {ArchSku.SM90A: MFlop(0.061, 0.119), ArchSku.SM80: MFlop(0.122, 0.237)},
    MathPrecision.TF32: {ArchSku.SM90A: MFlop(0.38, 0.38), ArchSku.SM80: MFlop(0.49, 0.95)},
    MathPrecision.TF32X3: {ArchSku.SM90A: MFlop(2.3, 2.7), ArchSku.SM80: MFlop(1.5, 2.8)},
    MathPrecision.F32: {ArchSku.SM90A: MFlop(2.9, 9.0), ArchSku.SM80: MFlop(3.4, 9.0)},
    MathPrecision.F64: {ArchSku.SM90A: MFlop(1.9, 1.9), ArchSku.SM80: MFlop(3.9, 7.6)},
}
#: By how much longer a step takes where all of its rows lie across lines of the L2 cache. From seven products on an
#: H200, which took 1.2 to 1.7 times as long as they were said to, by a run that is not published.
ACROSS_LINES_SLOWER = 0.45
#: Factor on tf32 that is multiplied by mma.sync on sm90a, in place of wgmma.
TF32_WITHOUT_WGMMA = 1.6
#: Elements of a thread up to which FMAs are slower: shared memory is read more often for each. From drawn products on
#: an H100 and an H200.
FEW_ACCUMULATORS = 8
#: Factor on FMAs where a thread accumulates as few. From the same products.
FEW_ACCUMULATORS_SLOWER = 1.3
#: Warps of a multiprocessor below which FMAs, tf32x3 and f64 are slower: three for two of its schedulers. From the same
#: products.
BUSY_WARPS = 6
#: Multiplicands that are slower where there are fewer warps: their operations wait for each other.
LONE = (MathPrecision.F32, MathPrecision.TF32X3, MathPrecision.F64)
#: Factor on these where there are fewer warps. From the same products; of f64 from a run on an H200 that is not
#: published.
LONE_SLOWER = 1.25
#: k up to which f64 is not: so few steps wait for their operands, not for each other. From a product of k = 127 on an
#: H200, by a run that is not published.
LONE_SHORT_K = 128
#: The same of tf32x3 in tiles of 16 rows, whose warps all split the same elements of A. From runs on an H200 that are
#: not published.
LONE_SHORT_SLOWER = 1.7
#: Programs that a multiprocessor computes in the time of one, by the columns of a tile for tf32 factors that both lie
#: along C: the latency of their loads, one element at a time, is the limit. From runs on an H200, not published.
ALONG_AT_ONCE = {128: 1.8, 64: 3.0, 32: 3.0}
#: Factor on FMAs where A is row-major: its columns are read from shared memory with conflicts between banks.
#: From a run on an H200 that is not published.
ROWS_SLOWER = 1.4
#: Exponent p of the p-norm that combines the limits.
LIMITS_POWER = 2.4
#: The same of computing and waiting where a multiprocessor holds one program, whose steps wait one after the other. Set
#: by hand, from sums of 2000 terms and more of halves that are loaded one by one, in ``bench/results/anywhere-gemm-*``.
LONE_LIMITS_POWER = 1.2
#: Registers of a thread besides its accumulators. Those of f64 take two each; in FMAs of f32, operands take as many.
OTHER_REGISTERS = 56
#: The same where halves are loaded one by one: no copy of two bytes is asynchronous, so that a step waits in registers.
#: And of f64 with elementwise access.
OTHER_REGISTERS_SINGLE = 120
#: The same where they are loaded as words, each of which has an address of its own. Untuned.
OTHER_REGISTERS_WORDS = 90
#: The same of tf32x3 with elementwise access, and for each element of a step that a thread loads. From binaries for
#: sm90a, whose registers these are within 30 of.
OTHER_REGISTERS_TF32X3, EACH_REGISTERS_TF32X3 = 50, 5
#: Microseconds that a program of 8 warps takes longer for 1000 halves of C that vectors cannot write: nothing hides its
#: epilogue. From runs on an H200 that are not published.
LATE_WORDS_US = 0.1
#: Microseconds that one multiprocessor takes for the error function of gelu of 1000 elements of C, which are many
#: instructions, by the bytes of an element. Of 2 bytes from products of k = 38 to 83 in
#: ``bench/results/anywhere-gemm-*``; of 8 from a drawn product of k = 19 on an H200.
GELU_US = {2: 0.2, 8: 0.6}
#: Bytes of shared memory that CUDA reserves for each block.
RESERVED_SHARED_BYTES = 1024


@fact  # asked of each tile
def _other_registers(desc: MatrixProductDescriptor) -> int:
    """Registers of a thread besides its accumulators."""
    if loads_single_halves(desc) or (desc.element is ElementKind.F64 and has_elementwise_access(desc)):
        return OTHER_REGISTERS_SINGLE
    words = desc.element.itemsize == 2 and any(is_elementwise(desc.operand(name)) for name in "ab")
    return OTHER_REGISTERS_WORDS if words else OTHER_REGISTERS


def resident_programs(desc: MatrixProductDescriptor, tile: Tile, target: Target) -> int:
    """Programs that one multiprocessor holds at a time."""
    by_memory = target.shared_memory // (tile.shared_bytes(desc.element.itemsize) + RESERVED_SHARED_BYTES)
    held = tile.accumulators * (2 if desc.multiplicands in (MathPrecision.F32, MathPrecision.F64) else 1)
    if desc.multiplicands is MathPrecision.TF32X3 and has_elementwise_access(desc):
        each = (tile.m + tile.n) * tile.k // (32 * tile.warps)
        held += OTHER_REGISTERS_TF32X3 + EACH_REGISTERS_TF32X3 * each
    else:
        held += _other_registers(desc)
    by_registers = SM_REGISTERS // (32 * tile.warps * min(held, MAX_THREAD_REGISTERS))
    return max(1, min(by_memory, by_registers))


def _uses_wgmma(tile: Tile, target: Target) -> bool:
    """Whether Triton multiplies 16-bit floats and tf32 by wgmma."""
    return target.arch is ArchSku.SM90A and tile.m >= 64 and tile.warps >= 4


def _fed_us(o: Operand, tile: Tile, extent: int, b_rows: bool, transposed: bool, fmas: bool) -> float:
    """Microseconds of loading a step's elements of a factor.

    ``b_rows``: whether B is row-major; ``transposed``: see ``TRANSPOSED_US``; ``fmas``: no tensor cores.
    """
    elements = extent * tile.k
    if o.element is ElementKind.F32 and unit_axis(o) is None and not fmas:
        return elements * (ELEMENTWISE_STRAY_US + transposed * TRANSPOSED_US[True]) / 1000
    if transposed:
        return elements * TRANSPOSED_US[is_elementwise(o)] / 1000
    if not is_elementwise(o):
        # The warps of 16 rows lie side by side: each reads all of A from shared memory, after it was written there.
        # Sweeps have such tiles with a column-major B alone, and the rate of these includes it.
        passes = 1 + (tile.warps if o.name == "a" else 1) if b_rows and tile.m == 16 and o.element.itemsize == 2 else 1
        return elements * passes * o.element.itemsize / FEED_BYTES_PER_US[b_rows]
    wide = o.element is ElementKind.F64 or (o.element.itemsize == 2 and tile.warps == 8)
    each = ELEMENTWISE_WIDE_US if wide else ELEMENTWISE_US
    short = fmas and not is_turned(o)
    return elements * (ELEMENTWISE_SHORT_US if short else each) / 1000 / elements_per_load(o)


def stray_us(c: Operand) -> float:
    """Microseconds to write a C without unit stride where neighbouring threads lie along its rows; else 0."""
    return c.nbytes / ALONG_BYTES_PER_US if unit_axis(c) is None else 0.0


def activation_us(desc: MatrixProductDescriptor, elements: int) -> float:
    """Microseconds that one multiprocessor takes for the activation of so many elements of C, beside writing them."""
    return elements * GELU_US.get(desc.element.itemsize, 0.0) / 1000 if desc.activation == "gelu" else 0.0


def tile_us(desc: MatrixProductDescriptor, tile: Tile, target: Target, pieces: int = 1) -> float:
    """Estimated microseconds of one kernel that multiplies in ``tile``, with k cut into ``pieces``."""
    itemsize, rows = desc.element.itemsize, is_row_major(desc.operand("b"))
    sms = target.sm_count
    programs = programs_of(desc, tile) * pieces
    steps = max(-(-desc.k // (tile.k * pieces)), 1)
    resident = resident_programs(desc, tile, target)
    # Several resident programs overlap, so that half a wave costs half; a single one does not. Those of f64 share what
    # multiplies: side by side they take as long as one after the other, and the fullest multiprocessor ends last.
    whole = resident == 1 or desc.multiplicands is MathPrecision.F64
    waves = -(-programs // sms) if whole else max(programs / sms, 1.0)

    rates = MFLOP_US[desc.multiplicands]
    rate = rates.get(target.arch, rates[ArchSku.SM90A])
    computed = 2e-6 * tile.m * tile.n * tile.k * (rate.rows if rows else rate.columns)
    fmas = desc.multiplicands is MathPrecision.F32
    tf32, wgmma = desc.multiplicands is MathPrecision.TF32, _uses_wgmma(tile, target)
    if tf32 and target.arch is ArchSku.SM90A and not wgmma:
        computed *= TF32_WITHOUT_WGMMA
    if fmas and tile.accumulators <= FEW_ACCUMULATORS:
        computed *= FEW_ACCUMULATORS_SLOWER
    if fmas and not is_turned(desc.operand("a")):
        computed *= ROWS_SLOWER
    held = min(max(programs / sms, 1.0), resident)  # programs of a multiprocessor, on average
    short = desc.multiplicands is MathPrecision.F64 and desc.k <= LONE_SHORT_K
    if desc.multiplicands in LONE and not short and held * tile.warps < BUSY_WARPS:
        computed *= LONE_SHORT_SLOWER if tile.m == 16 and not fmas else LONE_SLOWER
    a, b = desc.operand("a"), desc.operand("b")
    fed = sum(
        _fed_us(o, tile, extent, rows and not tf32, tf32 and wgmma and is_turned(o), fmas)
        for o, extent in ((a, tile.m), (b, tile.n))
    )
    along = tf32 and tile in TILES_TF32_ALONG and has_elementwise_access(desc)
    slower = max(ALONG_AT_ONCE[tile.n] / held, 1.0) if along else 1.0
    if itemsize == 2 and target.arch is ArchSku.SM90A:  # (untimed elsewhere; wider elements take longer by themselves)
        rows_across = sum(e for o, e in ((a, tile.m), (b, tile.n)) if lies_across_lines(o) and not is_elementwise(o))
        slower *= 1 + ACROSS_LINES_SLOWER * rows_across / (tile.m + tile.n)
    compute = waves * steps * (computed + fed) * slower
    if pieces == 1:  # of pieces, another kernel writes C
        compute += waves * activation_us(desc, tile.m * tile.n)

    requested = (min(tile.m, max(desc.m, 1)) + tile.n) * tile.k * itemsize
    latency = LATENCY_US + LATENCY_64K_US * requested / 2**16
    in_flight = 1 if loads_single_halves(desc) else max(tile.stages - 1, 1)
    waiting = -(-programs // (sms * resident)) * steps * latency / in_flight

    factors = itemsize * desc.k * (desc.m + desc.n)
    results = desc.out.itemsize * desc.m * desc.n * (1 + desc.reads_c0 + desc.saves_pre)
    memory = math.prod(desc.lead) * (factors + results) / STREAM_BYTES_PER_US
    c = desc.operand("c")
    if pieces == 1 and unit_axis(c) is None:
        memory += c.nbytes / STRAY_BYTES_PER_US

    between = BETWEEN_PROGRAMS_SINGLE_US if loads_single_halves(desc) else BETWEEN_PROGRAMS_US
    between *= (waves - 1) / resident
    if pieces == 1 and tile.warps == 8 and desc.out.itemsize == 2 and is_elementwise(c):
        between += waves * tile.m * tile.n * LATE_WORDS_US / 1000
    if resident == in_flight == 1:  # nothing is computed while a step is waited for
        compute, waiting = combined(compute, waiting, power=LONE_LIMITS_POWER), 0.0
    return (FIXED_US if steps > 1 else ONE_STEP_US) + between + combined(compute, waiting, memory, power=LIMITS_POWER)


@fact
def cheapest_tile(desc: MatrixProductDescriptor, target: Target) -> Tile:
    """The tile of the lowest estimate; of equal ones the smallest."""
    return min(tiles_of(desc, target), key=lambda t: (tile_us(desc, t, target), t.m * t.n))
