"""Cases of batch normalisation and its backward: layers of CNNs, channels last and first, beside torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import triplan as tp
from bench.anywhere import batch_norm
from bench.rows import Buffers, OneOpCase, wrong_elements
from triplan.backends.triton.common.rows_entries import Entry

#: (images, channels, side)
SIZES = ((64, 256, 56), (512, 32, 28))


def cases(tiny: bool = False) -> list[BatchNormCase]:
    """Every size and layout, forward and backward; ``tiny`` shrinks them for a smoke test."""
    return [
        BatchNormCase(op, *((n, c) if not tiny else (4, 4)), torch.bfloat16, side if not tiny else 4, last)
        for n, c, side in SIZES[: 1 if tiny else None]
        for last in (True, False)
        for op in ("batch_norm", "batch_norm_backward")
    ]


@dataclass(frozen=True)
class BatchNormCase(OneOpCase):
    """``rows``: images; ``n``: channels. Parameters and running statistics are f32, as mixed precision has them."""

    side: int
    last: bool

    @property
    def name(self) -> str:
        order = "last" if self.last else "first"
        return f"{self.op} {self.rows}x{self.n}x{self.side}x{self.side} channels {order}"

    @property
    def bytes(self) -> int:
        """In training x is read twice, and backward dout too."""
        return (5 if self.backward else 3) * self.rows * self.n * self.side**2 * self.dtype.itemsize

    def descriptor(self) -> tp.Descriptor:
        cls: Any = tp.descriptor_types()[self.op]
        pixels = self.side**2
        batch, pixels = (self.rows * pixels, 1) if self.last else (self.rows, pixels)
        found: tp.Descriptor = cls(
            element=self.dtype, batch=batch, channels=self.n, pixels=pixels, parameter_element="f32"
        )
        return found

    def make(self, device: torch.device, generator: torch.Generator) -> Buffers:
        desc, found = self.descriptor(), {}
        for o in desc.operands():
            if o.is_tensor:
                found[o.name] = torch.randn(o.shape, device=device, generator=generator).to(o.element.torch)
        batch_norm.complete(desc, found)
        return Buffers(found)

    def _images(self, t: Tensor) -> Tensor:
        """As torch takes them: (images, channels, height, width)."""
        if not self.last:
            return t.view(self.rows, self.n, self.side, self.side)
        return t.view(self.rows, self.side, self.side, self.n).permute(0, 3, 1, 2)

    def formula(self) -> Callable[..., Any]:
        aten = torch.ops.aten
        if self.backward:
            return lambda dout, x, mean, rstd, weight: aten.native_batch_norm_backward(
                dout, x, weight, None, None, mean, rstd, True, batch_norm.EPS, [True] * 3
            )
        return lambda x, weight, bias, mean, var: torch.nn.functional.batch_norm(
            x, mean, var, weight, bias, True, batch_norm.MOMENTUM, batch_norm.EPS
        )

    def inputs(self, b: Buffers) -> list[Tensor]:
        names = ("dout", "x", "mean", "rstd", "weight")
        if not self.backward:
            names = ("x", "weight", "bias", "running_mean", "running_var")
        return [self._images(t) if t.dim() == 3 else t for t in (b.tensors[name] for name in names)]

    def functions(self, device: torch.device) -> dict[str, Callable[[Buffers], Any]]:
        def torchs(b: Buffers) -> Any:
            *given, mean, var = self.inputs(b)
            if not self.backward:  # it updates them
                mean, var = mean.clone(), var.clone()
            return self.formula()(*given, mean, var)

        return {"torch": torchs}

    def mismatch(self, b: Buffers) -> str:
        """Beside the definition in f64."""
        v, dims, wide = b.x.double(), (0, 2), {name: t.double() for name, t in b.tensors.items() if t.dim() == 1}
        if self.backward:
            dout, n = b.dout.double(), b.x.numel() // self.n
            hat = (v - wide["mean"][:, None]) * wide["rstd"][:, None]
            wanted = {"dweight": (dout * hat).sum(dims), "dbias": dout.sum(dims)}
            dx = dout - (wanted["dbias"] / n)[:, None] - hat * (wanted["dweight"] / n)[:, None]
            wanted["dx"] = dx * (wide["rstd"] * wide["weight"])[:, None]
        else:
            scale = wide["weight"] / (v.var(dims, correction=0) + batch_norm.EPS).sqrt()
            wanted = {"out": (v - v.mean(dims)[:, None]) * scale[:, None] + wide["bias"][:, None]}
        eps = torch.finfo(self.dtype).eps
        wrong = (
            wrong_elements(name, b.tensors[name].double(), t, eps, t.square().mean().sqrt())
            for name, t in wanted.items()
        )
        return next((text for text in wrong if text), "")

    def swept(self) -> Iterator[type[Entry]]:
        return iter(())
