"""Bound runs: they write what runs write, as one CUDA graph where they can, and disturb nobody's capture."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import triton
from samples import SAMPLES, make_args, outputs, refill

import triplan as tp
from triplan.backends import graph
from triplan.facade import bound
from triplan.facade.bound import BoundRun

gpu = pytest.mark.gpu
PREFERENCES = [tp.PlanPreference(deterministic=False), tp.PlanPreference(deterministic=True)]
COPY = tp.IndexSelectDescriptor(out_shape=(1000, 64), src_dim_size=1000, select_dim=0, element="f32")
#: Some of them begin before the launch ahead has ended.
PROBLEMS: dict[str, tp.Descriptor] = {
    **SAMPLES,
    "gemm, f16": tp.GemmDescriptor(m=512, n=512, k=512, element="f16"),
    "gemm, few tiles": tp.GemmDescriptor(m=16, n=256, k=4096, element="bf16"),
    "layer_norm, long rows": tp.LayerNormDescriptor(input_shape=(4, 262_144), element="bf16"),
}


# --- what is done at a call, told without a GPU ---


class Driver:
    """Stands for what a bound run asks of the driver and of torch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handle, self.error, self.capturing, self.faulty, self.device = 0, 0, False, False, 3
        self.said: list[Any] = []
        self.enter: list[Any] = []
        self.leave: list[Any] = []
        monkeypatch.setattr(bound, "graph_start", lambda calls, device: self.start)
        monkeypatch.setattr(bound, "current_stream", lambda device: self.handle)
        monkeypatch.setattr(bound, "current_device", lambda: self.device)
        monkeypatch.setattr(bound, "is_capturing", self.is_capturing)
        monkeypatch.setattr(bound, "launch_all", lambda calls, device, stream: self.said.append(("each", stream)))
        monkeypatch.setattr(bound, "ENTER_HOOKS", self.enter)
        monkeypatch.setattr(bound, "EXIT_HOOKS", self.leave)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def start(self, handle: int) -> int:
        self.said.append(("graph", handle))
        return self.error

    def is_capturing(self) -> bool:
        self.said.append("capturing?")
        if self.faulty:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.capturing


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def bound_run(*written: torch.Tensor) -> BoundRun:
    return BoundRun((), 3, written, ())


def test_a_call_launches_the_graph_on_torchs_stream(driver: Driver) -> None:
    run = bound_run()
    run()
    assert driver.said == [("graph", 0)]  # torch's default stream cannot be captured: nobody asks
    driver.said.clear()
    driver.handle = 77
    run()
    assert driver.said == ["capturing?", ("graph", 77)]


