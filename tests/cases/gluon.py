"""Hopper's Gluon kernels in plain Python: what they do with barriers, slots and work lists.

Triton's interpreter does not run Gluon. Here each partition of ``warp_specialize`` is a thread, a barrier has phases
and counts bytes, and what is asynchronous is done as late as its wait allows: a product reads its slot when it is
waited for, and TMA a staging buffer when that is. So a slot that is given back too early is overwritten, and a barrier
that is waited for in vain ends the test. Layouts, and what the threads of a warpgroup do side by side, are left out.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from triplan.backends.runtime import gluon as runtime
from triplan.backends.runtime.gluon import gl
from triplan.backends.runtime.launch import Counter, Float, Int, Launch, Ptr, Scalar, Scratch, Stride, TensorMap
from triplan.backends.triton import attention, conv, gemm
from triplan.backends.triton.common import meeting_kernels, rings_kernels
from triplan.sku import ElementKind

Tensor = torch.Tensor
#: The modules of the kernels, by the name of their family.
MODULES = {
    family.__name__.rpartition(".")[2]: [
        module
        for name, module in vars(family).items()
        if name.startswith(("wgmma", "banded", "mma", "fma", "cuts")) and name.endswith("_kernels")
    ]
    + [meeting_kernels, rings_kernels]
    for family in (attention, conv, gemm)
}
_TORCH = {
    gl.float16: torch.float16,
    gl.bfloat16: torch.bfloat16,
    gl.float32: torch.float32,
    gl.int64: torch.int64,
    gl.int32: torch.int32,
}
_GLUON = {ElementKind.of(t): g for g, t in _TORCH.items()}
#: The modules' own functions that are written in PTX.
OWN = frozenset({"bar_arrive", "bar_sync", "opaque", "rounded", "scaled_seldom", "unpacked"})
#: What a launch that meets adds to its counter, and the counter before.
EPOCH = meeting_kernels.EPOCH.value
BEFORE = 3 * EPOCH
#: Bytes of a row that lie together in shared memory.
ROW_BYTES = 128
#: Seconds after which a partition that waits is taken to wait for ever.
PATIENCE = 20.0


class Value:
    """A block in registers."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.shape = data, list(data.shape)
        self.type = SimpleNamespace(layout=None)

    def to(self, dtype: Any) -> Value:
        return Value(self.data.to(_TORCH[dtype]))

    def __getitem__(self, at: Any) -> Value:
        return Value(self.data[at])

    def __neg__(self) -> Value:
        return Value(-self.data)

    def reshape(self, shape: Any) -> Value:
        return Value(self.data.reshape(shape))

    def permute(self, axes: Any) -> Value:
        return Value(self.data.permute(axes))

    def split(self) -> tuple[Value, Value]:
        return Value(self.data[..., 0]), Value(self.data[..., 1])


