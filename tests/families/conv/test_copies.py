"""Copies of operands of convolutions: channels last, with channels and columns that are added."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import triplan as tp
from triplan.backends.runtime.launch import Int, Stride
from triplan.backends.triton.conv import copies

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Triton's interpreter


@pytest.mark.interpret
@pytest.mark.parametrize(
    "extents", [(2, 3, 4, 9), (2, 70, 5, 13), (3, 70, 1, 1), (5, 17, 2, 70), (1, 140, 2, 40)], ids=str
)
def test_padded_copies(extents: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels and columns that the image does not have are 0; of outputs, only what they have is written."""
    monkeypatch.setattr(copies, "JOINED", 1)
    x = torch.randn(extents)
    channels, columns = extents[1], extents[3]
    last = x.to(memory_format=torch.channels_last).clone()
    views = (
        (tp.Layout(), x),
        (tp.Layout.strided(unit_axis=1), last),
        (tp.Layout.strided(order=(0, 2, 3, 1)), last),
        (tp.Layout.strided(), last.repeat_interleave(2, 1).contiguous(memory_format=torch.channels_last)[:, ::2]),
        (tp.Layout.strided(), x.repeat_interleave(2, 3)[..., ::2]),
    )
    for (layout, own), role, (left, right) in itertools.product(views, ("input", "output"), ((0, 0), (3, 2))):
        if role == "output" and right:
            continue
        o = tp.Operand("x", tp.descriptors.Role(role), tp.ElementKind.F32, extents, layout=layout)
        (plain,) = copies.plain({o: 1})
        copy = plain._replace(columns=columns + left + right, left=left)
        launch = copies.launch(copy)
        added = (left, right, 0, 0, 0, copy.channels - channels)
        wanted = torch.nn.functional.pad(x, added).contiguous(memory_format=torch.channels_last)
        held = wanted.clone() if role == "output" else torch.full_like(wanted, torch.nan)
        assert copy.strides == held.stride() or extents[2:] == (1, 1)
        memory = {"x": torch.empty_strided(own.shape, own.stride()).fill_(torch.nan) if role == "output" else own}

        def value(arg: Any, memory: dict[str, Tensor] = memory, held: Tensor = held) -> Any:
            if isinstance(arg, tuple):
                return tuple(map(value, arg))
            if isinstance(arg, Int):
                return arg.value
            if isinstance(arg, Stride):
                return memory[arg.operand].stride(arg.axis)
            return None if arg is None else memory.get(getattr(arg, "operand", ""), held)

        given = {k: value(a) for k, a in launch.args.items()}
        launch.kernel[(launch.grid,)](**given, **launch.constexprs, OVERLAPS=False)
        assert torch.equal(memory["x"], x) if role == "output" else torch.equal(held, wanted)


def test_tiles_have_whole_rows() -> None:
    """Of up to 128 channels that are adjacent on both sides; of few columns if channels are apart."""
    last, apart = tp.Layout.strided(order=(0, 2, 3, 1)), tp.Layout.strided(order=(0, 2, 1, 3))
    for extents, layout, tile in (
        ((3000, 95, 19, 19), last, (128, 32)),
        ((3000, 37, 19, 19), last, (64, 64)),
        ((3000, 250, 7, 7), last, (128, 32)),
        ((100, 128, 37, 37), apart, (64, 64)),  # of narrower tiles as many columns would be outside
        ((100, 128, 14, 14), tp.Layout(), (128, 32)),
        ((100, 128, 7, 7), tp.Layout(), (64, 64)),
        ((1000, 128, 1, 1), tp.Layout(), (128, 32)),
        ((100, 3, 50, 50), tp.Layout(), (8, 512)),
    ):
        o = tp.Operand("x", tp.descriptors.Role("input"), tp.ElementKind.F16, extents, layout=layout)
        assert copies._tile(*copies.plain({o: 1})) == tile, extents
