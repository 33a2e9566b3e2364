"""BoundRun: a run whose addresses are fixed; and the last steps that it shares with ``Plan.run``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from triplan.backends.launcher import BoundLaunch, launch
from triplan.errors import InvalidProblem

# Private since torch 2.0 and cheaper than their public faces by half a microsecond each.
current_device = getattr(torch._C, "_cuda_getDevice", lambda: -1)
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
_increment_version = getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version)


class BoundRun:
    """Calling it launches on ``stream``, or on torch's current one. ``Plan.bind`` says what the caller promises."""

    __slots__ = ("_calls", "_held", "_index", "_written")

    def __init__(
        self, calls: tuple[BoundLaunch, ...], index: int, written: tuple[torch.Tensor, ...], held: tuple[Any, ...]
    ) -> None:
        self._calls, self._index = calls, index
        self._written = [t for t in written if not t.is_inference()]
        self._held = held  # keeps every operand alive

    def __call__(self, stream: torch.cuda.Stream | int | None = None) -> None:
        index = self._index
        if stream is None and current_device() == index:
            launch(self._calls, current_stream(index))
        else:
            launch_all(self._calls, index, stream)
        _increment_version(self._written)


def launch_all(calls: Sequence[BoundLaunch], index: int, stream: torch.cuda.Stream | int | None) -> None:
    """Launch in order on ``stream`` of device ``index``, which need not be current."""
    handle = current_stream(index) if stream is None else _handle(stream, index)
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
    """Tell autograd that these changed, so that a backward which saved them raises. Inference tensors keep no count."""
    try:
        _increment_version(written)
    except RuntimeError:
        _increment_version([t for t in written if not t.is_inference()])
