"""Gluon kernels whose threads work together by PTX, in plain Python.

Triton's interpreter does not run Gluon. Here blocks are NumPy arrays, and PTX is executed instruction by instruction,
by 32 lanes at a time. Programs run one after the other: what several would do side by side, and barriers, are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import triton.language as tl

from triplan.backends.runtime.launch import Int, Launch, Ptr, Scratch, Stride
from triplan.backends.triton.sorting import block_kernels, onesweep_kernels, ranking_kernels, shared_kernels

MODULES = (shared_kernels, ranking_kernels, onesweep_kernels, block_kernels)
SHARED_BYTES = 48 << 10
UNSIGNED = {4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}
MASKS = {
    "%lanemask_lt": np.array([(1 << i) - 1 for i in range(32)], np.uint64),
    "%lanemask_gt": np.array([(1 << 32) - (2 << i) for i in range(32)], np.uint64),
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "and": np.bitwise_and,
    "mov": np.copy,
    "not": np.invert,
    "or": np.bitwise_or,
    "popc": lambda x: np.unpackbits(x[..., None].view(np.uint8), -1).sum(-1, dtype=x.dtype),
    "shl": np.left_shift,
    "shr": np.right_shift,
    "sub": np.subtract,
}


def _bare(value: Any) -> Any:
    value = getattr(value, "value", value)
    return value.data if isinstance(value, Block) else value


class Block:
    """A block in registers, or a scalar of a certain type."""

    def __init__(self, data: Any) -> None:
        self.data = np.asarray(data)
        self.shape = self.data.shape

    @property
    def dtype(self) -> Any:
        return getattr(tl, "int1" if self.data.dtype == bool else self.data.dtype.name)

    def to(self, dtype: Any) -> Block:
        return Block(self.data.astype(dtype.name))

    def __getitem__(self, at: Any) -> Block:
        return Block(self.data[at])

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __invert__(self) -> Block:
        return Block(~self.data)

    def __neg__(self) -> Block:
        return Block(-self.data)


def _lifted(name: str) -> Callable[..., Any]:
    def method(self: Block, other: Any) -> Any:
        # (A Python number takes the block's type, as in Triton.)
        return NotImplemented if isinstance(other, Address) else Block(getattr(self.data, name)(_bare(other)))

    return method


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"):
    setattr(Block, f"__{_name}__", _lifted(f"__{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Block, f"__{_name}__", _lifted(f"__{_name}__"))


class Address:
    """An address, or a block of them, within an array."""

    def __init__(self, memory: Any, offset: Any = 0) -> None:
        self.memory, self.offset = memory, np.asarray(offset, dtype=np.int64)

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=getattr(tl, self.memory.dtype.name))

    def __add__(self, other: Any) -> Address:
        return Address(self.memory, self.offset + _bare(other))

    def __sub__(self, other: Any) -> Address:
        return Address(self.memory, self.offset - _bare(other))

    def places(self, mask: Any) -> tuple[Any, Any]:
        """(which are accessed, their offsets)."""
        known = np.ones(self.offset.shape, bool) if mask is None else np.broadcast_to(mask.data, self.offset.shape)
        found = self.offset[known]
        assert ((found >= 0) & (found < self.memory.size)).all(), "an access out of bounds"
        return known, found


#: (predicate, whether it is negated, instruction, operands) of a line of PTX; a label is its own instruction.
Instruction = tuple[str, bool, str, tuple[str, ...]]


@cache
def _instructions(text: str) -> tuple[Instruction, ...]:
    body = text.strip().removeprefix("{").removesuffix("}").replace(":", ":;")
    found = []
    for line in filter(None, map(str.strip, body.split(";"))):
        negated, predicate, op, rest = re.fullmatch(r"(?:@(!?)(\w+)\s+)?(\S+)\s*(.*)", line, re.DOTALL).groups()  # type: ignore[union-attr]
        if op not in (".reg", ".shared") and not op.startswith("bar."):
            found.append((predicate or "", bool(negated), op, tuple(n.strip().strip("[]") for n in rest.split(","))))
    return tuple(found)


def execute(text: str, operands: list[Any], bits: int, shared: Any, memory: Any) -> Any:
    """What lanes find in $0, of ``bits`` bits. ``operands``: $1 and on, [..., lanes]; ``memory``: bytes of an operand.

    Lanes of several rows, which do not see each other's votes, run side by side.
    """
    shape = operands[0].shape
    held = {f"${i}": values.astype(np.uint64) for i, values in enumerate([np.zeros(shape), *operands])}
    held.update((name, np.broadcast_to(mask, shape)) for name, mask in MASKS.items() if shape[-1] == 32)
    found = _executed(_instructions(text), 0, held, shared, memory)
    return found.astype(f"u{bits // 8}").view(f"i{bits // 8}")


def _executed(lines: Sequence[Instruction], at: int, held: dict[str, Any], shared: Any, memory: Any) -> Any:
    """$0 after the ``lines`` from ``at`` on. ``held``: the lanes' registers by name."""
    shape = held["$0"].shape
    while at < len(lines):
        predicate, negated, op, names = lines[at]
        at += 1
        runs = held[predicate] != negated if predicate else np.ones(shape, bool)
        kind, wide = op.split(".")[0], UNSIGNED[8 if op.endswith("64") else 4]

        def value(name: str, wide: Any = wide) -> Any:
            return held[name].astype(wide) if name in held else np.full(shape, int(name, 0), wide)

        def places(name: str, op: str = op, wide: Any = wide, runs: Any = runs) -> tuple[Any, Any]:
            """Words of memory, and which of them the lanes access."""
            where, rest = np.divmod(held[name][runs].view(np.int64), wide.itemsize)
            assert not rest.any(), "a misaligned access"
            space = memory if ".global" in op else shared
            return space[: space.size // wide.itemsize * wide.itemsize].view(wide), where

        if op.endswith(":"):
            continue
        if kind == "bra":
            to = [op for _, _, op, _ in lines].index(f"{names[0]}:")
            if runs.any() and not runs.all():  # lanes part, and do not meet again
                result = np.empty(shape, np.uint64)
                for own, begin in ((runs, to), (~runs, at)):
                    registers = {n: values[own] for n, values in held.items()}
                    result[own] = _executed(lines, begin, registers, shared, memory)
                return result
            at = to if runs.all() else at
            continue
        if kind in ("st", "red"):
            words, where = places(names[0])
            if kind == "red":
                np.add.at(words, where, value(names[1])[runs])
            else:
                words[where] = value(names[1])[runs]
            continue
        if kind == "ld":
            words, where = places(names[1])
            result = np.zeros(shape, wide)
            result[runs] = words[where]
        elif kind == "vote":
            assert shape[-1] == 32
            result = np.packbits(held[names[1]], -1, bitorder="little").view(np.uint32).repeat(32, -1)
        elif kind == "setp":
            result = (value(names[1]) == value(names[2])) == (".eq." in op)
        elif names[1] == "bytes":  # the address of all that is declared
            result = np.zeros(shape, wide)
        else:
            result = FUNCTIONS[kind](*map(value, names[1:]))
        if not runs.all():
            result = np.where(runs, result, held.get(names[0], np.zeros(shape, result.dtype)))
        held[names[0]] = result if result.dtype == bool else result.astype(np.uint64)
    return held["$0"]


def _language(program: int, shared: Any) -> dict[str, Any]:
    """The names that the kernels' modules take from Gluon and Triton."""

    def inline_asm(text: Any, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int) -> Block:
        text, memory, given = _bare(text), None, []
        for arg in args:
            if isinstance(arg, Address):
                memory = arg.memory.view(np.uint8)
                given.append(arg.offset * arg.memory.itemsize)
            else:
                given.append(arg.data)
        shape = np.broadcast_shapes(*(np.shape(g) for g in given))
        # Of a tile, [warps, items, lanes], those of a warp work together; else any number may.
        together = 32 if "warp" in text or "vote" in text else math.prod(shape)
        rows = [np.broadcast_to(g, shape).reshape(-1, together) for g in given]
        # What reaches memory comes after the rows before.
        parts = zip(*rows, strict=True) if ".shared" in text or ".global" in text else [rows]
        found = [execute(text, [*part], dtype.primitive_bitwidth, shared, memory) for part in parts]
        return Block(np.concatenate(found, None).reshape(shape))

    def load(at: Address, mask: Any = None, other: int = 0) -> Block:
        known, places = at.places(mask)
        found = np.full(at.offset.shape, other, at.memory.dtype)
        found[known] = at.memory[places]
        return Block(found)

    def store(at: Address, value: Block, mask: Any = None) -> None:
        known, places = at.places(mask)
        assert len(np.unique(places)) == len(places), "two values for one place"
        assert value.data.dtype == at.memory.dtype
        at.memory[places] = np.broadcast_to(value.data, known.shape)[known]

    def atomic_add(at: Address, value: Any, mask: Any = None, sem: str = "") -> Block:
        known, places = at.places(mask)
        before = at.memory[at.offset].copy()
        np.add.at(at.memory, places, np.broadcast_to(_bare(value), known.shape)[known])
        return Block(before)

    def either(c: Any, x: Any, y: Any) -> Any:
        if not isinstance(c, Block):
            return x if c else y
        x, y = _bare(x), _bare(y)
        kind = next((v.dtype for v in (x, y) if isinstance(v, np.ndarray)), np.dtype(np.int32))
        return Block(np.where(c.data, np.asarray(x, kind), np.asarray(y, kind)))

    def upto(x: Block, axis: int, _: Any = None) -> Block:
        return Block(x.data.cumsum(axis, dtype=x.data.dtype))

    names = SimpleNamespace(
        **{n: getattr(tl, n) for n in ("constexpr", "int16", "int32", "int64", "uint8")},
        arange=lambda first, end, layout=None: Block(np.arange(_bare(first), _bare(end), dtype=np.int32)),
        associative_scan=upto,
        atomic_add=atomic_add,
        convert_layout=lambda x, layout: x,
        cumsum=upto,
        inline_asm_elementwise=inline_asm,
        load=load,
        program_id=lambda axis: Block(np.int32(program)),
        static_range=range,
        store=store,
        sum=lambda x, axis: Block(x.data.sum(axis, dtype=x.data.dtype)),
        to_tensor=lambda x: Block(np.int32(x)),
        where=either,
        **dict.fromkeys(("BlockedLayout", "SliceLayout"), lambda *args: None),
    )
    return {"gl": names, "tl": names, "thread_barrier": lambda: None}


@contextmanager
def _emulation(program: int) -> Iterator[None]:
    """The kernels' modules as plain Python. (Constants stay what they are.)"""
    language = _language(program, np.full(SHARED_BYTES, 0x77, np.uint8))
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            for name, value in vars(module).items():
                if name in language:
                    patch.setattr(module, name, language[name])
                elif hasattr(value, "fn") and hasattr(value, "is_gluon"):
                    patch.setattr(module, name, value.fn)
        yield


def _argument(arg: Any, operands: Mapping[str, Any], workspace: Any) -> Any:
    if isinstance(arg, tuple):
        return tuple(_argument(a, operands, workspace) for a in arg)
    if isinstance(arg, Ptr):
        return Address(operands[arg.operand].reshape(-1))
    if isinstance(arg, Scratch):
        dtype = np.dtype(str(arg.element.torch).removeprefix("torch."))
        memory = workspace[arg.offset :]
        return Address(memory[: memory.size // dtype.itemsize * dtype.itemsize].view(dtype))
    if isinstance(arg, Stride):
        raise NotImplementedError("operands are packed")
    return Block(np.int64(arg.value) if arg.wide else np.int32(arg.value)) if isinstance(arg, Int) else arg


def emulate(launch: Launch, operands: Mapping[str, Any], workspace: Any, order: Callable[[int], list[int]]) -> None:
    """Run a launch, its programs one after the other, in the ``order`` of so many.

    ``operands``: packed arrays by name, as integers of their width; ``workspace``: bytes.
    """
    args = {name: _argument(arg, operands, workspace) for name, arg in launch.args.items()}
    for program in order(launch.grid):
        with _emulation(program):
            launch.kernel.fn(**args, **launch.constexprs)
