"""Kernels whose source Triton reads when they are first used."""

from __future__ import annotations

import inspect
import os
import threading
import time
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.experimental import gluon

from triplan.backends.runtime import jit as module
from triplan.backends.runtime.jit import gluon_jit, jit
from triplan.sku import interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="kernels are interpreted here")


def twice(x, y, B: tl.constexpr):  # type: ignore[no-untyped-def]
    """y = 2 x."""
    i = tl.arange(0, B)
    tl.store(y + i, 2 * tl.load(x + i))  # the last line


@pytest.mark.parametrize(("deferring", "eager"), [(jit, triton.jit), (gluon_jit, gluon.jit)], ids=["triton", "gluon"])
def test_an_object_is_tritons_own_from_its_first_use_on(deferring: Any, eager: Any) -> None:
    expected, found = eager(twice), deferring(twice)
    assert (found.__name__, found.__qualname__, found.__module__, found.__doc__) == (
        ("twice", "twice", __name__, twice.__doc__)
    )
    assert found.fn is twice
    assert "raw_src" not in vars(found)
    assert isinstance(found, type(expected))
    assert found.src == expected.src
    assert found.src.endswith("# the last line\n")
    assert type(found) is type(expected)
    assert vars(found).keys() == vars(expected).keys()
    assert found.cache_key == expected.cache_key
    assert hash(found) == hash(expected)
    with pytest.raises(AttributeError, match="absent"):
        found.absent  # noqa: B018
    assert hash(deferring(twice)) == hash(expected)  # the first use reads no attribute


def test_a_function_without_source_is_refused_at_each_use() -> None:
    kernel = jit(eval("lambda x: x"))
    for _ in range(2):
        with pytest.raises(ValueError, match="defined in a Python file"):
            kernel.params  # noqa: B018


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Reading takes a while; the functions that were read."""
    read: list[Any] = []
    original = inspect.getsourcelines

    def getsourcelines(fn: Any) -> Any:
        read.append(fn)
        time.sleep(0.05)
        return original(fn)

    monkeypatch.setattr(inspect, "getsourcelines", getsourcelines)
    return read


def test_threads_see_all_attributes_and_read_once(slowly: list[Any]) -> None:
    kernel, start, found = jit(twice), threading.Barrier(8), []

    def use() -> None:
        start.wait()
        # Of these, Triton sets the first before it reads the source, and fills the second after it.
        found.append((len(kernel.signature.parameters), len(kernel.params), kernel.cache_key))

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(3, 3, triton.jit(twice).cache_key)] * 8
    assert slowly.count(twice) == 2


def test_a_process_that_is_forked_while_a_thread_reads_can_read() -> None:
    held, kernel = threading.Event(), jit(twice)

    def read() -> None:
        with module._reading:
            held.set()
            time.sleep(0.1)

    thread = threading.Thread(target=read)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if len(kernel.params) == 3 else 1)
    thread.join()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child waits for the lock")
    assert status == 0
