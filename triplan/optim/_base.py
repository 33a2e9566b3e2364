"""What the optimizers share: which parameters are updated together, their states, and torch's conventions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from triplan.errors import InvalidProblem
from triplan.facade.tables import TablePlan
from triplan.functional._sharding import is_dtensor
from triplan.functional.optim import ListStep, packed
from triplan.optim._shards import divided_alike, is_replicated, local, local_as

#: What torch's optimizers keep in groups and these ignore: state dicts go both ways.
IGNORED = {"foreach": None, "capturable": False, "differentiable": False, "fused": None}


def check_range(name: str, value: Any, below: float | None = None) -> None:
    """Raise ``ValueError`` unless 0 <= value (< ``below``), as torch does."""
    if not value >= 0.0 or (below is not None and value >= below):
        raise ValueError(f"Invalid {name}: {value}")


class _Known:
    """What a step of one group found, for the next one: it holds if nothing but the contents of tensors changed.

    Each check is one pass over all tensors, in C where possible: to look at every property of thousands takes the
    host longer than the step takes the device.
    """

    def __init__(
        self, optimizer: ListOptimizer, group: dict[str, Any], parts: list[tuple[ListStep, list[Tensor]]]
    ) -> None:
        """``parts``: the lists that are updated together, and their parameters."""
        self.kind, self.params = optimizer.kind(group), list(group["params"])
        at = {id(p): i for i, p in enumerate(self.params)}
        self.parts = [(step, [at[id(p)] for p in params]) for step, params in parts]
        self.updated = [p for _, params in parts for p in params]
        self.states = [optimizer.state[p] for p in self.updated]
        self.sharded = any(map(is_dtensor, self.updated))
        self.values = self._values()
        self.addresses = self._addresses()
        self.grads = self._kinds([p.grad for p in self.params], self.sharded)

    @classmethod
    def of(
        cls, optimizer: ListOptimizer, group: dict[str, Any], parts: list[tuple[ListStep, list[Tensor]]]
    ) -> _Known | None:
        """None where a step needs more than addresses: of gradients that do not lie as parameters do."""
        updated = [p for _, params in parts for p in params]
        # Only once per step may ranks exchange gradients: whether one of them knows its addresses, no other can tell.
        plain = all(
            divided_alike(p.grad, p) and _packed_grad(p).data_ptr() == local(p.grad).data_ptr() for p in updated
        )
        return cls(optimizer, group, parts) if plain else None

    def _values(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self.states)))

    def _addresses(self) -> list[int]:
        lying: Iterable[Tensor] = chain(self.updated, self.values)
        return list(map(Tensor.data_ptr, map(local, lying) if self.sharded else lying))

    @staticmethod
    def _kinds(grads: list[Any], sharded: bool) -> list[Any]:
        given = [g for g in grads if g is not None]
        try:
            strides = list(map(Tensor.stride, given))
        except RuntimeError:  # sparse tensors have none
            strides = None
        placements = [g.placements for g in given if is_dtensor(g)] if sharded else None
        sizes = list(map(Tensor.numel, given))  # the memory of a parameter may now be that of a larger one's part
        return [[g is None for g in grads], [g.dtype for g in given], strides, sizes, placements]

    def step(self, optimizer: ListOptimizer, group: dict[str, Any], scale: Tensor | None, found: Tensor | None) -> bool:
        """Make the step if it is the one that was made before; whether it is."""
        if self.kind != optimizer.kind(group) or not _same(group["params"], self.params):
            return False
        states = list(map(optimizer.state.get, self.updated))
        if not _same(states, self.states) or not _same(self._values(), self.values):
            return False
        grads: list[Any] = [p.grad for p in self.params]
        if self._kinds(grads, self.sharded) != self.grads or self._addresses() != self.addresses:
            return False
        if self.sharded:
            grads = [None if g is None else local(g) for g in grads]
        calls = []
        for step, at in self.parts:
            own = [grads[i] for i in at]
            call = step.known(own, scale, found)
            if call is None:
                own = [packed(g, local(self.params[i])) for g, i in zip(own, at, strict=True)]
                call = partial(step, own, grad_scale=scale, found_inf=found)
            calls.append(call)
        numbers = optimizer.numbers(group)
        for call in calls:
            call(numbers)
        return True


def _has_master(group: dict[str, Any], p: Tensor) -> bool:
    return group["master_weights"] and p.dtype is not torch.float32


def _lying(params: Sequence[Tensor], states: Sequence[Sequence[Tensor]]) -> tuple[int, ...]:
    """The addresses and sizes of parameters, and the addresses of their states."""
    sizes = [local(p).numel() for p in params]
    return (*sizes, *[local(t).data_ptr() for p, own in zip(params, states, strict=True) for t in (p, *own)])


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether these are the same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


class ListOptimizer(torch.optim.Optimizer):
    """The base of the optimizers: a step of a group is one launch for each device and set of element types, and a tiny
    one that counts the steps. Nothing waits for the device.

    Steps may be captured in CUDA graphs: make a step before. Between replays ``lr`` may change if it is a tensor.
    GradScaler passes its scale and what it found without a wait; gradients are divided by the scale in registers, and
    what ``.grad`` holds stays scaled.

    Of parameters that are DTensors, as fully_shard makes them, each rank updates its part; states are DTensors too.
    """

    #: GradScaler then sets ``grad_scale`` and ``found_inf`` instead of waiting for the latter.
    _step_supports_amp_scaling = True
    grad_scale: Tensor | None
    found_inf: Tensor | None
    #: The plan, and the fields of a group that are numbers, in the order of the descriptor's ``hyper``.
    plan: ClassVar[type[TablePlan[Any, Any]]]

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], master_weights: bool = False, stochastic_rounding: bool = False
    ) -> None:
        """``master_weights``: f32 copies of narrower parameters (``master`` in their state) and f32 states.

        ``stochastic_rounding``: bf16 parameters are rounded at random, by ``rounding_seed`` of the groups, from torch's
        default generator.
        """
        if master_weights and stochastic_rounding:
            raise ValueError("master_weights and stochastic_rounding: masters are f32, and not rounded")
        seed = int(torch.randint(2**62, ())) if stochastic_rounding else None
        super().__init__(params, {**defaults, **IGNORED, "master_weights": master_weights, "rounding_seed": seed})
        self._lists: dict[tuple[Any, ...], tuple[tuple[int, ...], ListStep]] = {}
        self._known: dict[int, _Known | None] = {}

    # --- a subclass says ---

    def numbers(self, group: dict[str, Any]) -> Sequence[float | Tensor]:
        """The values of ``hyper``."""
        raise NotImplementedError

    def options(self, group: dict[str, Any]) -> dict[str, Any]:
        """Fields of the descriptor."""
        return {"maximize": group["maximize"]}

    def states(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The names of the states of a parameter."""
        raise NotImplementedError

    # --- steps ---

    def kind(self, group: dict[str, Any]) -> tuple[Any, ...]:
        """All of a group but parameters and numbers: groups may be changed between steps."""
        return self.options(group), self.states(group), group["master_weights"], group["rounding_seed"]

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.optim.Optimizer.profile_hook_step
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient. ``closure`` computes the loss again, and is called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for number, group in enumerate(self.param_groups):
            self._update(number, group, scale, found)
        return loss

    def _update(self, number: int, group: dict[str, Any], scale: Tensor | None, found: Tensor | None) -> None:
        """A step of the group of that number."""
        known = self._known.get(number)
        if known is not None and known.step(self, group, scale, found):
            return
        parts = []
        for key, params in self._together(group).items():
            step = self._list_step((number, *key), group, params)
            step([_packed_grad(p) for p in params], self.numbers(group), scale, found)
            parts.append((step, params))
        self._known[number] = _Known.of(self, group, parts)

    def _together(self, group: dict[str, Any]) -> dict[tuple[Any, ...], list[Tensor]]:
        found: dict[tuple[Any, ...], list[Tensor]] = {}
        for p in group["params"]:
            if p.grad is not None:
                if p.grad.is_sparse:
                    raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
                if torch.is_complex(p):
                    raise RuntimeError(f"{type(self).__name__} does not support complex parameters")
                kept = self.state.get(p) or {}
                own = torch.float32 if _has_master(group, p) else p.dtype
                state = next((kept[n].dtype for n in self.states(group) if kept.get(n) is not None), own)
                found.setdefault((p.device, p.dtype, p.grad.dtype, state), []).append(p)
        return found

    def _list_step(self, key: tuple[Any, ...], group: dict[str, Any], params: list[Tensor]) -> ListStep:
        options, names, seed = self.options(group), self.states(group), group["rounding_seed"]
        mastered = _has_master(group, params[0])
        names = (*names, "master") if mastered else names
        key = (*key, *options.values(), *names, seed)
        # Where everything lies: parameters and states may have been replaced since (``p.data = ...``, a loaded state).
        kept = [self._initialized(p, names) for p in params]
        which = _lying(params, kept)
        known = self._lists.get(key)
        if known is not None and known[0] == which:
            return known[1]
        # Other parameters than last time have a gradient: their steps go side by side.
        device, steps = params[0].device, [state[0] for state in kept]
        if len({step.device for step in steps}) > 1:
            steps = [step.to(device) for step in steps]
        counted = torch.stack([step.float() for step in steps]).to(device)
        for p, step in zip(params, counted.unbind(), strict=True):
            self.state[p]["step"] = step
        operands: dict[str, Any] = {"steps": counted}
        if seed is not None and params[0].dtype is torch.bfloat16:
            if any(map(is_replicated, params)):
                raise InvalidProblem(
                    f"{type(self).__name__}: stochastic_rounding would round the copies of a parameter that several "
                    "ranks hold apart"
                )
            operands["seed"] = torch.tensor([seed], device=device)
        for name in ("param", *names):
            whole = params if name == "param" else [self.state[p][name] for p in params]
            operands[name] = self._dense(name, whole, params)
        if mastered:
            operands |= {"copy": operands["param"], "param": operands.pop("master")}
        made = ListStep(self.plan, operands, len(self.numbers(group)), options)
        self._lists[key] = _lying(params, [self._initialized(p, names) for p in params]), made
        return made

    def _dense(self, name: str, tensors: Sequence[Tensor], params: Sequence[Tensor]) -> list[Tensor]:
        """Views of tensors that lie as ``params`` do, with axes in the order of memory; of DTensors, the part here."""
        tensors, params = list(map(local, tensors)), list(map(local, params))
        found = [packed(t, p) for t, p in zip(tensors, params, strict=True)]
        if any(t.data_ptr() != own.data_ptr() for t, own in zip(tensors, found, strict=True)):
            raise InvalidProblem(
                f"{type(self).__name__}: there are gaps between the elements of a {name}, or they overlap; "
                "parameters must be dense in memory, in any order of axes"
            )
        return found

    def _initialized(self, p: Tensor, names: Sequence[str]) -> list[Tensor]:
        """The step and the states of ``p``."""
        state: dict[str, Any] = self.state[p]
        # torch's SGD counts no steps: a buffer from one of its state dicts has made its first.
        if "step" not in state:
            state["step"] = torch.tensor(1.0 if any(state.get(name) is not None for name in names) else 0.0)
        elif not isinstance(state["step"], Tensor):
            state["step"] = torch.tensor(float(state["step"]))  # older state dicts have a number
        for name in names:
            t = state.get(name)
            if t is None and name == "master":
                state[name] = p.detach().to(torch.float32, memory_format=torch.preserve_format)
            elif t is None:
                dtype = torch.float32 if "master" in names else p.dtype
                state[name] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
            elif t.stride() != p.stride():
                # Loaded from elsewhere: states lie as their parameters.
                state[name] = torch.empty_like(p, dtype=t.dtype).copy_(t)
        return [state["step"], *[state[name] for name in names]]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # torch has rounded states to their parameters' dtype.
        params = [(p, _has_master(group, p)) for group in self.param_groups for p in group["params"]]
        places = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for (p, mastered), place in zip(params, places, strict=True):
            for name, t in state_dict["state"].get(place, {}).items():
                if mastered and name != "step" and isinstance(t, Tensor):
                    self.state[p][name] = t.to(p.device, torch.float32, copy=True)
        self._lists.clear()
        self._known.clear()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in {**self.defaults, **IGNORED, "master_weights": False, "rounding_seed": None}.items():
                group.setdefault(name, value)
        self._lists, self._known = {}, {}


# torch wraps the ``step`` of each class whose ``step`` is not marked so, and so would define one in each of ours.
ListOptimizer.step.hooked = True  # type: ignore[attr-defined]


def _packed_grad(p: Tensor) -> Tensor:
    """The gradient with its axes in the order in which the parameter lies in memory; of DTensors, this rank's part."""
    assert p.grad is not None
    return packed(local_as(p.grad, p), local(p))
