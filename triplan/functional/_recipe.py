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
from triplan.backends.runtime.launcher import Places, launching
from triplan.facade.bound import current_device, current_stream, increment_version
from triplan.facade.check import span
from triplan.facade.seen import tensor_guard
from triplan.functional._plans import Ran

Tensor = torch.Tensor
# Inductor's allocation: torch.empty_strided on the current device, without parsing of arguments.
_empty: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cuda", None)


#: Shapes that change at every call would otherwise keep a recipe each for ever.
_MOST_RECIPES = 4096

_deterministic = torch._C._get_deterministic_algorithms
_function_modes = torch._C._len_torch_function_stack


#: Repeats a call with the arguments given: the result, or None if that call is another.
Recipe = Callable[[tuple[Any, ...]], Tensor | None]


class Repeats:
    """The recipes of one form of an op's calls: a new result, ``out=``, in place."""

    def __init__(self, able: bool) -> None:
        """``able``: whether calls of this form can be repeated by launches alone."""
        self._able = able
        self.forget()

    def forget(self) -> None:
        # By plain facts of the arguments; the last one is tried first, without asking for facts.
        self._recipes: dict[Any, Recipe] = {}
        self.last: Recipe = _no_recipe

    def call(self, args: tuple[Any, ...], long_way: Callable[..., tuple[Tensor, Ran | None]]) -> Tensor:
        """The call by its recipe, or by ``long_way(*args)``, which says what it ran."""
        if not self._able:
            return long_way(*args)[0]
        recipe = self._recipes.get(key := facts(args))
        if recipe is not None and (found := recipe(args)) is not None:
            self.last = recipe
            return found
        out, ran = long_way(*args)
        if ran is not None and (recipe := make_recipe(args, out, ran)) is not None:
            if len(self._recipes) >= _MOST_RECIPES:
                self._recipes.clear()
            self.last = self._recipes[key] = recipe
        return out


def _no_recipe(args: tuple[Any, ...]) -> None:
    return None


def make_recipe(args: tuple[Any, ...], out: Tensor, ran: Ran) -> Recipe | None:
    """How to repeat a call with ``args`` that gave ``out``: one of them, or a new tensor of a call with two.

    None where more than launches are needed.
    """
    plan, operands, scalars = ran
    at = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
    tensors = [args[i] for i in at]
    new = not any(t is out for t in tensors)
    # Launches take addresses in the order of this call's tensors, a new result last.
    everything = [*tensors, out] if new else tensors
    of = {id(t): i for i, t in enumerate(everything)}
    if not (
        len(of) == len(everything) == 3
        and len(args) > len(at) + (not new)
        and not any(isinstance(a, (list, tuple)) for a in args)
        and out.is_cuda
        and out.is_contiguous()
        and _empty is not None
        and "status" not in operands
        and plan.workspace_size() == 0
        and all(id(t) in of for t in operands.values())
        and not any(t.requires_grad for t in tensors)
    ):
        return None
    places: Places = {(name, None): of[id(t)] for name, t in operands.items()}
    templates = plan.templates(plan.args_type(**operands, **scalars), places)
    masks = [0, 0, 0]
    for operand in plan.descriptor.operands():
        if (t := operands.get(operand.name)) is not None and t.numel():
            masks[of[id(t)]] |= operand.alignment - 1
    return _recipe(args, at, out, new, launching(templates), masks)


def _recipe(
    args: tuple[Any, ...],
    at: list[int],
    out: Tensor,
    new: bool,
    fire: Callable[[tuple[Any, ...], int], None],
    masks: list[int],
) -> Recipe:
    # A closure: every attribute that a call of an object would look up costs as much as a comparison.
    tensors_of = itemgetter(*at)
    others_of = itemgetter(*(i for i in range(len(args)) if i not in at))
    tensors, others = tensors_of(args), others_of(args)
    guard = tensor_guard(tensors)
    was_deterministic, generation = _deterministic(), TABLE.generation
    index, sizes, strides, dtype = out.get_device(), tuple(out.shape), out.stride(), out.dtype
    first_mask, second_mask, _ = masks
    misplaced = _misplaced(tensors, masks)
    kinds, counted = None if new else tuple(map(type, others)), not out.is_inference()
    last: tuple[int, ...] = ()

    def repeat(args: tuple[Any, ...]) -> Tensor | None:
        nonlocal last
        tensors = tensors_of(args)
        # The guard also sees dispatch modes, functorch, autocast and inference mode in the thread's dispatch keys.
        if (
            not guard(*tensors)
            or (rest := others_of(args)) != others
            or _deterministic() is not was_deterministic
            or TABLE.generation != generation
            or _function_modes()
            or current_device() != index
        ):
            return None
        if kinds is None:
            first, second = tensors
            first_address, second_address = first.data_ptr(), second.data_ptr()
            if first_address & first_mask or second_address & second_mask:
                return None
            out: Tensor = _empty(sizes, strides, dtype)  # aligned, and apart from all else
            fire((first_address, second_address, out.data_ptr()), current_stream(index))
            return out
        # Integers take no fraction as a scale, and 1.0 is one, for all that it equals 1.
        if tuple(map(type, rest)) != kinds:
            return None
        addresses = tuple([t.data_ptr() for t in tensors])
        if addresses != last:
            if misplaced(addresses):
                return None
            last = addresses
        fire(addresses, current_stream(index))
        written: Tensor = tensors[0]
        if counted:
            increment_version((written,))
        return written

    return repeat


def _misplaced(tensors: tuple[Tensor, ...], masks: list[int]) -> Callable[[tuple[int, ...]], bool]:
    """Whether an address breaks an alignment, or the first tensor, which is written, may overlap with another."""
    sizes = [span(t)[1] - span(t)[0] for t in tensors]
    read = [i for i in range(1, len(sizes)) if sizes[0] and sizes[i]]

    def misplaced(addresses: tuple[int, ...]) -> bool:
        start, end = addresses[0], addresses[0] + sizes[0]
        return any(a & mask for a, mask in zip(addresses, masks, strict=False)) or any(
            start < addresses[i] + sizes[i] and addresses[i] < end for i in read
        )

    return misplaced


def facts(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A plain key of a call: what a plan depends on, of tensors and others."""
    return tuple([_fact(a) if isinstance(a, Tensor) else a for a in args])


def _fact(t: Tensor) -> tuple[Any, ...]:
    return type(t), t.dtype, t.shape, t.stride(), t.device, t.data_ptr() & 15
