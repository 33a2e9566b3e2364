"""Convolutions, channels last: forward and both gradients, beside cuDNN with its search for the best algorithm on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import triplan as tp
from bench.rows import Buffers, OneOpCase, Run, on_set, wrong_elements
from triplan.backends.triton.common.rows_entries import Entry

OPS = ("conv2d", "conv2d_backward_input", "conv2d_backward_weight")
#: (images, channels, side, filters, kernel, stride, padding, dilation, groups)
SIZES = (
    (64, 256, 56, 256, 3, 1, 1, 1, 1),
    (64, 256, 56, 256, 3, 1, 0, 1, 1),
    (32, 128, 112, 128, 3, 1, 1, 1, 1),
    (64, 512, 28, 512, 3, 1, 1, 1, 1),
    (64, 256, 56, 64, 1, 1, 0, 1, 1),
    (64, 64, 56, 256, 1, 1, 0, 1, 1),
    (64, 256, 56, 256, 3, 2, 1, 1, 1),
    (64, 256, 56, 512, 1, 2, 0, 1, 1),
    (64, 256, 56, 256, 3, 1, 2, 2, 1),
    (64, 384, 56, 384, 3, 1, 1, 1, 384),
    (64, 384, 56, 384, 7, 1, 3, 1, 384),
)
#: The convolutions of ResNet-50 (stride in the kernel of 3): (channels, side, filters, kernel, stride), how often each.
RESNET = {
    (3, 224, 64, 7, 2): 1,
    (64, 56, 64, 1, 1): 1, (64, 56, 64, 3, 1): 3, (64, 56, 256, 1, 1): 4, (256, 56, 64, 1, 1): 2,
    (256, 56, 128, 1, 1): 1, (128, 56, 128, 3, 2): 1, (128, 28, 512, 1, 1): 4, (256, 56, 512, 1, 2): 1,
    (512, 28, 128, 1, 1): 3, (128, 28, 128, 3, 1): 3,
    (512, 28, 256, 1, 1): 1, (256, 28, 256, 3, 2): 1, (256, 14, 1024, 1, 1): 6, (512, 28, 1024, 1, 2): 1,
    (1024, 14, 256, 1, 1): 5, (256, 14, 256, 3, 1): 5,
    (1024, 14, 512, 1, 1): 1, (512, 14, 512, 3, 2): 1, (512, 7, 2048, 1, 1): 3, (1024, 14, 2048, 1, 2): 1,
    (2048, 7, 512, 1, 1): 2, (512, 7, 512, 3, 1): 2,
}  # fmt: skip
RESNET_BATCH = 256
#: Filters whose gradient is compared with float64, of the first groups.
COMPARED_FILTERS = 4


def cases(tiny: bool = False) -> list[ConvCase]:
    """Every op and size; ``tiny`` shrinks them for a smoke test."""
    resnet = [(RESNET_BATCH, c, n, k, r, s, r // 2, 1, 1, times) for (c, n, k, r, s), times in RESNET.items()]
    listed = [*((*size, 0) for size in SIZES), *(resnet[:4] if tiny else resnet)]
    found = []
    for images, channels, side, filters, kernel, stride, padding, dilation, groups, times in listed:
        if tiny:
            images, side, channels, filters = 2, max(side // 8, kernel), max(channels // 32, 1), max(filters // 32, 1)
            groups = channels if groups > 1 else 1
        for op in OPS:
            shape = (channels, side, kernel, stride, padding, dilation, groups, times)
            found.append(ConvCase(op, images, filters, torch.bfloat16, *shape))
    return found


@dataclass(frozen=True)
class ConvCase(OneOpCase):
    """``rows``: images; ``n``: filters; ``times``: how often ResNet-50 has it, 0 of others."""

    channels: int
    side: int
    kernel: int
    stride: int
    padding: int
    dilation: int
    groups: int
    times: int

    @property
    def sustained(self) -> bool:
        return self.times == 0

    @property
    def name(self) -> str:
        how = f"k{self.kernel} s{self.stride} p{self.padding} d{self.dilation} g{self.groups}"
        source = f" ResNet-50 x{self.times}" if self.times else ""
        return f"{self.op} {self.rows}x{self.channels}x{self.side}x{self.side} {self.n} {how}{source}"

    @property
    def bytes(self) -> int:
        return sum(o.nbytes for o in self.descriptor().operands())

    def descriptor(self) -> tp.Descriptor:
        cls: Any = tp.descriptor_types()[self.op]
        fields: dict[str, Any] = {"in_channels": self.channels, "out_channels": self.n, "groups": self.groups}
        fields |= {"batch": self.rows, "height": self.side, "width": self.side, "padding": (self.padding,) * 4}
        pairs = {"kernel": self.kernel, "stride": self.stride, "dilation": self.dilation}
        desc: tp.Descriptor = cls(element=self.dtype, **fields, **{name: (n, n) for name, n in pairs.items()})
        last = {}
        for o in desc.operands():
            like = torch.empty(o.shape, device="meta", memory_format=torch.channels_last)
            last[o.name] = tp.Layout.of(o.shape, like.stride(), 16, self.dtype.itemsize)
        return desc.replace(layouts=last)

    def make(self, device: torch.device, generator: torch.Generator) -> Buffers:
        found = {}
        for o in self.descriptor().operands():
            t = torch.randn(o.shape, dtype=self.dtype, device=device, generator=generator)
            found[o.name] = t.contiguous(memory_format=torch.channels_last)
        return Buffers(found)

    def formula(self) -> Callable[..., Any]:
        how = (self.stride, self.padding, self.dilation)

        def forward(x: Tensor, weight: Tensor) -> Tensor:
            return torch.nn.functional.conv2d(x, weight, None, *how, self.groups)

        def backward(x: Tensor, weight: Tensor, dout: Tensor) -> Tensor:
            stride, padding, dilation = ([n, n] for n in how)
            which = self.op == "conv2d_backward_input"
            wanted = [which, not which, False]
            options = (None, stride, padding, dilation, False, [0, 0], self.groups, wanted)
            found: Tensor = torch.ops.aten.convolution_backward(dout, x, weight, *options)[0 if which else 1]
            return found

        return backward if self.backward else forward

    @property
    def backward(self) -> bool:
        return self.op != "conv2d"

    def inputs(self, b: Buffers) -> list[Tensor]:
        """A gradient's own memory stands for the operand that only gives its shape."""
        names = {"conv2d": "x weight", "conv2d_backward_input": "dx weight dout"}.get(self.op, "x dweight dout")
        return [b.tensors[name] for name in names.split()]

    def functions(self, device: torch.device) -> dict[str, Callable[[Buffers], Any]]:
        """Gradients of ``SIZES`` in cuDNN's deterministic mode too."""

        def searched(deterministic: bool, b: Buffers) -> Any:
            flags = {"enabled": True, "benchmark": True, "deterministic": deterministic, "allow_tf32": False}
            with torch.backends.cudnn.flags(**flags):
                return self.formula()(*self.inputs(b))

        modes = {"torch": False, "torch deterministic": True} if self.backward and not self.times else {"torch": False}
        return {name: partial(searched, mode) for name, mode in modes.items()}

    def peers(self, buffers: list[Buffers], device: torch.device, tiny: bool) -> list[tuple[str, Run]]:
        """Without torch.compile, which calls cuDNN too."""
        return [(name, partial(on_set, peer, buffers)) for name, peer in self.functions(device).items()]

    def mismatch(self, b: Buffers) -> str:
        """Of the first and the last image, or of the gradient of the first filters, each of its group if there are."""
        x, weight, *dout = self.inputs(b)
        (name,) = self.outputs()
        ends, few = slice(None, None, max(self.rows - 1, 1)), min(COMPARED_FILTERS, self.n)
        of = self
        if self.op == "conv2d_backward_weight":
            of = replace(self, groups=1 if self.groups == 1 else few)
            given, got = [x if self.groups == 1 else x[:, :few], weight[:few], dout[0][:, :few]], b.tensors[name][:few]
        else:
            given, got = [x[ends], weight, *(t[ends] for t in dout)], b.tensors[name][ends]
        wanted = of.formula()(*(t.double() for t in given))
        size = wanted.square().mean().sqrt()
        return wrong_elements(name, got.double(), wanted, torch.finfo(self.dtype).eps, size)

    def swept(self) -> Iterator[type[Entry]]:
        return iter(())
