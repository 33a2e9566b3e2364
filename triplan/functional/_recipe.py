"""The short way for calls that differ from an earlier one in addresses and contents alone.

A recipe keeps what the long way found: the plan's launches and the result's shape. It is made only for CUDA calls whose
kernel reads the call's very tensors, writes its very result, needs no workspace and checks no index; and it is taken
only if nothing but addresses changed: not a dtype, shape, stride, device, dispatch key, mode or global setting. What it
compares with is dynamo's compiled guard, which also sees autocast, functorch and inference mode in the thread's state.
"""

from __future__ import annotations

from collections.abc import Callable
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


_deterministic = torch._C._get_deterministic_algorithms
_function_modes = torch._C._len_torch_function_stack


#: Repeats a call with the arguments given: the result, or None if that call is another.
Recipe = Callable[[tuple[Any, ...]], Tensor | None]


def make_recipe(args: tuple[Any, ...], out: Tensor, ran: Ran) -> Recipe | None:
    """How to repeat a call with ``args`` that gave ``out``; None where more than launches are needed."""
    plan, operands = ran
    at = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
    if len(at) != 2 or len(args) < 3 or any(isinstance(a, (list, tuple)) for a in args):
        return None
    tensors = [args[i] for i in at]
    # Launches take addresses in the order of this call's tensors, the result last.
    of = {id(t): i for i, t in enumerate([*tensors, out])}
    if not (
        out.is_cuda
        and out.is_contiguous()
        and _empty is not None
        and "status" not in operands
        and plan.workspace_size() == 0
        and all(id(t) in of for t in operands.values())
        and not any(t.requires_grad for t in tensors)
    ):
        return None
    places: Places = {(name, None): of[id(t)] for name, t in operands.items()}
    templates = plan.templates(plan.args_type(**operands), places)
    masks = [0, 0, 0]
    for operand in plan.descriptor.operands():
        if (t := operands.get(operand.name)) is not None and t.numel():
            masks[of[id(t)]] |= operand.alignment - 1
    return _recipe(args, at, out, templates, masks)


def _recipe(args: tuple[Any, ...], at: list[int], out: Tensor, templates: Any, masks: list[int]) -> Recipe:
    # A closure: every attribute that a call of an object would look up costs as much as a comparison.
    tensors_of = itemgetter(*at)
    others_of = itemgetter(*(i for i in range(len(args)) if i not in at))
    others, guard = others_of(args), tensor_guard(tensors_of(args))
    was_deterministic, generation = _deterministic(), TABLE.generation
    index, sizes, strides, dtype = out.get_device(), tuple(out.shape), out.stride(), out.dtype
    first_mask, second_mask, _ = masks  # the result is new memory

    def repeat(args: tuple[Any, ...]) -> Tensor | None:
        first, second = tensors_of(args)
        # The guard also sees dispatch modes, functorch, autocast and inference mode in the thread's dispatch keys.
        if (
            not guard(first, second)
            or others_of(args) != others
            or _deterministic() is not was_deterministic
            or TABLE.generation != generation
            or _function_modes()
        ):
            return None
        first_address, second_address = first.data_ptr(), second.data_ptr()
        if first_address & first_mask or second_address & second_mask or current_device() != index:
            return None
        out: Tensor = _empty(sizes, strides, dtype)
        launch_values(templates, (first_address, second_address, out.data_ptr()), current_stream(index))
        return out

    return repeat


def facts(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A plain key of a call: what a plan depends on, of tensors and others."""
    return tuple([_fact(a) if isinstance(a, Tensor) else a for a in args])


def _fact(t: Tensor) -> tuple[Any, ...]:
    return type(t), t.dtype, t.shape, t.stride(), t.device, t.data_ptr() & 15