def _lifted(name: str) -> Callable[..., Any]:
    def method(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return other + self
        return Value(getattr(self.data, name)(other.data if isinstance(other, Value) else other))

    return method


ARITHMETIC = ("add", "radd", "sub", "rsub", "mul", "rmul")
for _name in (*ARITHMETIC, "truediv", "rtruediv", "lt", "le", "gt", "ge", "eq", "and", "or"):
    setattr(Value, f"__{_name}__", _lifted(f"__{_name}__"))


class Number(int):
    """A scalar."""

    def to(self, dtype: Any) -> Number:
        return self


def _numbered(name: str) -> Callable[..., Any]:
    def method(self: Number, other: Any) -> Any:
        found = getattr(int, name)(self, other)
        return Number(found) if isinstance(found, int) else found

    return method


for _name in (*ARITHMETIC, "floordiv", "rfloordiv", "mod", "rmod", "and", "xor"):
    setattr(Number, f"__{_name}__", _numbered(f"__{_name}__"))


@dataclass
class Pointer:
    """An address, or a block of addresses, within a tensor."""

    tensor: Tensor
    offset: Any = 0

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=_GLUON[ElementKind.of(self.tensor.dtype)])

    @property
    def memory(self) -> Tensor:
        """What lies from the tensor's first element on."""
        own, first = self.tensor.untyped_storage(), self.tensor.storage_offset()
        count = own.nbytes() // self.tensor.element_size() - first
        return torch.empty(0, dtype=self.tensor.dtype).set_(own, first, (count,), (1,))

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.tensor, self.offset + (other.data if isinstance(other, Value) else other))

    __radd__ = __add__

    def to(self, dtype: Any, bitcast: bool) -> Pointer:
        """A pointer to larger elements."""
        memory = self.memory.view(_TORCH[dtype.element_ty])
        return Pointer(memory, self.offset // (memory.element_size() // self.tensor.element_size()))

    def __getitem__(self, at: Any) -> Pointer:
        return Pointer(self.tensor, self.offset[at])


class Buffer:
    """A part of shared memory."""

    def __init__(self, data: Tensor, dtype: Any, layout: Any) -> None:
        self.data, self.dtype, self.layout, self.shape = data, dtype, layout, list(data.shape)
        #: Parts that were asked for before, and the same bytes as other tensors: making those takes long.
        self.parts: dict[int, Buffer] = {}
        self.others: dict[Any, Tensor] = {}

    def index(self, i: int) -> Buffer:
        if i not in self.parts:
            self.parts[i] = Buffer(self.data[i], self.dtype, self.layout)
        return self.parts[i]

    def slice(self, start: int, length: int, dim: int = 0) -> Buffer:
        return Buffer(self.data.narrow(dim, start, length), self.dtype, self.layout)

    def permute(self, axes: Any) -> Buffer:
        return Buffer(self.data.permute(axes), self.dtype, self.layout)

    def load(self, layout: Any) -> Value:
        return Value(self.data.clone())

    def store(self, value: Value) -> None:
        self.put(value.data)

    def put(self, data: Tensor) -> None:
        self.data.copy_(data)


class Columns(Buffer):
    """A matrix in blocks of columns, one after the other, as wgmma finds them in shared memory."""

    def __init__(self, blocks: Tensor, dtype: Any, layout: Any, turned: bool = False) -> None:
        self._blocks, self._turned, self.dtype, self.layout = blocks, turned, dtype, layout
        self.shape = list(self.data.shape)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        found = torch.cat(list(self._blocks), 1)
        return found.mT if self._turned else found

    def put(self, data: Tensor) -> None:
        self._blocks.copy_(torch.stack((data.mT if self._turned else data).split(self._blocks.shape[-1], 1)))

    def permute(self, axes: Any) -> Buffer:
        assert axes == (1, 0)
        return Columns(self._blocks, self.dtype, self.layout, not self._turned)


def reinterpret(buffer: Buffer, dtype: Any, shape: Any, layout: Any) -> Buffer:
    found = _TORCH[dtype]
    width = ROW_BYTES // found.itemsize
    if len(shape) == 2 and shape[1] > width == buffer.shape[-1] and dtype is buffer.dtype:
        return Columns(buffer.data.view(-1, shape[0], width), dtype, layout)
    assert buffer.data.is_contiguous()
    key = (found, tuple(shape))
    if key not in buffer.others:
        memory, first = buffer.data.untyped_storage(), buffer.data.storage_offset() * buffer.data.itemsize
        flat = torch.empty(0, dtype=torch.uint8).set_(memory, first, (math.prod(shape) * found.itemsize,), (1,))
        buffer.others[key] = flat.view(found).view(list(shape))
    return Buffer(buffer.others[key], dtype, layout)


class Map:
    """A tensor map."""

    def __init__(self, tensor: Tensor, spec: TensorMap) -> None:
        self.tensor, self.dtype, self.layout = tensor, _GLUON[spec.element], spec.shared
        self.block_type, self.shape = SimpleNamespace(shape=list(spec.block)), list(tensor.shape)

    def part(self, at: Any) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Where the block at ``at`` lies in the tensor, as far as it does, and that part of the block."""
        ends = [min(x + w, n) for x, w, n in zip(at, self.block_type.shape, self.tensor.shape, strict=True)]
        return (
            tuple(slice(max(x, 0), max(end, x, 0)) for x, end in zip(at, ends, strict=True)),
            tuple(slice(max(-x, 0), max(end - x, -x, 0)) for x, end in zip(at, ends, strict=True)),
        )


class Barrier:
    """An mbarrier: a phase ends when the arrivals and bytes that it expects have come."""

    def __init__(self, state: Shared) -> None:
        self.state, self.phase, self.count, self.arrived, self.missing = state, 0, 0, 0, 0

    def change(self, arrivals: int, nbytes: int) -> None:
        with self.state.changed:
            self.arrived += arrivals
            self.missing += nbytes
            if self.arrived == self.count and self.missing == 0:
                self.phase, self.arrived = self.phase + 1, 0
                self.state.changed.notify_all()
            assert self.arrived <= self.count

    def wait(self, parity: int) -> None:
        with self.state.changed:
            done = self.state.changed.wait_for(lambda: self.phase % 2 != parity or self.state.failed, PATIENCE)
        if self.state.failed or not done:
            raise RuntimeError("another partition has failed" if done else "a barrier is waited for in vain")


class Barriers:
    """What ``allocate_shared_memory`` of barriers gives."""

    def __init__(self, count: int, state: Shared) -> None:
        self.all = [Barrier(state) for _ in range(count)]

    def index(self, i: int) -> Barrier:
        return self.all[i]


class Accumulator:
    """The result of a ``wgmma`` that may still run."""

    def __init__(self, before: Any, x: Buffer | Value, y: Buffer) -> None:
        self.before, self.x, self.y = before, x, y

    def finish(self) -> None:
        before = self.before.data if isinstance(self.before, (Value, Accumulator)) else self.before
        self.data = before + self.x.data.float() @ self.y.data.float()


@dataclass
class Shared:
    """What the partitions of a program share."""

    program: int = 0
    programs: int = 1
    failed: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)
    own: threading.local = field(default_factory=threading.local)
    #: Of named barriers: how often all have come, and how many have since.
    named: dict[int, tuple[int, int]] = field(default_factory=dict)

    def running(self, kind: str) -> list[Any]:
        """What this partition has begun and not waited for."""
        return self.own.__dict__.setdefault(kind, [])


def _finish(running: list[Any], outstanding: int) -> None:
    while len(running) > outstanding:
        running.pop(0)()


def _language(state: Shared) -> dict[str, Any]:
    """The names that the kernels' modules take from Gluon."""

    def load_tile(operand: Map, at: Any, barrier: Barrier, buffer: Buffer, pred: bool = True) -> None:
        assert buffer.shape == operand.block_type.shape
        if pred:
            inside, block = operand.part(at)
            read = torch.zeros(buffer.shape, dtype=operand.tensor.dtype)
            read[block] = operand.tensor[inside]
            buffer.put(read)
            barrier.change(0, -read.numel() * read.element_size())

    def store_tile(operand: Map, at: Any, buffer: Buffer) -> None:
        assert buffer.shape == operand.block_type.shape

        def write() -> None:
            inside, block = operand.part(at)
            operand.tensor[inside] = buffer.data[block]

        state.running("stores").append(write)

    def warpgroup_mma(x: Buffer | Value, y: Buffer, acc: Any, is_async: bool, use_acc: bool = True) -> Accumulator:
        found = Accumulator(acc if use_acc else 0.0, x, y)
        state.running("products").append(found.finish)
        return found

    def warpgroup_mma_wait(num_outstanding: int, deps: tuple[Any, ...]) -> Any:
        _finish(state.running("products"), num_outstanding)
        found = [Value(d.data) if isinstance(d, Accumulator) and hasattr(d, "data") else d for d in deps]
        return tuple(found) if len(found) > 1 else found[0]

    def allocate(dtype: Any, shape: Any, layout: Any) -> Any:
        if dtype is gl.int64:
            words = torch.full(list(shape), -1)  # NaN in halves
            return Buffer(words, dtype, layout) if len(shape) > 2 else Barriers(shape[0], state)
        return Buffer(torch.full(list(shape), math.nan, dtype=_TORCH[dtype]), dtype, layout)

    def init(barrier: Barrier, count: int) -> None:
        barrier.count = count

    def arrive(barrier: Barrier, count: int, pred: bool = True) -> None:
        if pred:
            barrier.change(count, 0)

    def store(at: Pointer, value: Value, mask: Value | None = None) -> None:
        kept = torch.ones_like(value.data, dtype=torch.bool) if mask is None else mask.data.expand(value.data.shape)
        at.memory[at.offset[kept]] = value.data[kept]

    def load(at: Pointer, mask: Any = None, other: float = 0.0, volatile: bool = False) -> Any:
        if volatile:
            return Number(at.tensor.item())
        if mask is None:
            return Value(at.memory[at.offset])
        found = at.memory[torch.where(mask.data, at.offset, 0)]
        return Value(torch.where(mask.data, found, torch.full_like(found, other)))

    def copy_block(buffer: Buffer, at: Pointer, mask: Value) -> None:
        """Done when its group is waited for."""
        state.running("group").append(lambda: buffer.put(load(at, mask, other=0).data))

    def copies_committed() -> None:
        group = list(state.running("group"))
        state.running("group").clear()
        state.running("copies").append(lambda: _finish(group, 0))

    def unpacked(words: Value, element: Any) -> tuple[Value, ...]:
        halves = words.data.contiguous().view(_TORCH[element]).view(*words.shape, -1)
        return tuple(map(Value, halves.unbind(-1)))

    def atomic_add(at: Pointer, value: int, sem: str) -> None:
        at.tensor += value

    def meet(which: int, threads: int, waits: bool) -> None:
        """A named barrier of two warpgroups, of which one may go on at once."""
        with state.changed:
            turn, come = state.named.get(which, (0, 0))
            state.named[which] = (turn, come + 1) if come + 1 < threads // 128 else (turn + 1, 0)
            state.changed.notify_all()
            if waits and not state.changed.wait_for(lambda: state.named[which][0] > turn or state.failed, PATIENCE):
                raise RuntimeError("a named barrier is waited for in vain")

    def specialise(partitions: list[tuple[Any, Any]], *_: Any) -> None:
        errors: list[BaseException] = []

        def run(body: Any, args: Any) -> None:
            try:
                body(*args)
                assert not state.running("stores")
                assert not state.running("products")
            except BaseException as e:  # of a thread: raised below
                errors.append(e)
                with state.changed:
                    state.failed = True
                    state.changed.notify_all()

        threads = [threading.Thread(target=run, args=p, daemon=True) for p in partitions]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if errors:
            raise errors[0]

    def nothing(*_: Any) -> None:
        pass

    def by(function: Callable[..., Tensor], scalar: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if not any(isinstance(a, Value) for a in args):
                return scalar(*args)
            data = [a.data if isinstance(a, Value) else torch.tensor(a) for a in args]
            return Value(function(*data))

        return call

    def either(c: Any, x: Any, y: Any) -> Any:
        if not isinstance(c, Value):
            return x if c else y
        x, y = (v.data if isinstance(v, Value) else torch.tensor(v, dtype=torch.float32) for v in (x, y))
        return Value(torch.where(c.data, x, y))

    def constant(x: Value, sizes: Any) -> Value:
        """``max_constancy`` along rows, which must be true."""
        assert (x.data.unflatten(-1, (-1, sizes[-1])) == x.data[..., :: sizes[-1], None]).all()
        return x

    def contiguous(at: Pointer, sizes: Any) -> Pointer:
        """``max_contiguous`` along rows, from multiples on, which must be true."""
        first = at.offset[..., :: sizes[-1], None]
        assert (first % sizes[-1] == 0).all()
        assert (at.offset.unflatten(-1, (-1, sizes[-1])) == first + torch.arange(sizes[-1])).all()
        return at

    def layout(*args: Any, **kwargs: Any) -> None:
        return None

    layout.get_default_for = layout  # type: ignore[attr-defined]
    language = SimpleNamespace(
        **{name: getattr(gl, name) for name in ("float32", "int32", "int64", "constexpr")},
        allocate_shared_memory=allocate,
        atomic_add=atomic_add,
        arange=lambda first, end, layout: Value(torch.arange(first, end)),
        cdiv=lambda x, y: -(-x // y),
        convert_layout=lambda x, layout: x,
        load=load,
        abs=by(torch.abs, abs),
        fma=lambda x, y, z: Value(x.data * y.data + z.data),
        exp2=by(torch.exp2, math.exp2),
        log2=by(torch.log2, math.log2),
        maximum=by(torch.maximum, max),
        minimum=by(torch.minimum, min),
        max=lambda x, axis: Value(x.data.amax(axis)),
        max_constancy=constant,
        max_contiguous=contiguous,
        multiple_of=lambda at, sizes: at,
        full=lambda shape, value, dtype, layout: Value(torch.full(shape, value, dtype=_TORCH[dtype])),
        pointer_type=lambda dtype: SimpleNamespace(element_ty=dtype),
        num_programs=lambda axis: Number(state.programs),
        program_id=lambda axis: Number(state.program),
        **dict.fromkeys(("BlockedLayout", "DotOperandLayout", "NVMMADistributedLayout", "SliceLayout"), layout),
        **dict.fromkeys(("NVMMASharedLayout", "SharedLinearLayout", "SwizzledSharedLayout"), layout),
        static_range=range,
        sqrt=lambda x: Number(math.isqrt(int(x))),
        store=store,
        sum=lambda x, axis: Value(x.data.sum(axis)),
        to_tensor=lambda x: x,
        warp_specialize=specialise,
        where=either,
        zeros=lambda shape, dtype, layout: Value(torch.zeros(shape, dtype=_TORCH[dtype])),
    )
    return {
        "gl": language,
        "bar_arrive": lambda which, threads: meet(which, threads, False),
        "bar_sync": lambda which, threads: meet(which, threads, True),
        "copies_committed": copies_committed,
        "copies_wait": lambda outstanding: _finish(state.running("copies"), outstanding),
        "copy_block": copy_block,
        "fence_async_shared": nothing,
        "load_tile": load_tile,
        "mbarrier": SimpleNamespace(
            MBarrierLayout=nothing,
            arrive=arrive,
            expect=lambda barrier, nbytes: barrier.change(1, nbytes),
            init=init,
            wait=lambda barrier, phase, pred=True: barrier.wait(int(phase)) if pred else None,
        ),
        "mma": lambda x, y, acc, precision=None: Value(acc.data + x.data.float() @ y.data.float()),
        "next_may_begin": nothing,
        **dict.fromkeys(("opaque", "rounded"), lambda x: x),
        "previous_wait": nothing,
        "reinterpret": reinterpret,
        "scaled_seldom": lambda acc, factor, *_: tuple(chunk * factor[:, None] for chunk in acc),
        "store_tile": store_tile,
        "store_wait": lambda outstanding: _finish(state.running("stores"), outstanding),
        "thread_barrier": nothing,
        "unpacked": unpacked,
        "warpgroup_mma": warpgroup_mma,
        "warpgroup_mma_wait": warpgroup_mma_wait,
    }


def _python(value: Any) -> Any:
    """A jit function as the function that it is made of, a constexpr as its value."""
    if isinstance(value, gl.constexpr):
        return value.value
    return value.fn if hasattr(value, "fn") and hasattr(value, "is_gluon") else value


@contextmanager
def _emulation(family: str, state: Shared) -> Iterator[None]:
    """The kernels' modules as plain Python."""
    language = _language(state)
    # Modules may have given other names to what they import.
    imported = {id(vars(runtime)[name]): value for name, value in language.items() if name in vars(runtime)}
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES[family]:
            patch.setattr(module, "range", lambda *ends: map(Number, range(*ends)), raising=False)
            for name, value in list(vars(module).items()):
                if id(value) in imported:
                    patch.setattr(module, name, imported[id(value)])
                elif name in OWN:
                    patch.setattr(module, name, language[name])
                elif not isinstance(value, ModuleType) and _python(value) is not value:
                    patch.setattr(module, name, _python(value))
        yield


def _argument(arg: Any, tensors: Mapping[str, Any], workspace: Tensor) -> Any:
    if isinstance(arg, TensorMap):
        tensor = tensors[arg.operand]
        if arg.copy is not None:
            memory = workspace[arg.copy.offset :].view(arg.element.torch)
            tensor = memory.as_strided(arg.copy.shape, arg.copy.strides, memory.storage_offset())
        if arg.lies is not None:
            tensor = tensor.as_strided(*arg.lies)
        if arg.view is not None:
            for axis, first, stop, step in arg.view:
                tensor = tensor[(slice(None),) * axis + (slice(first, stop, step),)]
            tensor = tensor.permute([axis for axis, *_ in arg.view])
        return Map(tensor.mT if arg.transposed else tensor, arg)
    if isinstance(arg, Ptr):
        return Pointer(tensors[arg.operand])
    if isinstance(arg, Scratch):
        return Pointer(workspace[arg.offset :].view(arg.element.torch))
    if isinstance(arg, Counter):
        return Pointer(torch.tensor(BEFORE, dtype=torch.int32))
    if isinstance(arg, Scalar):
        return tensors.get(arg.operand, arg.default)
    if isinstance(arg, Stride):
        return tensors[arg.operand].stride(arg.axis)
    if isinstance(arg, tuple):
        return tuple(_argument(a, tensors, workspace) for a in arg)
    if isinstance(arg, Int):
        return Number(arg.value)
    return arg.value if isinstance(arg, Float) else arg


def emulate(launch: Launch, tensors: Mapping[str, Any], workspace: Tensor) -> bool:
    """Run a launch of a Gluon kernel, program after program: each waits in vain for those after it.

    ``tensors``: the operands by name, on the CPU, and host scalars; ``workspace``: bytes. Returns whether programs met.
    """
    args = {name: _argument(arg, tensors, workspace) for name, arg in launch.args.items()}
    constants = {name: _python(value) for name, value in launch.constexprs.items()}
    family = launch.kernel.fn.__module__.split(".")[-2]
    state = Shared()
    with _emulation(family, state):
        for program in range(launch.grid):
            vars(state).update(vars(Shared(program, launch.grid)))
            launch.kernel.fn(**args, **constants)
    counted = [args[name].tensor.item() for name, arg in launch.args.items() if isinstance(arg, Counter)]
    assert all(count in (BEFORE, BEFORE + EPOCH) for count in counted)  # else the next launch would misread it
    return any(count > BEFORE for count in counted)
