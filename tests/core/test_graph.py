"""Graphs of launches: put together in order, with a driver that may fail anywhere, beside captures that stay whole."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from samples import make_args, outputs

import triplan as tp
from triplan.backends.runtime import cuda, graph

gpu = pytest.mark.gpu
COPY = tp.IndexSelectDescriptor(out_shape=(1000, 64), src_dim_size=1000, select_dim=0, element="f32")


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
        monkeypatch.setattr(cuda, "DRIVER", driver)
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


def test_nothing_is_freed_when_the_interpreter_exits(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.finalize[..., Any]] = []

    def finalize(*args: Any) -> Any:
        made.append(weakref.finalize(*args))
        return made[-1]

    monkeypatch.setattr(graph, "weakref", SimpleNamespace(finalize=finalize))
    driver = Failing()
    start = build(driver, launched(driver, "first"))
    assert [f.alive for f in made] == [True]
    assert not made[0].atexit
    del start


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


# --- on a GPU ---


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
    driver = Recording(cuda.DRIVER)
    monkeypatch.setattr(cuda, "DRIVER", driver)

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
    driver = Recording(cuda.DRIVER)
    monkeypatch.setattr(cuda, "DRIVER", driver)
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


CALLBACK = """
import ctypes, sys, time, torch, triplan as tp, triplan.functional as F
desc = tp.IndexSelectDescriptor(out_shape=(64, 64), src_dim_size=64, select_dim=0, element="f32")
plan, index = tp.plan(desc), torch.arange(64, device="cuda")
args = tp.IndexSelectArgs(torch.ones(64, 64, device="cuda"), index, torch.empty(64, 64, device="cuda"))
ways = {"bound": plan.bind(args), "run": lambda: plan.run(args), "function": lambda: F.index_select(args.src, 0, index)}
call = ways[sys.argv[1]]
for _ in range(5):
    call()
torch.cuda.synchronize()
ran = []
host = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: (time.sleep(0.5), ran.append(data))[0])
stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
assert ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc(stream, host, None) == 0
for _ in range(500):
    call()
assert not ran  # so all were behind it
torch.cuda.synchronize()
assert ran
"""


@gpu
@pytest.mark.parametrize("way", ["run", "bound", "function"])
def test_launches_behind_a_python_callback_go_on(way: str) -> None:
    """The callback needs Python's lock, which a launch holds, also while it waits for room: 500 find room."""
    subprocess.run([sys.executable, "-c", CALLBACK, way], check=True, timeout=120)
