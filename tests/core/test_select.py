"""Select: pure, complete in its refusals, indifferent to registration order."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from samples import SAMPLES, known

import triplan as tp
from triplan.backends.select import select

H200 = tp.Target.preset("h200")
LOOSE = tp.PlanPreference(deterministic=False)


@pytest.mark.parametrize("op", SAMPLES)
def test_select_is_pure(op: str) -> None:
    first = tp.plan(SAMPLES[op], target=H200)
    for _ in range(3):
        again = tp.plan(tp.parse_descriptor(SAMPLES[op].to_json()), target=tp.Target.preset("h200"))
        assert again.key == first.key
        assert again.sku() == first.sku()
        assert again.candidates == first.candidates
        assert again.workspace_size() == first.workspace_size()
        assert again.launches == first.launches


@pytest.mark.parametrize("op", SAMPLES)
def test_refusals_carry_every_candidate(op: str) -> None:
    entries = {e.name for e in tp.TABLE.rows(op)}
    for preference in (tp.PlanPreference(kernel="no_such"), tp.PlanPreference(backend=tp.BackendKind.REFERENCE)):
        with pytest.raises(tp.Unsupported) as info:
            tp.plan(SAMPLES[op], preference=preference, target=H200)
        assert {c.kernel for c in info.value.candidates} == entries
        assert all(c.reason and not c.chosen and c.cost_us is None for c in info.value.candidates)
        for entry in entries:
            assert entry in str(info.value)
    assert isinstance(info.value, NotImplementedError)
    again = pickle.loads(pickle.dumps(info.value))
    assert again.candidates == info.value.candidates


@pytest.mark.parametrize("op", SAMPLES)
def test_every_candidate_is_named_once_and_one_is_chosen(op: str) -> None:
    plan = tp.plan(SAMPLES[op], target=H200)
    assert sorted(c.kernel for c in plan.candidates) == sorted(e.name for e in tp.TABLE.rows(op))
    assert [c.chosen for c in plan.candidates] == [True, *[False] * (len(plan.candidates) - 1)]
    text = plan.explain()
    for c in plan.candidates:
        assert c.kernel in text
        assert c.reason in text
    assert plan.sku().id in text


def test_registration_order_does_not_matter() -> None:
    entries = tp.TABLE.rows("gather_backward")
    desc = SAMPLES["gather_backward"]
    answers = set()
    for order in (entries, entries[::-1]):
        table = tp.KernelTable()
        for entry in order:
            table.register(replace(entry, rank=lambda desc, target: 1.0))  # all tie
        chosen, candidates = select(desc, LOOSE, H200, table=table)
        answers.add((chosen.name, tuple(c.kernel for c in candidates)))
    assert len(answers) == 1


def test_no_entry_may_be_registered_twice() -> None:
    with pytest.raises(tp.InvalidProblem, match="already"):
        tp.TABLE.register(tp.TABLE.rows("gather")[0])


def test_tuning_reorders_and_never_invents() -> None:
    desc = SAMPLES["gather"]
    problem = tp.TuningTable.problem(desc.key, H200)
    assert tp.plan(desc, target=H200).sku().kernel == "elements"
    tuning = tp.TuningTable.of({problem: {"elements": 9e9, "no_such": 0.0}})
    assert tp.plan(desc, target=H200, tuning=tuning).sku().kernel == "rows"
    other = tp.TuningTable.of({tp.TuningTable.problem(desc.key, tp.Target.preset("a100")): {"elements": 9e9}})
    assert tp.plan(desc, target=H200, tuning=other).sku().kernel == "elements"
    assert tuning.digest != other.digest


def test_preferences_are_requirements() -> None:
    desc = SAMPLES["index_add"]
    for word in ("deterministic", "batch_invariant"):
        assert getattr(tp.plan(desc, preference=LOOSE.replace(**{word: True}), target=H200).precision_guarantee(), word)
    with pytest.raises(tp.Unsupported, match="order_invariant"):
        tp.plan(desc, preference=LOOSE.replace(order_invariant=True, kernel="ordered_sum"), target=H200)
    pinned = LOOSE.replace(kernel="atomic_f32")
    half = desc.replace(element="f16")
    needed = tp.plan(half, preference=pinned, target=H200).workspace_size()
    assert needed == 9 * 32 * 4
    tp.plan(half, preference=pinned.replace(max_workspace_bytes=needed), target=H200)
    with pytest.raises(tp.Unsupported, match=str(needed)):
        tp.plan(half, preference=pinned.replace(max_workspace_bytes=needed - 1), target=H200)


def test_a_configuration_with_less_workspace_is_taken_where_the_cheapest_needs_too_much() -> None:
    desc = tp.GemmDescriptor(m=16, n=512, k=1 << 16, element="f16")
    (entry,) = (e for e in tp.TABLE.rows("gemm") if e.name == "split_k")
    ways = entry.configurations(desc, H200)
    most = tp.plan(desc, target=H200, kernel="split_k").workspace_size() - 1
    plan = tp.plan(desc, target=H200, kernel="split_k", max_workspace_bytes=most)
    cost, size = min((way.cost, way.workspace) for way in ways.values() if way.workspace <= most)
    assert (plan.candidates[0].cost_us, plan.workspace_size()) == (cost, size)
    least = min(way.workspace for way in ways.values())
    with pytest.raises(tp.Unsupported, match=f"at most {least - 1} are allowed"):
        tp.plan(desc, target=H200, kernel="split_k", max_workspace_bytes=least - 1)


def test_excluded_features_are_never_used() -> None:
    table = tp.KernelTable()
    entry = tp.TABLE.rows("gather")[0]
    table.register(replace(entry, name="by_tma", features=frozenset({"tma"})))
    select(SAMPLES["gather"], LOOSE, H200, table=table)
    with pytest.raises(tp.Unsupported, match="tma"):
        select(SAMPLES["gather"], LOOSE.replace(exclude=("tma",)), H200, table=table)


def test_determinism_follows_torch_when_not_said() -> None:
    desc = SAMPLES["index_add"]
    assert not tp.plan(desc, target=H200).precision_guarantee().deterministic
    torch.use_deterministic_algorithms(True)
    try:
        plan = tp.plan(desc, target=H200)
        assert plan.precision_guarantee().deterministic
        assert plan.preference.deterministic is True
        assert not tp.plan(desc, preference=LOOSE, target=H200).precision_guarantee().deterministic
    finally:
        torch.use_deterministic_algorithms(False)
    assert plan.key != tp.plan(desc, target=H200).key


def test_targets_take_their_backends() -> None:
    desc = SAMPLES["gather"]
    assert tp.plan(desc, target=tp.Target.cpu()).sku().backend is tp.BackendKind.REFERENCE
    assert tp.plan(desc, target=tp.Target.cpu(interpret=True)).sku().backend is tp.BackendKind.TRITON
    for name in ("a100", "h100", "h200"):
        assert tp.plan(desc, target=tp.Target.preset(name)).sku().arch is tp.Target.preset(name).arch


def test_unknown_elements_are_refused_with_what_is_taken() -> None:
    with pytest.raises(tp.Unsupported, match="element bool; takes bf16"):
        tp.plan(SAMPLES["index_add"].replace(element="bool"), target=H200)
    with pytest.raises(tp.Unsupported, match="fp8e4m3"):
        tp.plan(SAMPLES["gather"].replace(element="fp8e4m3"), target=H200)


def test_a_plan_takes_its_own_descriptor_only() -> None:
    with pytest.raises(tp.InvalidProblem, match="GatherDescriptor"):
        tp.GatherPlan.select(SAMPLES["scatter"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="select"):
        tp.GatherPlan()


@pytest.mark.parametrize("op", SAMPLES)
def test_where_batch_invariance_is_required_rank_chooses_within_one_numerics(op: str) -> None:
    """Rank sees batch extents, so entries of equal priority that promise batch invariance must give the same bits."""
    for element in ("f16", "bf16", "f32", "f64", "i32"):
        # Sums over the batch, as gradients of weights and reduced losses are, depend on it whatever the kernel.
        options = {"reduction": "none", "gradient": False, "wants_db": False, "wants_dbias": False}
        bare = known(SAMPLES[op], weight=False, bias=False, **options)
        for options in ({"accumulate": True}, {"accumulate": False}) if op == "index_put" else (bare,):
            if not any(element in entry.elements for entry in tp.TABLE.rows(op)):
                continue
            desc = SAMPLES[op].replace(**known(SAMPLES[op], element=element), **options)
            found: dict[int, set[str | None]] = {}
            for entry in tp.TABLE.rows(op):
                if entry.backend is not tp.BackendKind.TRITON or desc.element not in entry.elements:
                    continue
                takes = entry.supports(desc, tp.Target.preset("h200"))
                if takes and all(g.batch_invariant for g in entry.guarantee(desc).values()):
                    found.setdefault(entry.priority, set()).add(entry.numerics(desc))
            assert found or not any(o.batch_axes for o in desc.operands())
            assert all(len(numerics) == 1 and None not in numerics for numerics in found.values()), found
