"""Bound runs: they write what runs write, launched as one CUDA graph where that can be."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from samples import SAMPLES, in_threads, make_args, outputs, refill

import triplan as tp
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


#: What keeps a call from launching the graph: what is so then, and what is asked and tried first.
OBSTACLES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "captured": ({"capturing": True}, ["capturing?"]),
    "another device is current": ({"device": 2}, []),
    "refused": ({"error": 700}, ["capturing?", ("graph", 77)]),
    "a fault before": ({"faulty": True}, ["capturing?"]),
    "enter hook": ({"enter": print}, []),
    "exit hook": ({"leave": print}, []),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_what_a_graph_cannot_do_is_launched_one_by_one(driver: Driver, obstacle: str) -> None:
    written = torch.zeros(2)
    run, before = bound_run(written), written._version
    state, first = OBSTACLES[obstacle]
    for name, value in {"handle": 77, **state}.items():
        if name in ("enter", "leave"):
            getattr(driver, name).append(value)
        else:
            setattr(driver, name, value)
    run()
    assert driver.said == [*first, ("each", None)]
    assert written._version == before + 1


@pytest.mark.parametrize("graph", [True, False])
def test_launches_on_a_named_stream_and_without_a_graph_go_one_by_one(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, graph: bool
) -> None:
    if not graph:
        monkeypatch.setattr(bound, "graph_start", lambda calls, device: None)
    written = torch.zeros(2)
    run, before = bound_run(written), written._version
    run(5)
    run()
    assert driver.said == [("each", 5), ("graph", 0) if graph else ("each", None)]
    assert written._version == before + 2


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


@gpu
@pytest.mark.parametrize("streams", [False, True])
def test_eight_threads_share_one(streams: bool) -> None:
    plan = tp.plan(COPY).prepare()
    args: Any = make_args(plan)
    args.out.zero_()
    run = plan.bind(args)
    torch.cuda.synchronize()

    def work(_: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()) if streams else nullcontext():
            for _ in range(200):
                run()  # in a thread that has used no GPU before

    in_threads(8, work)
    torch.cuda.synchronize()
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
