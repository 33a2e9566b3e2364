"""Gluon kernels whose threads work together by PTX, in plain Python.

Triton's interpreter does not run Gluon. Here blocks are NumPy arrays, and PTX is executed instruction by instruction,
by 32 lanes at a time. Programs run one after the other: what several would do side by side, and barriers, are left out.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import triton.language as tl

from triplan.backends.runtime.launch import Int, Launch, Ptr, Scratch, Stride
from triplan.backends.triton.sorting import block_kernels, onesweep_kernels, ranking_kernels, shared_kernels

MODULES = (shared_kernels, ranking_kernels, onesweep_kernels, block_kernels)
SHARED_BYTES = 48 << 10
BINARY: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "and": operator.and_,
    "or": operator.or_,
    "shl": operator.lshift,
    "shr": operator.rshift,
    "sub": operator.sub,
}
UNARY: dict[str, Callable[[int], int]] = {"mov": int, "not": operator.invert, "popc": int.bit_count}


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


def execute(text: str, operands: list[list[int]], bits: int, shared: bytearray, memory: Any) -> list[int]:
    """What the lanes of ``operands``, $1 and on, find in $0, of ``bits`` bits. ``memory``: the bytes of an operand."""
    lanes = range(len(operands[0]))
    held = {f"${i}": [*values] for i, values in enumerate([[0 for _ in lanes], *operands])}
    held["%lanemask_lt"] = [(1 << i) - 1 for i in lanes]
    held["%lanemask_gt"] = [(2**32 - 1) & ~((2 << i) - 1) for i in lanes]
    body = text.strip().removeprefix("{").removesuffix("}").replace(":", ":;")
    lines = [line.strip() for line in body.split(";") if line.strip()]
    at = 0
    while at < len(lines):
        predicate, negated, line = None, False, lines[at]
        at += 1
        if found := re.match(r"@(!?)(\w+)\s+(.*)", line):
            negated, predicate, line = bool(found[1]), found[2], found[3]
        runs = [i for i in lanes if predicate is None or bool(held[predicate][i]) != negated]
        op, _, rest = line.partition(" ")
        names = [n.strip().strip("[]") for n in rest.split(",")]
        wide = 8 if op.endswith("64") else 4
        space = memory if ".global" in op else shared

        def value(name: str, lane: int, wide: int = wide) -> int:
            return (held[name][lane] if name in held else int(name, 0)) % (1 << 8 * wide)

        kind = op.split(".")[0]
        if line.endswith(":") or op in (".reg", ".shared") or kind == "bar":
            continue
        if kind == "bra":
            assert len(runs) in (0, len(lanes)), "lanes part"
            at = lines.index(f"{names[0]}:") if runs else at
        elif kind in ("st", "red"):
            for i in runs:
                place = slice(held[names[0]][i], held[names[0]][i] + wide)
                before = int.from_bytes(space[place], "little") if kind == "red" else 0
                space[place] = ((before + value(names[1], i)) % (1 << 8 * wide)).to_bytes(wide, "little")
        else:
            results = {}
            for i in runs:
                if kind == "ld":
                    place = slice(held[names[1]][i], held[names[1]][i] + wide)
                    results[i] = int.from_bytes(space[place], "little")
                elif kind == "vote":
                    assert len(lanes) == 32
                    results[i] = sum(1 << lane for lane in lanes if held[names[1]][lane])
                elif kind == "setp":
                    results[i] = (value(names[1], i) == value(names[2], i)) == (".eq." in op)
                elif names[1] == "bytes":  # the address of all that is declared
                    results[i] = 0
                else:
                    given = [value(n, i) for n in names[1:]]
                    results[i] = (BINARY[kind](*given) if len(given) == 2 else UNARY[kind](*given)) % (1 << 8 * wide)
            held.setdefault(names[0], [0 for _ in lanes])
            for i, result in results.items():
                held[names[0]][i] = result
    return [v - (v >> (bits - 1) << bits) for v in held["$0"]]


def _language(program: int, shared: bytearray) -> dict[str, Any]:
    """The names that the kernels' modules take from Gluon and Triton."""

    def inline_asm(text: Any, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int) -> Block:
        text, memory, given = _bare(text), None, []
        for arg in args:
            if isinstance(arg, Address):
                memory = memoryview(arg.memory).cast("B")
                given.append(arg.offset * arg.memory.itemsize)
            else:
                given.append(arg.data)
        shape = np.broadcast_shapes(*(np.shape(g) for g in given))
        # Of a tile, [warps, items, lanes], those of a warp work together; what waits, waits alone; else any number may.
        together = {"warp" in text or "vote" in text: 32, "bra" in text: 1}.get(True, math.prod(shape))
        rows = [np.broadcast_to(g, shape).reshape(-1, together).tolist() for g in given]
        found = [
            execute(text, [r[i] for r in rows], dtype.primitive_bitwidth, shared, memory) for i in range(len(rows[0]))
        ]
        return Block(np.array(found, dtype=dtype.name).reshape(shape))

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
    language = _language(program, bytearray(b"\x77" * SHARED_BYTES))
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
