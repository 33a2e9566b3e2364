"""Seeds and offsets that torch draws into device memory, so that a captured graph draws them anew at each replay."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import torch

from triplan.backends.runtime.cuda import capture_of, uncaptured
from triplan.facade.bound import current_stream
from triplan.functional._sharding import of_first_rank
from triplan.functional._watching import transformed

Tensor = torch.Tensor
#: Tensors of a seed and an offset that are allocated at a time.
_MANY = 1024


def device_state(t: Tensor, generator: torch.Generator | None) -> Tensor:
    """(seed, offset) in i64 on the device of ``t``, drawn by torch. The generator moves on.

    Of a DTensor, all ranks get those of the first: they draw as one, whatever their generators hold.
    """
    if torch.compiler.is_compiling() or transformed():
        given: dict[str, Any] = {} if generator is None else {"generator": generator}  # dynamo takes no None
        return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=t.device, **given)
    found = torch.empty(2, dtype=torch.int64, device=t.device).random_(generator=generator)
    return of_first_rank(found, t)


# --- within a capture ---


class _Captured(threading.local):
    """What this thread has drawn in the capture in which it drew last."""

    def __init__(self) -> None:
        self.capture = 0
        #: By stream and generator, with its seed and offset, which tell the states that a generator is given in turn:
        #: (seed, offset) on the device, and what the draws add to that offset, one after another.
        self.states: dict[tuple[int, torch.Generator, int, int], tuple[Tensor, Iterator[int]]] = {}


_captured = _Captured()
_unused: dict[int, list[Tensor]] = {}
_allocating = threading.Lock()


def is_captured(index: int) -> bool:
    """Whether the current stream of the device ``index``, which need not be the current one, is being captured."""
    return _capture(current_stream(index)) != 0


def _capture(stream: int) -> int:
    return capture_of(stream) if stream else 0  # the stream 0 cannot be captured


def captured_state(t: Tensor, generator: torch.Generator) -> tuple[Tensor, int]:
    """(seed, offset) on the device of ``t``, and what this draw adds to that offset, while a graph is captured.

    The first draw on a stream lets torch draw them, at each replay; the others on that stream, which come after it,
    take the same tensor. A capture's streams wait for each other only where they are told to: each has its own.
    """
    stream = current_stream(t.get_device())
    capture = _capture(stream)
    if not capture:  # another device's stream is captured
        return device_state(t, generator), 0
    if _captured.capture != capture:
        _captured.capture, _captured.states = capture, {}
    with uncaptured(t.device):  # where torch lets them be read
        key = stream, generator, generator.initial_seed(), generator.get_offset()
    found = _captured.states.get(key)
    if found is None:
        state = _unused_state(t.device).random_(generator=generator)
        found = _captured.states[key] = state, itertools.count()
    return found[0], next(found[1])


def _unused_state(device: torch.device) -> Tensor:
    """A tensor that no graph has: 16 bytes, never freed, as nothing tells when a graph is replayed for the last time.

    Memory of the capture's own would have to be held while others may draw, and nothing tells when a capture ends.
    """
    with _allocating, torch.inference_mode(False):
        unused = _unused.setdefault(device.index, [])
        if not unused:
            with uncaptured(device):
                unused += torch.empty(_MANY, 2, dtype=torch.int64, device=device).unbind()
        return unused.pop().data  # with a version counter of its own: autograd compares that of what it saves
