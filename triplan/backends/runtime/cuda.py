"""Functions of the CUDA driver (CUDA 12 and later), called with ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

#: CU_STREAM_CAPTURE_MODE_RELAXED
RELAXED = 2
#: CU_STREAM_NON_BLOCKING
NON_BLOCKING = 1


def _driver() -> Any:
    try:
        library: Any = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no GPU, so nothing to launch
        return None
    launch = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    library.cuGraphLaunch = launch(("cuGraphLaunch", library))
    copy = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    library.cuMemcpyDtoDAsync = copy(("cuMemcpyDtoDAsync_v2", library))
    return library


DRIVER = _driver()
#: Copies bytes within a device: ``copy_memory(to, source, bytes, stream)``, addresses and a raw handle. Returns the
#: driver's error, or 0.
copy_memory: Callable[[int, int, int, int], int] | None = getattr(DRIVER, "cuMemcpyDtoDAsync", None)


@contextmanager
def relaxed() -> Iterator[None]:
    """Let this thread allocate and free memory while streams are captured."""
    mode = ctypes.c_int(RELAXED)
    check("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        check("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


@contextmanager
def uncaptured(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Make a stream current that is not being captured: to allocate, and to read what torch hides within a capture.

    Memory that is allocated is no graph's: a graph that shares the capture's pool does not write there when replayed.
    """
    with relaxed(), torch.cuda.device(device):
        stream = _own_stream(torch.cuda.current_device())
        with torch.cuda.stream(stream):
            yield stream


@contextmanager
def beside_capture(device: torch.device) -> Iterator[None]:
    """Work on a stream of its own while the current one is being captured; waits for that work."""
    with uncaptured(device) as stream:
        yield
        stream.synchronize()


@cache
def _own_stream(index: int) -> torch.cuda.Stream:
    """A stream of the current device, ``index``, that nothing else uses: one of torch's pool might be captured."""
    handle = ctypes.c_void_p()
    check("cuStreamCreate", ctypes.byref(handle), NON_BLOCKING)
    return torch.cuda.ExternalStream(handle.value, device=index)  # type: ignore[no-untyped-call]


def check(function: str, *args: Any) -> None:
    """Call ``function`` of the driver. Raises ``RuntimeError`` with its error code."""
    code = getattr(DRIVER, function)(*args)
    if code:
        raise RuntimeError(f"{function} failed: CUDA error {code}")


def capture_of(stream: int) -> int:
    """The number of the capture under way on ``stream``, a raw handle other than 0; 0 if none is.

    No other capture of the process ever has it. Streams that a capture has forked have it, too.
    """
    status, found = ctypes.c_int(), ctypes.c_uint64()
    nothing = (None,) * 3  # of the graph, the nodes that the next one waits for, and their count
    check("cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(found), *nothing)
    return found.value if status.value else 0
