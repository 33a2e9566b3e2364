"""Bound runs: they write what runs write, as one CUDA graph where they can, and disturb nobody's capture."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from samples import SAMPLES, make_args, outputs

import triplan as tp
from triplan.backends import graph
from triplan.facade import bound
from triplan.facade.bound import BoundRun

gpu = pytest.mark.gpu
PREFERENCES = [tp.PlanPreference(deterministic=False), tp.PlanPreference(deterministic=True)]
COPY = tp.IndexSelectDescriptor(out_shape=(1000, 64), src_dim_size=1000, select_dim=0, element="f32")


# --- what is done at a call, told without a GPU ---


class Driver:
    """Stands for what a bound run asks of the driver and of torch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handle, self.error, self.capturing, self.device = 0, 0, False, 3
        self.said: list[Any] = []
        self.enter: list[Any] = []
        monkeypatch.setattr(bound, "graph_start", lambda calls, device: self.start)
        monkeypatch.setattr(bound, "current_stream", lambda device: self.handle)
        monkeypatch.setattr(bound, "current_device", lambda: self.device)
        monkeypatch.setattr(bound, "is_capturing", self.is_capturing)
        monkeypatch.setattr(bound, "launch_all", lambda calls, device, stream: self.said.append(("each", stream)))
        monkeypatch.setattr(bound, "ENTER_HOOKS", self.enter)

    def start(self, handle: int) -> int:
        self.said.append(("graph", handle))
        return self.error

    def is_capturing(self) -> bool:
        self.said.append("capturing?")
        return self.capturing


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def a_kernel() -> None: ...


def bound_run(*written: torch.Tensor) -> BoundRun:
    call: Any = SimpleNamespace(kernel=SimpleNamespace(launch=SimpleNamespace(kernel=a_kernel)))
    return BoundRun((call,), 3, written, ())


def test_a_call_launches_the_graph_on_torchs_stream(driver: Driver) -> None:
    run = bound_run()
    run()
    assert driver.said == [("graph", 0)]  # torch's default stream cannot be captured: nobody asks
    driver.said.clear()
    driver.handle = 77
    run()
    assert driver.said == ["capturing?", ("graph", 77)]


@pytest.mark.parametrize("why", ["captured", "named", "other device", "profiled", "no context"])
def test_what_a_graph_cannot_do_is_launched_one_by_one(driver: Driver, why: str) -> None:
    run, stream = bound_run(), None
    driver.handle = 77
    if why == "captured":
        driver.capturing = True
    elif why == "named":
        stream = 5
    elif why == "other device":
        driver.device = 2
    elif why == "profiled":
        driver.enter.append(print)
    else:
        driver.error = graph.NO_CONTEXT
    run(stream)
    assert driver.said[-1] == ("each", stream)
    tried = ("graph", 77) in driver.said
    assert tried == (why == "no context")


def test_the_drivers_refusal_is_an_internal_error(driver: Driver) -> None:
    driver.error = 700
    with pytest.raises(tp.KernelInternal, match="launch of a_kernel failed: CUDA error 700"):
        bound_run()()
    assert driver.said == [("graph", 0)]


@pytest.mark.parametrize("handle", [0, 77])
def test_every_call_tells_autograd_what_it_wrote(driver: Driver, handle: int) -> None:
    driver.handle, driver.capturing = handle, handle != 0  # at once, and one by one
    written = torch.zeros(2)
    with torch.inference_mode():
        uncounted = torch.zeros(2)
    run, before = bound_run(written, uncounted), written._version
    run()
    run()
    assert written._version == before + 2


# --- putting a graph together, with a driver that may fail anywhere ---


class Failing:
    """A driver's functions, of which one returns an error; it keeps count of what there is."""

    def __init__(self, function: str) -> None:
        self.function = function
        self.alive = {"stream": 0, "capture": 0, "captured": 0, "graph": 0}
        self.mode = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        def function(*args: Any) -> int:
            if name == self.function:
                return 2
            if name == "cuThreadExchangeStreamCaptureMode":
                held = args[0]._obj
                self.mode, held.value = held.value, self.mode
            for what, by in {
                "cuStreamCreate": ("stream", 1),
                "cuStreamDestroy_v2": ("stream", -1),
                "cuStreamBeginCapture_v2": ("capture", 1),
                "cuStreamEndCapture": ("capture", -1),
                "cuGraphDestroy": ("captured", -1),
                "cuGraphInstantiateWithFlags": ("graph", 1),
                "cuGraphExecDestroy": ("graph", -1),
            }.items():
                if what == name:
                    self.alive[by[0]] += by[1]
            if name == "cuStreamCreate":
                args[0]._obj.value = 5
            if name == "cuStreamEndCapture":
                args[1]._obj.value = 6
                self.alive["captured"] += 1
            if name == "cuGraphInstantiateWithFlags":
                args[0]._obj.value = 7
            return 0

        return function


