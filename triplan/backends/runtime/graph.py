"""Launches put together as one CUDA graph: the host launches one sooner than a single kernel (``bench host``).

Relies on the driver's own functions, of CUDA 12 and later, by ctypes (``tests/core/test_graph.py`` would notice):

- ``cuGraphLaunch`` may be called for a graph that still runs, which the next run then follows, and a graph may be
  destroyed while it runs.
- It fails, and spoils the capture, in a stream that is being captured: the caller asks first.
- What takes or frees memory spoils a capture, of this thread or another, unless the thread's own mode is relaxed.
- Two threads may not launch one graph at once: ``cuGraphLaunch`` keeps the interpreter's lock, as torch's static
  launcher does. (Python without that lock is not supported.)

Not ``torch.cuda.CUDAGraph``: each takes a memory pool, and while it captures random numbers fail in other threads.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from triplan.backends.runtime.launcher import BoundLaunch

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def _driver() -> Any:
    try:
        library: Any = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no GPU, and nothing to launch
        return None
    launch = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    library.cuGraphLaunch = launch(("cuGraphLaunch", library))
    return library


_DRIVER = _driver()


def graph_start(calls: Sequence[BoundLaunch], device: int) -> Callable[[int], int] | None:
    """What launches ``calls`` in order on a stream (a raw handle) and returns the driver's error, 0 for none.

    None if they are to be launched one by one: see ``_fits``, and where there is no memory left for a graph.
    """
    if _DRIVER is None or not calls or not all(_fits(call.kernel.compiled.metadata) for call in calls):
        return None
    try:
        with torch.cuda.device(device):
            torch.cuda.is_current_stream_capturing()  # makes the device's context current in a thread that had none
            with _relaxed():
                return _instantiate(calls)
    except RuntimeError:
        # Launching one by one is right as well, and says what is wrong if that is not for want of memory.
        return None


def _fits(metadata: Any) -> bool:
    """Whether a kernel can be launched by a graph.

    Not with scratch memory, which Triton allocates for each launch; nor, without loss, one that begins before the
    launch ahead has ended, as nothing in a graph's first place does.
    """
    return not (metadata.launch_pdl or metadata.global_scratch_size or metadata.profile_scratch_size)


def _instantiate(calls: Sequence[BoundLaunch]) -> Callable[[int], int]:
    """Captures the launches in a stream of our own, in which nobody else's can be."""
    stream, captured, graph = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    _check("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
    try:
        _check("cuStreamBeginCapture_v2", stream, _RELAXED)
        try:
            for call in calls:
                call.start(int(stream.value or 0))
        finally:
            _check("cuStreamEndCapture", stream, ctypes.byref(captured))
        _check("cuGraphInstantiateWithFlags", ctypes.byref(graph), captured, ctypes.c_ulonglong(0))
        start = partial(_DRIVER.cuGraphLaunch, graph)
        # Not when the interpreter exits: the driver may be gone by then, and frees all anyway.
        weakref.finalize(start, _destroy, graph, os.getpid()).atexit = False
        # The first launch would otherwise do it, and is not bound to follow it in another stream.
        _check("cuGraphUpload", graph, stream)
        _check("cuStreamSynchronize", stream)
    finally:
        if captured:
            _check("cuGraphDestroy", captured)
        _check("cuStreamDestroy_v2", stream)
    return start


def _destroy(graph: ctypes.c_void_p, process: int) -> None:
    if os.getpid() == process:  # a forked child has no graph
        # After a fault every call of the driver returns it, and there is nobody here to be told.
        with suppress(RuntimeError), _relaxed():
            _check("cuGraphExecDestroy", graph)


@contextmanager
def _relaxed() -> Iterator[None]:
    """This thread may take and free memory while streams are captured."""
    mode = ctypes.c_int(_RELAXED)
    _check("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        _check("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def _check(function: str, *args: Any) -> None:
    code = getattr(_DRIVER, function)(*args)
    if code:
        raise RuntimeError(f"{function} failed: CUDA error {code}")