def test_where_there_is_one_device_it_is_current(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(bound, "current_device", lambda: pytest.fail("asked"))
    bound_run()()
    assert driver.said == [("graph", 0)]


@pytest.mark.parametrize(
    "why", ["captured", "named", "other device", "enter hook", "exit hook", "refused", "fault", "no graph"]
)
def test_what_a_graph_cannot_do_is_launched_one_by_one(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "no graph":
        monkeypatch.setattr(bound, "graph_start", lambda calls, device: None)
    written = torch.zeros(2)
    run, before, stream = bound_run(written), written._version, None
    driver.handle = 77
    if why == "captured":
        driver.capturing = True
    elif why == "named":
        stream = 5
    elif why == "other device":
        driver.device = 2
    elif why == "enter hook":
        driver.enter.append(print)
    elif why == "exit hook":
        driver.leave.append(print)
    elif why == "refused":
        driver.error = 700
    elif why == "fault":
        driver.faulty = True
    run(stream)
    asked = {"captured": ["capturing?"], "fault": ["capturing?"], "refused": ["capturing?", ("graph", 77)]}
    assert driver.said == [*asked.get(why, []), ("each", stream)]
    assert written._version == before + 1
    if why == "no graph":
        run(5)
        assert driver.said[-1] == ("each", 5)


def test_every_call_tells_autograd_what_it_wrote(driver: Driver) -> None:
    written = torch.zeros(2)
    with torch.inference_mode():
        uncounted = torch.zeros(2)
    run, before = bound_run(written, uncounted), written._version
    run()
    run()
    assert driver.said == [("graph", 0)] * 2
    assert written._version == before + 2


def test_it_keeps_its_operands(driver: Driver) -> None:
    operand = torch.zeros(2)
    alive = weakref.ref(operand)
    run = BoundRun((), 3, (), (operand,))
    del operand
    gc.collect()
    assert alive() is not None
    del run
    gc.collect()
    assert alive() is None


# --- putting a graph together, with a driver that may fail anywhere ---


class Failing:
    """The driver's functions, of which one returns an error: it notes each call with its handles and the mode."""

    MAKES: ClassVar[dict[str, tuple[int, int]]] = {  # function: which argument it fills, and with what
        "cuStreamCreate": (0, 5 << 40),
        "cuStreamEndCapture": (1, 6 << 40),
        "cuGraphInstantiateWithFlags": (0, 7 << 40),
    }

    def __init__(self, function: str = "") -> None:
        self.function, self.mode = function, 0
        self.said: list[Any] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def function(*args: Any) -> int:
            if name == "cuThreadExchangeStreamCaptureMode":
                if name != self.function:
                    held = args[0]._obj
                    self.mode, held.value = held.value, self.mode
            else:
                given = [getattr(a, "value", a) for a in args if not hasattr(a, "_obj")]
                self.said.append((name, *given, "relaxed" if self.mode == 2 else self.mode))
            if name == self.function:
                return 2
            if name in self.MAKES:
                at, value = self.MAKES[name]
                args[at]._obj.value = value
            return 0

        return function


STREAM, CAPTURED, GRAPH = (value for _, value in Failing.MAKES.values())
MADE = [
    ("cuStreamCreate", 1, "relaxed"),  # CU_STREAM_NON_BLOCKING: it waits for no other stream
    ("cuStreamBeginCapture_v2", STREAM, 2, "relaxed"),  # CU_STREAM_CAPTURE_MODE_RELAXED
    ("first", STREAM),
    ("second", STREAM),
    ("cuStreamEndCapture", STREAM, "relaxed"),
    ("cuGraphInstantiateWithFlags", CAPTURED, 0, "relaxed"),
    ("cuGraphUpload", GRAPH, STREAM, "relaxed"),
    ("cuStreamSynchronize", STREAM, "relaxed"),
    ("cuGraphDestroy", CAPTURED, "relaxed"),
    ("cuStreamDestroy_v2", STREAM, "relaxed"),
]
ENDS = {
    "cuStreamCreate": "cuStreamDestroy_v2",
    "cuStreamBeginCapture_v2": "cuStreamEndCapture",
    "cuStreamEndCapture": "cuGraphDestroy",
    "cuGraphInstantiateWithFlags": "cuGraphExecDestroy",
}


def launched(driver: Failing, name: str, error: Exception | None = None, **metadata: Any) -> Any:
    """A launch that tells ``driver`` of itself."""
    plain = {"launch_pdl": False, "global_scratch_size": 0, "profile_scratch_size": 0}
    compiled = SimpleNamespace(metadata=SimpleNamespace(**{**plain, **metadata}))

    def start(stream: int) -> None:
        driver.said.append((name, stream))
        if error is not None:
            raise error

    return SimpleNamespace(start=start, kernel=SimpleNamespace(compiled=compiled))


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Puts a graph together on device 3, which must be current meanwhile."""
    current: list[int] = []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    def asked() -> bool:
        assert current == [3]
        return False

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", asked)

    def build(driver: Any, *calls: Any) -> Any:
        monkeypatch.setattr(graph, "_DRIVER", driver)
        return graph.graph_start(calls, 3)

    return build


def test_launches_are_captured_in_order_and_freed_with_what_starts_them(build: Callable[..., Any]) -> None:
    driver = Failing()
    start = build(driver, launched(driver, "first"), launched(driver, "second"))
    assert driver.said == MADE
    driver.said.clear()
    assert start(77) == 0
    assert driver.said == [("cuGraphLaunch", GRAPH, 77, 0)]
    driver.said.clear()
    del start
    gc.collect()
    assert driver.said == [("cuGraphExecDestroy", GRAPH, "relaxed")]
    assert driver.mode == 0


def test_a_forked_child_does_not_free_its_parents_graph(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Failing()
    start = build(driver, launched(driver, "first"))
    driver.said.clear()
    monkeypatch.setattr(graph.os, "getpid", lambda: -1)
    del start
    gc.collect()
    assert driver.said == []


@pytest.mark.parametrize("function", ["cuThreadExchangeStreamCaptureMode", *dict.fromkeys(n for n, *_ in MADE[:8])])
def test_no_graph_and_nothing_left_where_the_driver_refuses(build: Callable[..., Any], function: str) -> None:
    driver = Failing(function)
    broken = RuntimeError("CUDA driver error: invalid argument")
    calls = [launched(driver, name, broken if name == function else None) for name in ("first", "second")]
    assert build(driver, *calls) is None
    gc.collect()
    names = [name for name, *_ in driver.said]
    for begins, ends in ENDS.items():
        assert names.count(ends) == (begins in names and begins != function), begins
    assert driver.mode == 0


@pytest.mark.parametrize("what", ["launch_pdl", "global_scratch_size", "profile_scratch_size"])
def test_kernels_that_begin_early_or_take_scratch_memory_are_in_no_graph(build: Callable[..., Any], what: str) -> None:
    driver = Failing()
    assert build(driver, launched(driver, "first"), launched(driver, "second", **{what: 1})) is None
    assert driver.said == []


def test_there_is_no_graph_of_nothing_nor_without_a_driver(build: Callable[..., Any]) -> None:
    driver = Failing()
    assert build(driver) is None
    assert build(None, launched(driver, "first")) is None
    assert driver.said == []


def test_plans_for_the_cpu_have_nothing_to_bind() -> None:
    plan = tp.plan(COPY, target=tp.Target.cpu())
    with pytest.raises(tp.Unsupported, match="no launch to bind"):
        plan.bind(None)


# --- on a GPU ---


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes the number of launches of each call that launches one by one."""
    counts: list[int] = []
    launch_all = bound.launch_all

    def counting(calls: Any, index: int, stream: Any) -> None:
        counts.append(len(calls))
        launch_all(calls, index, stream)

    monkeypatch.setattr(bound, "launch_all", counting)
    return counts


def early(plan: tp.Plan) -> bool:  # type: ignore[type-arg]
    return any(launch.source().overlaps for launch in plan.launches)


def ways(run: BoundRun) -> dict[str, Callable[[], None]]:
    """Every way to call it."""
    side = torch.cuda.Stream()

    def beside(stream: Any = None) -> None:
        side.wait_stream(torch.cuda.current_stream())
        if stream is None:
            with torch.cuda.stream(side):
                run()
        else:
            run(stream)
        torch.cuda.current_stream().wait_stream(side)

    def captured() -> None:
        replayed = torch.cuda.CUDAGraph()
        with torch.cuda.graph(replayed):
            run()
        replayed.replay()

    return {
        "default": run,
        "current": beside,
        "named": lambda: beside(side),
        "handle": lambda: beside(side.cuda_stream),
        "captured": captured,
    }


@gpu
@pytest.mark.parametrize("preference", PREFERENCES, ids=["loose", "deterministic"])
@pytest.mark.parametrize("op", PROBLEMS)
def test_a_bound_run_writes_what_a_run_writes(op: str, preference: tp.PlanPreference, one_by_one: list[int]) -> None:
    plan = tp.plan(PROBLEMS[op], preference=preference).prepare()
    if plan.precision_guarantee().duplicates is tp.Duplicates.ANY:
        pytest.skip("two runs may differ; the deterministic row of the op is compared instead")
    args, theirs, workspace = make_args(plan), make_args(plan), tp.Workspace.allocate(plan)
    run = plan.bind(args, workspace)
    for seed, (way, call) in enumerate(ways(run).items(), 1):
        fresh = make_args(plan, seed)
        refill(plan, args, fresh)
        refill(plan, theirs, fresh)
        one_by_one.clear()
        torch.cuda.synchronize()
        call()
        at_once = way in ("default", "current") and not early(plan)
        assert one_by_one == ([] if at_once else [len(plan.launches)]), way
        torch.cuda.synchronize()
        plan.run(theirs, workspace)
        for mine, wanted in zip(outputs(plan, args), outputs(plan, theirs), strict=True):
            torch.testing.assert_close(mine, wanted, rtol=0, atol=0, equal_nan=True)


@gpu
def test_a_call_takes_no_memory_and_does_not_wait() -> None:
    plan = tp.plan(COPY).prepare()
    args: Any = make_args(plan)
    run = plan.bind(args)
    version, before = args.out._version, torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    ended = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    ended.record()
    assert not ended.query()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert args.out._version == version + 1


@gpu
def test_a_bound_run_of_prepared_indices(one_by_one: list[int]) -> None:
    desc = tp.IndexAddDescriptor(src_shape=(999, 64), add_dim=0, out_dim_size=100, element="f32")
    plan = tp.plan(desc, preference=tp.PlanPreference(kernel="sorted_sum")).prepare()
    args: Any = make_args(plan)
    theirs, workspace = replace(args, out=args.out.clone()), tp.Workspace.allocate(plan)
    storage = tp.Workspace(torch.empty(plan.prepared_size(), dtype=torch.uint8, device="cuda"))
    run = plan.bind(args, workspace, plan.prepare_indices(args.index, storage, workspace))
    one_by_one.clear()
    run()
    assert one_by_one == []
    plan.run(theirs, workspace)
    assert torch.equal(args.out, theirs.out)


class Recording:
    """The driver, with a note of what each of its functions returned."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.returned: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def function(*args: Any) -> int:
            code: int = getattr(self.driver, name)(*args)
            self.returned.append((name, code))
            return code

        return function


@gpu
@pytest.mark.parametrize("elsewhere", [False, True])
def test_binding_calling_and_dropping_disturb_no_capture(elsewhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tp.plan(COPY).prepare()
    args, other = make_args(plan), make_args(plan, seed=1)
    run, replayed, side = plan.bind(args), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    driver = Recording(graph._DRIVER)
    monkeypatch.setattr(graph, "_DRIVER", driver)

    def disturb() -> None:  # elsewhere: in a thread that has used no GPU before
        another = plan.bind(other)
        if elsewhere:  # in the thread that captures, this would be one more stream of the capture's
            with torch.cuda.stream(side):
                another()
        del another
        gc.collect()

    torch.cuda.synchronize()
    with torch.cuda.graph(replayed):
        run()
        if elsewhere:
            thread = threading.Thread(target=disturb)
            thread.start()
            thread.join()
        else:
            disturb()
        run()
    expected = [name for name, *_ in MADE if name.startswith("cu")]
    expected += ["cuGraphLaunch"] * elsewhere + ["cuGraphExecDestroy"]
    done = [(name, code) for name, code in driver.returned if name != "cuThreadExchangeStreamCaptureMode"]
    assert done == [(name, 0) for name in expected]
    outputs(plan, args)[0].zero_()
    replayed.replay()
    torch.cuda.synchronize()
    for given in (args, other)[: 1 + elsewhere]:
        assert torch.equal(outputs(plan, given)[0], given.src[given.index])  # type: ignore[attr-defined]


@gpu
def test_the_last_thread_to_hold_one_may_have_used_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tp.plan(COPY).prepare()
    driver = Recording(graph._DRIVER)
    monkeypatch.setattr(graph, "_DRIVER", driver)
    runs = [plan.bind(make_args(plan))]
    thread = threading.Thread(target=runs.clear)
    thread.start()
    thread.join()
    gc.collect()
    assert ("cuGraphExecDestroy", 0) in driver.returned


@gpu
def test_the_first_call_follows_the_upload() -> None:
    plan = tp.plan(COPY).prepare()
    args: Any = make_args(plan)
    wanted = args.src[args.index]
    for _ in range(300):
        args.out.zero_()
        torch.cuda.synchronize()
        plan.bind(args)()
        assert torch.equal(args.out, wanted)


@gpu
def test_dropping_one_that_runs() -> None:
    plan = tp.plan(COPY).prepare()
    for seed in range(50):
        args: Any = make_args(plan, seed)
        wanted = args.src[args.index]
        torch.cuda._sleep(1_000_000)
        plan.bind(args)()
        gc.collect()
        assert torch.equal(args.out, wanted)


@gpu
@pytest.mark.parametrize("streams", [False, True])
def test_eight_threads_share_one(streams: bool) -> None:
    plan = tp.plan(COPY).prepare()
    args: Any = make_args(plan)
    args.out.zero_()
    run, failures = plan.bind(args), []
    torch.cuda.synchronize()

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()) if streams else nullcontext():
                for _ in range(200):
                    run()  # in a thread that has used no GPU before
        except Exception as e:
            failures.append(e)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    torch.cuda.synchronize()
    assert failures == []
    assert torch.equal(args.out, args.src[args.index])


@gpu
def test_a_profilers_hooks_hear_of_each_launch() -> None:
    plan = tp.plan(COPY).prepare()
    args: Any = make_args(plan)
    run, heard = plan.bind(args), []
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(heard.append)
    try:
        run()
    finally:
        hook.remove(heard.append)
    assert len(heard) == 1
    assert torch.equal(args.out, args.src[args.index])


@gpu
@pytest.mark.skipif("torch.cuda.device_count() < 2")
@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("at", [0, 1])
def test_bound_runs_between_devices(at: int, current: int, one_by_one: list[int]) -> None:
    plan = tp.plan(COPY)
    with torch.cuda.device(at):
        args: Any = make_args(plan)
        args.out.zero_()
    with torch.cuda.device(current):
        run = plan.bind(args)
        torch.cuda.synchronize(at)
        with torch.cuda.device(at):
            torch.cuda._sleep(50_000_000)
            ended = torch.cuda.Event()
        run()
        assert torch.cuda.current_device() == current
        ended.record(torch.cuda.current_stream(at))
    assert not ended.query()  # it waits for the other device's stream
    assert one_by_one == ([] if at == current else [1])
    assert torch.equal(args.out, args.src[args.index])
