"""What ``bench anywhere`` draws, that torch computes the same, and the arithmetic of its figures."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

import triplan as tp
from bench.__main__ import main
from bench.anywhere import drawing, run
from bench.anywhere.drawing import (
    FAMILIES,
    LEAST,
    MOST,
    Case,
    Tensors,
    case,
    entries_of,
    op_of,
    ops_of,
    placed,
    tensors,
)

CPU, H200 = tp.Target.cpu(), tp.Target.preset("h200")
#: Families whose operands have one axis.
VECTORS = {"optim"}
OPS = {op: family for family in FAMILIES for op in ops_of(family)}


def first(op: str, seed: int = 0, most: int = run.TINY) -> Case:
    """The first problem of ``op``, tiny."""
    number = next(i for i in count() if op_of(OPS[op], seed, i) == op)
    return case(OPS[op], seed, number, CPU, most)


def inverted(plan: Any, args: Any, t: Tensors) -> None:
    """A kernel that writes 1 where the result is 0, and 0 elsewhere."""
    plan.run(args)
    for o in plan.descriptor.operands():
        if o.is_written:
            for x in t[o.name] if isinstance(t[o.name], list) else [t[o.name]]:
                x.copy_(x == 0)


def size(c: Case) -> float:
    """Where the bytes of the operands lie between the least (0) and the most (1), logarithmically."""
    nbytes = sum(o.nbytes * o.count for o in c.desc.operands())
    return math.log(nbytes / LEAST) / math.log(MOST / LEAST)


@pytest.mark.parametrize("family", FAMILIES)
def test_draws_are_spread_over_sizes_and_cover_elements_layouts_and_patterns(family: str) -> None:
    drawn = [case(family, 5, i, H200) for i in range(240)]
    assert [case(family, 5, i, H200) for i in (3, 77)] == [drawn[3], drawn[77]]
    assert case(family, 6, 3, H200) != drawn[3]
    quarters = Counter(min(max(int(4 * size(c)), 0), 3) for c in drawn)
    assert all(35 <= quarters[q] <= 85 for q in range(4)), quarters
    assert max(map(size, drawn)) < 1.03  # 1.6 times the most
    assert {c.desc.op for c in drawn} == set(ops_of(family))
    taken = {e for op in ops_of(family) for entry in entries_of(op) for e in entry.elements}
    assert {getattr(c.desc, "element") for c in drawn} == taken  # noqa: B009 (no field of the base)
    styles = get_args(drawing.Style) if family not in VECTORS else ("packed",)
    assert {m.style for c in drawn for m in c.memory.values()} == set(styles)
    assert {c.pattern for c in drawn} == set(get_args(drawing.Pattern))
    assert sum(c.deterministic for c in drawn) <= 0.1 * len(drawn)


def test_extents_are_of_every_kind() -> None:
    d = drawing.Draw("kinds")
    drawn = [d.extent(2, 300_000) for _ in range(2000)]
    assert all(2 <= n <= 300_000 for n in drawn)
    kinds = {
        "power": [n for n in drawn if n & (n - 1) == 0],
        "beside": [n for n in drawn if n & (n + 1) == 0 or (n - 1) & (n - 2) == 0],
        "prime": [n for n in drawn if all(n % k for k in range(2, math.isqrt(n) + 1))],
        "model": [n for n in drawn if n in drawing.MODELS],
    }
    assert all(len(found) > 200 for found in kinds.values())
    assert 1000 < sorted(drawn)[1000] < 4000  # half lie below the geometric mean of FEW and the most


@pytest.mark.parametrize("op", OPS)
def test_torch_computes_what_is_planned(op: str) -> None:
    for seed in range(1 if OPS[op] == "elementwise" else 3):
        c = first(op, seed)
        plan = tp.plan(c.desc, target=CPU)
        for name, peer in drawing.family_of(op).peers(c.desc).items():
            t = tensors(c, torch.device("cpu"), torch.Generator().manual_seed(seed))  # peers may change them
            args = tp.plan_type(op).args_type(**{o.name: t[o.name] for o in c.desc.operands()})
            assert plan.can_implement(args), c.name  # the operands keep the layouts' promises
            with run.torchs_modes(c):
                assert run.mismatch(c, lambda i: plan.run(args), peer, t, apart=0.02) == "", (c.name, name)  # noqa: B023
                assert "differs from torch's" in run.mismatch(c, lambda i: inverted(plan, args, t), peer, t)  # noqa: B023


@pytest.mark.parametrize("op", ["attention_backward", "softmax_backward", "cumprod_backward"])
def test_what_follows_from_other_inputs_is_not_expanded(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One lse of all batch entries, say, gives other gradients than torch's."""
    monkeypatch.setattr(drawing, "STYLES", {"packed": 1, "expanded": 1})
    monkeypatch.setattr(drawing, "PACKED_PART", 0.0)
    following = getattr(drawing.family_of(op), "FOLLOWING")  # noqa: B009 (not every family has it)
    expanded: set[str] = set()
    for seed in range(20):
        c = first(op, seed, 1 << 20)
        own = {name for name, m in c.memory.items() if m.style == "expanded"}
        assert not own & set(following)
        t = tensors(c, torch.device("cpu"), torch.Generator().manual_seed(seed))
        plan = tp.plan(c.desc, target=CPU)
        args = tp.plan_type(op).args_type(**{o.name: t[o.name] for o in c.desc.operands()})
        peer = drawing.family_of(op).peers(c.desc)["torch"]
        assert run.mismatch(c, lambda i: plan.run(args), peer, t, apart=0.02) == "", c.name  # noqa: B023
        expanded |= own
    assert expanded


