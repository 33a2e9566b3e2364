"""Tuning tables: what they change, when they are a miss and how that is said; tune with a clock of its own."""

from __future__ import annotations

import importlib
import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.gemm import COLUMN, ROW
from samples import SAMPLES

import triplan as tp
from bench.stub import launch_stubbed
from triplan.backends.runtime.launch import overlapping
from triplan.backends.storing import software

tuning: Any = importlib.import_module("triplan.facade.tune")  # the package has a function of that name
CPU, H200 = torch.device("cpu"), tp.Target.preset("h200")
GEMM = tp.GemmDescriptor(m=16, n=1024, k=4096, element="f16", layouts={"b": COLUMN})
TILES = next(e for e in tp.TABLE.rows("gemm") if e.name == "tiles")
#: One matrix for all of a batch.
ONE_MATRIX = tp.Layout.strided(unit_axis=1, zero_axes=[0], stride_multiple=8, alignment=16)
INVARIANT = tp.PlanPreference(batch_invariant=True)


def table(desc: tp.Descriptor, times: dict[str, float], **facts: Any) -> tp.TuningTable:
    return tp.TuningTable.of({tp.TuningTable.problem(desc.key, H200): times}, **facts)


def configurations(entry: str) -> Any:
    """The ways of an entry to compute GEMM, by name."""
    return next(e for e in tp.TABLE.rows("gemm") if e.name == entry).configurations(GEMM, H200)


# --- what select makes of a table ---


def test_a_measured_configuration_is_what_runs() -> None:
    ways = configurations("split_k")
    bare = tp.plan(GEMM, target=H200)
    name = next(n for n, way in ways.items() if way.workspace not in (0, bare.workspace_size()))
    plan = tp.plan(GEMM, target=H200, tuning=table(GEMM, {"tiles": 5.0, "split_k": 4.0, f"split_k {name}": 3.0}))
    assert plan.sku().kernel == "split_k"
    assert plan.workspace_size() == ways[name].workspace
    assert plan.launches == overlapping(ways[name].build(), H200) != bare.launches
    assert plan.candidates[0].cost_us == 3.0
    assert name in plan.explain()
    assert "3 times" in plan.explain()
    assert plan.sku() == tp.plan(GEMM, target=H200, preference=tp.PlanPreference(kernel="split_k")).sku()


def test_a_configuration_that_is_gone_or_too_large_is_passed_over() -> None:
    ways = configurations("split_k")
    large = max(ways, key=lambda n: ways[n].workspace)
    small = min(ways, key=lambda n: ways[n].workspace)
    times = {"split_k gone": 0.1, f"split_k {large}": 0.2, f"split_k {small}": 0.3}
    most = tp.PlanPreference(kernel="split_k", max_workspace_bytes=ways[large].workspace - 1)
    plan = tp.plan(GEMM, target=H200, tuning=table(GEMM, times), preference=most)
    assert plan.workspace_size() == ways[small].workspace
    assert plan.candidates[0].cost_us == 0.3
    assert "2 times; no such kernel or configuration: split_k gone" in plan.explain()
    bare = tp.plan(GEMM, target=H200)
    unknown = tp.plan(GEMM, target=H200, tuning=table(GEMM, {"no_such_row": 0.1, "no_such_row way": 0.2}))
    assert unknown.launches == bare.launches
    assert "0 times; no such kernel or configuration: no_such_row, no_such_row way" in unknown.explain()


@pytest.mark.parametrize("us", [float("nan"), float("inf"), -1.0])
def test_times_are_finite_and_not_negative(us: float, tmp_path: Path) -> None:
    with pytest.raises(tp.InvalidProblem, match="times"):
        table(GEMM, {"tiles": us})
    path = tmp_path / "tuning.json"
    table(GEMM, {"tiles": 0.5}).save(path)
    path.write_text(path.read_text().replace("0.5", json.dumps(us)))
    with pytest.raises(tp.InvalidProblem, match=r"tuning\.json"):
        tp.TuningTable.load(path)


def test_batch_invariant_plans_do_not_see_the_table() -> None:
    """Its times are of one batch size: a row that won at one m would lose at another, and bits with it."""
    bare = tp.plan(GEMM, target=H200, preference=INVARIANT)
    times = {c.kernel: 1000.0 - 900 * (c.kernel == "tiles") for c in bare.candidates}
    plan = tp.plan(GEMM, target=H200, preference=INVARIANT, tuning=table(GEMM, times))
    assert (plan.sku(), plan.launches, plan.candidates) == (bare.sku(), bare.launches, bare.candidates)
    assert plan.key != bare.key
    assert "not consulted where batch_invariant is required" in plan.explain()


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"software": {**software(), "triton": "0.1"}}, ("triton 0.1", f"here {software()['triton']}")),
        ({"software": {**software(), "torch": "0.2"}}, ("torch 0.2",)),
        ({"software": {**software(), "ptxas": "13"}}, ("ptxas 13", "here none")),
        ({"kernels": {"gemm/tiles": 99}}, ("version 99 of tiles", f"version {TILES.version}")),
    ],
)
def test_a_stale_table_is_a_miss_with_its_reason(facts: dict[str, Any], words: tuple[str, ...]) -> None:
    good = table(GEMM, {"tiles": 0.5}, software=software(), kernels={"gemm/tiles": TILES.version})
    assert tp.plan(GEMM, target=H200, tuning=good).sku().kernel == "tiles"
    bare = tp.plan(GEMM, target=H200)
    assert bare.sku().kernel != "tiles"
    plan = tp.plan(GEMM, target=H200, tuning=table(GEMM, {"tiles": 0.5}, **facts))
    assert (plan.sku(), plan.candidates) == (bare.sku(), bare.candidates)
    (line,) = [line for line in plan.explain().splitlines() if line.startswith("  tuning")]
    assert "a miss" in line
    assert all(word in line for word in words)


