"""Cases of softmax, log_softmax and their backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import triplan as tp
from bench.liger import liger_function
from bench.rows import (
    DTYPES,
    SHAPES,
    Buffers,
    OneOpCase,
    looped_tiles,
    shrunken,
    whole_tiles,
    with_tile,
    wrong_elements,
)
from triplan.backends.triton.common.rows_entries import Entry
from triplan.backends.triton.softmax import looped, rows

OPS = ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward")


def cases(tiny: bool = False) -> list[SoftmaxCase]:
    """Every op, dtype and shape; ``tiny`` shrinks them for a smoke test."""
    found = [SoftmaxCase(op, *shrunken(shape, tiny), dtype) for dtype in DTYPES for op in OPS for shape in SHAPES]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class SoftmaxCase(OneOpCase):
    @property
    def is_log(self) -> bool:
        return self.op.startswith("log_")

    @property
    def in_sweep(self) -> bool:
        return super().in_sweep and not self.is_log  # a logarithm changes nothing about tiles

    def make(self, device: torch.device, generator: torch.Generator) -> Buffers:
        def values() -> Tensor:
            return torch.randn(self.rows, self.n, dtype=self.dtype, device=device, generator=generator)

        x = values()
        if not self.backward:
            return Buffers({"x": x, "out": torch.empty_like(x)})
        y = functional.log_softmax(x, -1) if self.is_log else functional.softmax(x.float(), -1)
        return Buffers({"dout": values(), "out": y.to(self.dtype), "dx": torch.empty_like(x)})

    def descriptor(self) -> tp.Descriptor:
        cls: Any = tp.descriptor_types()[self.op]
        found: tp.Descriptor = cls(input_shape=(self.rows, self.n), element=self.dtype, softmax_axis=1)
        return found

    def functions(self, device: torch.device) -> dict[str, Callable[[Buffers], Any]]:
        aten = torch.ops.aten
        forward = torch.log_softmax if self.is_log else torch.softmax
        backward = aten._log_softmax_backward_data if self.is_log else aten._softmax_backward_data
        found: dict[str, Callable[[Buffers], Any]] = {"torch": lambda b: forward(b.x, -1)}
        if self.backward:
            found["torch"] = lambda b: backward(b.dout, b.out, 1, self.dtype)
        if device.type == "cuda" and (liger := liger_function(self.op, self.n)) is not None:
            found["liger"] = liger
        return found

    def formula(self) -> Callable[..., Any]:
        def softmax_backward(dout: Tensor, out: Tensor) -> Tensor:
            dy, y = dout.float(), out.float()
            if self.is_log:
                return (dy - y.exp() * dy.sum(-1, keepdim=True)).to(out.dtype)
            return (y * (dy - (dy * y).sum(-1, keepdim=True))).to(out.dtype)

        if self.backward:
            return softmax_backward
        return lambda x: torch.log_softmax(x, -1) if self.is_log else torch.softmax(x, -1)

    def inputs(self, b: Buffers) -> list[Tensor]:
        return [b.dout, b.out] if self.backward else [b.x]

    def mismatch(self, b: Buffers) -> str:
        at = self.compared(b.out.device)
        wide = {name: t[at].double() for name, t in b.tensors.items()}
        if not self.backward:
            name, wanted = "out", (torch.log_softmax if self.is_log else torch.softmax)(wide["x"], -1)
        else:
            dy, y = wide["dout"], wide["out"]
            total = (dy if self.is_log else dy * y).sum(1, keepdim=True)
            name, wanted = "dx", dy - y.exp() * total if self.is_log else y * (dy - total)
        return wrong_elements(name, wide[name], wanted, torch.finfo(self.dtype).eps, wanted.square().mean().sqrt())

    def swept(self) -> Iterator[type[Entry]]:
        for tile in whole_tiles(self, 2 * rows.SoftmaxRows.longest[self.backward]):
            name = f"rows {tile.rows}x{tile.block} w{tile.warps}"
            if self.backward or tile.block < 32768 or tile.warps > 16:
                yield with_tile(rows.SoftmaxRows, name, tile)
                continue
            yield with_tile(rows.SoftmaxRows, f"{name} narrow", tile, narrow=True)
            if tile.warps == 16:  # with fewer, registers do not hold so many elements in f32
                yield with_tile(rows.SoftmaxRows, name, tile, narrow=False)
        for tile, unroll in looped_tiles(self):
            yield with_tile(looped.SoftmaxLooped, f"looped {tile.block} w{tile.warps} u{unroll}", tile, unroll=unroll)
