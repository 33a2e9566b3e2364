"""Caches: of pure functions of descriptors, elements and targets, and of an object's derived attributes."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

#: Results kept per function. A select asks up to 30 functions about one descriptor, which keep about 10 KiB of it.
MAX_FACTS = 1024
_facts: weakref.WeakSet[Any] = weakref.WeakSet()


def fact(function: Callable[P, R]) -> Callable[P, R]:
    """Cache a pure function of hashable arguments, and drop the least recently used result beyond ``MAX_FACTS``.

    A function that is decorated already is returned unchanged. Of arguments the type counts, too: 1 is not 1.0.
    """
    if function in _facts:
        return function
    cached = functools.lru_cache(maxsize=MAX_FACTS, typed=True)(function)
    _facts.add(cached)
    return cast(Callable[P, R], cached)


class cached_property(functools.cached_property[R]):  # noqa: N801
    """functools.cached_property as it is from Python 3.12 on, without a lock.

    Before, one lock served all objects of a class, and a process that was forked while another thread held it hung.
    Threads may compute a value twice; either is right.
    """

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> R:  # type: ignore[override]
        if instance is None:
            return cast(R, self)
        value = self.func(instance)
        instance.__dict__[self.attrname] = value
        return value


def forget_facts() -> None:
    """Empty all of these caches, for tests that change a constant."""
    for cached in _facts:
        cached.cache_clear()
