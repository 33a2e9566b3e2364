"""Replays of functional calls on a CPU: in place of a launch, the reference runs on the addresses that it is given."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

import triplan as tp
from triplan import functional
from triplan.functional import _plans
from triplan.functional._ops import RECORDED
from triplan.functional._replay import program as _program, replay as _replay
from triplan.functional.batch_norm.calls import _normalised
from triplan.functional.elementwise.table import _to_target, _written
from triplan.nn.attention import _multi_head, _transposed
from triplan.nn.copies import _flattened

#: What ``noted`` gives.
_ANSWERS: list[bool] = []


def tensor_at(address: int, like: torch.Tensor) -> torch.Tensor:
    """The tensor at ``address`` with the shape, strides and dtype of ``like``."""
    if not like.numel():
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    elements = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
    memory = (ctypes.c_char * (elements * like.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())


def without_memory(value: Any) -> Any:
    """The shapes, strides and dtypes of operands: launches keep no tensor."""
    if isinstance(value, (list, tuple)):
        return [without_memory(t) for t in value]
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


class Launching:
    """Stands for the launches of a plan."""

    computed = ()
    kernel = SimpleNamespace(compiled=None)

    def __init__(self, plan: Any, args: Any, places: Any) -> None:
        self.plan, self.places = plan, places
        with _disable_current_modes():
            self.args = {o.name: without_memory(getattr(args, o.name)) for o in plan.descriptor.operands()}

    def source(self, values: list[str], prefix: str) -> tuple[str, dict[str, Any]]:
        return f"({''.join(f'{v}, ' for v in values)})", {}

    def start(self, values: tuple[Any, ...], stream: int) -> None:
        given: dict[str, Any] = {}
        for o in self.plan.descriptor.operands():
            value = self.args[o.name]
            if isinstance(value, (list, tuple)):
                value = [tensor_at(values[self.places[(o.name, i)]], t) for i, t in enumerate(value)]
            elif isinstance(value, torch.Tensor):
                value = tensor_at(values[self.places[(o.name, None)]], value)
            elif (o.name, None) in self.places:
                value = values[self.places[(o.name, None)]]
            given[o.name] = value
        with torch.no_grad():
            self.plan.run(self.plan.args_type(**given))


@contextmanager
def noted() -> Iterator[list[bool]]:
    """Gives, of every replay that is asked, whether it answers; in one list, so that replays may be kept for later."""
    answers = _ANSWERS
    answers.clear()
    original = _program.guarded

    def asking(*args: Any, **kwargs: Any) -> Any:
        guard = original(*args, **kwargs)

        def ask(*call: Any) -> Any:
            found = guard(*call)
            answers.append(found is not None)
            return found

        return ask

    forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_program, "guarded", asking)
        yield answers
    forget()


@contextmanager
def replays_on_cpu() -> Iterator[list[bool]]:
    """As ``noted``, of CPU tensors, which are replayed as those of a GPU are."""
    run = tp.Plan.run

    def unseen(*args: Any) -> None:
        with _disable_current_modes():  # as a launch: the reference's ops are not the call's
            run(*args)

    def templates(plan: Any, args: Any, workspace: Any, places: Any) -> list[Launching]:
        plan._validate(args, workspace)
        return [Launching(plan, args, places)]

    def empty(shape: Any, strides: Any, dtype: Any) -> torch.Tensor:
        found = torch.empty_strided(shape, strides, dtype=dtype)
        return found.fill_(torch.nan) if found.is_floating_point() and 0 not in strides else found

    def copy(to: int, source: int, count: int, stream: int) -> int:
        ctypes.memmove(to, source, count)
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tp.Plan, "run", unseen)
        patch.setattr(_replay, "on_gpu", lambda args: True)
        patch.setattr(_replay, "is_capturing", lambda: False)
        patch.setattr(_program, "_empty", empty)
        patch.setattr(_program, "copy_memory", copy)
        patch.setattr(_program, "current_device", lambda: -1)
        patch.setattr(_plans, "always_checks", lambda device: False)
        patch.setattr(tp.Plan, "templates", templates)
        with noted() as answers:
            yield answers


@cache
def _replays() -> tuple[_replay.Replays, ...]:
    functions = (getattr(functional, name) for name in functional.__all__)
    every = (*functions, _multi_head, _transposed, _normalised, _flattened, _written, _to_target)
    return (*(f.replays for f in every if hasattr(f, "replays")), *(op.replays for op in RECORDED.values()))


def forget() -> None:
    """Drop all replays. (Of hundreds of functions, a test calls a few.)"""
    for replays in _replays():
        if replays._came or replays._alike:
            replays.forget()


def kept() -> Callable[[], None]:
    """Gives a function that makes all replays again what they are now."""
    found = [(replays, _copied(replays)) for replays in _replays() if replays._came]

    def restore() -> None:
        forget()
        for replays, state in found:
            vars(replays).update(_copied(SimpleNamespace(**state)))

    return restore


def _copied(replays: Any) -> dict[str, Any]:
    return {name: dict(v) if isinstance(v, dict) else v for name, v in vars(replays).items()}