@pytest.mark.parametrize(("op", "result"), [(op, "dx" if "backward" in op else "out") for op in ops_of("batch_norm")])
def test_torch_writes_normalised_channels_where_ours_are(op: str, result: str) -> None:
    """Of one pixel and a gap behind each element: packed results would be a fraction of the memory that ours writes."""
    fields = {"groups": 2} if op.startswith("group") else {}
    desc = drawing.described(op, element="f32", batch=3, channels=4, pixels=1, weight=True, bias=True, **fields)
    lying = {o.name: drawing.memory(o, "padded" if o.name == result else "packed") for o in desc.operands()}
    desc = desc.replace(layouts={o.name: lying[o.name].layout(o) for o in desc.operands() if o.is_tensor})
    c = Case(0, desc, lying)
    t = tensors(c, torch.device("cpu"), torch.Generator().manual_seed(0))
    found = drawing.family_of(op).peers(desc)["torch"](t)[result]
    assert found.data_ptr() == t[result].data_ptr()
    assert found.stride(1) == 9


@pytest.mark.parametrize(
    ("strides", "copies"),
    [((64, 16, 1), False), ((80, 16, 1), False), ((96, 24, 1), False), ((1, 8, 32), True), ((128, 32, 2), True)],
)
def test_torch_writes_a_result_where_ours_is(strides: tuple[int, ...], copies: bool) -> None:
    """Unless each of its sectors has as many elements there."""
    ours = torch.empty(4096, dtype=torch.float32).as_strided((8, 4, 16), strides)
    theirs = torch.randn(8, 4, 16)
    found = placed(lambda t: {"out": theirs})({"out": ours})
    assert (found["out"] is ours) == copies


@pytest.mark.parametrize(("step", "copies"), [(66, True), (4, True), (3, False)])
def test_torch_writes_half_sectors(step: int, copies: bool) -> None:
    """Rows of two doubles with a gap behind them, from as long as they are on."""
    ours = torch.empty(4096, dtype=torch.float64).as_strided((8, 4, 2), (4 * step, step, 1))
    found = placed(lambda t: {"out": torch.randn(8, 4, 2).double()})({"out": ours})
    assert (found["out"] is ours) == copies


def test_factors_are_odd() -> None:
    """Products of even ones vanish, and are then not written any more."""
    for seed in range(20):
        c = first("scatter_prod", seed, 1 << 16)
        t = tensors(c, torch.device("cpu"), torch.Generator().manual_seed(seed))
        assert (t["src"] % 2 == 1).all()


