"""Cost model of the kernels that read through pointers: microseconds on an H200, which select compares.

Only the order of the estimates matters. Three limits bound such a kernel:

- compute: the tensor cores, and the loads that feed them;
- latency: every step along k waits for its operands, and ``stages - 1`` steps are in flight;
- memory: the operands' bytes.

Limits that are close to each other slow each other down, so a p-norm combines them.

The constants were fitted, by least squares of logarithms, to the times of all tiles in ``bench/results/gemm-*-sweep``
(``python -m bench gemm --sweep``); ``tests/families/gemm/test_costs.py`` holds the resulting choices against those
files. What was not measured, the other elements and sm80, is scaled by the peak rates of its units.
"""

from __future__ import annotations

import math

from triplan.backends.triton.common.card import SM_REGISTERS
from triplan.backends.triton.gemm.matrices import elements_per_load, is_elementwise, is_row_major
from triplan.backends.triton.gemm.tile_shapes import Tile, programs_of, tiles_of
from triplan.descriptors import Operand
from triplan.descriptors.gemm import MatrixProductDescriptor
from triplan.sku import ArchSku, MathPrecision, Target
from triplan.sku.facts import fact

#: Microseconds of a kernel outside its steps along k.
FIXED_US = 2.9
#: Bytes per microsecond that the operands stream at where nothing else limits the kernel.
STREAM_BYTES_PER_US = 4.55e6
#: Microseconds from a program's last step to the first step of the next one; only other programs on the same
#: multiprocessor hide them.
BETWEEN_PROGRAMS_US = 2.4
#: Microseconds from requesting the operands of a step to having them, on a busy card.
LATENCY_US = 0.71
#: Microseconds that each 64 KiB of a step's operands add to its latency.
LATENCY_64K_US = 0.43
#: Microseconds of 1e6 floating-point operations (f16, sm90a) on one multiprocessor, by whether B is row-major.
MFLOP_US = {True: 0.122, False: 0.237}
#: Bytes per microsecond that reach one multiprocessor through pointers while all load, by whether B is row-major.
FEED_BYTES_PER_US = {True: 2.36e5, False: 5.78e5}
#: Microseconds of loading 1000 elements one by one into one multiprocessor: addresses, masks, shared memory. Set by
#: hand from odd extents of about 2000 on an H200, which no sweep has.
ELEMENTWISE_US = 0.07
#: Time of one operation relative to f16 on sm90a. Peak rates; untuned, but for tf32x3 and f32 on sm90a, which were set
#: by hand as ``ELEMENTWISE_US``: each factor of tf32x3 is split in registers, and FMAs wait for shared memory.
RELATIVE_TIME = {
    MathPrecision.F16: {ArchSku.SM90A: 1.0, ArchSku.SM80: 2.0},
    MathPrecision.BF16: {ArchSku.SM90A: 1.0, ArchSku.SM80: 2.0},
    MathPrecision.EXACT: {ArchSku.SM90A: 0.5, ArchSku.SM80: 1.0},
    MathPrecision.TF32: {ArchSku.SM90A: 2.0, ArchSku.SM80: 4.0},
    MathPrecision.TF32X3: {ArchSku.SM90A: 16.0, ArchSku.SM80: 12.0},
    MathPrecision.F32: {ArchSku.SM90A: 24.0, ArchSku.SM80: 28.0},
    MathPrecision.F64: {ArchSku.SM90A: 14.0, ArchSku.SM80: 32.0},
}
#: Exponent p of the p-norm that combines the limits.
LIMITS_POWER = 2.4
#: Registers of a thread besides its accumulators, and, in FMAs of f32, operands that are as many again.
OTHER_REGISTERS = 56
#: Bytes of shared memory that CUDA reserves for each block.
RESERVED_SHARED_BYTES = 1024


def combined(*limits: float, power: float) -> float:
    """The p-norm of ``limits``: their maximum as ``power`` goes to infinity, their sum at 1."""
    most = max(limits)
    return most and most * float(sum((x / most) ** power for x in limits) ** (1 / power))


def resident_programs(desc: MatrixProductDescriptor, tile: Tile, target: Target) -> int:
    """Programs that one multiprocessor holds at a time."""
    by_memory = target.shared_memory // (tile.shared_bytes(desc.element.itemsize) + RESERVED_SHARED_BYTES)
    held = tile.accumulators * (2 if desc.multiplicands is MathPrecision.F32 else 1)
    by_registers = SM_REGISTERS // (32 * tile.warps * (held + OTHER_REGISTERS))
    return max(1, min(by_memory, by_registers))


def _fed_us(o: Operand, elements: int, b_rows: bool) -> float:
    """Microseconds of loading a step's elements of a factor; ``b_rows``: whether B is row-major."""
    itemsize = o.element.itemsize
    if not is_elementwise(o):
        return elements * itemsize / FEED_BYTES_PER_US[b_rows]
    return elements * ELEMENTWISE_US / 1000 / elements_per_load(o)


def tile_us(desc: MatrixProductDescriptor, tile: Tile, target: Target, pieces: int = 1) -> float:
    """Estimated microseconds of one kernel that multiplies in ``tile``, with k cut into ``pieces``."""
    itemsize, rows = desc.element.itemsize, is_row_major(desc.operand("b"))
    sms = max(target.sm_count, 1)
    programs = programs_of(desc, tile) * pieces
    steps = max(-(-desc.k // (tile.k * pieces)), 1)
    resident = resident_programs(desc, tile, target)
    # Several resident programs overlap, so that half a wave costs half; a single one does not.
    waves = -(-programs // sms) if resident == 1 else max(programs / sms, 1.0)

    relative = RELATIVE_TIME[desc.multiplicands].get(target.arch, 1.0)
    computed = 2e-6 * tile.m * tile.n * tile.k * MFLOP_US[rows] * relative
    a, b = desc.operand("a"), desc.operand("b")
    fed = _fed_us(a, tile.m * tile.k, rows) + _fed_us(b, tile.n * tile.k, rows)
    compute = waves * steps * (computed + fed)

    requested = (min(tile.m, max(desc.m, 1)) + tile.n) * tile.k * itemsize
    latency = LATENCY_US + LATENCY_64K_US * requested / 2**16
    waiting = -(-programs // (sms * resident)) * steps * latency / max(tile.stages - 1, 1)

    factors = itemsize * desc.k * (desc.m + desc.n)
    results = desc.out.itemsize * desc.m * desc.n * (1 + desc.reads_c0 + desc.saves_pre)
    memory = math.prod(desc.lead) * (factors + results) / STREAM_BYTES_PER_US

    between = (waves - 1) * BETWEEN_PROGRAMS_US / resident
    return FIXED_US + between + combined(compute, waiting, memory, power=LIMITS_POWER)


@fact
def cheapest_tile(desc: MatrixProductDescriptor, target: Target) -> Tile:
    """The tile of the lowest estimate; of equal ones the smallest."""
    return min(tiles_of(desc, target), key=lambda t: (tile_us(desc, t, target), t.m * t.n))
