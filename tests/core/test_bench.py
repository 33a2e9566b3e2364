"""The bench: its arithmetic by hand-computed figures, its control flow on a simulated GPU, its files by a smoke run."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases.bench import smoke

import triplan as tp
from bench import determinism, host, report, timing
from bench.__main__ import main
from bench.indexing import cases, run as indexing
from bench.indexing.cases import Case, bytes_moved
from bench.timing import Contestant

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


@pytest.mark.parametrize(
    ("op", "touched", "expected"),
    [
        # 4 rows of 8 f16 values, a table of 16 rows; an i64 index.
        ("index_select", 0, 2 * 32 * 2 + 4 * 8),
        ("gather", 0, 2 * 32 * 2 + 32 * 8),
        ("embedding", 0, 2 * 32 * 2 + 4 * 8),
        # src read, three rows of the table read and written
        ("index_add", 24, 32 * 2 + 2 * 24 * 2 + 4 * 8),
        ("scatter_add", 30, 32 * 2 + 2 * 30 * 2 + 32 * 8),
        # dout read, the whole table written
        ("embedding_backward", 24, 32 * 2 + 128 * 2 + 4 * 8),
        ("index_select_backward", 24, 32 * 2 + 128 * 2 + 4 * 8),
        ("gather_backward", 30, 32 * 2 + 128 * 2 + 32 * 8),
        ("index_put", 24, 32 * 2 + 2 * 24 * 2 + 4 * 8),
    ],
)
def test_bytes_moved(op: str, touched: int, expected: int) -> None:
    assert bytes_moved(Case("", op, rows=16, width=8, count=4), 2, touched) == expected


def test_touched_elements_counts_each_once() -> None:
    rows = Case("", "index_add", rows=16, width=8, count=4)
    assert cases.touched_elements(rows, torch.tensor([3, 5, 3, 0])) == 3 * 8
    full = Case("", "scatter_add", rows=16, width=2, count=3)
    assert cases.touched_elements(full, torch.tensor([[0, 1], [0, 2], [7, 1]])) == 4


def test_rotation_outgrows_l2_or_stays_in_it() -> None:
    l2 = 60 << 20
    sets, resident = timing.rotation(31 << 20, l2)
    assert not resident
    assert sets * (31 << 20) >= 4 * l2
    assert timing.rotation(10 << 30, l2) == (2, False)
    assert timing.rotation(1000, l2) == (4, True)
    sets, resident = timing.rotation(16 << 20, l2)
    assert resident
    assert sets * (16 << 20) <= l2


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
    if repeats > timing.MIN_REPEATS:
        assert repeats * launches * once <= timing.BUDGET_S * 1e6
    assert timing.repeats_for(once, launches, iterations=2) == 2


def test_the_seed_rows_and_the_large_rows_are_there() -> None:
    named = {(c.group, c.op, c.rows, c.width, c.count) for c in cases.cases()}
    for op in ("index_select", "index_add"):
        for size in ((1024, 256, 128), (4096, 1024, 512), (16384, 1024, 2048)):
            assert ("seed", op, *size) in named
    for op in ("index_select", "index_add", "scatter_add", "gather"):
        assert ("large", op, 131072, 1024, 262144) in named
    for op in ("embedding", "embedding_backward"):
        assert ("large", op, 50304, 1024, 65536) in named


def test_zipf_tokens_are_skewed_and_in_range() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = cases.zipf_tokens(20_000, 1000, torch.device("cpu"), generator)
    assert int(tokens.min()) >= 0
    assert int(tokens.max()) < 1000
    counts = torch.bincount(tokens, minlength=1000).sort(descending=True).values
    # Token 1 has 1 / H(1000) = 13.4% of the mass, token 10 a tenth of that.
    assert 0.12 < counts[0] / 20_000 < 0.15
    assert 6 < counts[0] / counts[9] < 15


# --- the check before any timing ---


@pytest.mark.parametrize("dtype", list(cases.DTYPES.values()), ids=list(cases.DTYPES))
@pytest.mark.parametrize("op", sorted({c.op for c in cases.cases()} | {t.case.op for t in determinism.timed_cases()}))
def test_mismatch_sees_a_wrong_element(op: str, dtype: torch.dtype) -> None:
    case = Case("", op, rows=12, width=16, count=40)
    buffers = cases.make(case, dtype, torch.device("cpu"), torch.Generator().manual_seed(3))
    truth = cases.truth(case, buffers)
    plan = tp.plan(cases.descriptor(case, dtype), target=tp.Target.cpu())
    plan.run(cases.plan_args(case, buffers))
    got = buffers.table if case.adds else buffers.dense
    guarantee = plan.precision_guarantee()
    assert cases.mismatch(truth, got, guarantee) == ""
    for wrong in (got[3, 4] + truth.magnitude[3, 4] + 1, float("nan")):
        spoiled = got.clone()
        spoiled[3, 4] = wrong
        assert "1 of" in cases.mismatch(truth, spoiled, guarantee)


def test_mismatch_sees_a_lost_contribution_in_narrow_atomics() -> None:
    """The f16 atomics' own tolerance allows for every row in one place; the count of each element is far stricter."""
    case = Case("", "index_add", rows=8, width=4, count=4096)
    buffers = cases.make(case, torch.float16, torch.device("cpu"), torch.Generator().manual_seed(3))
    index = torch.zeros(4096, dtype=torch.int64)
    index[:3] = 5
    buffers = replace(buffers, index=index)
    guarantee = tp.plan(cases.descriptor(case, torch.float16), target=tp.Target.sm90a()).precision_guarantee()
    truth = cases.truth(case, buffers)
    lost = truth.value.clone()
    lost[5] -= buffers.dense[1].double()
    assert guarantee.accumulator == "f16"
    assert guarantee.tolerance.ctol > 1, "the plan's bound alone would let this pass"
    assert "wrong: 4 of" in cases.mismatch(truth, lost, guarantee)


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(plan: tp.IndexSelectPlan, args: tp.IndexSelectArgs, workspace: object = None) -> None:
        args.out.zero_()

    monkeypatch.setattr(tp.IndexSelectPlan, "run", wrong)
    monkeypatch.setattr(indexing, "cases", lambda tiny: [Case("seed", "index_select", 8, 4, 4)])
    found = indexing.run("fp32", 2, 0, torch.device("cpu"), True, lambda *a: None)
    by_name = {row["contestant"]: row for row in found.rows}
    assert "device_us" in by_name["torch"]
    assert by_name["triplan"]["error"].startswith("wrong: ")
    assert "device_us" not in by_name["triplan"]


