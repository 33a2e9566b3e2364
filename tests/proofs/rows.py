"""Sizes of the problems whose contributions are rows."""

from __future__ import annotations

import torch

from triplan.sku import interpreting

#: No multiples of a block. With so many elements some rounding of a sum shows in narrow results too; the longer rows
#: take several blocks of every kernel that has such. There is more of them where a GPU does it.
LENGTH, LONG, LONG_ROWS = 1030, *((40_000, 24) if torch.cuda.is_available() and not interpreting() else (17_000, 12))


def size(n: int, long: bool) -> tuple[int, int]:
    """Rows and their length, for a problem that is to have ``n`` contributions: fewer rows, as each is long."""
    return (max(n // 64, LONG_ROWS), LONG) if long else (max(n // 8, 16), LENGTH)
