"""The bench's clock on a simulated GPU, its arithmetic by figures worked out by hand, its command and its files."""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime import driver

import triplan as tp
from bench import host, report, timing
from bench.__main__ import main
from bench.anywhere import run as anywhere
from bench.report import until_stopped
from bench.stub import launch_stubbed
from bench.timing import Contestant, DeviceTime

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")

# --- arithmetic ---


def test_median_and_quantile() -> None:
    assert timing.median([3.0, 1.0, 2.0]) == 2.0
    assert timing.median([4.0, 1.0, 2.0, 3.0]) == 2.5
    samples = [float(v) for v in range(10, -1, -1)]
    assert (timing.quantile(samples, 0.1), timing.quantile(samples, 0.9)) == (1.0, 9.0)
    with pytest.raises(ValueError, match="no samples"):
        timing.median([])


def test_ratio_above_one_is_faster() -> None:
    assert timing.speed_ratio(peer_us=6.0, us=3.0) == 2.0
    # 8 MB in 4 us are 2 TB/s: half of a copy at 4 TB/s.
    assert timing.copy_share(8_000_000, 4.0, 4e12) == pytest.approx(0.5)


def test_the_speed_is_the_median_of_neighbouring_repeats() -> None:
    """A clock that drifts slows both: their medians, of 2 and 4, would call it even."""
    ours = DeviceTime(2.0, 1.0, 4.0, 3, 1, samples=(1.0, 2.0, 4.0))
    assert ours.speed_beside(DeviceTime(2.0, 1.1, 4.4, 3, 1, samples=(1.1, 2.2, 4.4))) == pytest.approx(1.1)
    assert ours.speed_beside(DeviceTime(3.0, 3.0, 3.0, 1, 1, samples=(3.0,))) == 1.5


@pytest.mark.parametrize(
    ("nbytes", "least", "most"), [(31 << 20, 8, 8), (10 << 30, 2, 2), (1000, 4, 4), (16 << 20, 1, 3)]
)
def test_rotation_outgrows_l2_four_times_or_stays_in_it(nbytes: int, least: int, most: int) -> None:
    sets, resident = timing.rotation(nbytes, 60 << 20)
    assert least <= sets <= most
    assert resident == (nbytes <= 30 << 20)


