"""Select: a pure function from (descriptor, preference, target, tuning table) to one entry of the kernel table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from triplan.backends.fitted import cost_us
from triplan.backends.table import TABLE, KernelRow, KernelTable
from triplan.backends.tuning import Measured, TuningTable
from triplan.descriptors import Descriptor
from triplan.errors import InvalidProblem, Unsupported, shown
from triplan.sku import (
    SUPPORTED,
    BackendKind,
    Candidate,
    KernelSku,
    PlanPreference,
    PrecisionGuarantee,
    Support,
    Target,
)
from triplan.sku.facts import fact

#: Problems with fewer elements have no grid of 2**31 programs, so their launches are not built to find out.
_MANY_ELEMENTS = 2**31


def canonical_key(desc: Descriptor, preference: PlanPreference, target: Target, tuning: TuningTable | None) -> str:
    """The string that identifies a selection. ``preference`` must be resolved."""
    return "|".join((desc.key, preference.key, target.key, tuning.digest if tuning is not None else "-"))


def select(
    desc: Descriptor,
    preference: PlanPreference,
    target: Target,
    tuning: TuningTable | None = None,
    table: KernelTable = TABLE,
) -> tuple[KernelRow, tuple[Candidate, ...]]:
    """The cheapest entry that meets every requirement, and all candidates with their verdicts.

    Where ``batch_invariant`` is required, the priority of entries comes before their cost.

    Raises ``Unsupported``, which carries the candidates, if no entry meets them, and ``InvalidProblem`` if a feature is
    excluded that no entry has.
    """
    entries = table.rows(desc.op)
    required = [w for w in ("deterministic", "batch_invariant", "order_invariant") if getattr(preference, w)]
    if preference.exclude:
        _check_features(preference.exclude, table)
    measured = consult(desc, preference, target, tuning, entries).times
    accepted: list[tuple[int, float, str, KernelRow, str]] = []
    refused: list[Candidate] = []
    for entry in entries:
        reason = _refusal(entry, desc, preference, target, required)
        if reason:
            refused.append(Candidate(entry.name, reason))
            continue
        priority = entry.priority if preference.batch_invariant else 0
        found = _fastest(entry, desc, preference, target, measured) or _within(entry, desc, preference, target)
        if found is None:
            needed, most = entry.workspace(desc, target), preference.max_workspace_bytes
            reason = f"needs {needed} bytes of workspace; at most {most} are allowed"
            refused.append(Candidate(entry.name, reason))
            continue
        entry, cost, way = found
        accepted.append((priority, cost, entry.name, entry, way))
    if not accepted:
        names = [entry.name for entry in entries]
        pinned = preference.kernel
        missing = "" if pinned is None or pinned in names else f"{desc.op} has no kernel {shown(pinned)}: "
        raise Unsupported(
            f"{missing}no kernel for {desc.op} meets the request: {desc.key} with {preference.key:.300} on "
            f"{target.key}",
            refused,
        )
    accepted.sort(key=lambda row: row[:3])  # the name breaks a tie, never the order of registration
    chosen = accepted[0][3]
    verdicts = [
        Candidate(
            name,
            ("chosen: the cheapest that meets the request" if entry is chosen else "slower") + way,
            cost,
            entry is chosen,
        )
        for _, cost, name, entry, way in accepted
    ]
    return chosen, (*verdicts, *refused)


def _check_features(excluded: Sequence[str], table: KernelTable) -> None:
    """Raise ``InvalidProblem`` for a feature that no kernel has."""
    if unknown := sorted(set(excluded) - (known := table.features())):
        raise InvalidProblem(f"exclude = {shown(unknown)}: the features of kernels are {', '.join(sorted(known))}")


def consult(
    desc: Descriptor,
    preference: PlanPreference,
    target: Target,
    tuning: TuningTable | None,
    entries: Sequence[KernelRow],
) -> Measured:
    """The measured times that select may use for ``desc``, or the reason why there are none."""
    if tuning is None:
        return Measured({}, "none was given")
    if preference.batch_invariant:
        # Times are measured at one batch size; the choice must be the same at every batch size.
        return Measured({}, "not consulted where batch_invariant is required")
    return tuning.measured(desc.key, target, entries)


def unknown_times(
    desc: Descriptor, target: Target, times: Mapping[str, float], entries: Sequence[KernelRow]
) -> list[str]:
    """The names in ``times`` that match no entry, or no configuration of their entry."""
    named = {entry.name: entry for entry in entries}
    found = []
    for name in sorted(times):
        entry, way = named.get(name.partition(" ")[0]), name.partition(" ")[2]
        if entry is None or (way and entry.supports(desc, target) and entry.configured(desc, target, way) is None):
            found.append(name)
    return found


def _fastest(
    entry: KernelRow, desc: Descriptor, preference: PlanPreference, target: Target, measured: Mapping[str, float]
) -> tuple[KernelRow, float, str] | None:
    """``entry`` in its fastest measured configuration that has workspace, the time, and a description of the
    configuration; None if none was measured."""
    most = preference.max_workspace_bytes
    own = sorted((us, name) for name, us in measured.items() if name.partition(" ")[0] == entry.name)
    for us, name in own:
        configuration = name.partition(" ")[2]
        found = entry.configured(desc, target, configuration) if configuration else entry
        if found is not None and (most is None or found.workspace(desc, target) <= most):
            return found, us, f" (measured{', ' * bool(configuration)}{configuration})"
    return None


def _within(
    entry: KernelRow, desc: Descriptor, preference: PlanPreference, target: Target
) -> tuple[KernelRow, float, str] | None:
    """``entry``, or the configuration of the lowest estimate if only others have enough workspace; the estimate, and a
    description of the configuration. None if all need more workspace."""
    most = preference.max_workspace_bytes
    if most is None or entry.workspace(desc, target) <= most:
        return entry, cost_us(entry, desc, target), ""
    ways = entry.configurations(desc, target).items()
    cost, name = min(((way.cost, name) for name, way in ways if way.workspace <= most), default=(0.0, ""))
    found = entry.configured(desc, target, name)
    return None if found is None else (found, cost, f" ({name}, for its workspace)")


def _refusal(
    entry: KernelRow, desc: Descriptor, preference: PlanPreference, target: Target, required: Sequence[str]
) -> str:
    """Why ``entry`` cannot be chosen; empty if it can. ``required``: the words of a guarantee that it must give."""
    if preference.kernel is not None and entry.name != preference.kernel:
        return f"kernel {shown(preference.kernel, 60)} is pinned"
    if preference.backend is not None and entry.backend is not preference.backend:
        return f"backend is {entry.backend}; {preference.backend} is required"
    if target.interpret:
        if entry.backend is not BackendKind.TRITON:
            return "the interpreter runs Triton kernels"
        if not entry.interpretable:
            return "Triton's interpreter cannot run it"
    elif target.arch not in entry.archs:
        return f"runs on {', '.join(sorted(entry.archs))}; the target is {target.arch}"
    element = getattr(desc, "element", None)
    if entry.elements and element not in entry.elements:
        return f"element {element}; takes {', '.join(sorted(entry.elements))}"
    if entry.index_elements and (index_element := getattr(desc, "index_element", None)) not in entry.index_elements:
        return f"index element {index_element}; takes {', '.join(sorted(entry.index_elements))}"
    if excluded := entry.features.intersection(preference.exclude):
        return f"uses {', '.join(sorted(excluded))}, which is excluded"
    support = entry.supports(desc, target)
    if support is not SUPPORTED:
        if not isinstance(support, Support):
            raise InvalidProblem(f"{entry!s}: supports() returned {support!r}; it must return a triplan.Support")
        if not support:
            return support.reason
    if required and (reason := _broken_requirement(entry, desc, required)):
        return reason
    if _has_many_elements(desc):
        try:
            entry.launches(desc, target)
        except Unsupported as e:  # a grid that CUDA does not take
            return e.message
    return ""


@fact
def _has_many_elements(desc: Descriptor) -> bool:
    return any(math.prod(o.shape) >= _MANY_ELEMENTS for o in desc.operands())


def _broken_requirement(entry: KernelRow, desc: Descriptor, required: Sequence[str]) -> str:
    guarantees = entry.guarantee(desc)
    for word in required:
        for output, g in guarantees.items():
            if not getattr(g, word):
                return f"{output} is not {word}, which is required"
    return ""


def sku_of(entry: KernelRow, desc: Descriptor, target: Target) -> KernelSku:
    """The identity of ``entry`` as the kernel of ``desc`` on ``target``."""
    return KernelSku(
        category=desc.category,
        op=desc.op,
        element=getattr(desc, "element"),  # noqa: B009 (a user's descriptor declares it)
        aux_element=getattr(desc, "aux_element", None),
        index_element=getattr(desc, "index_element", None),
        layout=entry.layout(desc),
        epilogue=getattr(desc, "epilogue", None),
        arch=target.arch,
        backend=entry.backend,
        kernel=entry.name,
        version=entry.version,
        precision_guarantee=PrecisionGuarantee.weakest(entry.guarantees(desc).values()),
        numerics_id=entry.numerics(desc),
    )
