"""Cases of cumulative sums and products, on tensors of softmax's and norms' shapes and on one long row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import triplan as tp
from bench.elementwise import ElementwiseCase
from bench.rows import DTYPES, SHAPES, Buffers, shrunken, wrong_elements

FORMULAS: dict[str, Callable[..., Tensor]] = {
    "cumsum": lambda x: torch.cumsum(x, 1),
    "cumprod": lambda x: torch.cumprod(x, 1),
}


def cases(tiny: bool = False) -> list[ScanCase]:
    """Every op, dtype and shape; ``tiny`` shrinks them for a smoke test."""
    shapes = [*SHAPES[:2], (1, 1 << 28)]
    found = [ScanCase(op, *shrunken(shape, tiny), dtype) for dtype in DTYPES for op in FORMULAS for shape in shapes]
    return list({case.name: case for case in found if not tiny or case.n <= 1 << 12}.values())


@dataclass(frozen=True)
class ScanCase(ElementwiseCase):
    def make(self, device: torch.device, generator: torch.Generator) -> Buffers:
        found = super().make(device, generator)
        if self.op == "cumprod":  # products that stay in range
            found.x.sign_()
        return found

    def descriptor(self) -> tp.Descriptor:
        cls: Any = tp.descriptor_types()[self.op]
        found: tp.Descriptor = cls(op=self.op, input_shape=(self.rows, self.n), scan_axis=1, element=self.dtype)
        return found

    def formula(self) -> Callable[..., Any]:
        return FORMULAS[self.op]

    def mismatch(self, b: Buffers) -> str:
        at = self.compared(b.x.device)
        wanted = self.formula()(b.x[at].double())
        eps, size = torch.finfo(self.dtype).eps, wanted.square().mean().sqrt()
        return wrong_elements("out", b.out[at].double(), wanted, eps, size)
