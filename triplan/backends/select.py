"""Select: a pure function of (descriptor, preference, target, tuning table) to one row of the kernel table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from triplan.backends.table import TABLE, KernelRow, KernelTable
from triplan.backends.tuning import Measured, TuningTable
from triplan.descriptors import Descriptor
from triplan.errors import Unsupported
from triplan.sku import BackendKind, Candidate, KernelSku, PlanPreference, PrecisionGuarantee, Target


def canonical_key(desc: Descriptor, preference: PlanPreference, target: Target, tuning: TuningTable | None) -> str:
    """The one string that identifies a selection. ``preference`` must be resolved."""
    return "|".join((desc.key, preference.key, target.key, tuning.digest if tuning is not None else "-"))


def select(
    desc: Descriptor,
    preference: PlanPreference,
    target: Target,
    tuning: TuningTable | None = None,
    table: KernelTable = TABLE,
) -> tuple[KernelRow, tuple[Candidate, ...]]:
    """The cheapest row that meets every requirement, and all candidates with their verdicts.

    Raises ``Unsupported``, carrying the candidates, where nothing is left.
    """
    rows = table.rows(desc.op)
    measured = consult(desc, preference, target, tuning, rows).times
    left: list[tuple[int, float, str, KernelRow, str]] = []
    refused: list[Candidate] = []
    for row in rows:
        reason = _refusal(row, desc, preference, target)
        if reason:
            refused.append(Candidate(row.name, reason))
            continue
        priority = row.priority if preference.batch_invariant else 0
        if measured:
            row, cost, way = _fastest(row, desc, preference, target, measured)
        else:
            cost, way = row.rank(desc, target), ""
        left.append((priority, cost, row.name, row, way))
    if not left:
        raise Unsupported(
            f"no kernel for {desc.op} meets the request: {desc.key} with {preference.key} on {target.key}", refused
        )
    left.sort(key=lambda entry: entry[:3])  # a tie goes to the name, never to registration order
    chosen = left[0][3]
    verdicts = [
        Candidate(
            name,
            ("chosen: the cheapest that meets the request" if row is chosen else "dearer") + way,
            cost,
            row is chosen,
        )
        for _, cost, name, row, way in left
    ]
    return chosen, (*verdicts, *refused)


def consult(
    desc: Descriptor,
    preference: PlanPreference,
    target: Target,
    tuning: TuningTable | None,
    rows: Sequence[KernelRow],
) -> Measured:
    """The measured times that select may use for ``desc``, or why there are none."""
    if tuning is None:
        return Measured({}, "none was given")
    if preference.batch_invariant:
        # Times are of one batch size, and what is chosen must be the same for all.
        return Measured({}, "not consulted where batch_invariant is required")
    return tuning.measured(desc.key, target, rows)


def unknown_times(desc: Descriptor, target: Target, times: Mapping[str, float], rows: Sequence[KernelRow]) -> list[str]:
    """Those of ``times`` that are of no row, or of a configuration that their row has not."""
    named = {row.name: row for row in rows}
    found = []
    for name in sorted(times):
        row, way = named.get(name.partition(" ")[0]), name.partition(" ")[2]
        if row is None or (way and row.supports(desc, target) and row.configured(desc, target, way) is None):
            found.append(name)
    return found


def _fastest(
    row: KernelRow, desc: Descriptor, preference: PlanPreference, target: Target, measured: Mapping[str, float]
) -> tuple[KernelRow, float, str]:
    """``row`` as it was measured to be fastest, the time, and in words how it was launched."""
    most = preference.max_workspace_bytes
    own = sorted((us, name) for name, us in measured.items() if name.partition(" ")[0] == row.name)
    for us, name in own:
        configuration = name.partition(" ")[2]
        found = row.configured(desc, target, configuration) if configuration else row
        if found is not None and (most is None or found.workspace(desc, target) <= most):
            return found, us, f" (measured{', ' * bool(configuration)}{configuration})"
    return row, row.rank(desc, target), ""


def _refusal(row: KernelRow, desc: Descriptor, preference: PlanPreference, target: Target) -> str:
    """Why ``row`` cannot answer; empty if it can."""
    if preference.kernel is not None and row.name != preference.kernel:
        return f"kernel {preference.kernel!r} is pinned"
    if preference.backend is not None and row.backend is not preference.backend:
        return f"backend is {row.backend}; {preference.backend} is required"
    if target.interpret:
        if row.backend is not BackendKind.TRITON:
            return "the interpreter runs Triton rows"
        if not row.interpretable:
            return "Triton's interpreter cannot run it"
    elif target.arch not in row.archs:
        return f"runs on {', '.join(sorted(row.archs))}; the target is {target.arch}"
    element = getattr(desc, "element", None)
    if row.elements and element not in row.elements:
        return f"element {element}; takes {', '.join(sorted(row.elements))}"
    index_element = getattr(desc, "index_element", None)
    if row.index_elements and index_element not in row.index_elements:
        return f"index element {index_element}; takes {', '.join(sorted(row.index_elements))}"
    if banned := row.features.intersection(preference.exclude):
        return f"uses {', '.join(sorted(banned))}, which is excluded"
    if not (support := row.supports(desc, target)):
        return support.reason
    if reason := _broken_requirement(row, desc, preference):
        return reason
    if preference.max_workspace_bytes is not None:
        needed = row.workspace(desc, target)
        if needed > preference.max_workspace_bytes:
            return f"needs {needed} bytes of workspace; at most {preference.max_workspace_bytes} are allowed"
    return ""


def _broken_requirement(row: KernelRow, desc: Descriptor, preference: PlanPreference) -> str:
    wanted = [w for w in ("deterministic", "batch_invariant", "order_invariant") if getattr(preference, w)]
    if wanted:
        guarantees = row.guarantee(desc)
        for word in wanted:
            for output, g in guarantees.items():
                if not getattr(g, word):
                    return f"{output} is not {word}, which is required"
    return ""


def sku_of(row: KernelRow, desc: Descriptor, target: Target) -> KernelSku:
    """The identity of ``row`` as the answer to ``desc`` on ``target``."""
    return KernelSku(
        category=desc.category,
        op=desc.op,
        element=getattr(desc, "element"),  # noqa: B009 (a user's descriptor declares it)
        aux_element=getattr(desc, "aux_element", None),
        index_element=getattr(desc, "index_element", None),
        layout=row.layout(desc),
        epilogue=getattr(desc, "epilogue", None),
        arch=target.arch,
        backend=row.backend,
        kernel=row.name,
        version=row.version,
        precision_guarantee=PrecisionGuarantee.weakest(row.guarantee(desc).values()),
        numerics_id=row.numerics(desc),
    )
