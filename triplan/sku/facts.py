"""One cache for pure functions of descriptors, elements and targets."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

#: Results kept per function. A select asks a dozen functions about one descriptor; a PlanCache holds 4,096 plans.
MAX_FACTS = 4096
_facts: weakref.WeakSet[Any] = weakref.WeakSet()


def fact(function: Callable[P, R]) -> Callable[P, R]:
    """Cache a pure function of hashable arguments, and drop the least recently used result beyond ``MAX_FACTS``.

    A function that is decorated already is returned unchanged.
    """
    if function in _facts:
        return function
    cached = lru_cache(maxsize=MAX_FACTS)(function)
    _facts.add(cached)
    return cast(Callable[P, R], cached)


def forget_facts() -> None:
    """Empty all of these caches, for tests that change a constant."""
    for cached in _facts:
        cached.cache_clear()
