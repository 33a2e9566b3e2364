"""Long columns, which are read in whole waves: each multiprocessor has a program, or two, until all are read."""

from __future__ import annotations

from collections.abc import Callable

from triplan.backends.triton.common.card import BYTES_PER_US, OVERLAPPED_LAUNCH_US, SMS
from triplan.backends.triton.reductions.limits import (
    FAR_APART,
    FEWEST_GROUPS,
    WAVE_BYTES,
    WAVE_CHUNKS,
    WAVE_GROUP,
    WAVE_ROW,
    WAVE_SHARE,
    WAVE_US,
    WIDE_WAVE_ROW,
)


def tile_of(item: int) -> tuple[int, int]:
    """The columns of a tile, of elements of ``item`` bytes, and the elements that it has of each."""
    row = WAVE_ROW if item <= 2 else WIDE_WAVE_ROW
    return row // item, WAVE_BYTES // row


def divided(
    n: int, lanes: int, side: int, item: int, light: bool, between: Callable[[int], int]
) -> tuple[int, int] | None:
    """(chunk, chunks) of ``lanes`` columns of ``n`` elements of ``item`` bytes; None if waves would not be full.

    ``side``: columns that are adjacent. ``light``: whether two programs fit on a multiprocessor. ``between``: bytes
    between so many elements of a column.
    """
    rows, block = tile_of(item)
    least = FEWEST_GROUPS * block * WAVE_GROUP
    groups = -(-side // rows) * (lanes // max(side, 1))

    def waves(chunks: int) -> tuple[float, int, int, int]:
        """(share of all reads and idle places that are reads, waves, chunk, chunks), if ``chunks`` are wanted."""
        chunk = -(-n // (chunks * block)) * block
        chunks = -(-n // chunk)
        programs = groups * chunks
        resident = SMS if programs <= SMS or not light else 2 * SMS
        count = -(-programs // resident)
        return lanes * n / (count * resident * rows * chunk), count, chunk, chunks

    def us(found: tuple[float, int, int, int]) -> float:
        share, count, _, chunks = found
        merging = OVERLAPPED_LAUNCH_US if chunks > 1 else 0
        return lanes * n * item / (share * BYTES_PER_US) + count * WAVE_US + merging

    possible = [waves(c) for c in range(1, min(n // least, WAVE_CHUNKS) + 1)] if groups else []
    possible = [w for w in possible if w[3] == 1 or between(w[2]) % FAR_APART != 0]
    best = min(possible, key=us, default=None)
    return best[2:] if best is not None and best[0] >= WAVE_SHARE else None
