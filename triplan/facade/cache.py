"""PlanCache: plans by canonical key. Bounded, thread-safe and fork-safe; threads share one select of a key."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from typing_extensions import Unpack

from triplan.backends.storing import software, write_json
from triplan.backends.table import TABLE
from triplan.backends.tuning import TuningTable
from triplan.descriptors import Descriptor, parse_descriptor
from triplan.descriptors.base import PlannedBy
from triplan.errors import InvalidProblem, TriplanError, shown
from triplan.facade.plan import Plan, Request, plan_type
from triplan.sku import NO_PREFERENCE, KernelSku, PlanPreference, Requirements, Target, TargetName

__all__ = ["CacheStats", "LoadReport", "PlanCache"]

AnyPlan = Plan[Any, Any]
P = TypeVar("P", bound=AnyPlan)
#: Format of saved files. Those of format 1, in which every entry repeats its tuning table, are read as well.
_FORMAT = 2
#: Seconds that a thread waits for another's select, which takes milliseconds, before it selects by itself.
_PATIENCE = 1.0
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


class _Selecting:
    """A select that runs: the thread it runs in, a lock held until it ends, and then its plan, None if it failed."""

    __slots__ = ("ended", "plan", "thread")

    def __init__(self) -> None:
        self.thread, self.ended, self.plan = threading.get_ident(), threading.Lock(), None
        self.ended.acquire()

    plan: AnyPlan | None


class PlanCache:
    """A bounded LRU of plans.

    It has no lock. A signal's handler may raise between any two calls of a ``get``, or itself use the cache, so every
    step is one call of a dict, which neither threads nor signals can divide while the GIL is held.
    """

    def __init__(self, capacity: int = 4096) -> None:
        if capacity < 1:
            raise InvalidProblem(f"PlanCache: capacity = {shown(capacity)}: must be at least 1")
        self.capacity = capacity
        self._hits = self._misses = self._evictions = self._refused = 0
        self.clear()
        _caches.add(self)

    def clear(self) -> None:
        """Drop every plan; the counts stay."""
        # Read first: what is selected from a table that changes after this is dropped by the next get. Replaced, not
        # emptied: a select that began before puts its plan into the old dict.
        generation = TABLE.generation
        self._plans: OrderedDict[str, AnyPlan] = OrderedDict()
        self._selecting: dict[str, _Selecting] = {}
        self._generation = generation

    @overload
    def get(self, desc: PlannedBy[P], **request: Unpack[Request]) -> P: ...
    @overload
    def get(self, desc: Descriptor, **request: Unpack[Request]) -> AnyPlan: ...
    def get(
        self,
        desc: Any,
        *,
        preference: PlanPreference | None = None,
        target: Target | TargetName | None = None,
        tuning: TuningTable | None = None,
        **requirements: Unpack[Requirements],
    ) -> Any:
        """The plan for the request, selected at most once. Takes and raises what ``Plan.select`` does; errors are not
        cached."""
        if requirements or preference is not None:
            preference = PlanPreference.of(preference, requirements)
        preference = (preference or NO_PREFERENCE).resolved()
        if target.__class__ is not Target:
            target = Target.given(target)
        # Equal to canonical_key(...); inlined because this line is most of the cost of a hit.
        try:
            key = f"{desc.key}|{preference.key}|{target.key}|{'-' if tuning is None else tuning.digest}"
        except AttributeError as e:
            raise InvalidProblem(f"{shown(desc)}, tuning {shown(tuning)}: no descriptor or no tuning table") from e
        if self._generation != TABLE.generation:
            self.clear()  # an entry was added or removed: any selection may differ now
        plans = self._plans
        found = plans.get(key)
        if found is None:
            self._misses += 1
            return self._select(key, desc, preference, target, tuning)
        try:
            plans.move_to_end(key)
        except KeyError:  # another thread has just evicted it
            self._insert(plans, key, found)
        self._hits += 1
        return found

    def _select(
        self, key: str, desc: Descriptor, preference: PlanPreference, target: Target, tuning: TuningTable | None
    ) -> AnyPlan:
        """Select a plan, or wait for another thread that does."""
        plans, selecting, mine = self._plans, self._selecting, _Selecting()
        try:
            # A signal's handler that needs the plan that its own thread selects must not wait.
            while (other := selecting.setdefault(key, mine)) is not mine and other.thread != mine.thread:
                if other.ended.acquire(timeout=_PATIENCE):
                    other.ended.release()
                if other.plan is not None:
                    return other.plan
                selecting.pop(key, None)  # it raised; its error, perhaps a KeyboardInterrupt, is not ours
            plan = plan_type(desc.op).select(desc, preference=preference, target=target, tuning=tuning)
            self._insert(plans, key, plan)
            mine.plan = plan
        finally:
            # First, and one call: nothing may come between. Who finds an entry that has ended passes it.
            mine.ended.release()
            if selecting.get(key) is mine:
                selecting.pop(key, None)
        return plan

    def _insert(self, plans: OrderedDict[str, AnyPlan], key: str, plan: AnyPlan) -> None:
        plans.pop(key, None)
        plans[key] = plan
        while len(plans) > self.capacity:
            try:
                plans.popitem(last=False)
            except KeyError:  # other threads evicted as well
                return
            self._evictions += 1

    def __repr__(self) -> str:
        return f"PlanCache({len(self)} of {self.capacity} plans, {self._hits} hits, {self._misses} misses)"

    def __len__(self) -> int:
        return len(self._plans)

    def stats(self) -> CacheStats:
        """Hits, misses, evictions, refused entries, size and capacity."""
        counts = (self._hits, self._misses, self._evictions, self._refused)
        return CacheStats(*counts, len(self._plans), self.capacity)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write every entry as JSON. Atomic: a reader finds the old file or the new one."""
        plans = list(self._plans.values())
        tables = {plan.tuning.digest: plan.tuning for plan in plans if plan.tuning is not None}
        numbers = {digest: number for number, digest in enumerate(tables)}
        entries = [_entry(plan, None if plan.tuning is None else numbers[plan.tuning.digest]) for plan in plans]
        content = {"format": _FORMAT, "versions": versions(), "entries": entries}
        write_json(path, {**content, "tables": [json.loads(table.to_json()) for table in tables.values()]})

    def load(self, path: str | os.PathLike[str]) -> LoadReport:
        """Select every saved entry again and keep those whose SKU is the same.

        Raises ``InvalidProblem`` for a file that is not a saved cache, and then leaves this cache as it is.
        """
        try:
            content = json.loads(Path(path).read_text())
            saved, entries = content["versions"], content["entries"]
            known, tables = content["format"] in (1, _FORMAT), content.get("tables", [])
            if (
                not known
                or not isinstance(entries, list)
                or not isinstance(saved, dict)
                or not isinstance(tables, list)
            ):
                raise ValueError(f"format {shown(content['format'])}, expected {_FORMAT}")
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise InvalidProblem(f"{os.fspath(path)} is not a saved PlanCache: {e}") from e
        here = versions()
        changed = tuple(f"{k}: {saved.get(k)} -> {v}" for k, v in here.items() if saved.get(k) != v)
        table = functools.cache(lambda number: TuningTable.from_json(json.dumps(tables[number])))
        if self._generation != TABLE.generation:
            self.clear()
        plans, loaded = self._plans, [_load_entry(entry, table) for entry in entries]
        for _, plan in loaded:  # not before every entry was read
            if plan is not None:
                self._insert(plans, plan.key, plan)
        report = tuple(verdict for verdict, _ in loaded)
        self._refused += sum(e.verdict != "same" for e in report)
        return LoadReport(report, changed)


