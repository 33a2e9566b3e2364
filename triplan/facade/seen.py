"""What a checked call found, remembered, so that the next call like it costs a handful of comparisons.

The comparison of types, dispatch keys (lazy negation, inference mode), dtypes, devices, shapes and strides is dynamo's
compiled guard, ``torch._C._dynamo.guards.TensorGuards`` (in torch since 2.0, private); without it, a plain comparison
that costs more. Addresses are compared here: alignment and overlap depend on nothing else once shapes are known.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from triplan.backends.runtime.launcher import WORKSPACE, Places
from triplan.descriptors import Descriptor, OperandKind
from triplan.facade.check import is_same, span
from triplan.facade.workspace import Workspace

# Any: the stub has other types than the code. None in a torch built without dynamo.
_TENSOR_GUARDS: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)


#: Below the largest finite f32.
_SMALL = 2.0**100


class Seen:
    """The signature of one accepted call."""

    __slots__ = (
        "_absent",
        "_alignments",
        "_apart",
        "_device",
        "_free",
        "_guard",
        "_last",
        "_lists",
        "_needed",
        "_nones",
        "_over",
        "_scalars",
        "_simple",
        "_sizes",
        "_tensors",
        "places",
    )

    def __init__(self, desc: Descriptor, args: Any, fields: tuple[str, ...], needed: int) -> None:
        """From args that the full check took, whose dataclass has ``fields``; ``needed`` bytes of workspace."""
        operands = {o.name: o for o in desc.operands()}
        present = [f for f in fields if getattr(args, f) is not None]
        kinds = {f: operands[f].kind for f in present}
        absent = [f for f in fields if f not in present]
        self._absent = operator.attrgetter(*absent) if absent else None
        self._nones = None if len(absent) == 1 else (None,) * len(absent)
        scalars = [f for f in present if kinds[f] is OperandKind.HOST_SCALAR]
        # Any number fits a floating-point scalar; which ones fit an integer the full path knows.
        self._free = all(operands[f].element.is_floating_point for f in scalars)
        self._scalars = getter(scalars)
        self._lists = tuple((f, operands[f].count) for f in present if kinds[f] is OperandKind.TENSOR_LIST)
        single = [f for f in present if kinds[f] in (OperandKind.TENSOR, OperandKind.DEVICE_SCALAR)]
        self._tensors = getter(single)
        self._needed = needed
        # Nothing but addresses can differ: a call whose addresses are the last one's needs no look at them.
        self._simple = not needed and not scalars
        self._last: tuple[Any, ...] = ()

        of = [operands[f] for f in single] + [operands[f] for f, n in self._lists for _ in range(n)]
        names: list[tuple[str, int | None]] = [(f, None) for f in single]
        names += [(f, i) for f, n in self._lists for i in range(n)]
        names += [WORKSPACE] if needed else []
        names += [(f, None) for f in scalars]
        #: Where each operand's value stands in the tuples of ``match`` and ``values``.
        self.places: Places = {name: i for i, name in enumerate(names)}
        tensors = self._collect(args)
        assert tensors is not None
        self._guard = tensor_guard(tensors)
        self._alignments = tuple((i, o.alignment - 1) for i, o in enumerate(of) if tensors[i].numel())
        self._device = tensors[0].device
        self._sizes = sizes = tuple(span(t)[1] - span(t)[0] for t in tensors)
        # Outputs that are written over an input: one memory, as here, or the full path must look.
        self._over = tuple(
            (i, j)
            for i in range(len(single))
            for j in range(len(single))
            if of[i].over == of[j].name and is_same(tensors[i], tensors[j])
        )
        # Every other pair of which one is written, with the bytes that each reaches over.
        self._apart = tuple(
            (i, sizes[i], j, sizes[j])
            for i in range(len(of))
            for j in range(len(of))
            if of[i].is_written and i != j and not (of[j].is_written and j < i) and sizes[i] and sizes[j]
            if (i, j) not in self._over
        )

    def _collect(self, args: Any) -> tuple[torch.Tensor, ...] | None:
        tensors: tuple[torch.Tensor, ...] = self._tensors(args)
        for name, count in self._lists:
            items = getattr(args, name)
            if type(items) not in (list, tuple) or len(items) != count:
                return None
            tensors = (*tensors, *items)
        return tensors

    def match(self, args: Any, workspace: Workspace | None) -> tuple[Any, ...] | None:
        """The addresses and scalars of a call that needs no other check; None if the full path must look at it."""
        tensors = self._collect(args) if self._lists else self._tensors(args)
        if tensors is None or not self._guard(*tensors):
            return None
        addresses = tuple([t.data_ptr() for t in tensors])
        if self._absent is not None and self._absent(args) != self._nones:
            return None
        if self._simple:
            last = self._last
            if addresses == last:
                return last  # whose alignment and overlap are known
            if self._misplaced(addresses):
                return None
            self._last = addresses
            return addresses
        if self._misplaced(addresses):
            return None
        if self._needed:
            if workspace is None or workspace.nbytes < self._needed or workspace.device != self._device:
                return None
            start, end = workspace.address, workspace.address + workspace.nbytes
            for address, size in zip(addresses, self._sizes, strict=True):
                if size and address < end and start < address + size:
                    return None
            addresses = (*addresses, start)
        scalars = self._scalars(args)
        for value in scalars:
            # Numbers that any float element holds; the full path knows about others, and about integers.
            if not self._free or type(value) not in (float, int) or not -_SMALL < value < _SMALL:
                return None
        return (*addresses, *scalars)

    def _misplaced(self, addresses: tuple[int, ...]) -> bool:
        for i, mask in self._alignments:
            if addresses[i] & mask:
                return True
        for i, j in self._over:
            if addresses[i] != addresses[j]:
                return True
        for i, size, j, other_size in self._apart:
            if addresses[i] < addresses[j] + other_size and addresses[j] < addresses[i] + size:
                return True
        return False

    def values(self, args: Any, workspace: Workspace | None) -> tuple[Any, ...]:
        """The same of a call that the full path took."""
        tensors = self._collect(args)
        assert tensors is not None
        start = (workspace.address,) if self._needed and workspace is not None else ()
        return (*(t.data_ptr() for t in tensors), *start, *self._scalars(args))


def getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Reads the attributes ``names``, always into a tuple."""
    if len(names) == 1:
        one = operator.attrgetter(names[0])
        return lambda args: (one(args),)
    return operator.attrgetter(*names) if names else lambda args: ()


def tensor_guard(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool]:
    """A test of whether as many tensors are like these in all but address and contents."""
    # Dynamo's guard takes no tensor twice.
    if _TENSOR_GUARDS is not None and len({id(t) for t in tensors}) == len(tensors):
        sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
        guards = _TENSOR_GUARDS(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        check: Callable[..., bool] = guards.check
        return check
    facts = [_facts(t) for t in tensors]
    return lambda *found: all(isinstance(t, torch.Tensor) and _facts(t) == f for t, f in zip(found, facts, strict=True))


def _facts(t: torch.Tensor) -> tuple[Any, ...]:
    return t.dtype, t.device, t.shape, t.stride(), t.layout, t.is_neg(), t.is_inference(), t.is_quantized
