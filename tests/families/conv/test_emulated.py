"""Hopper's kernels of convolution, whose logic is emulated without a GPU: boxes, borders, strides, taps, parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import H200
from cases.gluon import emulate

import triplan as tp
from triplan.backends.triton.conv import wgmma

#: So few programs that each has several tiles.
FEW = tp.Target(arch=H200.arch, sm_count=3, shared_memory=H200.shared_memory)
#: Images, channels, height, width, filters, rows and columns of a filter; then what a convolution has besides.
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "same": ((2, 72, 13, 11, 136, 3, 3), {"padding": (1, 1, 1, 1), "has_bias": True}),
    "pointwise": ((3, 136, 9, 8, 72, 1, 1), {}),
    "strided": ((2, 64, 15, 18, 64, 3, 3), {"padding": (1, 1, 1, 1), "stride": (2, 2)}),
    "strided_pointwise": ((2, 64, 15, 18, 72, 1, 1), {"stride": (2, 1)}),
    "dilated": ((2, 64, 17, 16, 64, 3, 2), {"padding": (2, 2, 1, 1), "dilation": (2, 2)}),
    "wide": ((1, 72, 6, 70, 264, 1, 5), {"padding": (0, 0, 2, 2)}),
}
OPS = ("conv2d", "conv2d_backward_input", "conv2d_backward_weight")


def drawn(desc: tp.Descriptor) -> dict[str, Any]:
    """Small integers, whose sums are exact, with channels last; outputs are NaN."""
    g = torch.Generator().manual_seed(0)
    found = {}
    for o in desc.operands():
        t = torch.randint(-2, 3, o.shape, generator=g).to(o.element.torch)
        t = torch.full_like(t, torch.nan) if o.is_written else t
        found[o.name] = t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t
    return found


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", CASES)
def test_convolutions(name: str, op: str) -> None:
    (batch, channels, height, width, filters, *kernel), options = CASES[name]
    cls: Any = tp.descriptor_types()[op]
    sizes = {"batch": batch, "in_channels": channels, "height": height, "width": width, "out_channels": filters}
    options = {k: v for k, v in options.items() if k in cls.model_fields}
    desc = cls(element="bf16", kernel=tuple(kernel), **sizes, **options)
    last = tp.Layout.strided(alignment=16, unit_axis=1, stride_multiple=8)
    desc = desc.replace(layouts={o.name: last for o in desc.operands() if len(o.shape) == 4})
    assert wgmma.supports(desc, FEW), wgmma.supports(desc, FEW)
    x = drawn(desc)
    workspace = torch.full((wgmma.workspace(desc, FEW),), 255, dtype=torch.uint8)
    build = wgmma.build_weight if op.endswith("weight") else wgmma.build
    for launch in build(desc, FEW):
        if launch.kernel.is_gluon():
            emulate(launch, x, workspace)
        else:  # adds the parts, in another language
            k, c, r, s = x["dweight"].shape
            parts = workspace.view(torch.float32).view(-1, k, r, s, c)
            x["dweight"].copy_(parts.sum(0).permute(0, 3, 1, 2))
    compute = tp.TABLE.reference(op).compute
    assert compute is not None
    given = {n: t.double() for n, t in x.items() if not desc.operand(n).is_written}
    for output, wanted in compute(desc, given).items():
        assert torch.equal(x[output], wanted.to(x[output].dtype)), output
