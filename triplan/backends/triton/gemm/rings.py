"""Rings: the tiles of the Hopper kernels, which stream operands by TMA through slots of shared memory; and their cost.

Costs are microseconds on an H200, which select compares. Two limits bound such a kernel: the waves of tiles that the
tensor cores multiply, and the bytes that stream from memory. A p-norm combines them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from triplan.backends.triton.common.card import TERA_PER_US, TMA_ENDING, TMA_ROWS_PER_US
from triplan.backends.triton.common.meeting_kernels import EPOCH
from triplan.backends.triton.common.tiles import combined
from triplan.backends.triton.gemm.arguments import GROUP_M
from triplan.backends.triton.gemm.matrices import is_row_major, lies_across_lines, unit_axis
from triplan.backends.triton.gemm.tile_costs import activation_us
from triplan.descriptors.gemm import MatrixProductDescriptor
from triplan.sku import Target
from triplan.sku.facts import fact


@dataclass(frozen=True, slots=True)
class Ring:
    """One configuration of a Hopper kernel.

    Attributes:
        m, n: rows and columns of a tile of C.
        k: extent of a step along k.
        stages: slots of the ring, each with the operands of one step.
        specialised: a warp of its own loads (``wgmma``; one warpgroup multiplies for each 64 rows); else all warps
            load and multiply (``wgmma_tiles``).
        pingpong: two warpgroups take tiles in turns, so that one writes while the other multiplies; else all share
            each tile.
        group: rows of tiles that are scheduled together, for the L2 cache.
    """

    m: int
    n: int
    k: int
    stages: int
    specialised: bool
    pingpong: bool = False
    group: int = GROUP_M

    def __str__(self) -> str:
        # Tuning tables and bench/results name ping-pong "turns".
        return f"{self.m}x{self.n}x{self.k} s{self.stages} g{self.group}{' turns' if self.pingpong else ''}"

    @property
    def pieces(self) -> int:
        """Warpgroups that share a tile; each writes rows of its own."""
        return self.m // 64 if self.specialised and not self.pingpong else 1

    @property
    def rest(self) -> int:
        """Columns beyond the largest power of two: they have their own buffers of B and accumulators."""
        return self.n - (1 << (self.n.bit_length() - 1))

    @property
    def is_plain(self) -> bool:
        """Whether rows and columns are powers of two, which all kernels but ``wgmma`` need."""
        return self.rest == 0 and self.pieces <= 2

    @property
    def rows(self) -> int:
        """Rows of a tile per warpgroup that shares it."""
        return self.m // self.pieces

    @property
    def accumulators(self) -> int:
        """Accumulators per thread: 128 threads of a warpgroup for a piece, or two threads for each row of a tile."""
        return self.rows * self.n // 128 if self.specialised else self.n // 2

    @property
    def buffer_columns(self) -> int:
        """Columns of C in one staging buffer."""
        return min(self.rest or self.n, 64)

    @property
    def buffers(self) -> int:
        """Staging buffers of C for each warpgroup, in specialised kernels."""
        tight = self.pingpong or (not self.is_plain and self.buffer_columns == 64)
        return 1 if tight else min(self.n // self.buffer_columns, 2)

    def shared_bytes(self, out_itemsize: int) -> int:
        """Shared memory of a ring of 2-byte elements, the staging buffers, the barriers and a tile of bias."""
        groups = max(self.pieces, 2) if self.specialised else 0
        staging = groups * self.rows * self.buffer_columns * self.buffers * out_itemsize
        return (self.m + self.n) * self.k * 2 * self.stages + staging + 3072

    def fits(self, desc: MatrixProductDescriptor, target: Target) -> bool:
        """Whether nothing spills and shared memory suffices."""
        # gelu (erf) spills at 128 accumulators. With c0 silu (exp) spills too, and with f32 output on Triton 3.9.
        wide = self.specialised and (desc.out.itemsize > 2 or desc.reads_c0)
        most = 64 if desc.activation == "gelu" or (desc.activation == "silu" and wide) else 128
        if not self.is_plain and (desc.reads_c0 or (self.rest and desc.lead)):
            return False
        # Without staging buffers a tile of C leaves through B's slots, which must hold it.
        staged = self.specialised or self.stages * self.k * 2 >= self.m * desc.out.itemsize
        return self.accumulators <= most and staged and self.shared_bytes(desc.out.itemsize) <= target.shared_memory


class Rates(NamedTuple):
    """What a ring reaches.

    Attributes:
        compute: TFLOP/s of one multiprocessor while all are busy.
        stream: TB/s at which the card streams operands.
    """

    compute: float
    stream: float


#: Each ring and its rates. Fitted, as are the constants below, by least squares of logarithms to the rings' times in
#: ``bench/results/gemm-*-sweep`` (``python -m bench gemm --sweep``). Then moved by hand so that the fastest ring is
#: chosen: the first ping-pong ring and ``FIXED_US`` of a specialised kernel for products of one wave and for batches,
#: the compute rate of a ring of 128 columns for cubes of 4096, and the stream rate of that of 64 by 64 for
#: 64 rows. ``tests/families/gemm/test_costs.py`` holds the choices. The compute rates of tiles of 192 rows, or of 96,
#: 160 or 192 columns, are relative to those of tiles of 128 by 128 and 128 by 256 in 15 products, by a run that is not
#: published.
RATES = {
    # m, n, k, stages
    Ring(128, 256, 64, 4, specialised=True, group=4): Rates(5.20, 3.96),
    Ring(128, 256, 64, 3, specialised=True): Rates(5.18, 3.96),
    Ring(128, 128, 64, 6, specialised=True): Rates(5.16, 3.96),
    Ring(128, 128, 64, 4, specialised=True): Rates(5.00, 3.79),
    Ring(128, 64, 64, 6, specialised=True): Rates(3.68, 2.44),
    Ring(192, 192, 64, 4, specialised=True): Rates(5.04, 3.90),
    Ring(192, 128, 64, 5, specialised=True): Rates(5.14, 3.90),
    Ring(192, 96, 64, 5, specialised=True): Rates(4.39, 3.60),
    Ring(128, 192, 64, 5, specialised=True): Rates(5.18, 3.90),
    Ring(128, 160, 64, 5, specialised=True): Rates(4.71, 3.80),
    Ring(128, 128, 64, 6, specialised=True, pingpong=True): Rates(5.34, 3.98),
    Ring(128, 128, 64, 5, specialised=True, pingpong=True): Rates(5.33, 3.41),
    Ring(128, 128, 64, 4, specialised=True, pingpong=True): Rates(5.05, 3.18),
    Ring(128, 256, 64, 4, specialised=False): Rates(5.10, 3.96),
    Ring(128, 256, 64, 3, specialised=False): Rates(5.09, 3.96),
    Ring(128, 128, 64, 6, specialised=False): Rates(5.10, 3.64),
    Ring(128, 128, 64, 4, specialised=False): Rates(4.80, 3.18),
    Ring(128, 64, 64, 6, specialised=False): Rates(3.25, 1.93),
    Ring(64, 128, 64, 8, specialised=False): Rates(4.15, 3.96),
    Ring(64, 128, 128, 4, specialised=False): Rates(4.01, 3.96),
    Ring(64, 64, 128, 6, specialised=False): Rates(2.84, 4.40),
    Ring(64, 32, 128, 8, specialised=False): Rates(2.17, 3.22),
}
RINGS = tuple(RATES)
_RATES_OF_ANY_GROUP = {replace(ring, group=GROUP_M): rates for ring, rates in RATES.items()}
#: Microseconds of a kernel outside its tiles, by whether it is specialised.
FIXED_US = {True: 2.8, False: 1.52}
#: Microseconds from one wave of tiles to the next where every program begins with an empty ring. Set by hand, from the
#: tiles of 128 by 128 in the sweeps.
REFILL_US = 1.0
#: Exponent p of the p-norm that combines the limits; p → inf is max().
LIMITS_POWER = 4.5
#: Floating-point operations from which on a product is taken to reach the card's power limit by itself. Set by hand: at
#: 4096 (with a bias) ping-pong reached 1.03 to 1.04 of addmm's speed in the committed sweep, but 0.97 in an earlier
#: bench, when the card was cool. From 9e11 operations on it leads in the sweep, or is at most 0.5% behind.
POWER_LIMITED_FLOPS = 5e11
#: Factor on the compute time of ping-pong rings in shorter products. Set by hand, with ``POWER_LIMITED_FLOPS``.
COOL_PINGPONG = 1.05
#: What writing a tile takes where nothing is multiplied meanwhile (not in ping-pong), as an extent of k. The rates were
#: fitted where k is about ``FITTED_K``, and hold there. Set by hand, from products of k = 768 on an H200 that no sweep
#: has.
WRITING_K, FITTED_K = 120, 4096
#: Microseconds that each 128 by 128 elements of C take at least in specialised kernels, through registers and staging
#: buffers, however short k is. From products of k = 1 to 167 on H100 and H200, which took 1.3 to 2.4.
LEAST_TILE_US = 1.4
#: Factor on the compute time of square tiles of a lower triangle, which read more of L2 than tiles twice as wide. Set
#: by hand, from batches of 24 matrices of 4096 by 4096 on an H200, which no sweep has.
LOWER_SQUARES = 1.25
#: Extent of k from which on the programs of a persistent kernel meet at each tile. Shorter tiles lose more by waiting
#: than they find in L2. Set by hand, from products on an H100 of k = 512 to 13824, which no sweep has.
MEETING_K = 2048
#: By how much one multiprocessor multiplies faster alone: the card's power is shared.
ALONE_SPEEDUP = 0.48
#: By how much operands stream slower where none of a tile's rows lie within A.
OUTSIDE_SLOWDOWN = 0.4
#: TB/s at which lines of the L2 cache reach all multiprocessors. Set by hand, from products of 3000 on an H200 by a run
#: that is not published: rings of 256 and of 128 columns took 109 and 134 us.
LINES_RATE = 13.2


def _rates(ring: Ring) -> Rates:
    return _RATES_OF_ANY_GROUP[replace(ring, group=GROUP_M)]


def rings_of(desc: MatrixProductDescriptor, target: Target, specialised: bool) -> tuple[Ring, ...]:
    """The rings that suit ``desc`` and fit ``target``."""
    return tuple(r for r in RINGS if r.specialised == specialised and r.fits(desc, target))


def lower(desc: MatrixProductDescriptor, ring: Ring) -> int:
    """Where only the lower triangle of a symmetric C is computed, the ratio of a tile's columns to its rows; else 0."""
    cut = desc.symmetric and desc.out.itemsize == 2 and ring.pieces == 2 and ring.n % ring.m == 0
    return ring.n // ring.m if cut else 0


