"""What functional calls keep in memory when shapes never stop changing."""

from __future__ import annotations

import gc
import itertools
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from replaying import forget, replays_on_cpu

from triplan import functional
from triplan.functional import _plans
from triplan.sku.facts import MAX_FACTS, forget_facts

#: Bytes by which a process may grow, and the number of shapes.
LIMIT, SHAPES = 64 << 20, 100_000


def shapes(rank: int) -> Iterator[tuple[int, ...]]:
    """All shapes of extents from 1 to 10, in no order: each axis takes all its extents soon."""
    for i in range(10**rank):
        yield tuple(1 + int(digit) for digit in f"{i * 7919 % 10**rank:0{rank}}")  # 7919 is prime to 10


def once(shape: tuple[int, ...]) -> None:
    functional.softmax(torch.zeros(shape), -1)


def thrice(shape: tuple[int, ...], device: str = "cpu") -> None:
    """So often that the call and its backward are replayed."""
    x = torch.zeros(shape, device=device, requires_grad=True)
    for _ in range(3):
        y = functional.softmax(x, -1)
        y.backward(y)


def traced(call: Callable[[tuple[int, ...]], None], given: Iterable[tuple[int, ...]]) -> int:
    """Bytes that Python holds after a call for each of the shapes."""
    for shape in given:
        call(shape)
    if call is thrice:  # what is left of replays that were dropped; ``once`` counts plans and facts
        forget()
        _plans.PLANS.clear()
        forget_facts()
    gc.collect()
    sys._clear_type_cache()  # of 4,096 names of attributes, which fills while types are made
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.parametrize(
    ("call", "context", "full", "more"),
    [(once, nullcontext, MAX_FACTS + 50, 100), (thrice, replays_on_cpu, 16, 16)],
    ids=["once", "replayed"],
)
def test_new_shapes_grow_no_memory(
    call: Callable[[tuple[int, ...]], None],
    context: Callable[[], AbstractContextManager[Any]],
    full: int,
    more: int,
) -> None:
    """Once the caches are full (after ``full`` shapes), what ``more`` add is extrapolated to all shapes."""
    given, threads = shapes(4), torch.get_num_threads()
    torch.set_num_threads(1)  # waking more takes longer than the calls do
    with context():
        traced(call, itertools.islice(given, 16))  # imports modules
        tracemalloc.start(1)
        try:
            first = traced(call, itertools.islice(given, 16))
            before = traced(call, itertools.islice(given, full))
            after = [traced(call, itertools.islice(given, more)) for _ in range(3)]
        finally:
            tracemalloc.stop()
            torch.set_num_threads(threads)
    # The least, as dicts of the interpreter may grow at any time; a leak is in each.
    added = min(b - a for a, b in itertools.pairwise([before, *after]))
    assert before - first + added * SHAPES / more < LIMIT, (first, before, after)


def resident() -> int:
    """Bytes of memory that the process uses."""
    gc.collect()
    return 1024 * int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0])


@pytest.mark.gpu
def test_a_process_on_a_gpu_grows_little() -> None:
    """All shapes; every 50th comes so often that it is replayed, which makes more replays than are kept."""
    before = 0
    for i, shape in enumerate(shapes(5)):
        if i % 50:
            functional.softmax(torch.zeros(shape, device="cuda"), -1)
        else:
            thrice(shape, "cuda")
        if i == 500:  # the kernels are compiled
            before = resident()
    assert resident() - before < LIMIT
