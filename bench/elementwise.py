"""Elementwise functions and expressions as they are called; ops on shapes of softmax and norms, for ``rowwise``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

import triplan as tp
import triplan.functional as F  # noqa: N812
from bench import rows, timing
from bench.copies import BF16, F32, CopyCase, Work
from bench.report import Report, Row
from bench.rows import DTYPES, SHAPES, Buffers, OneOpCase, Progress, compiled_by_torch, shrunken, wrong_elements
from triplan.backends.triton.common.rows_entries import Entry

FORMULAS: dict[str, Callable[..., Tensor]] = {
    "relu_squared": lambda x: torch.relu(x).square(),
    "relu_squared_backward": lambda dout, x: dout * 2 * torch.relu(x),
}


def cases(tiny: bool = False) -> list[ElementwiseCase]:
    """Every op, dtype and shape; ``tiny`` shrinks them for a smoke test."""
    found = [ElementwiseCase(op, *shrunken(s, tiny), dtype) for dtype in DTYPES for op in FORMULAS for s in SHAPES[:2]]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class ElementwiseCase(OneOpCase):
    in_sweep = False

    def make(self, device: torch.device, generator: torch.Generator) -> Buffers:
        found = {}
        for o in self.descriptor().operands():
            found[o.name] = torch.randn(o.shape, dtype=self.dtype, device=device, generator=generator)
        return Buffers(found)

    def descriptor(self) -> tp.Descriptor:
        cls: Any = tp.descriptor_types()[self.op]
        found: tp.Descriptor = cls(op=self.op, input_shape=(self.rows, self.n), element=self.dtype)
        return found

    def functions(self, device: torch.device) -> dict[str, Callable[[Buffers], Any]]:
        return {"torch": lambda b: self.formula()(*self.inputs(b))}

    def formula(self) -> Callable[..., Any]:
        return FORMULAS[self.op]

    def inputs(self, b: Buffers) -> list[Tensor]:
        return [b.tensors[o.name] for o in self.descriptor().operands() if not o.is_written]

    def mismatch(self, b: Buffers) -> str:
        at, (name,) = self.compared(next(iter(b.tensors.values())).device), self.outputs()
        wanted = self.formula()(*(t[at].double() for t in self.inputs(b)))
        eps, size = torch.finfo(self.dtype).eps, torch.zeros((), dtype=torch.float64, device=wanted.device)
        return wrong_elements(name, b.tensors[name][at].double(), wanted, eps, size)

    def swept(self) -> Iterator[type[Entry]]:
        return iter(())


# --- functional calls ---


@dataclass(frozen=True)
class Fused(Work):
    """``others``: shapes of the operands after the first."""

    others: tuple[tuple[int, ...], ...] = ()


def swiglu(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return nnf.silu(a) * b


def swiglu_backward(x: Tensor, g: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((torch.ops.aten.silu_backward(g * b, a), g * nnf.silu(a)), -1)


def blend(m: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, scale: float = 0.5) -> Any:
    """Ten functions of six operands, of ``m``: torch or tp.expr."""
    left = m.tanh(a) * m.sigmoid(b) + m.exp(-m.abs(c)) * m.sin(d)
    return left + m.log1p(m.abs(e)) * m.sqrt(m.abs(f)) - scale * m.maximum(m.erf(a), m.atan(b))


def _blended(*operands: Any) -> Any:
    return blend(tp.expr, *operands)


SQUARE, ODD = (16384, 16384), (16381, 16383)
PACKED, HALF = (16384, 2 * 11008), (16384, 11008)
CALLS: dict[str, Fused] = {
    "gelu": Fused(F.gelu, nnf.gelu, SQUARE, BF16),
    "silu": Fused(F.silu, nnf.silu, SQUARE, BF16),
    "add": Fused(F.add, torch.add, SQUARE, BF16, others=(SQUARE,)),
    "swiglu": Fused(F.swiglu, swiglu, PACKED, BF16),
    "swiglu backward": Fused(
        lambda x, g: torch.ops.triplan.packed_gate_backward(g, x, 1, "swiglu tt"),
        swiglu_backward,
        PACKED,
        BF16,
        others=(HALF,),
    ),
    "add row": Fused(F.add, torch.add, SQUARE, BF16, others=(SQUARE[1:],)),
    "add column": Fused(F.add, torch.add, SQUARE, BF16, others=((SQUARE[0], 1),)),
    "add (b, 1, s, 1)": Fused(F.add, torch.add, (16, 16, 1024, 1024), BF16, others=((16, 1, 1024, 1),)),
    "add transposed": Fused(
        lambda x, y: F.add(x, y.t()), lambda x, y: torch.add(x, y.t()), SQUARE, BF16, others=(SQUARE,)
    ),
    "add row, odd": Fused(F.add, torch.add, ODD, BF16, others=(ODD[1:],)),
    "expression": Fused(
        partial(F.expression, _blended), partial(blend, torch), (8192, 8192), BF16, others=((8192, 8192),) * 5
    ),
    "small add": Fused(F.add, torch.add, (1000,), F32, others=((1000,),)),
}


@dataclass(frozen=True)
class CallCase(CopyCase):
    """One of ``CALLS``. ``rows``: extents at most, if not 0."""

    @property
    def work(self) -> Fused:
        return CALLS[self.op]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        # The halves of an axis of two, so that a gate's operands still fit each other.
        return [
            tuple(min(n, self.rows * (2 if n == PACKED[1] else 1) or n) for n in shape)
            for shape in (self.work.shape, *self.work.others)
        ]

    @property
    def bytes(self) -> int:
        """Of the operands and the result, once each."""
        given = [torch.empty(shape, dtype=self.dtype, device="meta") for shape in self.shapes]
        return int(sum(t.nbytes for t in (*given, self.work.torchs(*given))))

    def make(self, device: torch.device, generator: torch.Generator) -> Buffers:
        drawn = (torch.randn(s, dtype=self.dtype, device=device, generator=generator) for s in self.shapes)
        return Buffers({f"x{i}": t for i, t in enumerate(drawn)})

    def inputs(self, b: Buffers) -> list[Tensor]:
        return [b.tensors[f"x{i}"] for i in range(len(self.work.others) + 1)]

    def mismatch(self, b: Buffers) -> str:
        wanted = self.work.torchs(*(t.double() for t in self.inputs(b)))
        one = torch.ones((), dtype=torch.float64, device=wanted.device)
        return wrong_elements("out", b.tensors["out"].double(), wanted, torch.finfo(self.dtype).eps, one)


def run(iterations: int, warmup: int, device: torch.device, tiny: bool, progress: Progress) -> Report:
    """Device time of ``CALLS``; host time of a small call; seconds until an expression's first result."""
    listed = [CallCase(name, 4 if tiny else 0, 0, work.dtype) for name, work in CALLS.items()]
    report = rows.run(listed, iterations, warmup, device, tiny, False, (), progress, "elementwise")
    report.rows.extend([*_host(device), *_first_calls(device, tiny)])
    return report