def tiles_in(desc: MatrixProductDescriptor, ring: Ring) -> int:
    """Tiles of C that are computed, of all products."""
    rows, columns = -(-desc.m // ring.m), -(-desc.n // ring.n)
    if ratio := lower(desc, ring):
        strips, rest = divmod(rows, ratio)
        return math.prod(desc.lead) * (ratio * strips * (strips + 1) // 2 + rest * (strips + 1))
    return math.prod(desc.lead) * rows * columns


def has_one_round(items: int, programs: int) -> bool:
    """Whether each of ``programs`` has one item: such a launch may begin while the previous one ends.

    Launches of several rounds were slower on an H100 if they did. Programs then begin on whichever multiprocessor is
    free; a likely cause is that neighbours in the order of tiles are no longer neighbours on the card.
    """
    return items == programs


def meeting_rounds(items: int, programs: int, k: float) -> int:
    """Turns at which ``programs``, which take ``items`` with that extent of k in turns, meet; 0 if none is worth it."""
    return items // programs if k >= MEETING_K and 2 * programs <= items < EPOCH.value else 0


def tile_us(ring: Ring, k: float, busy: float = 1.0) -> float:
    """Estimated microseconds of one tile while the share ``busy`` of the multiprocessors works."""
    # In ping-pong, products that are not shorter hide what writing takes.
    k = max(k, WRITING_K) if ring.pingpong else (k + WRITING_K) * FITTED_K / (FITTED_K + WRITING_K)
    found = 2 * ring.m * ring.n * k / (_rates(ring).compute * TERA_PER_US * (1 + ALONE_SPEEDUP * (1 - busy)))
    return max(found, LEAST_TILE_US * ring.m * ring.n / 128**2) if ring.specialised else found


def is_short(desc: MatrixProductDescriptor) -> bool:
    """Whether a product may end before it reaches the card's power limit."""
    return 2 * math.prod(desc.lead) * desc.m * desc.n * desc.k < POWER_LIMITED_FLOPS


def ring_us(desc: MatrixProductDescriptor, ring: Ring, target: Target) -> float:
    """Estimated microseconds of one kernel."""
    sms, tiles = target.sm_count, tiles_in(desc, ring)
    each = tile_us(ring, desc.k, min(tiles / sms, 1.0)) + activation_us(desc, ring.m * ring.n)
    waves = math.ceil(tiles / sms)
    compute = waves * each
    if not ring.specialised:
        compute += max(waves - 1, 0) * REFILL_US
    return limited_us(desc, ring, waves, compute)


def limited_us(desc: MatrixProductDescriptor, ring: Ring, waves: float, compute: float) -> float:
    """Estimated microseconds of a kernel whose ``waves`` of tiles take ``compute`` while nothing else limits them."""
    batch = math.prod(desc.lead)
    if ring.pingpong and is_short(desc):
        compute *= COOL_PINGPONG
    if lower(desc, ring) == 1:
        compute *= LOWER_SQUARES
    nbytes = batch * (2 * desc.k * (desc.m + desc.n) + desc.out.itemsize * desc.m * desc.n * (1 + desc.reads_c0))
    within = min(desc.m / ring.m, 1.0)
    memory = nbytes / (_rates(ring).stream * TERA_PER_US * (1 - OUTSIDE_SLOWDOWN * (1 - within)))
    a_ends = desc.m % 64 > 0 and unit_axis(desc.operand("a")) == 0
    b_ends = desc.n % ring.buffer_columns > 0 and is_row_major(desc.operand("b"))
    filled = 0.0
    if waves == 1 and (a_ends or b_ends):  # the tile in which rows of both end is the last one
        a_rows, b_rows = ring.m / 64 * within, ring.n / 64
        rows = a_rows + b_rows
        if a_ends:
            rows += (TMA_ENDING[1] - 1.0) * min(a_rows, 1.0)
        if b_ends:
            rows += (TMA_ENDING[1] - 1.0) * min(b_rows, 1.0)
        filled = desc.k * rows / TMA_ROWS_PER_US
    elif b_ends:  # rows of B end in the last tile of a row
        filled = waves * desc.k * TMA_ENDING[1] / TMA_ROWS_PER_US / -(-desc.n // ring.n)
    lines = lines_us(desc, ring)
    return FIXED_US[ring.specialised] + combined(compute, memory, filled, lines, power=LIMITS_POWER)


def lines_us(desc: MatrixProductDescriptor, ring: Ring) -> float:
    """Microseconds in which the lines that a tile's rows touch reach the multiprocessors, if those lie across lines.

    TMA reads 128 bytes of a row at a time. Between two lines these take both. Where rows begin at lines, the rates of
    the rings say how fast operands come.
    """
    touched = 0
    for operand, rows in ((desc.operand("a"), min(ring.m, desc.m)), (desc.operand("b"), min(ring.n, desc.n))):
        touched += rows * (2 if lies_across_lines(operand) else 1)
    if touched == min(ring.m, desc.m) + min(ring.n, desc.n):
        return 0.0
    return tiles_in(desc, ring) * touched * desc.k * desc.element.itemsize / (LINES_RATE * TERA_PER_US)


@fact
def cheapest_ring(desc: MatrixProductDescriptor, target: Target, specialised: bool) -> Ring:
    """The ring of the lowest estimate; of equal ones that of the narrowest tile."""
    return min(rings_of(desc, target, specialised), key=lambda r: (ring_us(desc, r, target), r.n))
