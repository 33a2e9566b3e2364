"""The kernel table: one row a kernel. It is open: users register rows, and ops of their own, the same way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from triplan.backends.runtime.launch import Launch, overlapping
from triplan.errors import InvalidProblem
from triplan.sku import (
    GPU_ARCHS,
    SUPPORTED,
    ArchSku,
    BackendKind,
    ElementKind,
    IndexElementKind,
    PrecisionGuarantee,
    Support,
    Target,
)
from triplan.sku.facts import fact

Guarantee = Callable[[Any], Mapping[str, PrecisionGuarantee]]
Build = Callable[[Any, Target], Sequence[Launch]]
Compute = Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]
Configurations = Callable[[Any, Target], "Mapping[str, Configuration]"]


def _one_way(desc: Any, target: Target) -> Mapping[str, Configuration]:
    return {}


@dataclass(frozen=True)
class Preparation:
    """How a row keeps what it makes of the indices alone, for any number of runs.

    Attributes:
        size: exact bytes of storage.
        build: the launches that fill the storage; the index operand is all that they read.
        run: the launches of a run that uses it. Neither needs more workspace than an ordinary run.
    """

    size: Callable[[Any, Target], int]
    build: Build
    run: Build


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to launch a row, of several among which its cost model chooses; ``tp.tune`` times each.

    Attributes:
        cost: estimated microseconds.
        build: its launches.
        workspace: exact bytes of scratch.
    """

    cost: float
    build: Callable[[], Sequence[Launch]]
    workspace: int = 0


@dataclass(frozen=True)
class KernelRow:
    """One kernel that can answer an op.

    Attributes:
        op: the descriptor's ``op``.
        name: unique within the op; what ``PlanPreference.kernel`` pins and the SKU shows.
        backend: triton or reference.
        elements: the elements it takes.
        index_elements: the index elements it takes; empty where the op has no indices.
        archs: where it runs.
        version: bumped when, and only when, its bits may change.
        guarantee: the PrecisionGuarantee of every output, by operand name.
        supports: further conditions, beyond elements, archs and preference.
        workspace: exact bytes of scratch.
        rank: estimated microseconds; select takes the smallest.
        priority: what decides before ``rank`` where ``batch_invariant`` is required, the smallest first. Rank sees
            batch extents, so it may then choose only among rows of one ``numerics_id``: others differ in priority.
        numerics: the ``numerics_id``, or None where no equality of bits is claimed.
        features: what ``PlanPreference.exclude`` can rule out, such as ``"tma"``.
        interpretable: whether Triton's interpreter runs it.
        build: its launches (triton rows).
        compute: plain torch from inputs to outputs (reference rows).
        layout: the SKU's layout, ``"packed"`` or ``"strided"``.
        preparation: how its indices can be prepared, where they can.
        configurations: the ways to launch it, by name, where there are several. None may change what the row
            guarantees; where it is ``batch_invariant``, there is one.
    """

    op: str
    name: str
    backend: BackendKind
    elements: frozenset[ElementKind]
    index_elements: frozenset[IndexElementKind]
    archs: frozenset[ArchSku]
    version: int
    guarantee: Guarantee
    supports: Callable[[Any, Target], Support]
    workspace: Callable[[Any, Target], int]
    rank: Callable[[Any, Target], float]
    numerics: Callable[[Any], str | None]
    features: frozenset[str] = frozenset()
    interpretable: bool = True
    priority: int = 0
    build: Build | None = None
    compute: Compute | None = None
    layout: Callable[[Any], str | None] = lambda desc: None
    preparation: Preparation | None = None
    configurations: Configurations = _one_way

    def launches(self, desc: Any, target: Target) -> tuple[Launch, ...]:
        """What a run launches, as data; nothing for a reference row."""
        return () if self.build is None else overlapping(self.build(desc, target), target)

    def configured(self, desc: Any, target: Target, name: str) -> KernelRow | None:
        """The row that launches ``desc`` in one of its configurations; None if there is none of that name."""
        found = self.configurations(desc, target).get(name)
        if found is None:
            return None
        return replace(self, build=lambda desc, target: found.build(), workspace=lambda desc, target: found.workspace)


