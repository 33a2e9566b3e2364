"""Replay: repeat the launches of an accepted call for calls that differ from it in addresses and scalars alone.

- ``guarded`` writes the function that does it: a guard, and what follows if a call passes it.
- ``Replay`` is that for the args of one plan: ``Plan.run`` and ``Plan.bind``.
- ``CallReplays`` holds the replays of a functional op, by what its calls have in common.

A call that no guard accepts takes the full path, which checks everything and says what is wrong. docs/replay.md tells
what is kept, for how long, and what bounds it.

Types, dispatch keys (lazy negation, inference mode), dtypes, devices, shapes, strides and ``requires_grad`` are
compared by dynamo's compiled guard, ``torch._C._dynamo.guards.TensorGuards`` (in torch since 2.0, private); without
it, by a plain comparison that costs more. Dynamo's guard also compares the dispatch keys of the thread, and so notices
dispatch modes, functorch, autocast and inference mode. Addresses are compared here: once shapes and strides are known,
alignment and overlap depend on nothing else.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from triplan.backends.runtime.launcher import (
    STORAGE,
    WORKSPACE,
    BoundLaunch,
    LoadedKernel,
    Places,
    Template,
)
from triplan.descriptors import Descriptor, OperandKind
from triplan.facade.bound import launch_all
from triplan.facade.check import is_same, span
from triplan.facade.workspace import Workspace
from triplan.sku.facts import fact

Tensor = torch.Tensor
# Any: the stub has other types than the code. None in a torch built without dynamo.
_GUARDS: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_TENSOR_GUARDS: Any = getattr(_GUARDS, "TensorGuards", None)
#: Numbers of smaller magnitude are finite in f32 and f64, the elements of floating-point scalars.
MAX_SCALAR = 2.0**100
#: Bytes: larger than any storage. Below it an address may be a mere offset: that of a view into freed storage.
_LARGEST_OFFSET = 2**38


# --- the guard ---


class Slot(NamedTuple):
    """A tensor of an accepted call, and what its operands ask of its address."""

    read: str  # the expression that reads it from a ``call``
    tensor: Tensor
    alignment: int  # bytes, a power of two
    is_written: bool


def guarded(
    slots: Sequence[Slot],
    then: Sequence[str],
    *,
    parameters: str = "call",
    same: Sequence[tuple[int, int]] = (),
    unreadable: Sequence[str] = (),
    refused: Sequence[str] = (),
    constants: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[[Any], Any]:
    """A function of a call: None if the full path must look at it, else what the statements ``then`` return.

    Args:
        slots: the tensors of an accepted call. Others must be like them, and where kernels can take them.
        then: statements that may use the tensors, ``x0``, ``x1`` and so on, their addresses, ``t0``, ``t1`` and so on,
            and if a slot is written the tuple of addresses, ``found``.
        parameters: of the function.
        same: pairs of slots that are one memory, the first of which is written over the second.
        unreadable: expressions that are true of a call whose tensors cannot be read.
        refused: expressions that are true of a call that the full path must look at.
        constants: what expressions and statements use by name.

    The function is written out as source, because loops over tensors and pairs take twice as long. For a call of two
    inputs and an output it is::

        def guard(call):
            x0 = call.src; x1 = call.index; x2 = call.out
            try:
                if x0.is_nested or x1.is_nested or x2.is_nested: return None
            except AttributeError: return None                                      # no tensor
            if not alike(x0, x1, x2): return None
            if call.status is not None: return None                                 # refused
            t0 = x0.data_ptr(); t1 = x1.data_ptr(); t2 = x2.data_ptr()
            found, known = (t0, t1, t2), last
            if found == known: found = known
            elif t0 < far and t0 == offset ... or t0 & mask0 ... or (t2 < t0 + size0 and t0 < t2 + size2): return None
            else: last = found
            return found                                                            # then
    """
    sizes = [size_of(slot.tensor) for slot in slots]
    constants = {"alike": tensor_guard(tuple(slot.tensor for slot in slots)), "far": _LARGEST_OFFSET, **constants}
    misplaced = [
        f"(t{i} < far and t{i} == x{i}.storage_offset() * {slot.tensor.element_size()})"
        for i, slot in enumerate(slots)
        if sizes[i]
    ]
    for i, slot in enumerate(slots):
        if sizes[i] and slot.alignment > 1:
            mask = slot.alignment - 1
            misplaced.append(
                f"t{i} & {mask} != {rest}" if (rest := slot.tensor.data_ptr() & mask) else f"t{i} & {mask}"
            )
    misplaced += [f"t{i} != t{j}" for i, j in same]
    # Every other pair of which one is written shares no byte.
    for i, slot in enumerate(slots):
        for j, other in enumerate(slots):
            twice = i == j or (other.is_written and j < i)
            if slot.is_written and not twice and (i, j) not in same and sizes[i] and sizes[j]:
                constants |= {f"size{i}": sizes[i], f"size{j}": sizes[j]}
                misplaced.append(f"(t{i} < t{j} + size{j} and t{j} < t{i} + size{i})")
    tensors = ", ".join(f"x{i}" for i in range(len(slots)))
    lines = [
        *(f"if {test}: return None" for test in unreadable),
        "; ".join(f"x{i} = {slot.read}" for i, slot in enumerate(slots)),
        # Dynamo's guard asks for strides. A strided nested tensor has none, and the C++ exception ends the process.
        "try:",
        f"  if {' or '.join(f'x{i}.is_nested' for i in range(len(slots)))}: return None",
        "except AttributeError: return None",  # no tensor
        f"if not alike({tensors}): return None",
        *(f"if {test}: return None" for test in refused),
        "; ".join(f"t{i} = x{i}.data_ptr()" for i in range(len(slots))),
    ]
    test = " or ".join(misplaced) or "False"
    if any(slot.is_written for slot in slots):
        # The addresses accepted last need no second look; they are returned as the very tuple, as ``Replay.launch``
        # compares identities first. ``last`` is read once, because other threads may replace it meanwhile.
        lines += [
            "nonlocal last",
            f"found = {''.join(f't{i}, ' for i in range(len(slots)))}",
            "known = last",
            "if found == known: found = known",
            f"elif {test}: return None",
            "else: last = found",
        ]
    else:
        lines.append(f"if {test}: return None")
    return generate(parameters, [*lines, *then], constants)


def generate(parameters: str, lines: Sequence[str], constants: Mapping[str, Any]) -> Callable[..., Any]:
    """A function of ``parameters`` with these ``lines``, which use ``constants`` and the variable ``last`` by name."""
    made = _maker(parameters, "\n  ".join(lines), tuple(constants))(**constants)
    # Lines may use the address of a tensor that no line names.
    made.held = [value for value in constants.values() if isinstance(value, Tensor)]  # type: ignore[attr-defined]
    return made


@fact
def _maker(parameters: str, body: str, constants: tuple[str, ...]) -> Callable[..., Callable[..., Any]]:
    """A function that makes the function from the values of ``constants``."""
    source = f"def make({', '.join(constants)}):\n last = ()\n def made({parameters}):\n  {body}\n return made"
    scope: dict[str, Any] = {}
    exec(compile(source, "<replay>", "exec"), scope)
    make: Callable[..., Callable[..., Any]] = scope["make"]
    return make


def tensor_guard(tensors: tuple[Tensor, ...]) -> Callable[..., bool]:
    """A test of whether as many tensors are like these in all but address and contents."""
    # Dynamo's guard takes no tensor twice.
    if _TENSOR_GUARDS is not None and len({id(t) for t in tensors}) == len(tensors):
        sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
        guards = _TENSOR_GUARDS(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        check: Callable[..., bool] = guards.check
        return check
    facts = [_compared(t) for t in tensors]
    return lambda *found: all(isinstance(t, Tensor) and _compared(t) == f for t, f in zip(found, facts, strict=True))


def _compared(t: Tensor) -> tuple[Any, ...]:
    return (
        t.dtype,
        t.device,
        t.shape,
        t.stride(),
        t.layout,
        t.is_neg(),
        t.is_inference(),
        t.is_quantized,
        t.requires_grad,
    )


def size_of(t: Tensor) -> int:
    """Bytes from the first to the last element of ``t``."""
    start, end = span(t)
    return end - start


def attributes(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Reads the attributes ``names``, always into a tuple."""
    if len(names) == 1:
        one = operator.attrgetter(names[0])
        return lambda args: (one(args),)
    return operator.attrgetter(*names) if names else lambda args: ()


