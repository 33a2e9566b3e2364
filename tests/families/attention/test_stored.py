"""Which heads and rows ``wgmma_stored`` takes at a time, and where each block of ds lies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from cases import H200
from hypothesis import given, strategies as st

import triplan as tp
from triplan.backends.triton.attention import wgmma_backward_kernels as kernels, wgmma_stored as stored
from triplan.backends.triton.attention.wgmma_backward import supports

TILE, ROWS = 128, 64


@st.composite
def problems(draw: st.DrawFn) -> tp.AttentionBackwardDescriptor:
    """With a causal mask, row 0 has a position that is a multiple of a tile, also below 0."""
    queries, causal = draw(st.integers(1, 40_000)), draw(st.booleans())
    keys = draw(st.integers(1, 40_000))
    if causal:
        keys = queries + TILE * draw(st.integers(max(-20, -((queries - 1) // TILE)), 20))
    sizes: dict[str, Any] = {"queries": queries, "keys": keys, "causal": causal, "batch": draw(st.integers(1, 5))}
    key_heads = draw(st.integers(1, 9))
    sizes |= {"key_heads": key_heads, "heads": key_heads * draw(st.integers(1, 8)), "align": "end"}
    return tp.AttentionBackwardDescriptor(**sizes, head_dim=draw(st.sampled_from([64, 128])), element="bf16")


def firsts(desc: tp.AttentionBackwardDescriptor, begin: int, end: int) -> list[int]:
    """By the definition: of each tile of keys, the first block of rows whose last row sees its first key."""
    position = desc.shift if desc.causal else 0
    found = []
    for key in range(0, desc.keys, TILE):
        sees = (m for m in range(begin, end) if not desc.causal or (m + 1) * ROWS - 1 + position >= key)
        found.append(next(sees, end))
    return found


@given(desc=problems(), data=st.data())
def test_blocks_are_counted_by_one_formula(desc: tp.AttentionBackwardDescriptor, data: st.DataObject) -> None:
    """Of the kernel, run as Python, and of the host, beside the definition."""
    blocks = stored.blocks_of(desc)
    begin = data.draw(st.integers(0, (blocks - 1) // stored.BLOCKS)) * stored.BLOCKS
    end = data.draw(st.sampled_from([*range(begin + stored.BLOCKS, blocks, stored.BLOCKS), blocks][-9:]))
    each = [end - first for first in firsts(desc, begin, end)]
    tile = data.draw(st.integers(0, len(each)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "gl", SimpleNamespace(minimum=min, maximum=max))
        patch.setattr(kernels, "ROWS", ROWS)
        counted = kernels.stored_before.fn(tile, begin, end, desc.shift if desc.causal else 0, desc.causal)
    assert counted == sum(each[:tile])
    assert stored.stored_blocks(desc, begin, end) == sum(each)


@given(desc=problems())
def test_parts_take_each_row_once_and_fit(desc: tp.AttentionBackwardDescriptor) -> None:
    """In the order in which one part would take them: query heads of a group, then their rows."""
    if not supports(desc, H200):
        return
    found = stored.division_of(desc, H200.sm_count)
    if found is None:
        assert desc.keys > 4096  # 256 rows of so many keys take 2 MiB
        return
    blocks = stored.blocks_of(desc)
    taken = [(m, b) for p in found.parts for m in range(p.begin, p.end) for b in range(p.first, p.last)]
    assert taken == [(m, b) for m in range(desc.group) for b in range(blocks)]
    assert all(p.first % stored.BLOCKS == 0 for p in found.parts)
    rows = stored.ds_rows(desc, found) * ROWS * 2
    sums = stored.sums_bytes(desc, found.heads) if len(found.parts) > 1 else 0
    assert rows + sums <= stored.BUDGET
