"""What a functional call does, recorded: the plans that it runs, and the ops that reach torch's dispatcher."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling
from torch.utils._python_dispatch import TorchDispatchMode

from triplan.backends.table import TABLE
from triplan.facade.workspace import Workspace
from triplan.functional._watching import nothing_watches, tensors_in, transformed

Tensor = torch.Tensor

_aten: Any = torch.ops.aten
_ALLOCATIONS = frozenset(
    (
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    )
)
#: Ops whose result is the same at every call of a signature.
CREATIONS = frozenset(
    (
        _aten.full.default,
        _aten.zeros.default,
        _aten.ones.default,
        _aten.new_full.default,
        _aten.new_zeros.default,
        _aten.new_ones.default,
        _aten.scalar_tensor.default,
        _aten.arange.default,
        _aten.arange.start,
    )
)
#: Tags of ops whose results have a shape that values decide, or are values on the host.
_DEPENDS_ON_VALUES = frozenset((torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output))
#: Ops that change what a tensor is a view of.
_REPOINTING = frozenset((_aten.resize_.default, *(getattr(_aten.set_, name) for name in _aten.set_.overloads())))
_RESHAPES = frozenset((_aten.view.default, _aten._unsafe_view.default, _aten._reshape_alias.default))
_RESHAPES |= {_aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims}


class Step(NamedTuple):
    """A plan that ran, with the operands, scalars and workspace of its run."""

    plan: Any
    operands: dict[str, Any]
    scalars: dict[str, Any]
    workspace: Workspace | None

    def tensors(self) -> Iterator[Tensor]:
        """Operands and workspace."""
        yield from tensors_in(tuple(self.operands.values()))
        if self.workspace is not None:
            yield self.workspace.tensor

    def written(self) -> Iterator[Tensor]:
        """The operands that it writes."""
        yield from tensors_in([self.operands.get(o.name) for o in self.plan.descriptor.operands() if o.is_written])


class TorchOp(NamedTuple):
    """An op of torch's that ran, no allocation and no view."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Tensor, ...]

    @property
    def is_function(self) -> bool:
        """Whether equal arguments give equal results, and nothing else changes."""
        return not self.func._schema.is_mutable and torch.Tag.nondeterministic_seeded not in self.func.tags

    def tensors(self) -> Iterator[Tensor]:
        """What it reads and writes."""
        yield from tensors_in((*self.args, *self.kwargs.values(), *self.results))

    def written(self) -> Iterator[Tensor]:
        """Its new results, or the arguments that it changes."""
        if not self.func._schema.is_mutable:
            yield from self.results
            return
        for i, declared in enumerate(self.func._schema.arguments):
            if declared.is_write:
                yield from tensors_in([self.args[i] if i < len(self.args) else self.kwargs.get(declared.name)])


