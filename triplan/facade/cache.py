"""PlanCache: plans by canonical key. Bounded, thread-safe and fork-safe; threads share one select of a key."""

from __future__ import annotations

import ctypes
import json
import os
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from triplan.backends.storing import software, write_json
from triplan.backends.table import TABLE
from triplan.backends.tuning import TuningTable
from triplan.descriptors import Descriptor, parse_descriptor
from triplan.errors import InvalidProblem, TriplanError
from triplan.facade.plan import Plan, plan_type
from triplan.sku import NO_PREFERENCE, KernelSku, PlanPreference, Target

__all__ = ["CacheStats", "LoadReport", "PlanCache"]

AnyPlan = Plan[Any, Any]
_FORMAT = 1
_caches: weakref.WeakSet[PlanCache] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts since the cache was created. ``refused`` counts loaded entries that became misses."""

    hits: int
    misses: int
    evictions: int
    refused: int
    size: int
    capacity: int


@dataclass(frozen=True, slots=True)
class LoadedEntry:
    """The verdict on one saved entry: ``same`` (cached), ``changed`` or ``refused`` (a miss, with its ``reason``)."""

    verdict: str
    key: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """All entries of a file, and which of the versions it was saved with differ from the current ones."""

    entries: tuple[LoadedEntry, ...]
    versions_changed: tuple[str, ...]

    def count(self, verdict: str) -> int:
        return sum(e.verdict == verdict for e in self.entries)


class PlanCache:
    """A bounded LRU of plans."""

    def __init__(self, capacity: int = 4096) -> None:
        if capacity < 1:
            raise InvalidProblem(f"PlanCache: capacity = {capacity}: must be at least 1")
        self.capacity = capacity
        self._plans: OrderedDict[str, AnyPlan] = OrderedDict()
        self._hits = self._misses = self._evictions = self._refused = 0
        self._generation = TABLE.generation
        self._reset_locks()
        _caches.add(self)

    def _reset_locks(self) -> None:
        self._lock = threading.Lock()
        self._selecting: dict[str, Future[AnyPlan]] = {}

    def get(
        self,
        desc: Descriptor,
        *,
        preference: PlanPreference | None = None,
        target: Target | None = None,
        tuning: TuningTable | None = None,
    ) -> AnyPlan:
        """The plan for the request, selected at most once. Raises as ``Plan.select``; errors are not cached."""
        preference = (NO_PREFERENCE if preference is None else preference).resolved()
        target = Target.current() if target is None else target
        # Equal to canonical_key(...); inlined because this line is most of the cost of a hit.
        key = f"{desc.key}|{preference.key}|{target.key}|{'-' if tuning is None else tuning.digest}"
        with self._lock:
            if self._generation != (generation := TABLE.generation):
                self._plans.clear()  # an entry was added or removed: any selection may differ now
                self._selecting.clear()
                self._generation = generation
            found = self._plans.get(key)
            if found is not None:
                self._plans.move_to_end(key)
                self._hits += 1
                return found
            self._misses += 1
            flight = self._selecting.get(key)
            mine = flight is None
            if flight is None:
                flight = self._selecting[key] = Future()
        if not mine:
            return flight.result()
        try:
            plan = plan_type(desc.op).select(desc, preference=preference, target=target, tuning=tuning)
        except BaseException as e:
            with self._lock:
                self._selecting.pop(key, None)
            flight.set_exception(e)
            raise
        with self._lock:
            self._insert(key, plan, generation)
            self._selecting.pop(key, None)
        flight.set_result(plan)
        return plan

    def _insert(self, key: str, plan: AnyPlan, generation: int) -> None:
        """Cache ``plan``, unless the table has changed since ``generation``, when its select began."""
        if generation != TABLE.generation:
            return
        self._plans[key] = plan
        self._plans.move_to_end(key)
        while len(self._plans) > self.capacity:
            self._plans.popitem(last=False)
            self._evictions += 1

    def __repr__(self) -> str:
        return f"PlanCache({len(self)} of {self.capacity} plans, {self._hits} hits, {self._misses} misses)"

    def clear(self) -> None:
        """Drop every plan; the counts stay."""
        with self._lock:
            self._plans.clear()

    def __len__(self) -> int:
        return len(self._plans)

    def stats(self) -> CacheStats:
        """Hits, misses, evictions, refused entries, size and capacity."""
        with self._lock:
            counts = (self._hits, self._misses, self._evictions, self._refused)
            return CacheStats(*counts, len(self._plans), self.capacity)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write every entry as JSON. Atomic: a reader finds the old file or the new one."""
        with self._lock:
            plans = list(self._plans.values())
        write_json(path, {"format": _FORMAT, "versions": versions(), "entries": [_entry(plan) for plan in plans]})

    def load(self, path: str | os.PathLike[str]) -> LoadReport:
        """Select every saved entry again and keep those whose SKU is the same.

        Raises ``InvalidProblem`` for a file that is not a saved cache, and then leaves this cache as it is.
        """
        try:
            content = json.loads(Path(path).read_text())
            saved, entries = content["versions"], content["entries"]
            if content["format"] != _FORMAT or not isinstance(entries, list) or not isinstance(saved, dict):
                raise ValueError(f"format {content['format']!r}, expected {_FORMAT}")
        except (ValueError, KeyError, TypeError) as e:
            raise InvalidProblem(f"{os.fspath(path)} is not a saved PlanCache: {e}") from e
        here = versions()
        changed = tuple(f"{k}: {saved.get(k)} -> {v}" for k, v in here.items() if saved.get(k) != v)
        report = tuple(self._load_entry(entry) for entry in entries)
        with self._lock:
            self._refused += sum(e.verdict != "same" for e in report)
        return LoadReport(report, changed)

    def _load_entry(self, entry: Any) -> LoadedEntry:
        generation = TABLE.generation
        try:
            desc = parse_descriptor(entry["descriptor"])
            preference = PlanPreference.model_validate_json(json.dumps(entry["preference"]))
            target = Target.model_validate_json(json.dumps(entry["target"]))
            tuning = None
            if entry["tuning"] is not None:
                tuning = TuningTable.from_json(json.dumps(entry["tuning"]))
            sku = KernelSku.model_validate_json(json.dumps(entry["sku"]))
            plan = plan_type(desc.op).select(desc, preference=preference, target=target, tuning=tuning)
        except (TriplanError, KeyError, TypeError) as e:
            return LoadedEntry("refused", str(entry)[:200], f"{type(e).__name__}: {e}")
        if plan.sku() != sku:
            return LoadedEntry("changed", plan.key, f"was {sku.id}, is {plan.sku().id}: {sku.key} -> {plan.sku().key}")
        with self._lock:
            self._insert(plan.key, plan, generation)
        return LoadedEntry("same", plan.key)


def _entry(plan: AnyPlan) -> dict[str, Any]:
    return {
        "descriptor": json.loads(plan.descriptor.to_json()),
        "preference": json.loads(plan.preference.model_dump_json()),
        "target": json.loads(plan.target.model_dump_json()),
        "tuning": None if plan.tuning is None else json.loads(plan.tuning.to_json()),
        "sku": json.loads(plan.sku().model_dump_json()),
    }


def versions() -> dict[str, str]:
    """The software versions on which a selection's bits may depend, besides its key."""
    return {**software(), "driver": _driver()}


def _driver() -> str:
    if not torch.cuda.is_available():
        return "none"
    found = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
    return str(found.value)


def _after_fork() -> None:
    # A lock that another thread held at the fork would stay locked in the child forever.
    for cache in _caches:
        cache._reset_locks()


os.register_at_fork(after_in_child=_after_fork)