class KernelTable:
    """Rows by op. Registration order never decides anything: rows are kept sorted by name."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, KernelRow]] = {}
        self._lock = threading.Lock()
        #: Grows with every registration: what a cache of selections must compare.
        self.generation = 0

    def register(self, row: KernelRow) -> None:
        """Add ``row``. Raises ``InvalidProblem`` if its op already has a row of that name."""
        with self._lock:
            rows = self._rows.get(row.op, {})
            if row.name in rows:
                raise InvalidProblem(f"op {row.op!r} already has a kernel named {row.name!r}")
            self._rows[row.op] = dict(sorted({**rows, row.name: row}.items()))
            self.generation += 1

    def unregister(self, op: str, name: str) -> None:
        """Remove a row (for tests and for users who replace one of ours). Raises ``KeyError``."""
        with self._lock:
            rows = dict(self._rows[op])
            del rows[name]
            self._rows[op] = rows
            self.generation += 1

    def rows(self, op: str) -> tuple[KernelRow, ...]:
        """The rows of ``op``, sorted by name; empty for an unknown op."""
        return tuple(self._rows.get(op, {}).values())

    def ops(self) -> tuple[str, ...]:
        """Every op with a row, sorted."""
        return tuple(sorted(op for op, rows in self._rows.items() if rows))

    def reference(self, op: str) -> KernelRow:
        """The reference row of ``op``: what tests compare with. Raises ``KeyError``."""
        for row in self.rows(op):
            if row.backend is BackendKind.REFERENCE:
                return row
        raise KeyError(f"op {op!r} has no reference")


TABLE = KernelTable()


def _supported(desc: Any, target: Target) -> Support:
    return SUPPORTED


def _nothing(desc: Any, target: Target) -> int:
    return 0


def _no_numerics(desc: Any) -> None:
    return None


def kernel(
    *,
    op: str,
    name: str,
    elements: Collection[ElementKind | str],
    guarantee: Guarantee,
    rank: Callable[[Any, Target], float],
    index_elements: Collection[IndexElementKind | str] = (),
    archs: Collection[ArchSku] = GPU_ARCHS,
    version: int = 1,
    supports: Callable[[Any, Target], Support] = _supported,
    workspace: Callable[[Any, Target], int] = _nothing,
    numerics: Callable[[Any], str | None] = _no_numerics,
    priority: int = 0,
    features: Collection[str] = (),
    interpretable: bool = True,
    layout: Callable[[Any], str | None] = lambda desc: None,
    preparation: Preparation | None = None,
    configurations: Configurations = _one_way,
    table: KernelTable = TABLE,
) -> Callable[[Build], Build]:
    """Register the decorated function, which turns (descriptor, target) into launches, as a Triton row.

    The arguments are the fields of ``KernelRow``. Raises ``InvalidProblem`` if the name is taken.
    """

    def register(build: Build) -> Build:
        table.register(
            KernelRow(
                op=op,
                name=name,
                backend=BackendKind.TRITON,
                elements=frozenset(ElementKind.of(e) for e in elements),
                index_elements=frozenset(IndexElementKind.of(e) for e in index_elements),
                archs=frozenset(archs),
                version=version,
                guarantee=fact(guarantee),
                supports=fact(supports),
                workspace=fact(workspace),
                rank=fact(rank),
                numerics=numerics,
                priority=priority,
                features=frozenset(features),
                interpretable=interpretable,
                build=build,
                layout=layout,
                preparation=preparation,
                configurations=configurations,
            )
        )
        return build

    return register


def reference(
    *,
    op: str,
    elements: Collection[ElementKind | str],
    guarantee: Guarantee,
    index_elements: Collection[IndexElementKind | str] = (),
    version: int = 1,
    table: KernelTable = TABLE,
) -> Callable[[Compute], Compute]:
    """Register the decorated function as the op's reference.

    It takes (descriptor, inputs by operand name) and returns the outputs by name, computing in whatever element the
    inputs have: float64 as the tests' oracle, the operands' own (f32 for narrower floats) as the CPU backend. In-out
    operands are among the inputs, and must not be modified.
    """

    def register(compute: Compute) -> Compute:
        table.register(
            KernelRow(
                op=op,
                name="reference",
                backend=BackendKind.REFERENCE,
                elements=frozenset(ElementKind.of(e) for e in elements),
                index_elements=frozenset(IndexElementKind.of(e) for e in index_elements),
                archs=frozenset({ArchSku.CPU}),
                version=version,
                guarantee=guarantee,
                supports=_supported,
                workspace=_nothing,
                rank=lambda desc, target: 0.0,
                numerics=_no_numerics,
                compute=compute,
            )
        )
        return compute

    return register
