"""TablePlan: plans whose vectors Args may hold as lists of tensors, which kernels find by tables in the workspace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import Self

from triplan.backends.runtime import cuda
from triplan.backends.runtime.launcher import WORKSPACE, BoundLaunch, Places
from triplan.backends.triton.common.tables import Tables, tables
from triplan.descriptors import Descriptor, Operand, OperandKind
from triplan.errors import InvalidProblem, TriplanError
from triplan.facade import check
from triplan.facade.bound import BoundRun, bump_versions, launch_all
from triplan.facade.plan import Plan
from triplan.facade.prepared import PreparedIndices
from triplan.facade.workspace import Workspace
from triplan.sku import SUPPORTED, BackendKind, Support
from triplan.sku.facts import cached_property

D = TypeVar("D", bound=Descriptor)
A = TypeVar("A")
#: The addresses of a tensor's first byte and after its last, its name, and whether it is written.
Span: TypeAlias = tuple[int, int, str, bool]


class TablePlan(Plan[D, A]):
    """A plan of an op with ``sizes``: the operands ``streams`` are vectors of ``sum(sizes)`` elements.

    Args hold each stream as one tensor, or all of them as lists of contiguous tensors of ``sizes`` elements, of any
    shape and alignment. ``run`` writes the tables of sizes and addresses to the workspace, from pinned memory and
    without waiting; where a stream is being captured, by tiny launches of their own. ``bind`` writes them once, to
    memory of the BoundRun's own, on the stream that is current then; a stream that launches the BoundRun must be behind
    that. Where the current stream is being captured, another stream writes them at once. A captured BoundRun writes
    none: its tables live as long as it. Of up to four tensors (``FEW``) there are no tables: sizes and addresses are
    arguments of the launches. Nor are there any of whole vectors, if a subclass ``joins`` them: each is one tensor.
    """

    #: Whether no bit of a result depends on where a tensor of the list ends.
    joins: ClassVar[bool] = False

    def can_implement(self, args: A) -> Support:
        if not isinstance(args, self.args_type) or not self._listed(args):
            return super().can_implement(args)
        try:
            _check_lists(self.descriptor, self, args)
        except TriplanError as e:
            return Support.no(e)
        return SUPPORTED

    def prepare(self, device: torch.device | str | int | None = None) -> Self:
        super().prepare(device)
        if self._whole is not self:
            self._whole.prepare(device)
        return self

    def run(
        self,
        args: A,
        workspace: Workspace | None = None,
        stream: torch.cuda.Stream | int | None = None,
        prepared: PreparedIndices | None = None,
    ) -> None:
        if prepared is not None or self.target.is_gpu:
            calls, index = self._bind(args, workspace, prepared, stream)
            launch_all(calls, index, stream)
        else:
            self._validate(args, workspace)
            is_listed = self._listed(args)
            if self._entry.backend is not BackendKind.REFERENCE:
                plan = self if is_listed else self._whole
                if workspace is not None:
                    plan._write_tables(workspace.tensor, args)
                plan._run_on_cpu(args if is_listed else plan._split(args), workspace, stream)
            elif is_listed:
                self._run_joined(args)
            else:
                self._run_on_cpu(args, workspace, stream)
        bump_versions(self._written(args))

    def bind(self, args: A, workspace: Workspace | None = None, prepared: PreparedIndices | None = None) -> BoundRun:
        """As ``Plan.bind``. The tables lie in memory that is allocated for them, as other calls use the workspace."""
        if prepared is not None or not self.target.is_gpu:
            return super().bind(args, workspace, prepared)  # raises
        self._validate(args, workspace)
        return self._located(args, (args,))

    def locate(self, args: A, counted: bool = True) -> BoundRun:
        """As ``bind``, but args are not held: gradients, which the caller frees after each step.

        The caller promises to call it only where all tensors of ``args`` have the addresses that they have now.
        What is written is held, as each call tells autograd of it; unless ``counted``, the caller does that.
        """
        return self._located(args, (), counted)

    def _located(self, args: A, held: tuple[Any, ...], counted: bool = True) -> BoundRun:
        written = self._written(args)
        device = written[0].device
        with cuda.beside_capture(device) if torch.cuda.is_current_stream_capturing() else nullcontext():
            own = Workspace.allocate(self, device) if self.workspace_size() else None
            calls, index = self._bind(args, own, None)
        return BoundRun(calls, index, written if counted else (), (*held, own))

    def _bind(
        self,
        args: A,
        workspace: Workspace | None,
        prepared: PreparedIndices | None,
        stream: torch.cuda.Stream | int | None = None,
    ) -> tuple[tuple[BoundLaunch, ...], int]:
        if prepared is not None:
            return super()._bind(args, workspace, prepared)  # raises: nothing can be prepared
        self._validate(args, workspace)
        index, plan = self._written(args)[0].get_device(), self if self._listed(args) else self._whole
        kernels, table = plan._load("launches", index), plan._table
        plain = {f.name: getattr(args, f.name) for f in fields(args) if f.name not in self._streams}  # type: ignore[arg-type]
        held = {name: t for name, t in plain.items() if isinstance(t, Tensor)}
        few = plan._addresses(args) if table.is_few else []
        keys = [(name, i) for name, own in zip(self._streams, few, strict=bool(few)) for i in range(len(own))]
        places: Places = {key: i for i, key in enumerate([*((name, None) for name in held), WORKSPACE, *keys])}
        start = 0 if workspace is None else workspace.address
        values = (*(t.data_ptr() for t in held.values()), start, *(a for own in few for a in own))
        if workspace is not None and table.nbytes:
            self._upload(workspace, args, index, stream)
        return tuple(kernel.template(args, places).fill(values) for kernel in kernels), index

    @cached_property
    def _whole(self) -> Self:
        """The plan for whole vectors."""
        if not self.joins or len(self._sizes) < 2:
            return self
        preference = self.preference.model_copy(update={"kernel": self._entry.name})
        desc = self.descriptor.replace(sizes=(sum(self._sizes),))
        return type(self).select(desc, preference=preference, target=self.target, tuning=self.tuning)

    # --- tables ---

    @property
    def _table(self) -> Tables:
        return tables(self._sizes, len(self._streams))

    @property
    def _streams(self) -> tuple[str, ...]:
        found: tuple[str, ...] = self.descriptor.streams  # type: ignore[attr-defined]
        return found

    @property
    def _sizes(self) -> tuple[int, ...]:
        found: tuple[int, ...] = self.descriptor.sizes  # type: ignore[attr-defined]
        return found

    def _listed(self, args: A) -> bool:
        return any(isinstance(getattr(args, name), (list, tuple)) for name in self._streams)

    def _addresses(self, args: A) -> list[list[int]]:
        found = []
        for name in self._streams:
            value, own = getattr(args, name), []
            if isinstance(value, Tensor):
                at = value.data_ptr()
                for n in self._sizes:
                    own.append(at)
                    at += n * value.element_size()
            else:
                own = [t.data_ptr() for t in value]
            found.append(own)
        return found

    def _split(self, args: A) -> A:
        """``args``, its streams as lists of views."""
        streams = {name: getattr(args, name) for name in self._streams}
        parts = {name: list(t.detach().split(list(self._sizes))) for name, t in streams.items()}
        return replace(args, **parts)  # type: ignore[type-var]

    def _write_tables(self, memory: Tensor, args: A) -> None:
        table = self._table
        table.write(memory[: table.nbytes], self._sizes, self._addresses(args))

    def _upload(self, workspace: Workspace, args: A, index: int, stream: torch.cuda.Stream | int | None) -> None:
        if isinstance(stream, int):
            stream = torch.cuda.ExternalStream(stream, device=index)  # type: ignore[no-untyped-call]
        table = self._table
        with torch.cuda.device(index), torch.cuda.stream(stream):  # None: the current one
            if torch.cuda.is_current_stream_capturing():
                table.fill(workspace.tensor[: table.nbytes], self._sizes, self._addresses(args))
                return
            # torch's allocator of pinned memory takes it back when the copy is over.
            memory = torch.empty(table.nbytes, dtype=torch.uint8, pin_memory=True)
            self._write_tables(memory, args)
            workspace.tensor[: table.nbytes].copy_(memory, non_blocking=True)

    def _run_joined(self, args: A) -> None:
        """The reference, of lists."""
        whole = {f.name: getattr(args, f.name) for f in fields(args)}  # type: ignore[arg-type]
        for name in self._streams:
            o = self.descriptor.operand(name)
            parts = [t.detach().reshape(-1) for t in whole[name]]
            whole[name] = torch.cat(parts) if parts else torch.empty(0, dtype=o.element.torch)
        self._run_on_cpu(self.args_type(**whole), None, None)
        for o in self.descriptor.operands():
            if o.is_written and o.name in self._streams:
                for t, part in zip(getattr(args, o.name), whole[o.name].split(list(self._sizes)), strict=True):
                    t.detach().copy_(part.view(t.shape))

    @property
    def _written(self) -> Callable[[Any], tuple[Tensor, ...]]:
        names = [o.name for o in self.descriptor.operands() if o.is_written]
        # Last: of no tensors the lists are empty, but these have a device.
        names.sort(key=lambda name: name in self._streams)

        def written(args: Any) -> tuple[Tensor, ...]:
            found: list[Tensor] = []
            for name in names:
                value = getattr(args, name)
                found += [value] if isinstance(value, Tensor) else value
            return tuple(found)

        return written


def _check_lists(desc: Descriptor, plan: TablePlan[Any, Any], args: Any) -> None:
    """Raise what is wrong with args whose streams are lists; ``facade/check.py`` checks each tensor.

    Lists in which nothing is wrong are checked in a few passes: gradients have new addresses in most steps of training,
    and to look at each of hundreds of tensors takes the host longer than a step takes the device.
    """
    op, sizes, streams = desc.op, plan._sizes, plan._streams
    named: list[check.Named] = []
    spans, seen = list[Span](), set[str]()
    lists = [name for name in streams if isinstance(getattr(args, name), (list, tuple))]
    others = [f"{name} is {type(getattr(args, name)).__name__}" for name in streams if name not in lists]
    if others:
        raise InvalidProblem(
            f"{op}: {', '.join(lists)} given as lists, but {', '.join(others)}; all are lists, or none"
        )
    for o in desc.operands():
        value = getattr(args, o.name)
        if o.name not in streams:
            if o.kind is OperandKind.HOST_SCALAR and value is not None:
                check._check_scalar(op, o, value)
                continue
            if value is None:
                raise InvalidProblem(f"{op}: {o.name} is missing; {o.element} of shape {o.shape} is expected")
            named.append((o.name, o, check._as_tensor(op, o.name, o, value)))
            continue
        if len(value) != len(sizes):
            raise InvalidProblem(f"{op}: {o.name} is {len(value)} tensors; a sequence of {len(sizes)} is expected")
        if (own := _plain_spans(o, value, sizes)) is not None:
            spans += own
            named.append((f"{o.name}[0]", _piece(o, value[0]), value[0]))  # all have its device
            seen.add(f"{o.name}[0]")
            continue
        for i, (t, n) in enumerate(zip(value, sizes, strict=True)):
            name = f"{o.name}[{i}]"
            piece = _piece(o, check._as_tensor(op, name, o, t))
            if t.numel() != n:
                raise InvalidProblem(f"{op}: {name} has {t.numel()} elements; {n} (sizes[{i}]) are expected")
            named.append((name, piece, t))
    known = {o.name for o in desc.operands()}
    for f in fields(args):
        if f.name not in known and getattr(args, f.name) is not None:
            raise InvalidProblem(f"{op}: {f.name} was passed, but this descriptor has no such operand")
    if not named:
        raise InvalidProblem(f"{op}: lists of no tensors tell no device; pass vectors of no elements")
    for name, o, t in named:
        check._check_tensor(op, name, o, t)
    check._check_devices(op, plan.target, named)
    for name, o, t in named:
        check._check_promises(op, name, o, t)
        check._check_overlap(op, [(name, o, t)])
    spans += [(*check.span(t), name, o.is_written) for name, o, t in named if t.numel() and name not in seen]
    _check_apart(op, spans)


def _piece(o: Operand, t: Tensor) -> Operand:
    """The operand that one tensor of a list is: packed, of any shape and alignment."""
    return replace(o, shape=tuple(t.shape), layout=o.layout.model_copy(update={"alignment": None}))


def _plain_spans(o: Operand, value: Sequence[Any], sizes: Sequence[int]) -> list[Span] | None:
    """The spans of tensors that are what they are expected to be, each pass over them in C. None where one may not be:
    a look at each then says which."""
    if not value or set(map(type, value)) - {Tensor, Parameter} or not o.layout.packed:
        return None
    kinds = set(map(attrgetter("dtype", "layout", "is_nested"), value))
    if kinds != {(o.element.torch, torch.strided, False)} or len(set(map(attrgetter("device"), value))) > 1:
        return None
    if tuple(map(Tensor.numel, value)) != tuple(sizes) or not all(map(Tensor.is_contiguous, value)):
        return None
    if any(map(Tensor.is_neg, value)) or (
        o.is_written and torch.is_grad_enabled() and any(map(attrgetter("requires_grad"), value))
    ):
        return None
    each, starts = o.element.itemsize, list(map(Tensor.data_ptr, value))
    # The address of a view into freed storage is its offset.
    offsets = map(Tensor.storage_offset, value)
    if any(a % each or (n and a == each * at) for a, n, at in zip(starts, sizes, offsets, strict=True)):
        return None
    ends = zip(starts, sizes, strict=True)
    return [(a, a + n * each, f"{o.name}[{i}]", o.is_written) for i, (a, n) in enumerate(ends) if n]


def _check_apart(op: str, spans: list[Span]) -> None:
    """Raise unless what is written shares no memory: one pass over thousands of tensors, in order of address."""
    ends = {True: (0, ""), False: (0, "")}  # the furthest end so far of what is written and of any, and whose it is
    for start, end, name, written in sorted(spans):
        furthest, other = ends[not written] if written else ends[True]
        if start < furthest:
            raise InvalidProblem(f"{op}: {name} shares memory with {other}, and one of them is written")
        ends[False] = max(ends[False], (end, name))
        if written:
            ends[True] = max(ends[True], (end, name))
