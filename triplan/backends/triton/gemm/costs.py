"""What a tile of the kernels by pointers costs, in microseconds on an H200: the figures that select compares.

Only which is smaller matters. A product takes as long as the slowest of three: the tensor cores and what feeds them,
the steps of one program after another (each waits for memory, ``stages - 1`` of them at a time), and the bytes of the
operands. Where two take nearly as long, they get in each other's way: hence the sum of powers.

The constants were fitted, by least squares of logarithms, to the kernels' tiles in the committed runs of ``python -m
bench gemm --sweep``; ``tests/families/gemm/test_costs.py`` holds the choices that follow against them. What was not
measured, the other elements and sm80, is scaled by the peak of its unit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from triplan.descriptors import MatrixProductDescriptor
from triplan.sku import Target

if TYPE_CHECKING:
    from triplan.backends.triton.gemm.launches import Tile

#: One launch within a stream of them, and bytes a microsecond that stream from memory.
LAUNCH_US, BYTES_PER_US = 1.6, 3.7e6
#: Around all steps of a kernel that multiplies; and the same bytes, where nothing else is waited for.
AROUND_US, STREAMED = 2.9, 4.55e6
#: From one program's last step to the next one's first, which only others on the same multiprocessor hide.
BETWEEN_US = 2.4
#: A launch that adds up partial sums, by architecture; on sm90a both launches are placed while the one ahead of them
#: ends, which saves 0.3 us more than the second takes, but two cost more of the host's time than one, and shall be
#: worth it. And bytes of those sums that the L2 cache passes in a microsecond.
NEXT_US, PARTIAL = {"sm90a": 0.4, "sm80": 0.7, "cpu": 0.7}, 3.6e6
#: Microseconds from asking for the operands of a step to having them, on a busy card: some, and more for 64 KiB.
LATENCY_US, LATENCY_64K_US = 0.71, 0.43
#: Microseconds of a million multiplications and additions on one multiprocessor, by whether rows of B lie in memory, or
#: columns; and bytes that one is fed by pointers in a microsecond, while all are.
MFLOP_US = {True: 0.122, False: 0.237}
FED = {True: 2.36e5, False: 5.78e5}
#: The same, of other multiplicands and architectures, beside f16's on sm90a: peak by peak.
SLOWER = {
    "sm90a": {"f16": 1.0, "bf16": 1.0, "exact": 0.5, "tf32": 2.0, "tf32x3": 6.0, "f32": 12.0, "f64": 14.0},
    "sm80": {"f16": 2.0, "bf16": 2.0, "exact": 1.0, "tf32": 4.0, "tf32x3": 12.0, "f32": 28.0, "f64": 32.0},
    "cpu": {},
}
#: How much two limits that are close to each other add.
POWER = 2.4
#: Registers of a thread besides its accumulators, and bytes of a multiprocessor's registers.
OTHER_REGISTERS, REGISTERS = 56, 65536


def resident(tile: Tile, itemsize: int, target: Target) -> int:
    """Programs that a multiprocessor holds at a time."""
    by_memory = target.shared_memory // (tile.shared_bytes(itemsize) + 1024)
    by_registers = REGISTERS // (32 * tile.warps * (tile.accumulators + OTHER_REGISTERS))
    return max(1, min(by_memory, by_registers))


def pointers_us(desc: MatrixProductDescriptor, tile: Tile, b_rows: bool, target: Target, pieces: int = 1) -> float:
    """Of one kernel that multiplies in tiles, with k in so many pieces. ``b_rows``: rows of B are contiguous."""
    size, batch = desc.element.itemsize, math.prod(desc.lead)
    sms = max(target.sm_count, 1)
    programs = batch * -(-desc.m // tile.m) * -(-desc.n // tile.n) * pieces
    steps = max(-(-desc.k // (tile.k * pieces)), 1)
    held = resident(tile, size, target)
    # Small tiles overlap on a multiprocessor, so that a wave that is half full costs half.
    waves = -(-programs // sms) if held == 1 else max(programs / sms, 1.0)
    slower: Any = SLOWER[str(target.arch)].get(str(desc.multiplicands), 1.0)
    computed = 2e-6 * tile.m * tile.n * tile.k * MFLOP_US[b_rows] * slower
    fed = (tile.m + tile.n) * tile.k * size / FED[b_rows]
    busy = waves * steps * (computed + fed)
    asked = (min(tile.m, max(desc.m, 1)) + tile.n) * tile.k * size
    latency = LATENCY_US + LATENCY_64K_US * asked / 2**16
    waiting = -(-programs // (sms * held)) * steps * latency / max(tile.stages - 1, 1)
    nbytes = size * desc.k * (desc.m + desc.n) + desc.out.itemsize * desc.m * desc.n * (
        1 + desc.reads_c0 + desc.saves_pre
    )
    moved = batch * nbytes / STREAMED
    return AROUND_US + (waves - 1) * BETWEEN_US / held + together(busy, waiting, moved, power=POWER)


def pieces_us(desc: MatrixProductDescriptor, pieces: int, target: Target) -> float:
    """Of writing, reading and adding the partial sums of ``pieces`` pieces of k."""
    partial = 2 * pieces * math.prod(desc.lead) * desc.m * desc.n * desc.sums.itemsize
    return NEXT_US[str(target.arch)] + partial / PARTIAL


def together(*limits: float, power: float) -> float:
    """What the slowest of ``limits`` takes where the others are in its way: the less, the higher ``power`` is."""
    most = max(limits)
    return most and most * float(sum((x / most) ** power for x in limits) ** (1 / power))
