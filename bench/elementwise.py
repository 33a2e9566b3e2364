"""Cases of elementwise ops, on tensors of softmax's and norms' shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import triplan as tp
from bench.rows import DTYPES, SHAPES, Buffers, OneOpCase, shrunken, wrong_elements
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
