"""Plan: select, inspect, run. The same for every op; an op adds its Args and names its descriptor."""

from __future__ import annotations

import dataclasses
import logging
import textwrap
from collections.abc import Callable
from types import NoneType
from typing import Any, ClassVar, Generic, TypeVar, overload

import torch
from torch.autograd import profiler
from typing_extensions import Self, Unpack

from triplan.backends.reference.run import run_reference
from triplan.backends.runtime.compile import CompiledRecord, record
from triplan.backends.runtime.interpreter import interpret
from triplan.backends.runtime.launch import Launch
from triplan.backends.runtime.launcher import BoundLaunch, LoadedKernel, Places, Template, load
from triplan.backends.runtime.modules import is_loaded
from triplan.backends.select import canonical_key, consult, select, sku_of, unknown_times
from triplan.backends.table import TABLE, KernelRow
from triplan.backends.tuning import TuningTable
from triplan.descriptors import Descriptor
from triplan.descriptors.base import PlannedBy
from triplan.errors import InvalidProblem, Unsupported, shown
from triplan.facade.bound import BoundRun, bump_versions, launch_all
from triplan.facade.check import check_args, check_memory, named_tensors
from triplan.facade.prepared import PreparedIndices, Preparing
from triplan.facade.replay import Replay, attributes
from triplan.facade.workspace import Workspace
from triplan.sku import (
    BackendKind,
    Candidate,
    KernelSku,
    PlanPreference,
    PrecisionGuarantee,
    Requirements,
    Support,
    Target,
    TargetName,
)
from triplan.sku.facts import cached_property, fact

__all__ = ["NamedArgs", "Plan", "plan", "plan_type"]

D = TypeVar("D", bound=Descriptor)
A = TypeVar("A")
P = TypeVar("P", bound="Plan[Any, Any]")

log = logging.getLogger("triplan")
_PLANS: dict[str, type[Plan[Any, Any]]] = {}


