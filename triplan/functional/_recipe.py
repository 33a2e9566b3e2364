"""The short way for calls that differ from an earlier one in addresses and contents alone.

A recipe keeps what the long way found: the plan's launches and the result's shape. It is made only for CUDA calls whose
kernel reads the call's very tensors, writes its very result, needs no workspace and checks no index; and it is taken
only if nothing but addresses changed: not a dtype, shape, stride, device, dispatch key, mode or global setting. What it
compares with is dynamo's compiled guard, which also sees autocast, functorch and inference mode in the thread's state.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch

from triplan.backends import TABLE
from triplan.backends.launcher import Places, launch_values
from triplan.facade.bound import current_device, current_stream
from triplan.facade.seen import tensor_guard
from triplan.functional._plans import Ran

Tensor = torch.Tensor
# Inductor's allocation: torch.empty_strided on the current device, without parsing of arguments.
_empty: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cuda", None)


class Recipe:
    """How to repeat one call of one op."""

    __slots__ = (
        "_deterministic",
        "_device",
        "_dtype",
        "_generation",
        "_guard",
        "_masks",
        "_others",
        "_others_of",
        "_sizes",
        "_strides",
        "_templates",
        "_tensors_of",
    )

    def __init__(self, args: tuple[Any, ...], out: Tensor, ran: Ran) -> None:
        """From a call with ``args`` that gave ``out``; ``fits`` must hold."""
        plan, operands = ran
        at = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
        self._tensors_of = itemgetter(*at)
        self._others_of = itemgetter(*(i for i in range(len(args)) if i not in at))
        tensors, self._others = self._tensors_of(args), self._others_of(args)
        self._guard = tensor_guard(tensors)
        self._deterministic, self._generation = _deterministic(), TABLE.generation
        self._device = out.get_device()
        self._sizes, self._strides, self._dtype = tuple(out.shape), out.stride(), out.dtype
        # Templates take addresses in the order of this call's tensors, the result last.
        of = {id(t): i for i, t in enumerate([*tensors, out])}
        places: Places = {(name, None): of[id(t)] for name, t in operands.items()}
        self._templates = plan.templates(plan.args_type(**operands), places)
        masks = [(of[id(operands[o.name])], o.alignment - 1) for o in plan.descriptor.operands() if o.name in operands]
        self._masks = tuple((i, mask) for i, mask in masks if i < len(tensors) and tensors[i].numel())

    @staticmethod
    def fits(args: tuple[Any, ...], out: Tensor, ran: Ran) -> bool:
        """Whether this call can be repeated by a recipe."""
        plan, operands = ran
        tensors = [a for a in args if isinstance(a, Tensor)]
        known = {id(t) for t in (*tensors, out)}
        return (
            "status" not in operands
            and 2 <= len(tensors) < len(args)
            and _available(out)
            and plan.workspace_size() == 0
            and all(id(t) in known for t in operands.values())
            and not any(isinstance(a, (list, tuple)) for a in args)
            and not any(t.requires_grad for t in tensors)
            and out.is_contiguous()
        )

    def __call__(self, args: tuple[Any, ...]) -> Tensor | None:
        """The result; None if this call is another."""
        tensors = self._tensors_of(args)
        # The guard also sees dispatch modes, functorch, autocast and inference mode in the thread's dispatch keys.
        if (
            not self._guard(*tensors)
            or self._others_of(args) != self._others
            or _deterministic() is not self._deterministic
            or TABLE.generation != self._generation
            or _function_modes()
        ):
            return None
        addresses = [t.data_ptr() for t in tensors]
        for i, mask in self._masks:
            if addresses[i] & mask:
                return None
        index = self._device
        if current_device() != index:
            return None
        out: Tensor = _empty(self._sizes, self._strides, self._dtype)
        launch_values(self._templates, (*addresses, out.data_ptr()), current_stream(index))
        return out


_deterministic = torch._C._get_deterministic_algorithms
_function_modes = torch._C._len_torch_function_stack


def _available(out: Tensor) -> bool:
    return out.is_cuda and _empty is not None


def facts(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A plain key of a call: what a plan depends on, of tensors and others."""
    return tuple([_fact(a) if isinstance(a, Tensor) else a for a in args])


def _fact(t: Tensor) -> tuple[Any, ...]:
    return type(t), t.dtype, t.shape, t.stride(), t.device, t.data_ptr() & 15