# --- control flow on a simulated GPU ---


class Gpu:
    """One queue with a virtual clock: work takes its stated time when it runs, capture records instead."""

    def __init__(self) -> None:
        self.now_us = 0.0
        self.recording: list[float] | None = None
        self.log: list[str] = []

    def work(self, name: str, us: float) -> Callable[[int], None]:
        def call(i: int) -> None:
            if self.recording is not None:
                self.recording.append(us)
            else:
                self.now_us += us
            self.log.append(f"{name}{i}")

        return call


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    simulated = Gpu()

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.at = 0.0

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
    def capture(graph: Graph) -> object:  # type: ignore[misc]
        simulated.recording = graph.recorded
        try:
            yield
        finally:
            simulated.recording = None

    class Stream:
        def wait_stream(self, other: object) -> None: ...

    @contextmanager
    def stream(s: object) -> object:  # type: ignore[misc]
        yield

    for name, value in {
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": capture,
        "Stream": Stream,
        "stream": stream,
        "current_stream": Stream,
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return simulated


def test_device_times_are_per_call(gpu: Gpu) -> None:
    fast, slow = timing.device_times(
        [Contestant("fast", gpu.work("f", 2.0), 4), Contestant("slow", gpu.work("s", 300.0), 2)], 20, 3
    )
    assert fast.median_us == pytest.approx(2.0)
    assert slow.median_us == pytest.approx(300.0)
    assert (fast.launches, slow.launches) == (64, 4)
    assert (fast.repeats, slow.repeats) == (20, 20)
    assert not fast.not_captured
    # Interleaved: the last replays alternate.
    replays = [entry for entry in gpu.log if entry.startswith("replay")]
    assert replays[-4:] == ["replay of 64", "replay of 4"] * 2


def test_slow_contestants_have_fewer_repeats_and_spread(gpu: Gpu) -> None:
    fast, slow = timing.device_times(
        [Contestant("fast", gpu.work("f", 2.0), 1), Contestant("slow", gpu.work("s", 50_000.0), 1)], 100, 0
    )
    assert (fast.repeats, slow.repeats) == (100, 10)
    assert slow.median_us == pytest.approx(50_000.0)
    replays = [entry for entry in gpu.log if entry.startswith("replay")][-110:]
    between = "".join("s" if entry == "replay of 1" else "f" for entry in replays).split("s")
    assert {len(run) for run in between[1:-1]} == {10}


def test_every_buffer_set_is_used(gpu: Gpu) -> None:
    timing.device_times([Contestant("w", gpu.work("w", 100.0), 5)], 3, 0)
    assert {f"w{i}" for i in range(5)} <= set(gpu.log)


def test_work_that_refuses_capture_is_timed_in_a_loop(gpu: Gpu) -> None:
    run = gpu.work("w", 40.0)

    def refusing(i: int) -> None:
        if gpu.recording is not None:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        run(i)

    (found,) = timing.device_times([Contestant("w", refusing, 2)], 5, 1)
    assert found.median_us == pytest.approx(40.0)
    assert found.not_captured == "no graph: operation not permitted when stream is capturing"


def test_a_plan_that_refuses_capture_is_an_error(gpu: Gpu) -> None:
    def unprepared(i: int) -> None:
        if gpu.recording is not None:
            raise tp.Unsupported("not prepared")

    with pytest.raises(tp.Unsupported):
        timing.device_times([Contestant("w", unprepared, 1)], 5, 1)


def test_copy_bandwidth_counts_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_one_millisecond(contestants: list[Contestant], iterations: int, warmup: int) -> list[timing.DeviceTime]:
        return [timing.DeviceTime(1000.0, 1000.0, 1000.0, iterations, 1)]

    monkeypatch.setattr(timing, "wall_times", in_one_millisecond)
    assert timing.copy_bandwidth(torch.device("cpu"), 3, 1, nbytes=1 << 20) == pytest.approx(2 * (1 << 20) / 1e-3)


def test_host_times_interleave_and_count() -> None:
    seen: list[str] = []
    one = Contestant("a", lambda i: seen.append(f"a{i}"), 2)
    two = Contestant("b", lambda i: seen.append("b"), 1)
    found = timing.host_times([one.calls(3), two.calls(1)], loops=2)
    assert seen == ["a0", "a1", "a0", "b"] * 3
    assert all(0 < t.best_us <= t.median_us for t in found)


# --- files ---


SMOKE = ["indexing", "--device", "cpu", "--dtype", "bf16", "--iterations", "1", "--warmup", "0"]


def test_indexing_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, content = smoke(tmp_path, SMOKE, "indexing-bf16-cpu-smoke")
    assert "SMOKE TEST" in str(content["label"])
    assert "SMOKE TEST" in capsys.readouterr().out
    assert content["command"] == "python -m bench indexing --device cpu --dtype bf16 --iterations 1 --warmup 0"
    timed = [r for r in rows if "device_us" in r]
    assert {r["contestant"] for r in timed} == {"torch", "triplan"}
    assert len(timed) == 2 * len(cases.cases())
    assert all(r["speed_vs_torch"] == 1 for r in timed if r["contestant"] == "torch")
    assert all(str(r["note"]).startswith("skipped: ") for r in rows if "device_us" not in r)


@pytest.mark.skipif(torch.cuda.is_available(), reason="stubs the launch that a GPU machine really makes")
def test_host_smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.run, "__defaults__", (2, 1))
    rows, content = smoke(tmp_path, ["host"], "host-cpu")
    assert "LAUNCH STUBBED" in str(content["label"])
    by_name = {(r["case"], r["contestant"]): r for r in rows}
    for key in (("select, warm", "index_add"), ("PlanCache hit", "gather"), ("can_implement", "embedding")):
        assert by_name[key]["host_us"] > 0  # type: ignore[operator]
    for contestant in ("plan.run", "BoundRun", "bare launch", "triton jit"):
        row = by_name["index_select into a given tensor, (1024, 256, 128)", contestant]
        assert row["note"] == "launch stubbed"
        assert "of_torch" not in row  # what was not launched is not compared


