"""From a recorded call to the code that repeats it: a guard, allocations, launches, perhaps ops of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import MethodDescriptorType
from typing import Any

import torch
from torch.autograd import forward_ad, profiler

from triplan.backends.runtime.cuda import copy_memory
from triplan.backends.runtime.launcher import (
    ENTER_HOOKS,
    EXIT_HOOKS,
    WORKSPACE,
    failed,
    is_capturing,
    launch,
    scratch_offsets,
)
from triplan.backends.runtime.modules import keep_loaded
from triplan.backends.table import TABLE
from triplan.descriptors import OperandKind
from triplan.facade.bound import current_device, current_stream, increment_version
from triplan.facade.check import is_injective
from triplan.facade.replay import MAX_SCALAR, Slot, guarded, size_of
from triplan.functional._replay.numbers import SPECIAL, differs, is_scale, other_outcomes, plain
from triplan.functional._replay.recording import CREATIONS, Recording, Step, TorchOp, View
from triplan.functional._watching import tensors_in

Tensor = torch.Tensor
#: Repeats a call with the arguments given: its result, or None if the full path must look at that call.
Repeat = Callable[..., Any]

#: Inductor's allocation: torch.empty_strided on the current device, without parsing of arguments.
_empty: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cuda", None)
_deterministic = torch._C._get_deterministic_algorithms
#: Whether a mode of torch's functions is active, or the type of an argument overrides them: they see attributes read.
_watched = torch._C._has_torch_function_variadic
#: Bytes: buffers in one allocation begin at multiples of this, as torch's allocations do.
_APART = 512
#: Bytes at most of a constant tensor that a replay holds.
_MAX_CONSTANT = 4096
#: Bytes at most of the scratch memory that a replay holds. Untuned.
_MAX_SCRATCH = 1 << 14
#: Functions that do the same as ops that are no methods.
_DIRECT = {torch.ops.aten.where.self: torch.where, torch.ops.aten.cat.default: torch.cat}


class NotRepeatable(Exception):  # noqa: N818  # not an error: the call runs as it is written
    """This call cannot be repeated from its recording."""


class Program:
    """The lines that repeat a recorded call of ``a0``, ``a1`` and so on.

    ``x0``, ``x1`` and so on are its tensors, ``t0``, ``t1`` and so on their addresses.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        record: Recording,
        kept: Sequence[Tensor],
        hidden: Sequence[Tensor] = (),
        *,
        scales: bool = True,
    ) -> None:
        """``kept``: tensors that the caller gets; those that the call allocated are allocated anew.

        ``hidden``: allocated tensors that only the backward gets, as parts of one buffer named ``hidden``. ``scales``:
        whether floats that a kernel is given at run time may differ from call to call.
        """
        self.record = record
        self._steps = record.steps_towards((*kept, *hidden))
        self._given_scales: list[Any] = []
        if scales:
            self._given_scales = [v for s in self._steps if isinstance(s, Step) for v in s.scalars.values()]
        self._parameters = ", ".join(f"a{i}" for i in range(len(args)))
        self.reads: list[str] = []  # how each tensor is read from the arguments
        self.tensors: list[Tensor] = []
        self._unreadable: list[str] = []
        #: Expressions that are true of a call that differs in other things than tensors.
        self.refused: list[str] = []
        self.constants: dict[str, Any] = {"empty": _empty, "stream": current_stream}
        self.lines: list[str] = []
        self._new: dict[int, tuple[str, Tensor]] = {}  # by storage: the variable, and the tensor that it holds
        #: By identity: floats among the arguments that may be scales, and what is drawn.
        self._scales: dict[int, str] = {}
        self._held: set[int] = set()  # identities of the ops whose results are constants
        self._owned: dict[int, str] = {}  # by identity: variables of tensors that autograd takes for no views
        self._compare(args)
        self._draw()
        #: Numbers of the tensors that require a gradient.
        self.differentiable = [i for i, t in enumerate(self.tensors) if t.requires_grad]
        ops = [step for step in self._steps if isinstance(step, TorchOp)]
        self._made = {t.untyped_storage()._cdata for op in ops if not op.func._schema.is_mutable for t in op.results}
        self._hold_constants(ops, (*kept, *hidden))
        # What torch's ops work on is allocated as it was, so that the same views lead to the same tensors.
        # So is that of which the caller gets a part.
        parts = [t for t in kept if size_of(t) != t.untyped_storage().nbytes()]
        viewed = [t for op in ops for t in op.tensors()] + parts
        for t in (*(self.record.fresh.get(t.untyped_storage()._cdata) for t in viewed), *kept):
            if t is not None and (storage := self._allocated(t)) is not None and storage not in self._new:
                name = f"n{len(self._new)}"
                self._new[storage] = name, t
                if storage not in self._made:
                    self.constants |= {f"shape_{name}": tuple(t.shape), f"strides_{name}": t.stride()}
                    self.constants[f"dtype_{name}"] = t.dtype
                    self._allocate(name, f"shape_{name}, strides_{name}, dtype_{name}")
        #: Bytes from the start of ``hidden`` to each hidden tensor.
        self.offsets: list[int] = []
        self._parts: dict[int, tuple[str, int]] = {}  # by storage: the buffer that it is a part of, and where
        self._divide("hidden", hidden)
        #: Bytes of scratch memory that the one launch of a call asks for.
        self._lone_scratch = 0
        self._divide("scratch", [t for step in self._steps if isinstance(step, Step) for t in step.tensors()])
        #: For each tensor: the alignment that operands in it need, and whether one is written.
        self.alignments, self.written = [1] * len(self.tensors), [False] * len(self.tensors)
        #: Whether the lines call ops of torch, which autograd must not see.
        self.calls_torch = False
        self._overwritten: list[int] = []  # the tensors that ops of torch write
        #: The autocast dtypes of the kinds of device on which autocast is on.
        self._autocast = {
            kind: torch.get_autocast_dtype(kind)
            for kind in sorted({t.device.type for t in self.tensors})
            if torch.is_autocast_enabled(kind)
        }
        self._repeat_steps()
        if self._autocast and len(self._held) < len(ops):
            # What was recorded is below autocast: it converts no operand of these ops.
            self.constants["autocast"] = torch.set_autocast_enabled
            on, off = (";".join(f"autocast('{kind}', {flag})" for kind in self._autocast) for flag in (True, False))
            self.lines = [off, "try:", *(f"  {line}" for line in self.lines), f"finally: {on}"]

    def _compare(self, args: tuple[Any, ...]) -> None:
        for i, a in enumerate(args):
            items = [(f"a{i}", a)]
            if isinstance(a, (list, tuple)) and any(isinstance(item, Tensor) for item in a):
                self._unreadable.append(f"type(a{i}) is not type{i} or len(a{i}) != {len(a)}")
                self.constants[f"type{i}"] = type(a)
                items = [(f"a{i}[{j}]", item) for j, item in enumerate(a)]
            for read, item in items:
                if isinstance(item, Tensor):
                    twice = next((j for j, known in enumerate(self.tensors) if known is item), None)
                    if twice is None:
                        self.reads.append(read)
                        self.tensors.append(item)
                    else:
                        self.refused.append(f"{read} is not {self.reads[twice]}")
                elif is_scale(item, self._given_scales, self.record):
                    self._scales[id(item)] = read
                    self.refused.append(
                        f"type({read}) is not float or not {-MAX_SCALAR} < {read} < {MAX_SCALAR} or {read} in special"
                    )
                    self.constants["special"] = SPECIAL
                else:
                    name, item = f"other{len(self.constants)}", plain(item)
                    self.constants |= {name: item, f"type_{name}": type(item)}
                    self.refused.append(differs(read, name, item))
        # A call of whose floats a comparison comes out otherwise is another.
        for test, constants in other_outcomes(self._scales, self.record):
            self.refused.append(test)
            self.constants |= constants

    def _draw(self) -> None:
        """Numbers that each call draws, as ``d0``, ``d1`` and so on."""
        count = 0
        for i, (draw, values) in enumerate(self.record.draws):
            names = [f"d{count + j}" for j in range(len(values))]
            count += len(values)
            self.constants[f"draw{i}"] = draw
            self.lines.append(f"{', '.join(names)}, = draw{i}()")
            self._scales |= {id(v): name for v, name in zip(values, names, strict=True)}

    def _allocated(self, t: Tensor) -> int | None:
        """The storage of ``t``, if the call allocated it."""
        storage = t.untyped_storage()._cdata
        return storage if storage in self.record.fresh else None

    def is_new(self, t: Tensor) -> bool:
        """Whether the call allocated ``t``."""
        return self._allocated(t) is not None

    def _allocate(self, name: str, what: str) -> None:
        self.lines += [f"{name} = empty({what})", f"{name}_at = {name}.data_ptr()"]

    def _hold_constants(self, ops: Sequence[TorchOp], kept: Sequence[Tensor]) -> None:
        """Make constants of small tensors that every call would compute anew, unless somebody writes or gets them."""
        used = {t.untyped_storage()._cdata for t in kept}
        used |= {t.untyped_storage()._cdata for op in ops if op.func._schema.is_mutable for t in op.tensors()}
        for step in self._steps:
            if isinstance(step, Step):
                used |= {t.untyped_storage()._cdata for t in step.written()}
        constant = set[int]()
        for op in ops:
            given = {t.untyped_storage()._cdata for t in tensors_in((*op.args, *op.kwargs.values()))}
            if op.func not in CREATIONS and not (given and given <= constant and op.is_function):
                continue
            if len(op.results) == 1 and op.results[0].untyped_storage()._cdata not in used:
                (t,) = op.results
                if t.nbytes > _MAX_CONSTANT or (t.is_cuda and torch.cuda.is_current_stream_capturing()):
                    continue
                if t.is_cuda:
                    torch.cuda.current_stream(t.device).synchronize()  # calls may come on other streams
                name = f"n{len(self._new)}"
                self._new[t.untyped_storage()._cdata] = name, t
                self.constants |= {name: t, f"{name}_at": t.data_ptr()}
                self._held.add(id(op))
                constant.add(t.untyped_storage()._cdata)

    def _divide(self, buffer: str, tensors: Sequence[Tensor]) -> None:
        """Make the storages of ``tensors`` parts of one allocation, if nothing else holds them."""
        size = 0
        for t in tensors:
            storage = self._allocated(t)
            if storage is not None and storage not in self._new and storage not in self._parts:
                self._parts[storage] = buffer, size
                size += -(-t.untyped_storage().nbytes() // _APART) * _APART
            if buffer == "hidden":
                if self._parts.get(storage or 0, ("",))[0] != buffer:
                    raise NotRepeatable
                self.offsets.append(self._parts[storage or 0][1] + int(t.storage_offset()) * t.element_size())
        if buffer == "scratch" and len(self._steps) == 1:
            self._lone_scratch = size
        elif size or (buffer == "hidden" and tensors):
            self._allocate_bytes(buffer, size)

    def _allocate_bytes(self, buffer: str, size: int) -> None:
        self.constants["bytes"] = torch.uint8
        self._allocate(buffer, f"({size},), (1,), bytes")

    def _provide_scratch(self, size: int) -> None:
        """Keep the scratch memory of a lone launch for calls on the current stream, where launches come one by one.

        Other streams allocate it. So does a capture, whose graph may outlive the replay.
        """
        of = self.tensors[0]
        if size > _MAX_SCRATCH or (of.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._allocate_bytes("scratch", size)
            return
        kept = torch.empty(size, dtype=torch.uint8, device=of.device)
        self.constants |= {"kept": kept, "kept_at": kept.data_ptr(), "kept_on": current_stream(of.get_device())}
        self.constants["capturing"] = is_capturing
        self.lines.append("if at == kept_on and not (at and capturing()): scratch_at = kept_at")
        before = len(self.lines)
        self._allocate_bytes("scratch", size)
        self.lines[before:] = ["else:", *(f"  {line}" for line in self.lines[before:])]

    def source(self, t: Tensor) -> tuple[int, list[View]]:
        """The number of the one tensor of the call that ``t`` is, or is a view of; and the views."""
        for i, known in enumerate(self.tensors):
            if known is t:
                return i, []
        paths = [(i, path) for i, known in enumerate(self.tensors) if (path := self.record.path(known, t)) is not None]
        if len(paths) != 1:
            raise NotRepeatable
        return paths[0]

    def name(self, t: Tensor | None) -> str:
        """The expression of a tensor."""
        if t is None:
            return "None"
        if id(t) in self._owned:
            return self._owned[id(t)]
        if (storage := self._allocated(t)) is not None:
            name, known = self._new[storage]
            views = self.record.path(known, t)
        else:
            i, views = self.source(t)
            known, name = self.tensors[i], f"x{i}"
        if views is None:
            raise NotRepeatable
        offset = "" if t.storage_offset() == known.storage_offset() else f", {name}.storage_offset() + "
        if offset:
            offset += str(t.storage_offset() - known.storage_offset())
        if known.requires_grad and not t.requires_grad and not self.record.records_gradients:
            name += ".detach()"
        # (The result of _unsafe_view is no view to autograd.)
        if t.dtype != known.dtype or any(view.func is torch.ops.aten._unsafe_view.default for view in views):
            for view in views:
                name = self._call(view.func, (name, *map(self._literal, view.args)), view.kwargs)
            return name
        if not views:
            return name
        # One view in place of all. The guard compares sizes and strides, not where in its storage a tensor begins.
        self.constants["strided"] = torch._C.TensorBase.as_strided
        return f"strided({name}, {self._literal(tuple(t.shape))}, {self._literal(t.stride())}{offset})"

    def own(self, t: Tensor) -> None:
        """Make ``t``, which may be a view of a new tensor, one that autograd takes for none."""
        if not (name := self.name(t)).isidentifier():
            self._owned[id(t)] = f"n{len(self._new) + len(self._owned)}"
            self.lines.append(f"{self._owned[id(t)]} = {name}.data")

    def _literal(self, value: Any) -> str:
        """The expression of an argument of a torch op."""
        if isinstance(value, Tensor):
            return self.name(value)
        if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
            return f"[{', '.join(map(self._literal, value))}]"
        name = f"k{len(self.constants)}"
        self.constants[name] = value
        return name

    def _call(self, func: Any, args: Iterable[str], kwargs: dict[str, Any]) -> str:
        name = f"op{len(self.constants)}"
        self.constants[name] = _direct(func, kwargs)
        return f"{name}({', '.join((*args, *(f'{k}={self._literal(v)}' for k, v in kwargs.items())))})"

    def _repeat_op(self, op: TorchOp) -> None:
        if id(op) in self._held or self._copies(op):
            return
        self.calls_torch = True
        call = self._call(op.func, list(map(self._literal, op.args)), op.kwargs)
        if op.func._schema.is_mutable:
            self.lines.append(call)
            self._overwritten += [self.source(t)[0] for t in op.written() if not self.is_new(t)]
            return
        names = [self._new[t.untyped_storage()._cdata][0] for t in op.results]
        self.lines.append(f"{', '.join(names)} = {call}")
        self.lines += [f"{name}_at = {name}.data_ptr()" for name in names]

    def _copies(self, op: TorchOp) -> bool:
        """Let the driver do ``op``, if it is a plain copy. Returns whether it is."""
        if copy_memory is None or op.func is not torch.ops.aten.copy_.default or len(op.args) != 2 or op.kwargs:
            return False
        to, source = op.args
        if not self.is_new(to) or any(getattr(to, fact) != getattr(source, fact) for fact in ("dtype", "device")):
            return False
        if (to.shape, to.stride()) != (source.shape, source.stride()) or not to.numel():
            return False
        if not is_injective(to) or size_of(to) != to.nbytes:
            return False  # gaps between its elements are others' memory
        self.constants |= {"copy_memory": copy_memory, "write": torch.no_grad()(Tensor.copy_)}
        self._ask_for_stream()
        copied = f"copy_memory({self._address(to)}, {self._address(source)}, {to.nbytes}, at)"
        # It fails in a thread without a context, which torch creates.
        self.lines.append(f"if {copied}: write({self.name(to)}, {self.name(source)})")
        return True

    def _ask_for_stream(self) -> None:
        """Call it ``at`` in the lines that follow."""
        if (line := "at = stream(index)") not in self.lines:
            self.lines.append(line)

    def _repeat_steps(self) -> None:
        for step in self._steps:
            if isinstance(step, TorchOp):
                self._repeat_op(step)
            else:
                self._launch(step)
        counted = [
            f"x{i}, "
            for i, (t, is_written) in enumerate(zip(self.tensors, self.written, strict=True))
            if is_written and not t.is_inference()  # inference tensors have no version counter
        ]
        if counted:
            self.constants["increment_version"] = increment_version
            self.lines.append(f"increment_version(({''.join(counted)}))")

    def _launch(self, step: Step) -> None:
        """Add the lines that launch ``step``."""
        places: dict[Any, int] = {}
        values: list[str] = []

        def place(key: Any, value: str) -> None:
            places[key] = len(values)
            values.append(value)

        for o in step.plan.descriptor.operands():
            value = step.operands.get(o.name)
            if o.kind is OperandKind.TENSOR_LIST:
                for i, t in enumerate(value or ()):
                    place((o.name, i), self._address(t, o))
            elif value is not None:
                place((o.name, None), self._address(value, o))
            elif id(step.scalars.get(o.name)) in self._scales:
                place((o.name, None), self._scales[id(step.scalars[o.name])])
        if step.workspace is not None:
            start = self._address(step.workspace.tensor)
            for offset in scratch_offsets(step.plan.launches):
                place((*WORKSPACE, offset), f"{start} + {offset}")
        args = step.plan.args_type(**step.operands, **{name: plain(v) for name, v in step.scalars.items()})
        with torch.no_grad():  # as the kernels ran
            templates = step.plan.templates(args, step.workspace, places)
        self._ask_for_stream()
        if self._lone_scratch:
            provide = self._provide_scratch if len(templates) == 1 else partial(self._allocate_bytes, "scratch")
            provide(self._lone_scratch)
        for template in templates:
            name = f"launch{len(self.lines)}"
            if template.computed:
                self.constants |= {name: template, "launch": launch}
                self.lines.append(f"launch([{name}.fill(({''.join(f'{v}, ' for v in values)}))], at)")
                continue
            given, constants = template.source(values, f"{name}_")
            compiled = template.kernel.compiled
            self.constants |= {name: template.start, f"{name}_kernel": template.kernel, f"{name}_compiled": compiled}
            self.constants |= {"capturing": is_capturing, "keep_loaded": keep_loaded, "failed": failed, **constants}
            # As ``launch`` does, without its loops. torch's default stream, 0, never is captured.
            self.lines += [
                f"try: at and capturing() and keep_loaded(({name}_compiled,)); {name}({given}, at)",
                f"except RuntimeError as e: raise failed({name}_kernel, e) from e",
            ]

    def _address(self, t: Tensor, operand: Any = None) -> str:
        """The expression of the address of ``t``. Notes what ``operand`` asks of the tensor that it lies in."""
        storage = self._allocated(t)
        if storage in self._parts:
            buffer, start = self._parts[storage]
            offset = start + t.storage_offset() * t.element_size()
            return f"{buffer}_at + {offset}" if offset else f"{buffer}_at"
        if storage is not None:
            name, whole = self._new[storage]
            offset = t.data_ptr() - whole.data_ptr() if t.numel() else 0
            if offset < 0 or offset + size_of(t) > size_of(whole):
                raise NotRepeatable
            return f"{name}_at + {offset}" if offset else f"{name}_at"
        i, _ = self.source(t)
        offset = t.data_ptr() - self.tensors[i].data_ptr() if t.numel() else 0
        if operand is not None:
            self.alignments[i] = max(self.alignments[i], operand.alignment)
            self.written[i] |= operand.is_written
        return f"t{i} + {offset}" if offset else f"t{i}"

    def repeat(self, then: Sequence[str], constants: dict[str, Any]) -> Repeat:
        """A guard of calls like the recorded one, and the lines ``then``."""
        index = next(t.get_device() for t in self.tensors)
        refused = [*self.refused, "deterministic() is not was_deterministic", "table.generation != generation"]
        refused.append("forward_ad._current_level >= 0")  # tangents have no dispatch key
        if torch.cuda.device_count() != 1:  # else no other device can be current
            refused.append("current_device() != index")
        refused += ["enter", "leave", "profiler._is_profiler_enabled"]  # Triton's profiler, and torch's
        if not torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors):
            refused.append("is_grad_enabled()")  # dynamo's guard does not look, and autograd must record such a call
        constants = constants | self.constants
        constants |= {
            "deterministic": _deterministic,
            "was_deterministic": _deterministic(),
            "table": TABLE,
            "generation": self.record.generation,
            "profiler": profiler,
            "index": index,
            "current_device": current_device,
            "forward_ad": forward_ad,
            "is_grad_enabled": torch.is_grad_enabled,
            "watched": _watched,
            "enter": ENTER_HOOKS,
            "leave": EXIT_HOOKS,
        }
        for kind, dtype in self._autocast.items():
            constants |= {"autocast_dtype": torch.get_autocast_dtype, f"dtype_{kind}": dtype}
            refused.append(f"autocast_dtype('{kind}') is not dtype_{kind}")
        for i, (read, value) in enumerate(self.record.settings.items()):
            constants |= {f"setting{i}": read, f"value{i}": value}
            refused.append(f"setting{i}() != value{i}")
        written = [is_written or i in self._overwritten for i, is_written in enumerate(self.written)]
        slots = [Slot(*slot) for slot in zip(self.reads, self.tensors, self.alignments, written, strict=True)]
        return guarded(
            slots,
            then,
            parameters=self._parameters,
            unreadable=[*self._unreadable, f"watched({', '.join(self.reads)})"],
            refused=[" or ".join(refused)],
            constants=constants,
        )


def _direct(func: Any, kwargs: dict[str, Any]) -> Any:
    """A function of torch's that is ``func``, an op of its dispatcher. It parses arguments in half the time."""
    if func is torch.ops.aten._to_copy.default and kwargs.keys() <= {"dtype", "device", "non_blocking"}:
        return partial(Tensor.to, copy=True)
    namespace, _, name = func._schema.name.partition("::")
    arguments = func._schema.arguments
    if namespace == "aten" and arguments and arguments[0].name == "self":
        if any(a.is_out for a in arguments):
            return getattr(torch._C._VariableFunctions, name, func)
        method = getattr(torch._C.TensorBase, name, None)
        if isinstance(method, MethodDescriptorType):
            return method
    return _DIRECT.get(func, func)


def expression(result: Any, name: Callable[[Any], str]) -> str:
    if isinstance(result, tuple):
        return f"({''.join(f'{name(t)}, ' for t in result)})"
    return name(result)
