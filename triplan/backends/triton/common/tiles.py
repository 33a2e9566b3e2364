"""What a program of a reduction holds at a time, the warps and registers for it, and what programs' traffic costs."""

from __future__ import annotations

from dataclasses import dataclass

from triplan.backends.triton.common import card
from triplan.backends.triton.common.offsets import ceil_power
from triplan.sku import SUPPORTED, Support, Target


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program holds at a time: ``rows`` x ``block`` elements, in ``warps`` warps."""

    rows: int
    block: int
    warps: int

    @property
    def text(self) -> str:
        """The tile within a numerics id."""
        return f"{self.rows}x{self.block}w{self.warps}"

    def additions(self, n: int, each_block: int = 1) -> float:
        """Roundings on the path of one term of a sum over ``n`` elements: within a thread, between threads, and
        ``each_block`` for each block of the row."""
        return self.rows * self.block // (32 * self.warps) + 12 + each_block * -(-n // self.block)


def tile_of(rows: int, block: int, size: int) -> Tile:
    """The tile of elements of ``size`` bytes whose threads hold about 32 bytes of an operand each: in at most 16 warps,
    but in 32 if it has 32,768 elements or more."""
    elements = rows * block
    return Tile(rows, block, 32 if elements >= 32768 else min(ceil_power(elements * size // (32 * 32)), 16))


def registers_for(tile: Tile, programs: int) -> int:
    """Registers a thread, a multiple of eight, with which ``programs`` programs are resident on a multiprocessor."""
    return min(card.SM_REGISTERS // (programs * 32 * tile.warps) // 8 * 8, card.MAX_THREAD_REGISTERS)


def fits_grid(programs: int) -> Support:
    """Whether a grid can hold ``programs``."""
    if programs < 2**31:
        return SUPPORTED
    return Support.no(f"needs {programs} programs; a grid holds fewer than 2**31")


# --- costs, in microseconds on an H200 ---


def waves_us(programs: int, nbytes: float, target: Target) -> float:
    """``programs`` programs that move ``nbytes`` each, beside their launch: bound by memory, or by the busiest
    multiprocessor."""
    return max(programs * nbytes / card.BYTES_PER_US, -(-programs // target.sm_count) * nbytes / card.SM_BYTES_PER_US)


def combined(*limits: float, power: float) -> float:
    """The p-norm of ``limits``: their maximum as ``power`` goes to infinity, their sum at 1."""
    most = max(limits)
    return most and most * float(sum((x / most) ** power for x in limits) ** (1 / power))


def again_us(nbytes: float) -> float:
    """Reading ``nbytes`` once more: from the L2 cache while they fit."""
    return nbytes / (card.L2_BYTES_PER_US if nbytes <= card.L2_BYTES else card.BYTES_PER_US)