def test_other_targets_and_problems_are_misses() -> None:
    found = table(GEMM, {"tiles": 0.5})
    assert "another target" in tp.plan(GEMM, target=tp.Target.preset("a100"), tuning=found).explain()
    assert "never measured" in tp.plan(GEMM.replace(m=17), target=H200, tuning=found).explain()


def test_another_model_of_gpu_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H100 and H200 are one target, but not one memory."""
    path = tmp_path / "tuning.json"
    table(GEMM, {"tiles": 0.5}, device="NVIDIA H100").save(path)
    at_home = tp.TuningTable.load(path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA H200")
    plan = tp.plan(GEMM, target=H200, tuning=tp.TuningTable.load(path))
    assert plan.sku().kernel != "tiles"
    assert "measured on NVIDIA H100, here is NVIDIA H200" in plan.explain()
    assert tp.plan(GEMM, target=H200, tuning=at_home).sku().kernel == "tiles"
    assert plan.tuning is not None
    assert plan.tuning.digest != at_home.digest
    plan.tuning.save(path)
    assert "foreign" not in path.read_text()


def test_another_model_of_gpu_is_a_miss_however_the_table_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a file of plans, or a pickled one; and on its way back it holds again."""
    path, cache = tmp_path / "plans.json", tp.PlanCache()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("triplan.facade.cache._driver", lambda: "1")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA H100")
    plan = cache.get(GEMM, target=H200, tuning=table(GEMM, {"tiles": 0.5}, device="NVIDIA H100"))
    assert plan.sku().kernel == "tiles"
    cache.save(path)
    pickled = pickle.dumps(plan)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA H200")
    (entry,) = tp.PlanCache().load(path).entries
    assert entry.verdict == "changed"
    there = pickle.loads(pickled)
    assert there.sku().kernel != "tiles"
    assert "measured on NVIDIA H100, here is NVIDIA H200" in there.explain()
    other = tp.PlanCache()
    other.get(GEMM, target=H200, tuning=there.tuning)
    other.save(path)
    assert "foreign" not in path.read_text()
    pickled = pickle.dumps(there)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA H100")
    assert pickle.loads(pickled).sku() == plan.sku()


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    found = table(GEMM, {"tiles": 0.5, "split_k": 1e-3}, software=software(), kernels={"gemm/tiles": 1}, device="x")
    found.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["tuning.json"]
    assert json.loads(path.read_text())["table"]["software"] == [list(x) for x in sorted(software().items())]
    again = tp.TuningTable.load(path)
    assert again == found
    assert again.digest == found.digest
    for text in ("", "{}", "[]", '{"format": 9, "table": {}}', '{"format": 1, "table": {"times": 3}}'):
        path.write_text(text)
        with pytest.raises(tp.InvalidProblem, match=r"tuning\.json"):
            tp.TuningTable.load(path)


def test_tables_are_joined() -> None:
    other = GEMM.replace(m=17)
    old = table(GEMM, {"tiles": 1.0}, software=software(), kernels={"gemm/tiles": 1}, device="x")
    new = table(other, {"tiles": 2.0}, software=software(), kernels={"gemm/split_k": 1}, device="x")
    both = old.joined(new)
    assert {p for p, _ in both.times} == {tp.TuningTable.problem(d.key, H200) for d in (GEMM, other)}
    assert both.kernels == (("gemm/split_k", 1), ("gemm/tiles", 1))
    assert dict(old.joined(table(GEMM, {"tiles": 3.0}, device="x")).times) == dict(table(GEMM, {"tiles": 3.0}).times)
    assert old.joined(new.replace(device="y")) == new.replace(device="y")
    assert old.replace(software=(("torch", "0.1"),)).joined(new) == new


# --- tune ---


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_tune_says_so() -> None:
    for target in ((), (H200,)):
        with pytest.raises(tp.Unsupported, match="there is none"):
            tp.tune(GEMM, *target)


