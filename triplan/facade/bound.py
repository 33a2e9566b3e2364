"""BoundRun: a run with fixed addresses; and the steps of a launch that it shares with ``Plan.run``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from triplan.backends.runtime import cuda
from triplan.backends.runtime.graph import graph_start
from triplan.backends.runtime.launcher import ENTER_HOOKS, EXIT_HOOKS, BoundLaunch, is_capturing, launch
from triplan.backends.runtime.modules import keep_loaded
from triplan.errors import InvalidProblem

# Private functions of torch, there since 2.0. Each takes half a microsecond less than its public equivalent.
current_device = getattr(torch._C, "_cuda_getDevice", lambda: -1)
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
increment_version = getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version)


class BoundRun:
    """Calling it launches on ``stream``, or on torch's current one. ``Plan.bind`` says what the caller promises."""

    # An attribute, not a method: its closure needs no attribute lookups and no extra frame.
    __slots__ = ("__call__", "_held")
    __call__: Callable[..., None]

    def __init__(
        self, calls: tuple[BoundLaunch, ...], index: int, written: tuple[torch.Tensor, ...], held: tuple[Any, ...]
    ) -> None:
        self._held = held  # keeps every operand alive
        # Inference tensors have no version counter.
        self.__call__ = _bound_call(calls, index, [t for t in written if not t.is_inference()])


def _bound_call(calls: tuple[BoundLaunch, ...], index: int, counted: list[torch.Tensor]) -> Callable[..., None]:
    start = graph_start(calls, index)
    if start is None:

        def one_by_one(stream: torch.cuda.Stream | int | None = None) -> None:
            launch_all(calls, index, stream)
            increment_version(counted)

        return one_by_one
    enter, leave = ENTER_HOOKS, EXIT_HOOKS  # locals of the closure are faster than globals
    alone = torch.cuda.device_count() == 1  # then no other device can be current

    def as_graph(stream: torch.cuda.Stream | int | None = None) -> None:
        if stream is None and (alone or current_device() == index) and not enter and not leave:
            handle = current_stream(index)
            try:
                # A graph cannot be launched in a stream that is being captured. torch's default stream, 0, never is.
                done = not (handle and is_capturing()) and not start(handle)
            except RuntimeError:  # is_capturing raises if an earlier launch faulted
                done = False
            if done:
                increment_version(counted)
                return
        launch_all(calls, index, stream)  # creates a missing context, and raises faults with a message
        increment_version(counted)

    return as_graph


def launch_all(calls: Sequence[BoundLaunch], index: int, stream: torch.cuda.Stream | int | None) -> None:
    """Launch ``calls`` in order on ``stream`` of device ``index``, which need not be current."""
    handle = current_stream(index) if stream is None else _handle(stream, index)
    # A launch notices by itself if the current stream is captured.
    if stream is not None and handle and cuda.DRIVER is not None and cuda.capture_of(handle):
        keep_loaded(call.kernel.compiled for call in calls)
    if current_device() == index:
        launch(calls, handle)
    else:
        with torch.cuda.device(index):
            launch(calls, handle)


def _handle(stream: torch.cuda.Stream | int, index: int) -> int:
    if isinstance(stream, int):
        return stream
    if stream.device.index != index:
        raise InvalidProblem(f"the stream is of {stream.device}, the operands on cuda:{index}")
    return int(stream.cuda_stream)


def bump_versions(written: Sequence[torch.Tensor]) -> None:
    """Tell autograd that ``written`` changed, so that a backward that saved them raises.

    Inference tensors have no version counter.
    """
    try:
        increment_version(written)
    except RuntimeError:
        increment_version([t for t in written if not t.is_inference()])
