"""Cases of pooling, resizing and their gradients, channels last: of ResNet and its like, beside torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import triplan as tp
from bench.anywhere import pooling
from bench.rows import Buffers, OneOpCase, Run, wrong_elements
from triplan.backends.triton.common.rows_entries import Entry

#: (op, images, channels, side, kernel (or side of a result), stride, padding)
SIZES = (
    ("max_pool2d", 256, 64, 112, 3, 2, 1),
    ("max_pool2d", 64, 256, 56, 2, 2, 0),
    ("avg_pool2d", 64, 256, 56, 2, 2, 0),
    ("avg_pool2d", 64, 256, 56, 3, 1, 1),
    ("adaptive_avg_pool2d", 256, 2048, 7, 1, 1, 0),
    ("upsample_nearest2d", 64, 256, 56, 112, 1, 0),
    ("upsample_bilinear2d", 64, 256, 56, 112, 1, 0),
)


def cases(tiny: bool = False) -> list[PoolCase]:
    """Every size, forward and backward; ``tiny`` shrinks them for a smoke test."""
    found = []
    for op, images, channels, side, *how in SIZES:
        n, at = (images, side) if not tiny else (2, max(side // 8, 4))
        for name in (op, f"{op}_backward"):
            found.append(PoolCase(name, n, channels if not tiny else 4, torch.bfloat16, at, *how))
    return found


@dataclass(frozen=True)
class PoolCase(OneOpCase):
    """``rows``: images; ``n``: channels."""

    side: int
    kernel: int
    stride: int
    padding: int

    @property
    def name(self) -> str:
        how = f"k{self.kernel} s{self.stride} p{self.padding}"
        return f"{self.op} {self.rows}x{self.n}x{self.side}x{self.side} {how}"

    @property
    def bytes(self) -> int:
        return sum(o.nbytes for o in self.descriptor().operands())

    @property
    def backward(self) -> bool:
        return self.op.endswith("_backward")

    def descriptor(self) -> tp.Descriptor:
        cls: Any = tp.descriptor_types()[self.op]
        how: dict[str, Any] = {"out_size": (self.kernel,) * 2}
        if "adaptive" not in self.op and "upsample" not in self.op:
            how = {"kernel": (self.kernel,) * 2, "stride": (self.stride,) * 2, "padding": (self.padding,) * 2}
        desc: tp.Descriptor = cls(
            element=self.dtype, batch=self.rows, channels=self.n, height=self.side, width=self.side, **how
        )
        last = {}
        for o in desc.operands():
            like = torch.empty(o.shape, device="meta", memory_format=torch.channels_last)
            last[o.name] = tp.Layout.of(o.shape, like.stride(), 16, o.element.itemsize)
        return desc.replace(layouts=last)

    def make(self, device: torch.device, generator: torch.Generator) -> Buffers:
        desc, found = self.descriptor(), {}
        for o in desc.operands():
            t = torch.randn(o.shape, device=device, generator=generator).to(o.element.torch)
            found[o.name] = t.contiguous(memory_format=torch.channels_last)
        pooling.complete(desc, found)
        return Buffers(found)

    def formula(self) -> Callable[..., Any]:
        (peer,) = pooling.peers(self.descriptor()).values()
        return peer

    def spoil(self, b: Buffers) -> None:
        for o in self.descriptor().operands():
            if o.is_written:
                b.tensors[o.name].fill_(torch.nan if o.element.is_floating_point else -2)

    def inputs(self, b: Buffers) -> list[Tensor]:
        return list(b.tensors.values())

    def functions(self, device: torch.device) -> dict[str, Callable[[Buffers], Any]]:
        return {"torch": lambda b: tuple(self.formula()(b.tensors).values())}

    def peers(self, buffers: list[Buffers], device: torch.device, tiny: bool) -> list[tuple[str, Run]]:
        (peer,) = self.functions(device).values()
        return [("torch", lambda i: peer(buffers[i]))]

    def mismatch(self, b: Buffers) -> str:
        """Beside torch's in f64."""
        wide = {name: t.double() if t.is_floating_point() else t for name, t in b.tensors.items()}
        for name, wanted in self.formula()(wide).items():
            if wanted.is_floating_point():
                size = wanted.square().mean().sqrt()
                wrong = wrong_elements(name, b.tensors[name].double(), wanted, torch.finfo(self.dtype).eps, size)
            else:
                wrong = "" if torch.equal(b.tensors[name], wanted) else f"{name}: other positions"
            if wrong:
                return wrong
        return ""

    def swept(self) -> Iterator[type[Entry]]:
        return iter(())