# --- plans: run and bind ---


class Replay:
    """The launches of a plan, for args of one signature."""

    __slots__ = (
        "_addresses",
        "_device",
        "_filled",
        "_floating",
        "_needed",
        "_only_addresses",
        "_scalars",
        "_scalars_at",
        "_sizes",
        "_templates",
        "index",
    )

    def __init__(
        self, desc: Descriptor, args: Any, needed: int, kernels: Sequence[LoadedKernel], storage: bool = False
    ) -> None:
        """From ``args`` that the full path accepted.

        ``needed``: bytes of workspace; ``kernels``: what the plan launches on the args' device, nothing on the CPU;
        ``storage``: whether they read prepared indices.
        """
        operands = {o.name: o for o in desc.operands()}
        # Args with names of their own (``NamedArgs``) have a class for each set of names.
        refused = ["type(call) is not args_type"]
        refused += [f"call.{f.name} is not None" for f in fields(args) if getattr(args, f.name) is None]
        unreadable: list[str] = []
        scalars: list[str] = []
        names: list[tuple[str, int | None]] = []
        slots: list[Slot] = []
        for name in (f.name for f in fields(args)):
            value, read = getattr(args, name), f"call.{name}"
            if value is None:
                continue
            operand = operands[name]
            if operand.kind is OperandKind.HOST_SCALAR:
                scalars.append(name)
            elif operand.kind is OperandKind.TENSOR_LIST:
                unreadable.append(f"type({read}) not in (list, tuple) or len({read}) != {operand.count}")
                for i, item in enumerate(value):
                    names.append((name, i))
                    slots.append(Slot(f"{read}[{i}]", item, operand.alignment, operand.is_written))
            else:
                names.append((name, None))
                slots.append(Slot(read, value, operand.alignment, operand.is_written))
        # Outputs may be written over inputs only where these were.
        same = [
            (i, j)
            for i, (output, _) in enumerate(names)
            for j, (name, _) in enumerate(names)
            if name in operands[output].over and is_same(slots[i].tensor, slots[j].tensor)
        ]
        self._addresses: Callable[[Any], tuple[int, ...] | None]
        self._addresses = guarded(
            slots,
            ["return found"],
            same=same,
            unreadable=unreadable,
            refused=refused,
            constants={"args_type": type(args)},
        )
        self._device = slots[0].tensor.device
        self.index = slots[0].tensor.get_device()
        self._sizes = [size_of(slot.tensor) for slot in slots]
        self._needed = needed
        self._floating = all(operands[f].element.is_floating_point for f in scalars)
        self._scalars = attributes(scalars)
        self._only_addresses = not needed and not scalars
        # The order of the values that ``match`` and ``values`` return.
        names += [WORKSPACE] if needed else []
        names += [STORAGE] if storage else []
        self._scalars_at = len(names)
        names += [(f, None) for f in scalars]
        places: Places = {name: i for i, name in enumerate(names)}
        self._templates: tuple[Template, ...] = tuple(kernel.template(args, places) for kernel in kernels)
        # The last launches, and the values in them. Replaced whole, so that no thread ever sees half of it.
        self._filled: tuple[tuple[Any, ...], tuple[BoundLaunch, ...]] = ((), ())

    def match(self, args: Any, workspace: Workspace | None) -> tuple[Any, ...] | None:
        """The values of a call that needs no other check; None if the full path must look at it."""
        addresses = self._addresses(args)
        if addresses is None or self._only_addresses:
            return addresses
        if self._needed:
            if workspace.__class__ is not Workspace or workspace.device != self._device:
                return None
            if workspace.nbytes < self._needed:
                return None
            start = workspace.address
            end = start + workspace.nbytes
            for address, size in zip(addresses, self._sizes, strict=True):
                if size and address < end and start < address + size:
                    return None
            addresses = (*addresses, start)
        scalars = self._scalars(args)
        for value in scalars:
            # The full path decides about larger numbers, NaN and infinity, and about integer scalars.
            if not self._floating or type(value) not in (float, int) or not -MAX_SCALAR < value < MAX_SCALAR:
                return None
        return (*addresses, *scalars)

    def values(self, args: Any, workspace: Workspace | None, storage: Workspace | None = None) -> tuple[Any, ...]:
        """The values of a call that the full path accepted: addresses, then scalars."""
        found: list[int] = []
        for field in fields(args):
            value = getattr(args, field.name)
            tensors = value if isinstance(value, (list, tuple)) else [value]
            found += [t.data_ptr() for t in tensors if isinstance(t, Tensor)]
        found += [workspace.address] if self._needed and workspace is not None else []
        found += [] if storage is None else [storage.address]
        return (*found, *self._scalars(args))

    def launch(self, values: tuple[Any, ...], stream: torch.cuda.Stream | int | None) -> None:
        """Launch with ``values``; those of the last launch are filled in already."""
        filled, calls = self._filled
        if filled is not values:
            # 0.0 equals -0.0: such scalars are filled in anew.
            if filled != values or 0 in values[self._scalars_at :]:
                calls = self.fill(values)
            self._filled = values, calls
        launch_all(calls, self.index, stream)

    def fill(self, values: tuple[Any, ...]) -> tuple[BoundLaunch, ...]:
        """The launches with ``values``."""
        return tuple([template.fill(values) for template in self._templates])
