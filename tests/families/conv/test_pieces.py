"""The sum of the pieces that ``wgmma`` writes of the gradient of weight; the pieces are as ``Division`` counts them."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from triplan.backends.triton.conv.shared_kernels import conv2d_fold_pieces_kernel
from triplan.backends.triton.conv.wgmma_division import Division, candidates

ROWS, COLUMNS, BLOCK = 1, 2, 2048


def pieces_of(d: Division) -> list[tuple[int, int]]:
    """(slot, tile) of each piece: lanes with a share, then what shares have of the others."""
    found = [(lane * d.tiles + tile, tile) for lane in range(d.lanes) for tile in range(d.tiles)][: d.shares]
    length = len(range(d.lanes - 1, d.boxes, d.lanes))
    begins = [share * d.left * length // d.shares for share in range(d.shares + 1)]
    for share in range(d.shares):
        lanes = range(begins[share] // length, -(-begins[share + 1] // length))
        found += [(d.shares + share + lane, d.tiles - d.left + lane) for lane in lanes]
    return found


#: Tiles, shares, boxes and tiles along the filters.
DIVISIONS = ((3, 5, 7, 3), (6, 11, 9, 2), (4, 3, 5, 2), (2, 6, 9, 1), (5, 12, 17, 5), (7, 5, 3, 7), (7, 5, 1, 7))


@pytest.mark.parametrize("sizes", DIVISIONS)
def test_slots(sizes: tuple[int, int, int, int]) -> None:
    tiles, shares, boxes, high = sizes
    d = Division(ROWS, COLUMNS, tiles, high, boxes, shares)
    found = pieces_of(d)
    assert len(dict(found)) == len(found)
    assert max(dict(found)) < d.slots
    assert max(Counter(tile for _, tile in found).values()) <= d.pieces


def test_lanes_have_boxes() -> None:
    """Of no tile are there more lanes than boxes: lengths of 0 would be divided by."""
    sizes = itertools.product(range(1, 300), range(1, 140))
    assert all(d.lanes <= boxes for tiles, boxes in sizes for d in candidates(ROWS, COLUMNS, tiles, 1, boxes))


@pytest.mark.interpret
@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("sizes", DIVISIONS)
def test_sums(sizes: tuple[int, int, int, int], at_once: int) -> None:
    tiles, shares, boxes, high = sizes
    d = Division(ROWS, COLUMNS, tiles, high, boxes, shares)
    slots = torch.full((d.slots, ROWS * COLUMNS * 4096), torch.nan)
    wanted = torch.zeros(tiles, slots.shape[1])
    g = torch.Generator().manual_seed(0)
    for slot, tile in pieces_of(d):
        slots[slot] = torch.randint(-3, 4, (slots.shape[1],), generator=g)
        wanted[tile] += slots[slot]
    filters, taps = high * 64, tiles // high * COLUMNS
    out = torch.full((filters, 64, taps, 1), torch.nan)
    sizes_of = (d.tiles, d.shares, d.lanes, d.boxes, high, 1, filters, taps, 64, 64, None, taps, 1)
    own = {"FILTERS": ROWS, "COLUMNS": COLUMNS, "PARTS": at_once, "BLOCK": BLOCK}
    grid = (slots.shape[1] // BLOCK * tiles,)
    conv2d_fold_pieces_kernel[grid](slots, out, out.stride(), *sizes_of, **own)
    blocks = wanted.view(tiles // high, high, COLUMNS, 8, 8, 8, 8).permute(1, 3, 5, 0, 2, 4, 6)
    assert torch.equal(out, blocks.reshape(filters, taps, 64).permute(0, 2, 1)[..., None])