def test_what_calls_allocate_is_rotated_as_well() -> None:
    """As many results are alive at a time as there are sets, less the one that is made anew."""

    class Result: ...

    made: list[weakref.ref[Result]] = []
    alive: list[int] = []

    def call(i: int) -> Result:
        alive.append(sum(ref() is not None for ref in made))
        result = Result()
        made.append(weakref.ref(result))
        return result

    Contestant("", call, 3).take_turns(7)
    assert alive == [0, 1, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("once", [0.5, 2.0, 30.0, 700.0, 4000.0, 80_000.0])
def test_launches_and_repeats_fit_the_budget(once: float) -> None:
    launches = timing.launches_for(once, sets=3)
    assert launches == 1 or launches % 3 == 0
    repeats = timing.repeats_for(once, launches, iterations=100)
    assert timing.MIN_REPEATS <= repeats <= 100
    assert repeats == timing.MIN_REPEATS or repeats * launches * once <= timing.BUDGET_S * 1e6
    assert timing.repeats_for(once, launches, iterations=2) == 2


# --- control flow on a simulated GPU ---


class Gpu:
    """One queue with a virtual clock: work takes its stated time when it runs, capture records instead."""

    def __init__(self) -> None:
        self.now_us = 0.0
        self.recording: list[float] | None = None
        self.log: list[str] = []
        self.waiting = "default"  # what becomes of work that waits for the device

    def work(self, name: str, us: float) -> Callable[[int], None]:
        def call(i: int) -> None:
            if self.recording is not None:
                self.recording.append(us)
            else:
                self.now_us += us
            self.log.append(f"{name}{i}")

        return call

    def replays(self, last: int) -> list[str]:
        return [entry for entry in self.log if entry.startswith("replay")][-last:]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    simulated = Gpu()

    class Event(SimpleNamespace):
        at = 0.0

        def record(self, stream: object = None) -> None:
            self.at = simulated.now_us

        def synchronize(self) -> None: ...

        def elapsed_time(self, other: Event) -> float:
            return (other.at - self.at) / 1e3

    class Graph:
        def __init__(self) -> None:
            self.recorded: list[float] = []

        def replay(self) -> None:
            simulated.now_us += sum(self.recorded)
            simulated.log.append(f"replay of {len(self.recorded)}")

    @contextmanager
    def capture(graph: Graph) -> Any:
        simulated.recording = graph.recorded
        try:
            yield
        finally:
            simulated.recording = None

    def stream() -> Any:
        return SimpleNamespace(wait_stream=lambda other: None)

    simulation = {"Event": Event, "CUDAGraph": Graph, "graph": capture, "synchronize": lambda: None}
    simulation["set_sync_debug_mode"] = lambda mode: setattr(simulated, "waiting", mode)
    streams = {"Stream": stream, "current_stream": stream, "stream": nullcontext}
    for name, value in {**simulation, **streams}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return simulated


def test_device_times_are_per_call_and_interleaved(gpu: Gpu) -> None:
    contestants = [Contestant("fast", gpu.work("f", 2.0), 4), Contestant("slow", gpu.work("s", 300.0), 2)]
    fast, slow = timing.device_times(contestants, 20, 3)
    assert (fast.median_us, slow.median_us) == pytest.approx((2.0, 300.0))
    assert (fast.launches, slow.launches, fast.repeats, slow.repeats) == (64, 4, 20, 20)
    assert not fast.not_captured
    assert gpu.replays(4) == ["replay of 64", "replay of 4"] * 2
    assert {*(f"f{i}" for i in range(4)), "s0", "s1"} <= set(gpu.log)  # every set of buffers is used


def test_slow_contestants_have_fewer_repeats_and_spread(gpu: Gpu) -> None:
    contestants = [Contestant("fast", gpu.work("f", 2.0), 1), Contestant("slow", gpu.work("s", 50_000.0), 1)]
    fast, slow = timing.device_times(contestants, 100, 0)
    assert (fast.repeats, slow.repeats, slow.median_us) == (100, 10, pytest.approx(50_000.0))
    between = "".join("s" if entry == "replay of 1" else "f" for entry in gpu.replays(110)).split("s")
    assert {len(run) for run in between[1:-1]} == {9, 10, 11}  # each round in another order


def test_sustained_times_are_those_of_one_contestant_without_rest(gpu: Gpu) -> None:
    contestants = [Contestant("fast", gpu.work("f", 100.0), 1), Contestant("slow", gpu.work("s", 500.0), 1)]
    assert [t.sustained_us for t in timing.device_times(contestants, 3, 0)] == [None, None]
    gpu.log.clear()
    fast, slow = timing.device_times(contestants, 3, 0, sustained=True)
    assert (fast.sustained_us, slow.sustained_us) == pytest.approx((100.0, 500.0))
    turns = [(entry, len(list(same))) for entry, same in groupby(gpu.replays(6 * 200))]
    work_us = [{"replay of 10": 1000.0, "replay of 2": 1000.0}[entry] * n for entry, n in turns]
    assert sum(work_us) == pytest.approx(6e6 * (timing.SETTLING_S + timing.SUSTAINED_S))
    assert min(work_us) >= 1e6 * (timing.SETTLING_S + timing.SUSTAINED_S)  # neighbours of one kind are one turn here


@pytest.mark.parametrize("error", [RuntimeError("operation not permitted\nmore"), tp.Unsupported("not prepared")])
def test_work_that_refuses_capture_is_timed_in_a_loop_but_a_plan_is_an_error(gpu: Gpu, error: Exception) -> None:
    run = gpu.work("w", 40.0)

    def refusing(i: int) -> None:
        if gpu.recording is not None:
            raise error
        run(i)

    if isinstance(error, tp.Unsupported):
        with pytest.raises(tp.Unsupported):
            timing.device_times([Contestant("w", refusing, 2)], 5, 1)
    else:
        (found,) = timing.device_times([Contestant("w", refusing, 2)], 5, 1)
        assert found.median_us == pytest.approx(40.0)
        assert found.not_captured == "no graph: operation not permitted"


def test_work_that_waits_for_the_device_is_never_captured(gpu: Gpu) -> None:
    run, captured = gpu.work("w", 40.0), []

    def waiting(i: int) -> None:
        captured.append(gpu.recording is not None)
        if gpu.waiting == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        run(i)

    (found,) = timing.device_times([Contestant("w", waiting, 2)], 5, 1)
    assert found.not_captured == "no graph: called a synchronizing CUDA operation"
    assert not any(captured)
    assert gpu.waiting == "default"


def test_long_calls_that_cannot_be_the_fastest_are_timed_twice(gpu: Gpu) -> None:
    """A call of 2 us takes so long to issue that one alone says little; that of 40 ms would take half a second.
    One that the host held up is not taken for long: the shorter of two calls counts."""

    def broken(i: int) -> None:
        raise RuntimeError("no kernel\nmore")

    runs = {"short": gpu.work("s", 2.0), "near": gpu.work("n", 900.0), "long": gpu.work("l", 40_000.0), "none": broken}
    listed = [anywhere.Timed(name, run) for name, run in runs.items()]
    anywhere.time_all(listed, 2, torch.device("cuda"), 9, 1)
    assert [e.us for e in listed] == pytest.approx([2.0, 900.0, 40_000.0, float("inf")])
    assert [e.note for e in listed] == ["", "", "", "RuntimeError: no kernel"]
    assert sum(entry.startswith("l") for entry in gpu.log) == 1 + 2
    assert sum(entry.startswith("replay") for entry in gpu.log) >= 2 * 9


def test_copy_bandwidth_counts_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "wall_times", lambda *args: [DeviceTime(1000.0, 1000.0, 1000.0, 3, 1)])
    assert timing.copy_bandwidth(torch.device("cpu"), 3, 1, nbytes=1 << 20) == pytest.approx(2 * (1 << 20) / 1e-3)