class View(NamedTuple):
    """A view that was taken: ``func(source, *args, **kwargs)``, of a source of ``shape``."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    source: tuple[Any, ...]
    shape: tuple[int, ...]

    def apply(self, t: Tensor) -> Tensor:
        result: Tensor = self.func(t, *self.args, **self.kwargs)
        return result

    @property
    def is_bijective(self) -> bool:
        return self.func in _RESHAPES or self.func in (_aten.t.default, _aten.transpose.int, _aten.permute.default)

    def pull_back(self, grad: Tensor) -> Tensor:
        """The gradient of the source; for bijective views."""
        if self.func is _aten.t.default:
            return grad.t()
        if self.func is _aten.transpose.int:
            return grad.transpose(*self.args)
        if self.func is _aten.permute.default:
            order = [d % len(self.shape) for d in self.args[0]]
            return grad.permute(sorted(range(len(order)), key=order.__getitem__))
        return grad.reshape(self.shape)


def geometry(t: Tensor) -> tuple[Any, ...]:
    """Equal for tensors of the same elements in the same arrangement."""
    return t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """What a call does below autograd."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generation = TABLE.generation  # of the kernel table, before a plan is selected
        self.records_gradients = torch.is_grad_enabled()
        self.steps: list[Step | TorchOp] = []
        self.fresh: dict[int, Tensor] = {}  # what was allocated, by storage; kept alive, so that no storage comes twice
        self.views: dict[tuple[Any, ...], View] = {}
        self.settings: dict[Callable[[], Any], Any] = {}
        self.differentiated: list[tuple[Any, tuple[Any, ...], Any]] = []  # (op, arguments, result)
        #: Functions that draw numbers, and what each drew.
        self.draws: list[tuple[Callable[[], tuple[int, ...]], tuple[int, ...]]] = []
        #: Comparisons of the call's floats: (float, symbol, the other side, how it came out).
        self.comparisons: list[tuple[float, str, Any, bool]] = []
        self.used: list[float] = []  # of which something else was made
        self.is_repeatable = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # If True, the first op recorded imports dynamo, which takes a second and keeps that op's tensors until gc.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._can_decompose():  # made of other ops; in a kernel that torch's dispatcher calls, it comes whole
            with _seen_by(self):
                return func.decompose(*args, **kwargs)
        count = len(self.steps)
        result = func(*args, **kwargs)
        # A plan ran within the op, as one does for tensors that watch: repeated, both would run.
        self.is_repeatable &= len(self.steps) == count
        results = tuple(result) if isinstance(result, (list, tuple)) else () if result is None else (result,)
        if not _DEPENDS_ON_VALUES.isdisjoint(func.tags):
            self.is_repeatable = False
        elif func in _ALLOCATIONS:
            self.fresh[result.untyped_storage()._cdata] = result
        elif func in _REPOINTING or not all(isinstance(t, Tensor) for t in results):
            # Numbers and booleans that no tensor decides are as constant as the arguments are.
            self.is_repeatable &= next(tensors_in((*args, *kwargs.values())), None) is None
        elif func.is_view or func is _aten._unsafe_view.default:
            source = args[0]
            if not isinstance(result, Tensor):
                self.is_repeatable = False
            elif geometry(result) != geometry(source):
                self.views[geometry(result)] = View(func, args[1:], kwargs, geometry(source), source.shape)
        else:
            self.steps.append(TorchOp(func, args, kwargs, results))
            if not func._schema.is_mutable:
                self.fresh.update((t.untyped_storage()._cdata, t) for t in results)
        return result

    def __enter__(self) -> Recording:
        _thread.recording = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _thread.recording = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def path(self, source: Tensor, wanted: Tensor) -> list[View] | None:
        """The views that lead from ``source`` to ``wanted``; None if none do."""
        at, start, found = geometry(wanted), geometry(source), list[View]()
        while at != start:
            view = self.views.get(at)
            if view is None or view in found:
                return None
            found.append(view)
            at = view.source
        return found[::-1]

    def steps_towards(self, wanted: Iterable[Tensor]) -> list[Step | TorchOp]:
        """The steps that ``wanted`` depends on, and those that write what the call did not allocate."""
        storages = {t.untyped_storage()._cdata for t in wanted}
        found: list[Step | TorchOp] = []
        for step in reversed(self.steps):
            written = {t.untyped_storage()._cdata for t in step.written()}
            if not written or not written.isdisjoint(storages) or not written <= self.fresh.keys():
                storages.update(t.untyped_storage()._cdata for t in step.tensors())
                found.append(step)
        return found[::-1]


@contextmanager
def _seen_by(record: Recording) -> Iterator[None]:
    """A dispatch mode does not see the ops of its own handler."""
    TorchDispatchMode.__enter__(record)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        TorchDispatchMode.__exit__(record, None, None, None)  # type: ignore[no-untyped-call]


class _Thread(threading.local):
    recording: Recording | None = None


_thread = _Thread()


def recording() -> Recording | None:
    """What records the calls of this thread."""
    return _thread.recording


def unwatched(args: Sequence[Any]) -> bool:
    """Whether torch's dispatcher can be skipped: it would go straight to the kernel, but for a recording of ours."""
    return nothing_watches(args, modes=recording() is not None)


def is_plain(*tensors: Any) -> bool:
    """Whether a plan can run on ``tensors``, unseen by anybody. (Callers handle gradients.)"""
    return not torch.compiler.is_compiling() and not transformed() and unwatched(tensors)


def setting(read: Callable[[], Any]) -> Any:
    """``read()``, of which a replay of the call under way notices that it changed. ``read`` takes part in a guard.

    Dynamo guards what compiled code reads by itself, and cannot trace what a thread records.
    """
    value = read()
    if not is_compiling() and (record := _thread.recording) is not None:
        record.settings[read] = value
    return value


class Drawn(int):
    """A number that every call has another of. It is told by identity, as the numbers of a call may be equal."""


def drawn(draw: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
    """``draw()``; a replay of the call under way calls ``draw`` again. The numbers may be scalars of plans, no more."""
    found = draw()
    if (record := _thread.recording) is not None:
        found = tuple(map(Drawn, found))
        record.draws.append((draw, found))
    return found
