"""One cache for what follows from descriptors, elements and targets alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

#: Entries of each function. A select asks a dozen functions about one descriptor, and a plan cache holds 1,024 plans.
MAX_FACTS = 4096
_cached: list[Any] = []


def fact(function: Callable[P, R]) -> Callable[P, R]:
    """Cache a pure function of hashable arguments; the least recently used of ``MAX_FACTS`` results is dropped."""
    found = lru_cache(maxsize=MAX_FACTS)(function)
    _cached.append(found)
    return cast(Callable[P, R], found)


def forget_facts() -> None:
    """Empty every such cache, for tests that change a constant."""
    for found in _cached:
        found.cache_clear()