def test_host_times_interleave_and_take_turns() -> None:
    seen: list[str] = []
    one = Contestant("a", lambda i: seen.append(f"a{i}"), 2)
    two = Contestant("b", lambda i: seen.append("b"), 1)
    found = timing.host_times([one.calls(3), two.calls(1)], loops=2)
    assert seen == ["b", "a0", "a1", "a0", "a0", "a1", "a0", "b", "b", "a0", "a1", "a0"]  # either begins as often
    assert all(0 < t.best_us <= t.median_us for t in found)


def test_host_times_of_few_at_a_time_go_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "HOST_ROUND", 2)
    seen: list[str] = []
    calls = [[partial(seen.append, name)] for name in "abcd"]
    timing.host_times(calls, loops=4, together=2)
    assert "".join(seen) == "baabba" + "dccddc" + "baabba" + "dccddc"  # with a warm-up each
    seen.clear()
    timing.host_times(calls, loops=4, together=2, until=0.0)
    assert "".join(seen) == "baabba" + "dccddc"


def test_a_stopped_bench_reports_what_it_timed() -> None:
    rows = []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with until_stopped() as labels:
            rows.append("timed")
            signal.raise_signal(signal.SIGTERM)
            rows.append("not timed")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (rows, labels) == (["timed"], ["STOPPED: cases are missing"])


def test_host_rows_are_judged_beside_torch() -> None:
    rows: list[dict[str, object]] = [
        {"case": "a", "contestant": "torch", "host_us": 4.0},
        {"case": "a", "contestant": "plan.run", "host_us": 4.0, "limit_of_torch": 1.0},
        {"case": "a", "contestant": "BoundRun", "host_us": 3.5, "limit_of_torch": 0.8, "holds": "yes"},
        {"case": "b", "contestant": "plan.run", "host_us": 1.0, "limit_of_torch": 1.0},
        {"case": "a", "contestant": "late", "host_us": 1.0, "limit_of_torch": 0.8, "holds": "NO"},
    ]
    found = host._beside_torch(rows)
    assert [r.get("of_torch") for r in found] == [1.0, 1.0, 0.875, None, 0.25]
    assert [r.get("holds") for r in found] == [None, "yes", "NO", None, "NO"]


def test_functions_are_judged_one_by_one_and_by_their_geometric_mean() -> None:
    def rows(**us: float) -> list[dict[str, object]]:
        return [{"case": f"{c}, (8, 64) f32", "contestant": "forward, recorded", "host_us": u} for c, u in us.items()]

    failed: list[dict[str, object]] = [{"case": "c, (8, 64) f32", "contestant": "forward, recorded", "error": "E"}]
    found = host._compared(rows(a=8.0, b=2.0, c=1.0), rows(a=4.0, b=2.0) + failed)
    assert [(r["case"].split(",")[0], r.get("of_torch"), r.get("holds")) for r in found] == [
        ("a", 2.0, "NO"),
        ("b", 1.0, "yes"),
        ("c", None, None),
        ("geometric mean", pytest.approx(2.0**0.5), "NO"),
    ]
    assert [r.get("torch_us") for r in found] == [4.0, 2.0, None, None]
    assert [r.get("error") for r in found] == [None, None, "E", None]


@NO_GPU
def test_the_stub_leaves_nothing_behind() -> None:
    before = (torch.cuda.device, tp.Target.of, driver._active)
    with launch_stubbed(tp.Target.preset("h200")):
        assert tp.Target.of("cpu").is_gpu
    assert (torch.cuda.device, tp.Target.of, driver._active) == before
    assert not tp.Target.of("cpu").is_gpu


# --- the command and its files ---


@NO_GPU
@pytest.mark.parametrize("name", ["indexing", "determinism"])
def test_without_a_gpu_nothing_is_measured(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    assert "--device cpu" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["--iterations=0", "--warmup=-1", "--dtype=fp8"])
def test_bad_options_are_refused(wrong: str) -> None:
    with pytest.raises(SystemExit) as e:
        main(["indexing", "--device", "cpu", wrong])
    assert e.value.code == 2


def test_command_line_leaves_the_folder_out() -> None:
    given = ["indexing", "--out", "/a b", "--dtype", "fp16"]
    assert report.command_line(given) == "python -m bench indexing --dtype fp16"
    assert report.command_line(["host", "--out=/a b"]) == "python -m bench host"


def test_a_figure_that_is_none_is_not_written(tmp_path: Path) -> None:
    bad = report.Report("x", "t", "", [], [], {}, [{"case": "c", "contestant": "a", "us": float("nan")}])
    with pytest.raises(ValueError, match="not JSON compliant"):
        bad.write(tmp_path, ["x"])


def test_processes_that_compile_get_no_signal_of_the_run() -> None:
    with anywhere.Compilers().pool as pool:
        assert pool.apply(os.getpgrp) != os.getpgrp()
