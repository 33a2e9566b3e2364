"""The gradients of a call that is composed of several ops, as a function of what must be saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import set_multithreading_enabled

from triplan.functional._replay.program import NotRepeatable, Program
from triplan.functional._replay.recording import Recording, TorchOp
from triplan.functional._watching import tensors_in

Tensor = torch.Tensor
#: Bytes at most that a backward computes again, such as weights in the dtype of autocast. (By the bandwidth of an H200,
#: to read and write that takes 8 us.) Untuned.
_MAX_AGAIN = 1 << 24
#: Bytes at most of a call's tensors: the backward that is tried takes about as much memory again. Untuned.
_MAX_TRIED = 1 << 30


class _Like(NamedTuple):
    """What is kept of a tensor of the call."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def zeros(self) -> Tensor:
        size = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        zeros = torch.zeros(max(size, 0), dtype=self.dtype, device=self.device)
        return zeros.as_strided(self.shape, self.strides)


class Composition:
    """A call of ``function`` whose ops autograd would record one by one.

    Its backward runs the function again, and differentiates that. Replayed, it computes only what the gradients depend
    on, from those tensors of the call that they depend on.
    """

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], outputs: Sequence[Tensor], program: Program
    ) -> None:
        """``program`` repeats the call with ``args``; ``outputs`` are its results without None."""
        self._function = function
        self._args = [self._place(a, program.tensors) for a in args]
        self._likes = [_Like(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in program.tensors]
        self._outputs = len(outputs)
        kind = outputs[0].device.type
        on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        #: As the call had it.
        self._autocast = partial(torch.autocast, kind, dtype, enabled=on)
        if sum(t.nbytes for t in (*program.tensors, *outputs)) > _MAX_TRIED:
            raise NotRepeatable
        if program.record.draws:
            raise NotRepeatable  # it would draw other numbers
        for step in program.record.steps:
            if isinstance(step, TorchOp) and torch.Tag.nondeterministic_seeded in step.func.tags:
                raise NotRepeatable  # it would draw other numbers
            if any(not program.is_new(t) for t in step.written()):
                raise NotRepeatable
        #: Whether the backward reads each tensor of the call.
        self.saves = [True] * len(program.tensors)
        try:
            self.saves = self._read(program.tensors, outputs)
        except torch.OutOfMemoryError:
            raise NotRepeatable from None

    @staticmethod
    def _place(a: Any, tensors: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Any]:
        """A function of the call's tensors that gives the argument ``a``."""
        if isinstance(a, Tensor):
            i = next(i for i, t in enumerate(tensors) if t is a)
            return lambda given: given[i]
        if isinstance(a, (list, tuple)):
            items, kind = [Composition._place(item, tensors) for item in a], type(a)
            return lambda given: kind(item(given) for item in items)
        return lambda given: a

    def _read(self, tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[bool]:
        grads = [torch.zeros_like(t) for t in outputs]
        with torch.no_grad(), Recording() as record:
            given, results = self._again([t.detach() for t in tensors])
            count = len(record.steps)
            found = self._gradients(given, results, grads)
        if not record.is_repeatable:
            raise NotRepeatable
        results = list(tensors_in(found))
        steps = record.steps_towards(results)
        again = {id(step) for step in record.steps[:count]}
        if sum(t.nbytes for step in steps if id(step) in again for t in step.written()) > _MAX_AGAIN:
            raise NotRepeatable
        used = {t.untyped_storage()._cdata for t in (*results, *(t for step in steps for t in step.tensors()))}
        return [t.untyped_storage()._cdata in used for t in tensors]

    def _again(self, saved: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        """The call's tensors, and its results as functions of them."""
        given: list[Tensor] = []
        for t, like in zip(saved, self._likes, strict=True):
            if t is not None and torch.is_grad_enabled():
                # Own nodes: else a gradient of one of them would count what others that depend on it receive, and
                # the hooks of the caller's tensors would run twice.
                given.append(t.view_as(t))
            else:  # the gradients do not depend on the values of what was not saved
                given.append((like.zeros() if t is None else t.detach()).requires_grad_(like.requires_grad))
        with torch.enable_grad(), self._autocast():
            result = self._function(*[place(given) for place in self._args])
        return given, list(tensors_in(result if isinstance(result, tuple) else (result,)))

    def _gradients(
        self, given: Sequence[Tensor], results: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        wanted = [i for i, like in enumerate(self._likes) if like.requires_grad]
        pairs = [(t, g) for t, g in zip(results, grads, strict=True) if t.requires_grad and g is not None]
        with set_multithreading_enabled(False):  # a recording is a thread's
            return torch.autograd.grad(
                [t for t, _ in pairs],
                [given[i] for i in wanted],
                [g for _, g in pairs],
                create_graph=torch.is_grad_enabled(),
                allow_unused=True,
            )

    def formula(self, *call: Tensor | None) -> tuple[Any, ...]:
        """The gradients, from those of the results and the saved tensors, if any are."""
        given, results = self._again(call[self._outputs :] or (None,) * len(self._likes))
        return None, *self._gradients(given, results, call[: self._outputs])
