"""Programs of a launch interpreted without memory: only the addresses that they load and store are looked at.

Operands may so have more elements than any machine holds.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

import triplan as tp
from triplan.backends.runtime.launch import Arg, Float, Int, Launch, Ptr, Scalar, Scratch
from triplan.backends.triton.common.offsets import packed_strides

#: Bytes between the operands' addresses: more than any operand has.
DISTANCE = 2**44


@dataclass
class Placed:
    """An address, as Triton takes a tensor."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@dataclass
class Memory:
    """What may be touched.

    Attributes:
        spans: the first byte of each operand, and that after its last.
        touched: the byte after the highest that was loaded or stored of each.
        values: what loads of an operand give; zeros without.
        stored: what is stored, one after another.
    """

    spans: dict[str, tuple[int, int]]
    touched: dict[str, int]
    values: dict[str, Any] = field(default_factory=dict)
    stored: list[Any] = field(default_factory=list)

    def load(self, pointers: Any, mask: Any, other: Any) -> Any:
        """An array of what a load gives; ``other`` where ``mask`` is off, if the operand has values."""
        element = interpreter._get_np_dtype(pointers.get_element_ty())
        other = np.zeros(pointers.data.shape, dtype=element) if other is None else other.data
        values = self.values.get(self.touch(pointers, mask))
        if values is None:
            return other
        start = next(self.spans[name][0] for name in self.values)
        at = (pointers.data.astype(np.int64) - start) // values.itemsize
        return np.where(mask, values[np.where(mask, at, 0)], other).astype(element)

    def touch(self, pointers: Any, mask: Any) -> str | None:
        """The name of the operand at the addresses where ``mask`` is on; fails if they are in none, or in several."""
        at = np.broadcast_to(pointers.data, np.broadcast_shapes(pointers.data.shape, mask.shape))
        at = at[np.broadcast_to(mask, at.shape).astype(bool)].astype(np.int64)
        if not at.size:
            return None
        low, size = int(at.min()), pointers.get_element_ty().primitive_bitwidth // 8
        high = int(at.max()) + size
        name = next((name for name, (start, end) in self.spans.items() if start <= low and high <= end), None)
        assert name is not None, f"addresses from {low:#x} to {high:#x} are outside of {self.spans}"
        self.touched[name] = max(self.touched.get(name, 0), high)
        return name


def few_turns(*bounds: Any) -> list[Any]:
    """The first and last values of a loop, in the element that the compiler gives its counter."""
    turns = range(*map(operator.index, bounds))
    is_wide = any(getattr(bound, "dtype", tl.int32) == tl.int64 for bound in bounds)
    element = tl.int64 if is_wide else tl.int32
    counted = turns[-1] + turns.step if turns else 0
    assert is_wide or counted < 2**31, f"the loop counts to {counted} in 32 bits"
    kept = turns if len(turns) <= 3 else (turns[0], turns[1], turns[-1])
    values = (np.array([turn], dtype=np.int64).astype(interpreter._get_np_dtype(element)) for turn in kept)
    return [tl.tensor(interpreter.TensorHandle(value, element), element) for value in values]


def wide(value: int) -> Any:
    """A kernel's argument of 64 bits. (The interpreter gives a small one 32.)"""
    return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.int64), tl.int64), tl.int64)


@contextmanager
def no_memory(memory: Memory, program: int, programs: int, *, whole_loops: bool = False) -> Iterator[None]:
    """Interpret as program number ``program`` of ``programs``; loads give zeros, or what they ask for instead.

    Loops take few turns, unless ``whole_loops``.
    """

    def load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        return interpreter.TensorHandle(memory.load(pointers, mask.data, other), pointers.get_element_ty())

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> None:
        memory.touch(pointers, mask.data)
        memory.stored += value.data.ravel().tolist()

    def add(self: Any, how: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        memory.touch(pointers, mask.data)
        return value

    def number(value: int) -> Any:
        return lambda self, axis: interpreter.TensorHandle(np.array([value], dtype=np.int32), tl.int32)

    with pytest.MonkeyPatch.context() as patch:
        builder = interpreter.InterpreterBuilder
        patch.setattr(builder, "create_masked_load", load)
        patch.setattr(builder, "create_masked_store", store)
        patch.setattr(builder, "create_atomic_rmw", add)
        patch.setattr(builder, "create_get_program_id", number(program))
        patch.setattr(builder, "create_get_num_programs", number(programs))
        for name, module in sys.modules.items():
            if not whole_loops and name.startswith("triplan.backends.triton") and name.endswith("_kernels"):
                patch.setattr(module, "range", few_turns, raising=False)
        executor = interpreter.GridExecutor
        patch.setattr(executor, "_init_args_hst", lambda self, args, kwargs: (args, kwargs))
        patch.setattr(executor, "_restore_args_dev", lambda self, *args: None)
        yield


def touched_by(desc: tp.Descriptor, launch: Launch, program: int, workspace: int) -> dict[str, int]:
    """Offsets past the last byte that one program touches of each operand; fails if it touches anything else.

    ``workspace``: its bytes. Loops take few turns.
    """
    operands = {o.name: o for o in desc.operands() if o.is_tensor}
    sizes = {**{name: o.nbytes for name, o in operands.items()}, "workspace": workspace}
    starts = {name: (i + 1) * DISTANCE for i, name in enumerate(sizes)}

    def value(arg: Arg) -> Any:
        if isinstance(arg, tuple):
            return tuple(value(a) for a in arg)
        if isinstance(arg, Int):
            return wide(arg.value) if arg.wide else arg.value
        if isinstance(arg, Float):
            return arg.value
        if isinstance(arg, Scratch):
            return Placed(starts["workspace"] + arg.offset, arg.element.torch)
        if isinstance(arg, Scalar):
            return arg.default
        if isinstance(arg, Ptr):
            return Placed(starts[arg.operand], arg.element.torch)
        return None if arg is None else wide(packed_strides(operands[arg.operand].shape)[arg.axis])

    memory = Memory({name: (start, start + sizes[name]) for name, start in starts.items()}, {})
    with no_memory(memory, program, launch.grid):
        launch.kernel[(1,)](**{name: value(arg) for name, arg in launch.args.items()}, **launch.constexprs)
    return {name: end - starts[name] for name, end in memory.touched.items()}
