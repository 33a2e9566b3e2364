"""Overlap and layouts of random views, compared with the set of bytes that each touches."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import triplan as tp
from triplan.errors import InvalidProblem
from triplan.facade.check import check_memory, is_injective, may_overlap

BASE = torch.zeros(4096, dtype=torch.uint8)
DTYPES = (torch.uint8, torch.int16, torch.float32)


def addresses(t: torch.Tensor) -> list[int]:
    """That of every element."""
    places = itertools.product(*(range(n) for n in t.shape))
    steps = [s * t.element_size() for s in t.stride()]
    return [t.data_ptr() + sum(i * s for i, s in zip(place, steps, strict=True)) for place in places]


def touched(t: torch.Tensor) -> set[int]:
    return {address + i for address in addresses(t) for i in range(t.element_size())}


def any_view(rng: random.Random) -> torch.Tensor:
    rank = rng.randrange(4)
    shape = [rng.choice((0, 1, 1, 2, 3, 4)) if rng.random() < 0.9 else 5 for _ in range(rank)]
    strides = [rng.choice((0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24)) for _ in range(rank)]
    return BASE.view(rng.choice(DTYPES)).as_strided(shape, strides, rng.randrange(24))


def box(rng: random.Random, whole: torch.Tensor) -> torch.Tensor:
    """A part of ``whole`` without steps, at least 2 long: of an axis of 1, the stride says nothing."""
    for axis, n in enumerate(whole.shape):
        low = rng.randrange(n - 1)
        whole = whole.narrow(axis, low, rng.randrange(2, n - low + 1))
    return whole


@pytest.mark.parametrize("seed", range(4))
def test_overlap_is_never_missed(seed: int) -> None:
    rng, apart = random.Random(seed), 0
    for _ in range(1500):
        a, b = any_view(rng), any_view(rng)
        if not may_overlap(a, b):
            assert not touched(a) & touched(b), (a.shape, a.stride(), b.shape, b.stride())
        if is_injective(a):
            assert len(set(addresses(a))) == a.numel(), (a.shape, a.stride())
            apart += a.numel() > 1 and not a.is_contiguous()
    assert apart > 50


@pytest.mark.parametrize("shape", [(40,), (8, 9)])
def test_boxes_of_one_tensor_overlap_where_they_share_bytes(shape: tuple[int, ...]) -> None:
    rng, whole = random.Random(0), torch.zeros(shape)
    found = set()
    for _ in range(1500):
        a, b = box(rng, whole), box(rng, whole)
        assert may_overlap(a, b) == bool(touched(a) & touched(b)), (a.shape, b.shape, b.data_ptr() - a.data_ptr())
        found.add(may_overlap(a, b))
    assert found == {False, True}


@pytest.mark.parametrize("seed", range(2))
def test_a_layout_promises_what_is_there(seed: int) -> None:
    rng, kinds, ordered = random.Random(seed), set(), set()
    for _ in range(1500):
        t = any_view(rng)
        if not t.numel():
            continue
        found = tp.Layout.of(t.shape, t.stride(), t.data_ptr(), t.element_size())
        kinds.add((found.packed, found.unit_axis is not None, bool(found.zero_axes), found.stride_multiple > 1))
        assert found.broken_by(t.shape, t.stride()) is None
        assert found.packed == t.is_contiguous()
        assert t.data_ptr() % (found.alignment or 1) == 0
        steps = {a: s for a, (n, s) in enumerate(zip(t.shape, t.stride(), strict=True)) if n > 1}
        if not found.packed:
            assert steps.pop(found.unit_axis, 1) == 1
            assert [steps.pop(axis) for axis in found.zero_axes] == [0] * len(found.zero_axes)
            assert all(step % found.stride_multiple == 0 for step in steps.values())
            reached = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            dense = len(set(addresses(t))) == t.numel() == reached
            assert bool(found.order) == dense
            ordered.add(dense)
    assert len(kinds) > 5
    assert ordered == {False, True}


def test_a_workspace_shares_no_memory_with_operands() -> None:
    """Whatever shares a byte with it is refused, and of tensors without gaps nothing else is."""
    rng, counts = random.Random(3), {False: 0, True: 0}
    for _ in range(2000):
        view, at = any_view(rng), 16 * rng.randrange(6)
        memory = tp.Workspace(BASE[at : at + 16 * rng.randrange(1, 4)])
        shares = bool(touched(view) & touched(memory.tensor))
        try:
            check_memory("gather", "the workspace", memory, 1, BASE.device, [("x", view)])
            refused = False
        except InvalidProblem as e:
            refused = "the workspace shares memory with x" in str(e)
        assert refused >= shares, (view.shape, view.stride(), view.storage_offset())
        if view.is_contiguous():
            assert refused == shares
            counts[shares] += 1
    assert min(counts.values()) > 100