def test_figures_and_limits() -> None:
    rows = [{"op": "f", "ratio": 1.0 + i / 100, "regret": 1.0} for i in range(19)]
    rows += [{"op": "g", "ratio": 0.8, "regret": 1.2}, {"op": "g", "regret": 1.2}, {"op": "h"}]
    whole, f, g, h = run.summary(rows)
    assert (whole["cases"], whole["compared"], whole["ratio_worst"]) == (22, 20, 0.8)
    assert (whole["ratio_q05"], whole["regret_q95"], whole["regret_median"]) == (1.0, 1.2, 1.0)
    assert g["ratio_mean"] == pytest.approx(0.8)
    assert [r["holds"] for r in (whole, f, g, h)] == [
        "NO: ratio_worst, regret_q95",
        "yes",
        "NO: ratio_worst, ratio_q05, regret_q95",
        "",
    ]


class Clock:
    """Stands for the clock and for the events of a GPU; a contestant's call lets seconds pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def call(self, seconds: float, first: float | None = None) -> run.Run:
        each = iter([first]) if first is not None else iter(())

        def passing(i: int) -> None:
            self.now += next(each, seconds)

        return passing

    def event(self) -> Any:
        event = SimpleNamespace(at=0.0, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda end: (end.at - event.at) * 1e3
        return event


def test_no_call_begins_after_the_time_of_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, again = Clock(), list[str]()

    def device_times(contestants: Any, iterations: int, warmup: int) -> list[Any]:
        again.extend(c.name for c in contestants)
        return [SimpleNamespace(median_us=1.0, not_captured="") for _ in contestants]

    monkeypatch.setattr(run.timing, "event", clock.event)
    monkeypatch.setattr(run.timing, "device_times", device_times)
    monkeypatch.setattr(run.time, "perf_counter", lambda: clock.now)

    def timed(*calls: run.Run) -> list[run.Timed]:
        found = [run.Timed(str(i), call) for i, call in enumerate(calls)]
        run.time_all(found, 1, torch.device("cuda"), 9, 1, clock.now + 20.0)
        return found

    # The first call takes all of the time: nothing is known but that.
    started = clock.now
    ours, torchs, other = timed(clock.call(0.01), clock.call(0.02, first=150.0), clock.call(0.01))
    assert clock.now - started == pytest.approx(150.03)
    assert not again
    assert (ours.us, ours.note) == (pytest.approx(1e4), "")
    assert torchs.us == other.us == math.inf
    assert "too long" in torchs.note
    assert "too long" in other.note
    # One call after the first was timed.
    ours, torchs = timed(clock.call(0.01), clock.call(12.0))
    assert (torchs.us, torchs.note, again) == (pytest.approx(12e6), "", [])
    # What is short is timed again.
    assert [e.us for e in timed(clock.call(1e-4), clock.call(1e-4))] == [1.0, 1.0]
    assert again == ["0", "1"]


def test_cudnn_searches_only_where_that_ends_soon() -> None:
    drawn = [case("conv", 14, i, H200) for i in range(6)]
    assert any(c.floor_us > 1000 for c in drawn)
    assert any(c.floor_us < 1000 for c in drawn)
    for c in (*drawn, first("softmax")):
        with run.torchs_modes(c):
            assert torch.backends.cudnn.benchmark == (c.floor_us <= 1000)


def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--cases", "7", "--device", "cpu", "--iterations", "1", "--warmup", "0"]
    assert main(["anywhere", "norms", *options, "--out", str(tmp_path)]) == 0
    assert "no comparison; 7 of 7 problems" in capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    content = json.loads(path.read_text())
    assert path.stem == "anywhere-norms-seed0-cpu-smoke"
    assert {r["op"] for r in content["rows"]} == set(ops_of("norms"))
    assert all(r["device_us"] > 0 and "ratio" not in r for r in content["rows"])
    assert content["summary"][0]["cases"] == 7