def _host(device: torch.device) -> list[Row]:
    x, y = (torch.randn(1000, device=device) for _ in range(2))
    calls = [[partial(f, x, y)] * timing.HOST_CALLS for f in (F.add, torch.add)]
    ours, theirs = (t.median_us for t in timing.host_times(calls))
    case = "host time: add 1000 f32"
    return [
        {"case": case, "contestant": "torch", "host_us": theirs, "note": f"{theirs:.2f} us a call"},
        {
            "case": case,
            "contestant": "triplan",
            "host_us": ours,
            "speed_vs_peer": theirs / ours,
            "note": f"{ours:.2f} us a call",
        },
    ]


def _first_calls(device: torch.device, tiny: bool) -> list[Row]:
    """A number that no run before had is compiled in, so that no cache holds the kernel."""
    operands = [torch.randn(1024, 1024, device=device) for _ in range(6)]
    blended: Callable[..., Any] = partial(blend, scale=time.time_ns() % 1000003 / 1000003)
    ways: dict[str, Callable[..., Any]] = {
        "torch.compile": compiled_by_torch(partial(blended, torch), tiny),
        "triplan": partial(F.expression, lambda *given: blended(tp.expr, *given)),
    }
    found: list[Row] = []
    for name, call in ways.items():
        started = time.perf_counter()
        call(*operands)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        found.append(
            {"case": "expression: first call", "contestant": name, "seconds": seconds, "note": f"{seconds:.2f} s"}
        )
    return found
