"""Launches combined in one CUDA graph, which the host launches in less time than a single kernel (``bench host``).

Relies on the driver's functions of CUDA 12 and later, called with ctypes (``tests/core/test_graph.py`` fails if they
change):

- ``cuGraphLaunch`` may be called while the graph still runs; the new run follows the old one. A graph may be destroyed
  while it runs.
- ``cuGraphLaunch`` fails in a stream that is being captured, and invalidates the capture. The caller checks first.
- Allocating or freeing memory invalidates a capture, of this thread or another, unless the thread's own capture mode is
  relaxed.
- Two threads may not launch one graph at the same time. ``cuGraphLaunch`` is therefore called with the GIL held, as
  torch's static launcher is: a lock of its own would cost 0.1 us more (H200). (Python without the GIL is not
  supported.) What follows if the queue is full: docs/replay.md, "Limits".

Not ``torch.cuda.CUDAGraph``: each one reserves a memory pool, and while it captures, random numbers fail in other
threads.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from triplan.backends.runtime import cuda
from triplan.backends.runtime.cuda import RELAXED, check, relaxed
from triplan.backends.runtime.launcher import BoundLaunch

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


def graph_start(calls: Sequence[BoundLaunch], device: int) -> Callable[[int], int] | None:
    """A function that launches ``calls`` in order on a stream (a raw handle) and returns the driver's error, or 0.

    None if the calls must be launched one by one: see ``_fits``, or if there is no memory left for a graph.
    """
    if cuda.DRIVER is None or not calls or not all(_fits(call.kernel.compiled.metadata) for call in calls):
        return None
    try:
        with torch.cuda.device(device):
            torch.cuda.is_current_stream_capturing()  # makes the device's context current in a new thread
            with relaxed():
                return _instantiate(calls)
    except RuntimeError:
        # Launching one by one is also correct. If the cause is not lack of memory, it raises the real error.
        return None


def _fits(metadata: Any) -> bool:
    """Whether a graph can launch a kernel.

    Not a kernel with scratch memory, which Triton allocates for each launch. Nor a kernel that may begin before the
    previous launch has ended: the first kernel of a graph never does, which would lose the overlap.
    """
    return not (metadata.launch_pdl or metadata.global_scratch_size or metadata.profile_scratch_size)


def _instantiate(calls: Sequence[BoundLaunch]) -> Callable[[int], int]:
    """Capture the launches in a stream of our own, so that no other launch is captured."""
    stream, captured, graph = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    check("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
    try:
        check("cuStreamBeginCapture_v2", stream, RELAXED)
        try:
            for call in calls:
                call.start(int(stream.value or 0))
        finally:
            check("cuStreamEndCapture", stream, ctypes.byref(captured))
        check("cuGraphInstantiateWithFlags", ctypes.byref(graph), captured, ctypes.c_ulonglong(0))
        start = partial(cuda.DRIVER.cuGraphLaunch, graph)
        # Not when the interpreter exits: the driver may be gone by then, and frees everything anyway.
        weakref.finalize(start, _destroy, graph, os.getpid()).atexit = False
        # Upload now. The first launch would otherwise upload, and in another stream it would not wait for the upload.
        check("cuGraphUpload", graph, stream)
        check("cuStreamSynchronize", stream)
    finally:
        if captured:
            check("cuGraphDestroy", captured)
        check("cuStreamDestroy_v2", stream)
    return start


def _destroy(graph: ctypes.c_void_p, process: int) -> None:
    if os.getpid() == process:  # a forked child does not own the graph
        # After a fault every driver call returns that error, and a finalizer has nobody to report it to.
        with suppress(RuntimeError), relaxed():
            check("cuGraphExecDestroy", graph)
