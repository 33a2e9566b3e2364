"""Cases of rms_norm, layer_norm and their backward."""

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
from triplan.backends.triton.norms import looped, rows

OPS = ("rms_norm", "layer_norm", "rms_norm_backward", "layer_norm_backward")
EPS = 1e-5
#: Elements up to which gradients of parameters are compared with float64, over all rows.
MOST_COMPARED = 1 << 27


def cases(tiny: bool = False) -> list[NormCase]:
    """Every op, dtype and shape; ``tiny`` shrinks them for a smoke test."""
    found = [NormCase(op, *shrunken(shape, tiny), dtype) for dtype in DTYPES for op in OPS for shape in SHAPES]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class NormCase(OneOpCase):
    @property
    def centred(self) -> bool:
        return self.op.startswith("layer_norm")

    def make(self, device: torch.device, generator: torch.Generator) -> Buffers:
        def values(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=self.dtype, device=device, generator=generator)

        def statistics(value: float) -> Tensor:
            return torch.full((self.rows,), value, dtype=torch.float32, device=device)

        whole = (self.rows, self.n)
        found = {"x": values(*whole), "weight": values(self.n), "rstd": statistics(1.0)}
        if self.centred:
            found["mean"] = statistics(0.0)
        if self.backward:
            found |= {"dout": values(*whole), "dx": values(*whole), "dweight": values(self.n)}
            return Buffers({**found, **({"dbias": values(self.n)} if self.centred else {})})
        return Buffers({**found, "out": values(*whole), **({"bias": values(self.n)} if self.centred else {})})

    def descriptor(self) -> tp.Descriptor:
        cls: Any = tp.descriptor_types()[self.op]
        eps = {"eps": EPS} if "eps" in cls.model_fields else {}
        found: tp.Descriptor = cls(input_shape=(self.rows, self.n), element=self.dtype, **eps)
        return found

    def functions(self, device: torch.device) -> dict[str, Callable[[Buffers], Any]]:
        torchs, found = self._torch_function(device), {}
        if torchs is not None:
            found["torch"] = torchs
        if device.type == "cuda" and (liger := liger_function(self.op, self.n, EPS)) is not None:
            found["liger"] = liger
        return found

    def _torch_function(self, device: torch.device) -> Callable[[Buffers], Any] | None:
        """torch's own kernel; None if this torch has none for ``device``."""
        n, aten = self.n, torch.ops.aten
        if self.op == "rms_norm":
            return lambda b: functional.rms_norm(b.x, (n,), b.weight, EPS)
        if self.op == "layer_norm":
            return lambda b: functional.layer_norm(b.x, (n,), b.weight, b.bias, EPS)
        if self.op == "layer_norm_backward":
            return lambda b: aten.native_layer_norm_backward(
                b.dout, b.x, [n], b.mean[:, None], b.rstd[:, None], b.weight, b.weight, [True, True, True]
            )
        key = "CUDA" if device.type == "cuda" else "CPU"
        if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm_backward", key):
            return None
        return lambda b: aten._fused_rms_norm_backward(b.dout, b.x, [n], b.rstd[:, None], b.weight, [True, True])

    def formula(self) -> Callable[..., Any]:
        def norm_backward(dout: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, *mean: Tensor) -> Any:
            v, dy = x.float(), dout.float()
            hat = (v - mean[0][:, None] if mean else v) * rstd[:, None]
            g = dy * weight.float()
            d = g - hat * (g * hat).mean(-1, keepdim=True)
            d = d - g.mean(-1, keepdim=True) if mean else d
            dx = (d * rstd[:, None]).to(x.dtype)
            dweight = (dy * hat).sum(0).to(x.dtype)
            return (dx, dweight, dy.sum(0).to(x.dtype)) if mean else (dx, dweight)

        if self.backward:
            return norm_backward
        if self.centred:
            return lambda x, weight, bias: functional.layer_norm(x, (self.n,), weight, bias, EPS)
        return lambda x, weight: functional.rms_norm(x, (self.n,), weight, EPS)

    def inputs(self, b: Buffers) -> list[Tensor]:
        names = ("dout", "x", "rstd", "weight", "mean") if self.backward else ("x", "weight", "bias")
        return [b.tensors[name] for name in names if name in b.tensors]

    def mismatch(self, b: Buffers) -> str:
        at = self.compared(b.x.device)
        of_columns = ("weight", "bias", "dweight", "dbias")
        wide = {name: (t if name in of_columns else t[at]).double() for name, t in b.tensors.items()}
        if not self.backward:
            v = wide["x"] - wide["x"].mean(1, keepdim=True) if self.centred else wide["x"]
            y = v / (v.square().mean(1, keepdim=True) + EPS).sqrt() * wide["weight"]
            wanted = {"out": y + wide["bias"] if self.centred else y}
        else:
            g, hat = wide["dout"] * wide["weight"], wide["x"] * wide["rstd"][:, None]
            d = g - hat * (g * hat).mean(1, keepdim=True)
            wanted = {"dx": (d - g.mean(1, keepdim=True) if self.centred else d) * wide["rstd"][:, None]}
            if self.rows * self.n <= MOST_COMPARED:
                wanted["dweight"] = (b.dout.double() * b.x.double()).sum(0)  # the mean is 0, rstd is 1
                if self.centred:
                    wanted["dbias"] = b.dout.double().sum(0)
        eps = torch.finfo(self.dtype).eps
        wrong = (wrong_elements(name, wide[name], t, eps, t.square().mean().sqrt()) for name, t in wanted.items())
        return next((text for text in wrong if text), "")

    def swept(self) -> Iterator[type[Entry]]:
        for tile in whole_tiles(self, 2 * rows.NormRows.longest[self.backward]):
            name = f"rows {tile.rows}x{tile.block} w{tile.warps}"
            if self.backward:
                for stages in (1, 3, 4):
                    yield with_tile(rows.NormRows, f"{name} s{stages}", tile, stages=stages)
            elif tile.block < 32768 or tile.warps > 16:
                yield with_tile(rows.NormRows, name, tile)
        for tile, unroll in looped_tiles(self):
            yield with_tile(looped.NormLooped, f"looped {tile.block} w{tile.warps} u{unroll}", tile, unroll=unroll)