class Anywhere:
    def __init__(self, device: int) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def launched(log: list[int], overlaps: bool = False) -> Any:
    compiled = SimpleNamespace(metadata=SimpleNamespace(launch_pdl=overlaps))
    return SimpleNamespace(start=log.append, kernel=SimpleNamespace(compiled=compiled))


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(torch.cuda, "device", Anywhere)

    def build(driver: Any, calls: list[Any]) -> Any:
        monkeypatch.setattr(graph, "_DRIVER", driver)
        return graph.graph_start(calls, 0)

    return build


def test_launches_are_captured_in_order_and_freed_with_what_starts_them(build: Callable[..., Any]) -> None:
    driver, log = Failing("none"), [0]
    start = build(driver, [launched(log), launched(log)])
    assert log == [0, 5, 5]
    assert driver.alive == {"stream": 0, "capture": 0, "captured": 0, "graph": 1}
    assert start.args[0].value == 7
    del start
    gc.collect()
    assert driver.alive["graph"] == 0
    assert driver.mode == 0


@pytest.mark.parametrize(
    "function",
    [
        "cuThreadExchangeStreamCaptureMode",
        "cuStreamCreate",
        "cuStreamBeginCapture_v2",
        "cuStreamEndCapture",
        "cuGraphInstantiateWithFlags",
        "cuGraphUpload",
    ],
)
def test_no_graph_and_nothing_left_where_the_driver_refuses(build: Callable[..., Any], function: str) -> None:
    driver = Failing(function)
    assert build(driver, [launched([])]) is None
    ended = {"stream": 0, "capture": int(function == "cuStreamEndCapture"), "captured": 0, "graph": 0}
    assert driver.alive == ended
    assert driver.mode == 0


def test_a_launch_that_fails_leaves_no_capture(build: Callable[..., Any]) -> None:
    def failing(stream: int) -> None:
        raise RuntimeError("CUDA driver error: invalid argument")

    call = launched([])
    call.start = failing
    driver = Failing("none")
    assert build(driver, [call]) is None
    assert driver.alive == {"stream": 0, "capture": 0, "captured": 0, "graph": 0}
    assert driver.mode == 0


def test_there_is_no_graph_of_nothing_nor_of_kernels_that_begin_early(build: Callable[..., Any]) -> None:
    driver = Failing("none")
    assert build(driver, []) is None
    assert build(driver, [launched([]), launched([], overlaps=True)]) is None
    assert build(None, [launched([])]) is None
    assert driver.alive["graph"] == 0


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


def refill(plan: tp.Plan, args: Any, seed: int) -> None:  # type: ignore[type-arg]
    """New values for all operands, in place."""
    fresh = make_args(plan, seed)
    for o in plan.descriptor.operands():
        old, new = getattr(args, o.name), getattr(fresh, o.name)
        if o.kind == "tensor":
            old.copy_(new)
        elif o.kind == "tensor_list":
            for x, y in zip(old, new, strict=True):
                x.copy_(y)


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
@pytest.mark.parametrize("op", SAMPLES)
def test_a_bound_run_writes_what_a_run_writes(op: str, preference: tp.PlanPreference, one_by_one: list[int]) -> None:
    plan = tp.plan(SAMPLES[op], preference=preference).prepare()
    if plan.precision_guarantee().duplicates is tp.Duplicates.ANY:
        return  # two runs may differ; the deterministic row of the op is compared instead
    args, theirs, workspace = make_args(plan), make_args(plan), tp.Workspace.allocate(plan)
    run = plan.bind(args, workspace)
    for seed, (way, call) in enumerate(ways(run).items(), 1):
        refill(plan, args, seed)
        refill(plan, theirs, seed)
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
@pytest.mark.parametrize("elsewhere", [False, True])
def test_binding_calling_and_dropping_disturb_no_capture(elsewhere: bool) -> None:
    plan = tp.plan(COPY).prepare()
    args, other = make_args(plan), make_args(plan, seed=1)
    run, replayed, side = plan.bind(args), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    done: list[bool] = []

    def disturb() -> None:
        another = plan.bind(other)
        if elsewhere:  # in the thread that captures, this would be one more stream of the capture's
            with torch.cuda.stream(side):
                another()
        del another
        gc.collect()
        done.append(True)

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
    assert done == [True]
    outputs(plan, args)[0].zero_()
    replayed.replay()
    torch.cuda.synchronize()
    for given in (args, other)[: 1 + elsewhere]:
        assert torch.equal(outputs(plan, given)[0], given.src[given.index])  # type: ignore[attr-defined]


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