class Plan(Preparing, Generic[D, A]):
    """A kernel selected for a descriptor, with what is known before it runs.

    Immutable: one plan may run from many threads and streams at once. Pickling keeps the request and selects again.
    A subclass names ``descriptor_type`` and ``args_type``.
    """

    descriptor_type: ClassVar[type[Descriptor]]
    args_type: ClassVar[type]

    descriptor: D
    preference: PlanPreference
    target: Target
    tuning: TuningTable | None
    #: The canonical key: equal keys mean equal selections.
    key: str
    #: Every kernel that select considered, the chosen one first.
    candidates: tuple[Candidate, ...]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "descriptor_type"):  # not an intermediate base
            _PLANS.update(dict.fromkeys(cls.descriptor_type.ops(), cls))

    def __init__(self) -> None:
        raise TypeError(f"use {type(self).__name__}.select(descriptor, ...)")

    @classmethod
    def select(
        cls,
        desc: D,
        *,
        preference: PlanPreference | None = None,
        target: Target | TargetName | None = None,
        tuning: TuningTable | None = None,
        **requirements: Unpack[Requirements],
    ) -> Self:
        """Choose a kernel: a pure function of its arguments, and no GPU is needed.

        ``preference`` defaults to no requirement (determinism then follows torch's global setting); ``requirements``
        replace its fields: ``deterministic=True``. ``target`` may be a preset's name, and defaults to
        ``Target.current()``. Raises ``Unsupported``, carrying every candidate, where nothing can meet the request, and
        ``InvalidProblem`` for a descriptor of another op.
        """
        if not isinstance(desc, cls.descriptor_type):
            raise InvalidProblem(f"{cls.__name__} plans {cls.descriptor_type.__name__}, not {type(desc).__name__}")
        if not isinstance(tuning, (TuningTable, NoneType)):
            raise InvalidProblem(f"tuning is {shown(tuning)}; a TuningTable is expected")
        preference = PlanPreference.of(preference, requirements).resolved()
        target = Target.given(target)
        entry, candidates = select(desc, preference, target, tuning)
        self = object.__new__(cls)
        self._entry = entry
        self._loaded, self._replay, self._earlier = {}, None, None
        self.descriptor, self.preference, self.target, self.tuning = desc, preference, target, tuning
        self.key = canonical_key(desc, preference, target, tuning)
        self.candidates = candidates
        log.debug("select %s -> %s", self.key, entry.name)
        return self

    _entry: KernelRow
    _loaded: dict[tuple[str, int], tuple[LoadedKernel, ...]]
    # Those of the last two signatures, as of calls with and without an optional operand. Plans are shared by threads:
    # each is replaced whole, and a lost one is made again.
    _replay: Replay | None
    _earlier: Replay | None

    # --- before a run ---

    def sku(self) -> KernelSku:
        """Identity of the selected kernel."""
        return self._sku

    def precision_guarantee(self, output: str | None = None) -> PrecisionGuarantee:
        """The guarantee of one output, or the weakest of all. Raises ``InvalidProblem`` for an unknown name."""
        if output is None:
            return self._sku.precision_guarantee
        guarantees = self._entry.guarantees(self.descriptor)
        if output not in guarantees:
            raise InvalidProblem(f"{self.descriptor.op} has outputs {', '.join(guarantees)}; none is {shown(output)}")
        return guarantees[output]

    def workspace_size(self) -> int:
        """Exact bytes of scratch, at ``Workspace.ALIGNMENT``."""
        return self._workspace_size

    @cached_property
    def _sku(self) -> KernelSku:
        # Lazy: most selected plans are never asked for their SKU.
        return sku_of(self._entry, self.descriptor, self.target)

    @cached_property
    def _workspace_size(self) -> int:
        return self._entry.workspace(self.descriptor, self.target)

    def can_implement(self, args: A) -> Support:
        """Whether ``run`` would take ``args``: truthy, or falsy with ``.reason`` and the ``.error`` it would raise."""
        return check_args(self.descriptor, self.target, self.args_type, args)

    def explain(self) -> str:
        """The request, the selected kernel, its guarantee, and every candidate with its verdict."""
        g = self._sku.precision_guarantee
        t = g.tolerance
        words = ("deterministic", "bit_stable_on_same_hardware", "batch_invariant", "order_invariant")
        held = ", ".join(w for w in words if getattr(g, w)) or "none"
        lines = [
            f"{self.descriptor.op} on {self.target.name or self.target.arch}",
            f"  key         {self.key}",
            f"  kernel      {self._sku.id}",
            f"  guarantees  {held}; math {g.math_precision}, accumulator {g.accumulator}"
            + (f", duplicates {g.duplicates}" if g.duplicates else ""),
            f"  tolerance   rtol {t.rtol:.3g}, ctol {t.ctol:.3g}, underflow {t.underflow:.3g}",
            f"  workspace   {self.workspace_size()} bytes",
        ]
        if self.tuning is not None:
            entries = TABLE.rows(self.descriptor.op)
            found = consult(self.descriptor, self.preference, self.target, self.tuning, entries)
            gone = unknown_times(self.descriptor, self.target, found.times, entries)
            said = f"{len(found.times) - len(gone)} times"
            said += f"; no such kernel or configuration: {', '.join(gone)}" if gone else ""
            lines.append(f"  tuning      {f'a miss: {found.miss}' if found.miss else said}")
        lines.append("  candidates")
        for c in self.candidates:
            cost = "" if c.cost_us is None else f" (about {c.cost_us:.1f} us)"
            lines.append(f"    {'*' if c.chosen else '-'} {c.kernel}{cost}: {c.reason}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._sku.id})"

    # --- building ---

    @cached_property
    def launches(self) -> tuple[Launch, ...]:
        """What ``run`` launches, as data; empty for the reference backend and for problems with nothing to do."""
        return self._entry.launches(self.descriptor, self.target)

    def compile(self) -> tuple[CompiledRecord, ...]:
        """Build the kernels, with or without a GPU: name, arch, ptx, cubin, registers, spill_bytes, shared_bytes.

        Raises ``Unsupported`` for a plan that compiles nothing (target cpu), ``KernelInternal`` if a build fails.
        """
        if not self.target.is_gpu:
            raise Unsupported(f"{self!r} runs on the cpu: there is nothing to compile; choose a GPU target")
        sources = dict.fromkeys(launch.source() for launch in self.launches)
        return tuple(record(source, self.target.arch) for source in sources)

    def prepare(self, device: torch.device | str | int | None = None) -> Self:
        """Build and load all that ``run`` can need on ``device`` (default: the current one).

        Raises ``Unsupported`` where there is no GPU, ``KernelInternal`` if a build fails.
        """
        if self.target.is_gpu:
            where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
            if where.type != "cuda" or not torch.cuda.is_available():
                raise Unsupported(f"{self!r} cannot be loaded on {where}: it needs a GPU; plan.compile() does not")
            index = torch.cuda.current_device() if where.index is None else where.index
            self._load("launches", index)
            if self._entry.preparation is not None:
                self._load("preparing_launches", index)
                self._load("prepared_launches", index)
        return self

    def _load(self, which: str, index: int) -> tuple[LoadedKernel, ...]:
        found = self._loaded.get((which, index))
        if found is None:
            arch, launches = self.target.arch, getattr(self, which)
            if torch.cuda.is_current_stream_capturing() and not all(
                is_loaded(launch.source(), arch, index) for launch in launches
            ):
                raise Unsupported(f"{self!r} is not prepared for cuda:{index}; call plan.prepare() before capturing")
            # Two threads may load the same kernels twice; either result is right.
            found = self._loaded[which, index] = load(launches, arch, index)
        return found

    # --- running ---

    def run(
        self,
        args: A,
        workspace: Workspace | None = None,
        stream: torch.cuda.Stream | int | None = None,
        prepared: PreparedIndices | None = None,
    ) -> None:
        """Launch on the operands' device, on ``stream`` (a ``torch.cuda.Stream``, a raw handle) or torch's current one.

        Allocates nothing and never synchronises. Raises what ``can_implement`` reports, or ``WorkspaceTooSmall``; then
        nothing was launched and nothing written. ``prepared`` replaces the work on the indices: see
        ``prepare_indices``. Calls with it are checked in full every time: ``bind`` them for loops.
        """
        if prepared is not None:
            self._run_prepared(args, workspace, stream, prepared)
            return
        replay, values = self._replay, None
        if replay is not None and isinstance(args, self.args_type):
            values = replay.match(args, workspace)
        if replay is None or values is None:
            replay, values = self._accept(args, workspace)
        if profiler._is_profiler_enabled:
            with profiler.record_function(f"triplan {self._sku.id}"):
                self._launch(replay, values, args, workspace, stream)
        elif self.target.is_gpu:
            replay.launch(values, stream)
        else:
            self._run_on_cpu(args, workspace, stream)
        bump_versions(self._written(args))

    def _launch(
        self, replay: Replay, values: tuple[Any, ...], args: A, workspace: Workspace | None, stream: Any
    ) -> None:
        if self.target.is_gpu:
            replay.launch(values, stream)
        else:
            self._run_on_cpu(args, workspace, stream)

    def bind(self, args: A, workspace: Workspace | None = None, prepared: PreparedIndices | None = None) -> BoundRun:
        """Check once and fix every address: for loops over the same buffers.

        The caller promises that, as long as the BoundRun is used, the tensors of ``args`` and the workspace are not
        resized or re-pointed (``resize_``, ``set_``; it holds references, so nothing else can move them), and that the
        workspace serves one call at a time. Scalars keep the values they had. Raises as ``run``; GPU plans only.

        The launches are instantiated as a CUDA graph. The driver takes about 0.1 MiB of GPU memory for it, outside
        torch's allocator (``bench host`` measures it). CUDA runs the launches of one graph in sequence: calls wait for
        each other even on different streams, and the kernels may not have a stream's priority.

        The launches are issued one by one, as by ``run``, if the stream is being captured or is named by the call, if
        another device is current, under a profiler's hooks, if there is no memory for a graph, and if a kernel takes
        scratch memory of Triton's or overlaps with the launch before it (on sm90a ``wgmma``,
        ``wgmma_cut``, ``wgmma_tiles``, ``split_k`` and the norms' ``split``).
        """
        if not self.target.is_gpu:
            raise Unsupported(f"{self!r} runs on the cpu: there is no launch to bind")
        calls, index = self._bind(args, workspace, prepared)
        return BoundRun(calls, index, self._written(args), (args, workspace, prepared))

    def _bind(
        self, args: A, workspace: Workspace | None, prepared: PreparedIndices | None
    ) -> tuple[tuple[BoundLaunch, ...], int]:
        """The launches of one call, and the device's index."""
        if prepared is not None:
            self._validate(args, workspace)
            self._check_prepared(prepared, args, workspace)
            replay = self._make_replay(args, prepared)
            return replay.fill(replay.values(args, workspace, prepared.storage)), replay.index
        known, values = self._replay, None
        if known is not None and isinstance(args, self.args_type):
            values = known.match(args, workspace)
        if known is None or values is None:
            known, values = self._accept(args, workspace)
        return known.fill(values), known.index

    def _run_prepared(
        self, args: A, workspace: Workspace | None, stream: torch.cuda.Stream | int | None, prepared: PreparedIndices
    ) -> None:
        if self.target.is_gpu:
            launch_all(*self._bind(args, workspace, prepared), stream)
        else:
            self._validate(args, workspace)
            self._check_prepared(prepared, args, workspace)
            interpret(
                self.prepared_launches, args, None if workspace is None else workspace.tensor, prepared.storage.tensor
            )
        bump_versions(self._written(args))

    # --- steps of a run ---

    def _validate(self, args: A, workspace: Workspace | None) -> None:
        support = self.can_implement(args)
        if support.error is not None:
            raise support.error
        self._check_workspace(workspace, self._written(args)[0].device, args)

    def _accept(self, args: A, workspace: Workspace | None) -> tuple[Replay, tuple[Any, ...]]:
        """The replay that takes a call that the last one does not, and the call's values.

        That of the signature before, or else a new one, which is kept: then the call is checked in full.
        """
        earlier = self._earlier
        if earlier is not None and isinstance(args, self.args_type):
            values = earlier.match(args, workspace)
            if values is not None:
                self._replay, self._earlier = earlier, self._replay
                return earlier, values
        self._validate(args, workspace)
        replay = self._make_replay(args)
        # Whether a tensor that requires grad may be written depends on torch's grad mode, which a replay does not see.
        if not any(t.requires_grad for t in self._written(args)):
            self._replay, self._earlier = replay, self._replay
        return replay, replay.values(args, workspace)

    def _make_replay(self, args: A, prepared: PreparedIndices | None = None) -> Replay:
        """How to repeat a call with ``args``, which the full path accepted."""
        kernels: tuple[LoadedKernel, ...] = ()
        if self.target.is_gpu:
            which = "launches" if prepared is None else "prepared_launches"
            kernels = self._load(which, self._written(args)[0].get_device())
        return Replay(self.descriptor, args, self._workspace_size, kernels, storage=prepared is not None)

    def templates(self, args: A, workspace: Workspace | None, places: Places) -> tuple[Template, ...]:
        """The launches of a run with the layout of ``args``, to be filled with values that stand at ``places``.

        For functional calls, whose replays guard their own tensors. Raises as ``run`` for args that do not fit.
        """
        self._validate(args, workspace)
        kernels = self._load("launches", self._written(args)[0].get_device())
        return tuple(kernel.template(args, places) for kernel in kernels)

    def _run_on_cpu(self, args: A, workspace: Workspace | None, stream: Any) -> None:
        if stream is not None:
            raise InvalidProblem(f"{self.descriptor.op}: a stream was given, but the operands are on the cpu")
        if self._entry.backend is BackendKind.REFERENCE:
            run_reference(self._entry, self.descriptor, args)
        else:
            interpret(self.launches, args, None if workspace is None else workspace.tensor)

    @cached_property
    def _written(self) -> Callable[[Any], tuple[torch.Tensor, ...]]:
        """The tensors among args that a run writes."""
        return attributes([o.name for o in self.descriptor.operands() if o.is_written])

    def check(self, args: A) -> None:
        """Synchronise and raise ``IndexError``, naming position and value, if the last run met a bad index.

        Only for ``out_of_bounds="error"``; raises ``InvalidProblem`` otherwise.
        """
        self.descriptor.check_status(args)

    def _check_workspace(self, workspace: Workspace | None, device: torch.device, args: A) -> None:
        check_memory(
            self._op, "the workspace", workspace, self.workspace_size(), device, named_tensors(self.descriptor, args)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _reselect, (type(self), self.descriptor, self.preference, self.target, self.tuning)


def _reselect(cls: Any, desc: Any, preference: Any, target: Any, tuning: Any) -> Any:
    # It may have been pickled on another machine.
    return cls.select(desc, preference=preference, target=target, tuning=None if tuning is None else tuning.here())


def plan_type(op: str) -> type[Plan[Any, Any]]:
    """The Plan class of an op. Raises ``InvalidProblem``."""
    if not isinstance(op, str) or op not in _PLANS:
        raise InvalidProblem(
            f"op {shown(op)} has no Plan; known are {textwrap.shorten(', '.join(sorted(_PLANS)), 900)}"
        )
    return _PLANS[op]


class Request(Requirements, total=False):
    """The keywords of ``Plan.select``, ``plan`` and ``PlanCache.get``."""

    preference: PlanPreference | None
    target: Target | TargetName | None
    tuning: TuningTable | None


@overload
def plan(desc: PlannedBy[P], **request: Unpack[Request]) -> P: ...
@overload
def plan(desc: Descriptor, **request: Unpack[Request]) -> Plan[Any, Any]: ...
def plan(desc: Any, **request: Unpack[Request]) -> Any:
    """Select a plan for any descriptor; its ``op`` says which Plan class. Takes and raises as ``Plan.select``."""
    return plan_type(getattr(desc, "op", desc)).select(desc, **request)


class NamedArgs:
    """Tensors and numbers by the names of a descriptor's operands: ``BinaryArgs(x=x, y=2.0, out=out)``.

    An instance is a frozen dataclass of these fields. A name that was not given reads as None.
    """

    __slots__ = ()

    def __new__(cls, **operands: Any) -> Self:
        made: Any = cls if dataclasses.is_dataclass(cls) else _with_fields(cls, tuple(operands))
        found: Self = object.__new__(made)
        return found

    def __init__(self, **operands: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@fact
def _with_fields(cls: type[NamedArgs], names: tuple[str, ...]) -> type[NamedArgs]:
    """A subclass of ``cls`` with the fields ``names``."""
    return dataclasses.make_dataclass(cls.__name__, names, bases=(cls,), frozen=True, slots=True)
