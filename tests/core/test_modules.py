"""Binaries on GPUs: loaded once a device, unloaded when nobody holds them, never while a graph may launch them."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from samples import SAMPLES

import triplan as tp
from bench.stub import launch_stubbed
from triplan.backends.runtime import launcher, modules

H200 = tp.Target.preset("h200")
COPY = tp.IndexSelectDescriptor(out_shape=(64, 64), src_dim_size=64, select_dim=0, element="f32")


class Driver:
    """Stands for Triton's: notes what is loaded, each with a handle of its own, and what is unloaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loads: list[str] = []
        self.unloads: list[str] = []
        utils = type(modules.driver.active.utils)
        monkeypatch.setattr(utils, "load_binary", self.load)
        monkeypatch.setattr(modules, "_unload", self.unload)
        self.captures = False
        monkeypatch.setattr(launcher, "is_capturing", lambda: self.captures)

    def load(self, name: str, *args: Any) -> tuple[int, int]:
        self.loads.append(name)
        return len(self.loads) - 1, 1

    def unload(self, handles: list[int]) -> None:
        self.unloads += [self.loads[handle] for handle in handles]
        handles.clear()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    with launch_stubbed(H200), monkeypatch.context() as patched:
        yield Driver(patched)


def loaded(desc: tp.Descriptor) -> Any:
    plan = tp.plan(desc, target=H200)
    plan._load("launches", 0)
    return plan


def test_plans_share_the_module_of_a_binary(driver: Driver) -> None:
    shapes = [COPY.replace(out_shape=(n, 64)) for n in range(64, 264)]
    plans = [loaded(desc) for desc in shapes]
    sources = {(launch.source(), H200.arch) for plan in plans for launch in plan.launches}
    assert len(driver.loads) == len(sources) < 5
    plans[0]._load("launches", 1)
    assert len(driver.loads) == len(sources) + 1  # on another device


@pytest.mark.parametrize("holder", ["nobody", "plan", "bound launch", "captured graph", "recently loaded"])
def test_a_module_is_unloaded_when_nobody_holds_it(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, holder: str
) -> None:
    """At the next load, for lack of a better moment."""
    monkeypatch.setattr(modules, "MAX_RECENT", 9 if holder == "recently loaded" else 1)
    driver.captures = holder == "captured graph"
    plan = loaded(COPY)
    (kernel,) = plan._loaded[("launches", 0)]
    launched = launcher.BoundLaunch(kernel, ())
    launcher.launch([launched], 5 if driver.captures else 0)
    held = {"plan": plan, "bound launch": launched}.get(holder)
    name = driver.loads[0]
    del plan, kernel, launched
    for op in ("softmax", "rms_norm", "gather"):
        loaded(SAMPLES[op])
    assert (name in driver.unloads) == (holder == "nobody")
    del held
    loaded(SAMPLES["index_add"])
    assert (name in driver.unloads) == (holder in ("nobody", "plan", "bound launch"))


@pytest.mark.gpu
@pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ, reason="others take memory of the card: `make gpu` runs it alone"
)
def test_memory_of_many_shapes_is_bounded() -> None:
    kept: list[Any] = []

    def prepare(start: int, count: int) -> int:
        for n in range(start, start + count):
            kept.append(tp.plan(COPY.replace(out_shape=(n, 64))).prepare())
            kept[-200:-100] = []  # as a cache of plans does
        return torch.cuda.mem_get_info()[0]

    before = prepare(64, 200)
    assert prepare(264, 10_000) > before - 2**25


@pytest.mark.gpu
def test_a_graph_and_a_queued_launch_outlive_their_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "MAX_RECENT", 1)
    src, index = torch.randn(64, 64, device="cuda"), torch.randperm(64, device="cuda")
    out = torch.zeros(2, 64, 64, device="cuda")
    desc = COPY.replace(out_of_bounds="clamp")  # a binary of its own
    plan, graph = tp.plan(desc).prepare(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(tp.IndexSelectArgs(src, index, out[0]))
    other = tp.plan(COPY.replace(wrap_negative=True))
    torch.cuda._sleep(50_000_000)
    other.run(tp.IndexSelectArgs(src, index, out[1]))
    del plan, other
    gc.collect()
    for op in ("softmax", "rms_norm", "gather"):
        tp.plan(SAMPLES[op]).prepare()
    graph.replay()
    assert torch.equal(out, src[index].expand(2, 64, 64))


@pytest.mark.gpu
def test_the_first_run_of_a_compiled_plan_within_a_capture() -> None:
    """One whose binary no other plan has loaded is refused, and the capture stays whole; else it is captured."""
    desc = COPY.replace(element="f64", wrap_negative=True)
    src, index = torch.randn(64, 64, device="cuda", dtype=torch.float64), torch.randperm(64, device="cuda")
    out, plan = torch.zeros_like(src), tp.plan(desc)
    plan.compile()
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(tp.Unsupported, match="prepare"):
        plan.run(tp.IndexSelectArgs(src, index, out))
    tp.plan(desc.replace(src_dim_size=128)).prepare()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(tp.IndexSelectArgs(src, index, out))
    graph.replay()
    assert torch.equal(out, src[index])