def _load_entry(entry: Any, table: Callable[[int], TuningTable]) -> tuple[LoadedEntry, AnyPlan | None]:
    """The verdict on a saved entry, and its plan if that is ``same``."""
    try:
        desc = parse_descriptor(entry["descriptor"])
        preference = PlanPreference.model_validate_json(json.dumps(entry["preference"]))
        target = Target.model_validate_json(json.dumps(entry["target"]))
        tuning = entry["tuning"]
        if tuning is not None:
            tuning = table(tuning) if isinstance(tuning, int) else TuningTable.from_json(json.dumps(tuning))
        sku = KernelSku.model_validate_json(json.dumps(entry["sku"]))
        plan = plan_type(desc.op).select(desc, preference=preference, target=target, tuning=tuning)
    except (TriplanError, LookupError, TypeError, ValueError, RecursionError) as e:
        return LoadedEntry("refused", shown(entry), f"{type(e).__name__}: {e}"), None
    if plan.sku() != sku:
        changed = f"was {sku.id}, is {plan.sku().id}: {sku.key} -> {plan.sku().key}"
        return LoadedEntry("changed", plan.key, changed), None
    return LoadedEntry("same", plan.key), plan


def _entry(plan: AnyPlan, table: int | None) -> dict[str, Any]:
    return {
        "descriptor": json.loads(plan.descriptor.to_json()),
        "preference": json.loads(plan.preference.model_dump_json()),
        "target": json.loads(plan.target.model_dump_json()),
        "tuning": table,
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
    # The threads that select are not in the child.
    for cache in _caches:
        cache._selecting = {}


os.register_at_fork(after_in_child=_after_fork)
