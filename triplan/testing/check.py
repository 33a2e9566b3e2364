"""check_plan: run a plan on generated args and test its whole guarantee."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from triplan.backends.table import TABLE, CheckRules
from triplan.facade import Plan
from triplan.facade.tables import TablePlan
from triplan.sku import Duplicates, ElementKind, PrecisionGuarantee
from triplan.testing.args import PlacedArgs, args_for
from triplan.testing.duplicates import can_be_distinct, check_any
from triplan.testing.oracle import Outputs, bit_oracle, judge, magnitudes, moved_bits, oracle
from triplan.testing.values import Indices, Values

__all__ = ["CheckReport", "check_plan"]


@dataclass(frozen=True)
class CheckReport:
    """What a check did, so that a caller can see that it tested something.

    Attributes:
        runs: the number of runs of the plan.
        compared: output elements compared with the reference.
        exact: output elements that had to be equal in every bit.
        repeated: output elements whose bits were compared between runs.
    """

    runs: int
    compared: int
    exact: int
    repeated: int


def check_plan(
    plan: Plan[Any, Any],
    *,
    device: torch.device | str | None = None,
    seed: int = 0,
    runs: int = 3,
    passes: Sequence[Values] | None = None,
    indices: Indices | None = None,
    given: Mapping[str, torch.Tensor] | None = None,
) -> CheckReport:
    """Run ``plan`` on generated args and compare with the float64 reference of its op. Raises ``AssertionError``.

    There is one pass for each kind of values. A pass builds new args and runs the plan on them ``runs`` times, with
    garbage in the workspace and a different poison in the outputs each time. It checks that

    - every output is within the tolerance of the plan's own ``precision_guarantee``; equal in every bit where the
      guarantee says that elements are only moved; exact where all sums are of small integers;
    - a deterministic output has the same bits every time, whatever the outputs and the workspace held before;
    - no input, no canary and no gap between elements of a strided output changed;
    - torch's version counters of the outputs increased, so that autograd notices the write.

    Args:
        plan: any plan; its op needs a reference (``@triplan.reference``), whose ``CheckRules`` say what follows from
            what among the inputs, and what sum|terms| is.
        device: by default the current device of the plan's target.
        seed: for everything that is drawn.
        runs: runs per pass; at least 2 to test determinism.
        passes: kinds of values; the default depends on the op's rules and the guarantee.
        indices: as ``args_for`` takes it.
        given: values for some operands instead of drawn ones, as ``args_for`` takes them.
    """
    where = torch.device(plan.target.device_type if device is None else device)
    guarantees, rules = _guarantees(plan), TABLE.reference(plan.descriptor.op).checks
    total = CheckReport(0, 0, 0, 0)
    kinds: Sequence[Any] = passes or rules.passes or _default_passes(guarantees.values())
    for number, kind in enumerate(kinds):
        how: list[Indices | None] = [indices]
        if indices is None and _any_write_stays(guarantees.values()) and can_be_distinct(plan.descriptor):
            how.append("distinct")
        for turn, choice in enumerate(how):
            placed = args_for(
                plan.descriptor, where, seed + 1000 * number + 500 * turn, values=kind, indices=choice, given=given
            )
            try:
                part = _check_pass(plan, placed, guarantees, rules, kind, runs, choice)
            except AssertionError as e:
                raise AssertionError(
                    f"{e}\n  in {plan.sku().id}, pass {kind!r}, indices {choice or 'by default'}, seed {seed}\n"
                    f"  on {plan.descriptor!r}"
                ) from None
            total = CheckReport(
                *(getattr(total, f) + getattr(part, f) for f in ("runs", "compared", "exact", "repeated"))
            )
    return total


def _guarantees(plan: Plan[Any, Any]) -> dict[str, PrecisionGuarantee]:
    return {o.name: plan.precision_guarantee(o.name) for o in plan.descriptor.operands() if o.is_written}


def _default_passes(guarantees: Iterable[PrecisionGuarantee]) -> tuple[Values, ...]:
    if all(moved_bits(g) for g in guarantees):
        return ("bits", "unit")
    return ("unit", "wide", "special", "integers")


def _any_write_stays(guarantees: Iterable[PrecisionGuarantee]) -> bool:
    return any(g.duplicates is Duplicates.ANY for g in guarantees)


def _check_pass(
    plan: Plan[Any, Any],
    placed: PlacedArgs,
    guarantees: dict[str, PrecisionGuarantee],
    rules: CheckRules,
    kind: str,
    runs: int,
    indices: Indices | None,
) -> CheckReport:
    desc, before = plan.descriptor, placed.host()
    wide = oracle(desc, before)
    native = bit_oracle(desc, before) if any(moved_bits(g) for g in guarantees.values()) else {}
    mags: Outputs = {}
    if any(g.tolerance.ctol for g in guarantees.values()):
        mags = magnitudes(desc, before)
    first: dict[str, torch.Tensor] = {}
    compared = exact = repeated = 0
    for run in range(runs):
        placed.reset(run)
        got = _run(plan, placed, run)
        for name, g in guarantees.items():
            out = got[name]
            if g.duplicates is Duplicates.ANY and indices != "distinct":
                check_any(desc, before, name, out, g)
                compared, exact = compared + out.numel(), exact + out.numel()
            else:
                ref = _checked(desc, native if moved_bits(g) else wide, name)
                summed = g.duplicates is Duplicates.SUM if rules.integers is None else rules.integers(desc)
                verdict = judge(out, ref, mags.get(name), g, integers=summed and kind == "integers")
                if bool(verdict.wrong.any()):
                    raise AssertionError(verdict.describe(name, out, ref) + f"\n  run {run}")
                compared, exact = compared + out.numel(), exact + verdict.exact
            bits = _bits(out)
            if run and g.deterministic:
                _same_bits(name, first[name], bits, out, run)
                repeated += out.numel()
            first.setdefault(name, bits)
    return CheckReport(runs, compared, exact, repeated)


def _checked(desc: Any, outputs: Outputs, name: str) -> torch.Tensor:
    if name not in outputs:
        raise AssertionError(f"the reference of {desc.op} gives no {name}; it gives {', '.join(outputs)}")
    ref, shape = outputs[name], desc.operand(name).shape
    if tuple(ref.shape) != shape:
        raise AssertionError(f"the reference of {desc.op} gives {name} the shape {tuple(ref.shape)}, not {shape}")
    return ref


def listed_by_turns(plan: Plan[Any, Any], args: Any, run: int) -> Any:
    """``args``, whose whole vectors are lists of views in every other run. (Lists of no tensors have no device.)"""
    return plan._split(args) if isinstance(plan, TablePlan) and plan._sizes and run % 2 == 0 else args


def _run(plan: Plan[Any, Any], placed: PlacedArgs, run: int) -> dict[str, torch.Tensor]:
    """The outputs of one run as packed CPU tensors."""
    written = [o.name for o in plan.descriptor.operands() if o.is_written]
    workspace = placed.workspace(plan)
    support = plan.can_implement(placed.args)
    if not support:
        raise AssertionError(f"the plan refuses args that its descriptor describes: {support.reason}")
    versions = {name: getattr(placed.args, name)._version for name in written}
    plan.run(listed_by_turns(plan, placed.args, run), workspace)
    if placed.device.type == "cuda":
        torch.cuda.synchronize(placed.device)
    for name in written:
        if getattr(placed.args, name)._version == versions[name]:
            raise AssertionError(f"{name}: written, but its version counter did not grow: autograd would not notice")
    placed.assert_intact()
    after = placed.host()
    return {name: getattr(after, name) for name in written}


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(ElementKind.of(t.dtype).bits.torch)


def _same_bits(name: str, first: torch.Tensor, bits: torch.Tensor, out: torch.Tensor, run: int) -> None:
    differs = (first != bits).nonzero()
    if len(differs):
        at = tuple(int(i) for i in differs[0])
        raise AssertionError(
            f"{name}[{', '.join(map(str, at))}]: run {run} gave {out[at].item()!r} (bits {int(bits[at])}), run 0 bits "
            f"{int(first[at])}; the guarantee says deterministic, and only outputs' and workspace's former contents "
            f"differed; {len(differs)} elements differ"
        )