@pytest.mark.skipif(torch.cuda.is_available(), reason="stubs the launch that a GPU machine really makes")
def test_the_stub_leaves_nothing_behind() -> None:
    from triton.runtime import driver

    from bench.stub import launch_stubbed

    before = (torch.cuda.device, tp.Target.of, driver._active)
    with launch_stubbed(tp.Target.preset("h200")):
        assert tp.Target.of("cpu").is_gpu
    assert (torch.cuda.device, tp.Target.of, driver._active) == before
    assert tp.Target.preset("h200").device_type == "cuda"
    assert not tp.Target.of("cpu").is_gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["indexing", "determinism"])
def test_without_a_gpu_nothing_is_measured(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    assert "--device cpu" in capsys.readouterr().err


def test_errors_show_in_the_exit_code_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("first line\nsecond")

    monkeypatch.setattr(indexing, "truth", broken)
    rows, _ = smoke(tmp_path, SMOKE, "indexing-bf16-cpu-smoke", code=1)
    assert {r["error"] for r in rows} == {"RuntimeError: first line"}


def test_command_line_leaves_the_folder_out() -> None:
    given = ["indexing", "--out", "/a b", "--dtype", "fp16"]
    assert report.command_line(given) == "python -m bench indexing --dtype fp16"
    assert report.command_line(["host", "--out=/a b"]) == "python -m bench host"


def test_a_figure_that_is_none_is_not_written(tmp_path: Path) -> None:
    bad = report.Report("x", "t", "", [], [], {}, [{"case": "c", "contestant": "a", "us": float("nan")}])
    with pytest.raises(ValueError, match="not JSON compliant"):
        bad.write(tmp_path, ["x"])


@pytest.mark.parametrize("wrong", ["--iterations=0", "--warmup=-1", "--dtype=fp8"])
def test_bad_options_are_refused(wrong: str) -> None:
    with pytest.raises(SystemExit) as e:
        main(["indexing", "--device", "cpu", wrong])
    assert e.value.code == 2


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
