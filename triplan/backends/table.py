"""The kernel table: one entry for each kernel of each op. Users register entries, and their own ops, the same way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from triplan.backends.runtime.launch import Launch, overlapping, undeclared
from triplan.errors import InvalidProblem, shown
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


@dataclass(frozen=True)
class Preparation:
    """How an entry stores what it computes from the indices alone, so that any number of runs can use it.

    Attributes:
        size: exact bytes of storage.
        build: the launches that fill the storage. They read only the index operand.
        run: the launches of a run that uses the storage. Neither needs more workspace than an ordinary run.
    """

    size: Callable[[Any, Target], int]
    build: Build
    run: Build


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to launch an entry, where its cost model chooses among several. ``tp.tune`` times each.

    Attributes:
        cost: estimated microseconds.
        build: its launches.
        workspace: exact bytes of workspace.
    """

    cost: float
    build: Callable[[], Sequence[Launch]]
    workspace: int = 0


@dataclass(frozen=True)
class CheckRules:
    """What ``triplan.testing`` must know of an op to check its plans. The defaults are right for sums of products.

    Attributes:
        terms: sum|terms| by output, from the descriptor and the absolute values of the float64 inputs; outputs that it
            leaves out have none: their errors are relative to the result. None: what the reference gives for these
            values, which is right if the op is linear in its floating inputs.
        inputs: from the descriptor and the drawn CPU inputs by operand, those that take other values: statistics, which
            follow from other inputs, and inputs of a limited range. Host scalars, too.
        passes: the kinds of values of which no intermediate result leaves the element's range; None: all.
        integers: whether small integers must give exact results, up to one rounding into the element; None: if
            contributions are summed by index (``duplicates`` is ``sum``).
        signed: whether ``terms`` takes the values themselves. It then says the error of the results at these values, in
            units of ``ctol``; infinite where nothing is known, so that any result is right.
    """

    terms: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]] | None = None
    inputs: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]] | None = None
    passes: tuple[str, ...] | None = None
    integers: Callable[[Any], bool] | None = None
    signed: bool = False

    @staticmethod
    def no_terms(desc: Any, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """``terms`` of an op all of whose errors are relative to the results."""
        return {}


def _no_configurations(desc: Any, target: Target) -> Mapping[str, Configuration]:
    return {}


@dataclass(frozen=True)
class KernelRow:
    """An entry of the kernel table: one kernel that can compute an op.

    Attributes:
        op: the descriptor's ``op``.
        name: unique within the op. ``PlanPreference.kernel`` pins it, the SKU shows it.
        backend: triton or reference.
        elements: the elements it supports.
        index_elements: the index elements it supports; empty for an op without indices.
        archs: the architectures it runs on.
        version: incremented when, and only when, its bits may change.
        guarantee: the PrecisionGuarantee of every output, by operand name.
        supports: conditions beyond elements, architectures and preference.
        workspace: exact bytes of workspace.
        rank: estimated microseconds; select takes the smallest.
        priority: compared before ``rank`` if ``batch_invariant`` is required; the smallest wins. ``rank`` depends on
            batch extents, so it may then choose only among entries of one ``numerics_id``. Entries with different
            ids have different priorities.
        numerics: the ``numerics_id``; None if no equality of bits is claimed.
        features: what ``PlanPreference.exclude`` can rule out, such as ``"tma"``.
        interpretable: whether Triton's interpreter can run it.
        build: its launches (Triton backend).
        compute: plain torch from inputs to outputs (reference backend).
        layout: the SKU's layout, ``"packed"`` or ``"strided"``.
        preparation: how to prepare its indices; None if they cannot be prepared.
        configurations: the ways to launch it, by name; empty if there is only one. All keep the entry's guarantee. A
            ``batch_invariant`` entry has only one.
        checks: what tests of the op's plans must know (reference backend).
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
    configurations: Configurations = _no_configurations
    checks: CheckRules = CheckRules()

    def launches(self, desc: Any, target: Target) -> tuple[Launch, ...]:
        """What a run launches, as data; empty for the reference.

        Raises ``InvalidProblem`` if an argument is read from an operand that the descriptor does not declare.
        """
        if self.build is None:
            return ()
        found = overlapping(self.build(desc, target), target)
        declared = [o.name for o in desc.operands()]
        for launch in found:
            for argument, operand in undeclared(launch, declared):
                raise InvalidProblem(
                    f"{self!s}: argument {argument!r} of {launch.kernel.__name__} is read from operand {operand!r}; "
                    f"the operands of {self.op} are {', '.join(declared)}"
                )
        return found

    def guarantees(self, desc: Any) -> Mapping[str, PrecisionGuarantee]:
        """The guarantee of every output. Raises ``InvalidProblem`` if it names other outputs than the descriptor."""
        found, written = self.guarantee(desc), [o.name for o in desc.operands() if o.is_written]
        if set(found) != set(written):
            raise InvalidProblem(
                f"{self!s}: its guarantee is of {', '.join(found) or 'nothing'}; the outputs of {self.op} are "
                f"{', '.join(written)}"
            )
        return found

    def __str__(self) -> str:
        return f"kernel {self.name!r} of {self.op}"

    def configured(self, desc: Any, target: Target, name: str) -> KernelRow | None:
        """This entry, launched in its configuration ``name``; None if there is none of that name."""
        found = self.configurations(desc, target).get(name)
        if found is None:
            return None
        return replace(self, build=lambda desc, target: found.build(), workspace=lambda desc, target: found.workspace)


class KernelTable:
    """Entries by op, sorted by name, so that the order of registration never decides anything."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, KernelRow]] = {}
        self._lock = threading.Lock()
        #: Incremented by every registration. A cache of selections compares it.
        self.generation = 0

    def __repr__(self) -> str:
        return f"KernelTable({len(self.ops())} ops, {sum(map(len, self._entries.values()))} entries)"

    def register(self, row: KernelRow) -> None:
        """Add the entry ``row``. Raises ``InvalidProblem`` if its op already has an entry of that name."""
        with self._lock:
            entries = self._entries.get(row.op, {})
            if row.name in entries:
                raise InvalidProblem(f"op {shown(row.op)} already has a kernel named {shown(row.name)}")
            self._entries[row.op] = dict(sorted({**entries, row.name: row}.items()))
            self.generation += 1

    def unregister(self, op: str, name: str) -> None:
        """Remove an entry (for tests, and for users who replace one of ours). Raises ``KeyError``."""
        with self._lock:
            entries = dict(self._entries[op])
            del entries[name]
            self._entries[op] = entries
            self.generation += 1

    def features(self) -> frozenset[str]:
        """The features of all entries."""
        return frozenset().union(*(row.features for entries in self._entries.values() for row in entries.values()))

    def rows(self, op: str) -> tuple[KernelRow, ...]:
        """The entries of ``op``, sorted by name; empty for an unknown op."""
        return tuple(self._entries.get(op, {}).values())

    def ops(self) -> tuple[str, ...]:
        """Every op that has an entry, sorted."""
        return tuple(sorted(op for op, entries in self._entries.items() if entries))

    def reference(self, op: str) -> KernelRow:
        """The reference of ``op``, with which tests compare. Raises ``KeyError``."""
        for entry in self.rows(op):
            if entry.backend is BackendKind.REFERENCE:
                return entry
        raise KeyError(f"op {shown(op)} has no reference")


#: The table that select reads unless it is given another.
TABLE = KernelTable()


def _supported(desc: Any, target: Target) -> Support:
    return SUPPORTED


def _no_workspace(desc: Any, target: Target) -> int:
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
    workspace: Callable[[Any, Target], int] = _no_workspace,
    numerics: Callable[[Any], str | None] = _no_numerics,
    priority: int = 0,
    features: Collection[str] = (),
    interpretable: bool = True,
    layout: Callable[[Any], str | None] = lambda desc: None,
    preparation: Preparation | None = None,
    configurations: Configurations = _no_configurations,
    table: KernelTable = TABLE,
) -> Callable[[Build], Build]:
    """Register the decorated function, which turns (descriptor, target) into launches, as an entry of Triton's backend.

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
    checks: CheckRules = CheckRules(),
    table: KernelTable = TABLE,
) -> Callable[[Compute], Compute]:
    """Register the decorated function as the op's reference.

    It takes (descriptor, inputs by operand name) and returns the outputs by name. It computes in the inputs' element:
    float64 as the tests' oracle, the operands' own (f32 for narrower floats) as the CPU backend. In-out operands are
    among the inputs; it must not modify them. ``checks`` says what ``triplan.testing`` must know of an op that is not a
    sum of products.
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
                workspace=_no_workspace,
                rank=lambda desc, target: 0.0,
                numerics=_no_numerics,
                compute=compute,
                checks=checks,
            )
        )
        return compute

    return register