SetClock = Callable[[Callable[[int], float]], None]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    """Lets tune run without a GPU: contestant ``i`` runs once on each copy of the operands, and took ``time(i)``."""

    def install(time: Callable[[int], float]) -> None:
        def times(contestants: Sequence[Sequence[Callable[[], object]]], device: object) -> list[float]:
            for runs in contestants:
                for run in runs:
                    run()
            return [time(i) for i in range(len(contestants))]

        monkeypatch.setattr(tuning, "_device", lambda target: CPU)
        monkeypatch.setattr(tuning, "_l2_bytes", lambda device: 1 << 12)
        monkeypatch.setattr(tuning, "device_times", times)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA H200")

    return install


@pytest.mark.parametrize("op", ["gather", "index_put", "gemm"])
def test_tune_times_every_candidate_and_select_takes_the_fastest(op: str, clock: SetClock) -> None:
    desc = SAMPLES[op]
    names = list(tuning.candidates(desc, H200))
    assert len(names) > 1
    slowest_first = {name: float(len(names) - i) for i, name in enumerate(names)}
    clock(lambda i: slowest_first[names[i]])
    with launch_stubbed(H200):
        found = tp.tune(desc, H200)
    assert (found.device, dict(found.software), found.stale) == ("NVIDIA H200", dict(software()), "")
    assert dict(dict(found.times)[tp.TuningTable.problem(desc.key, H200)]) == slowest_first
    loose = tp.PlanPreference(deterministic=False)
    plan = tp.plan(desc, target=H200, preference=loose, tuning=found)
    assert plan.sku().kernel == names[-1].partition(" ")[0]
    assert plan.candidates[0].cost_us == 1.0
    assert "times" in plan.explain()


def test_tune_adds_to_what_is_known(clock: SetClock) -> None:
    clock(lambda i: 1.0 + i)
    known = table(GEMM, {"tiles": 0.5}, software=software(), device="NVIDIA H200")
    two = [SAMPLES["gather"], SAMPLES["gather"].replace(element="f16")]
    with launch_stubbed(H200):
        found = tp.tune(two, H200, table=known)
    assert {p for p, _ in found.times} == {tp.TuningTable.problem(d.key, H200) for d in (GEMM, *two)}
    nothing = SAMPLES["gather"].replace(element="fp8e4m3")
    with pytest.raises(tp.Unsupported, match="nothing to tune"):
        tp.tune(nothing, H200)


def test_hopeless_configurations_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = configurations("tiles")
    least = min(way.cost for way in ways.values())
    timed = {n.partition(" ")[2] for n in tuning.candidates(GEMM, H200) if n.startswith("tiles ")}
    assert timed == {n for n, way in ways.items() if way.cost <= tuning.MAX_COST_RATIO * least}
    monkeypatch.setattr(tuning, "MAX_COST_RATIO", 1.0)
    assert len([n for n in tuning.candidates(GEMM, H200) if n.startswith("tiles ")]) == 1


@pytest.mark.parametrize(
    "desc",
    [
        *SAMPLES.values(),
        GEMM.replace(layouts={"a": COLUMN, "b": ROW, "c": "strided"}),
        tp.BatchedGemmDescriptor(batch=3, m=5, n=8, k=16, element="f16", layouts={"b": ONE_MATRIX}),
    ],
    ids=lambda desc: desc.op,
)
def test_sample_args_keep_every_promise(desc: tp.Descriptor) -> None:
    args = tuning.sample_args(desc, CPU, torch.Generator().manual_seed(0))
    assert tp.plan(desc, target=tp.Target.cpu()).can_implement(args)
    for o in desc.operands():
        for extent in o.index_extents:
            index = getattr(args, o.name)
            for t in index if isinstance(index, list) else [index]:
                assert 0 <= int(t.min()) <= int(t.max()) < extent


# --- on the GPU ---


@pytest.mark.gpu
def test_tune_on_the_gpu(tmp_path: Path) -> None:
    target = tp.Target.current()
    problems = [
        GEMM,
        tp.BatchedGemmDescriptor(batch=4, m=256, n=256, k=128, element="bf16"),
        tp.IndexAddDescriptor(src_shape=(4096, 64), add_dim=0, out_dim_size=100, element="f32"),
    ]
    found = tp.tune(problems, target)
    found.save(tmp_path / "tuning.json")
    found = tp.TuningTable.load(tmp_path / "tuning.json")
    assert found.device == torch.cuda.get_device_name()
    for desc in problems:
        times = dict(dict(found.times)[tp.TuningTable.problem(desc.key, target)])
        assert set(times) == set(tuning.candidates(desc, target))
        assert all(0.5 < us < 1e5 for us in times.values())
        plan = tp.plan(desc, preference=tp.PlanPreference(deterministic=False), target=target, tuning=found)
        assert plan.candidates[0].cost_us == min(times.values())
        args = tuning.sample_args(desc, torch.device("cuda"), torch.Generator("cuda").manual_seed(1))
        plan.run(args, tp.Workspace.allocate(plan))
    with pytest.raises(tp.Unsupported, match="the target is"):
        tp.tune(GEMM, target.replace(sm_count=target.sm_count + 1))
