"""What runs where: GPU tests need a GPU, interpreter tests a process of their own with ``TRITON_INTERPRET=1``."""

from __future__ import annotations

import ast
import dataclasses
import gc
import inspect
import os
import warnings
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases.functional import DEVICES
from hypothesis import HealthCheck, settings
from replaying import forget
from samples import SetConstant, family_of as family_of_op
from triton.compiler import code_generator
from triton.runtime.cache import FileCacheManager
from triton.runtime.jit import JITCallable

import triplan as tp
from triplan.sku import interpreting
from triplan.sku.facts import forget_facts

# No deadline: the first example of a process pays for imports and compiles. Derandomised under CI, so that a red run
# can be repeated; elsewhere every run looks at new problems.
settings.register_profile(
    "triplan",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("triplan")
# Interpreted programs are numpy on a few elements, and tests may run in as many processes as there are cores: torch's
# threads would only get into each other's way.
# torch's convolutions are compared with: by default they round f32 operands to tf32.
torch.backends.cudnn.allow_tf32 = False
# Lines of the source in binaries change no instruction, and take an eighth of the time of compiling.
os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")
# MLIR divides functions among threads. A kernel is one function, so that starting them is only lost time.
os.environ.setdefault("MLIR_DISABLE_MULTITHREADING", "1")
# torch.compile's workers would import torch, each for a graph or two.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Inductor would compile trials of the vectors that the C++ compiler has, in each process.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# Triton parses the source of a function again wherever a kernel calls it.
parsed = cache(ast.parse)
JITCallable.parse = lambda self: parsed(self._src)
# It changes Python's filters of warnings at each node of a source, and reads a builtin's signature at each call.
silent, signature = {"catch_warnings": nullcontext, "simplefilter": lambda *_: None}, cache(inspect.signature)
asked = {"signature": lambda f: signature(getattr(f, "__func__", f))}  # whether it takes _semantic, self or not
code_generator.warnings = SimpleNamespace(**(vars(warnings) | silent))
code_generator.inspect = SimpleNamespace(**(vars(inspect) | asked))


def put(manager: FileCacheManager, data: Any, filename: str, binary: bool = True) -> str:
    """Triton's cache makes a directory for each file, and prints modules that no test reads: here they are empty."""
    path = Path(manager.cache_dir, filename)
    part = path.with_name(f"{os.getpid()}.part")
    part.write_bytes(data if isinstance(data, bytes) else data.encode() if isinstance(data, str) else b"")
    return str(part.replace(path))


FileCacheManager.put = put
NEVER_INTERPRETED = Path(__file__).parent / "contracts" / "functional"
workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(1 if interpreting() else max(1, torch.get_num_threads() // workers))
os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # of the processes that tests start


def family_of(item: pytest.Item) -> str | None:
    """The family whose folder holds a test, or whose op is among its parameters."""
    parts = item.path.parts
    if "families" in parts:
        return parts[parts.index("families") + 1]
    types = tp.descriptor_types()
    for value in getattr(item, "callspec", SimpleNamespace(params={})).params.values():
        name = getattr(value, "name", value)  # of a functional call
        op = name.split()[0].strip("_") if name and isinstance(name, str) else getattr(value, "op", None)
        if op in types:
            return family_of_op(op)
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps modules and tests, which live as long as the process, out of Python's searches for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(100_000)  # frozen objects count no more, so that searches would come after every few tests
        gc.enable()


@pytest.hookimpl(trylast=True)  # the tests of other marks are gone by then
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if family := config.getoption("family"):
        others = {item for item in items if family_of(item) != family}
        config.hook.pytest_deselected(items=[*others])
        items[:] = [item for item in items if item not in others]
    no_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU; torch.cuda.is_available() is False")
    not_interpreting = pytest.mark.skip(reason="needs TRITON_INTERPRET=1, set before Triton is imported")
    only_interpreting = pytest.mark.skip(reason="TRITON_INTERPRET=1: this process runs the interpreter's tests alone")
    for item in items:
        if item.get_closest_marker("interpret"):
            if NEVER_INTERPRETED in item.path.parents:
                raise pytest.UsageError(f"{item.nodeid} is never interpreted: see pytest_ignore_collect")
            if not interpreting():
                item.add_marker(not_interpreting)
        elif interpreting():
            item.add_marker(only_interpreting)
        elif item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out, in a process that interprets, the folder that has half of all tests and none that it would run."""
    return True if interpreting() and collection_path == NEVER_INTERPRETED else None


def _forget() -> None:
    forget_facts()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Where a functional call runs."""
    return str(request.param)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[type[tp.Plan[Any, Any]], dict[str, torch.Tensor]]]:
    """The class and the tensors of every plan that a functional call runs."""
    found: list[tuple[type[tp.Plan[Any, Any]], dict[str, torch.Tensor]]] = []
    original = tp.Plan.run

    def run(plan: Any, args: Any, *others: Any) -> None:
        values = ((f.name, getattr(args, f.name)) for f in dataclasses.fields(args))
        found.append((type(plan), {name: v for name, v in values if isinstance(v, torch.Tensor)}))
        original(plan, args, *others)

    forget()  # a replay runs no plan
    monkeypatch.setattr(tp.Plan, "run", run)
    return found


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile with nothing that it compiled before."""
    torch._dynamo.reset()
    # For its log, dynamo measures how long a graph's guards take: it flushes the processor's caches first.
    monkeypatch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *args: 0.0)
    # torch's caches on disk do not know when the gradient of a registered op has changed.
    with torch.compiler.config.patch(force_disable_caches=True):
        yield


@pytest.fixture
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def constant(monkeypatch: pytest.MonkeyPatch) -> Iterator[SetConstant]:
    """Sets a module's constant for one test. Facts found under another value are forgotten, before and after."""

    def change(module: Any, name: str, value: Any) -> None:
        monkeypatch.setattr(module, name, value)
        _forget()

    yield change
    monkeypatch.undo()
    _forget()
