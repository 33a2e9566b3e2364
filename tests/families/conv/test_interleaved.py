"""The gradient of x of strided convolutions with few channels, as a convolution of dout: its copies, interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import H200
from torch import Tensor

import triplan as tp
from triplan.backends.runtime.launch import Int, Launch, Scratch, Stride
from triplan.backends.triton.conv import interleaved

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Triton's interpreter
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of infinities
]

#: Height and width of x, then what a convolution has besides.
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "first layer": (14, 18, {"kernel": (7, 7), "stride": (2, 2), "padding": (3, 3, 3, 3)}),
    "odd": (11, 13, {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1, 1, 1)}),
    "unequal": (12, 16, {"kernel": (4, 2), "stride": (3, 1), "padding": (1, 2, 0, 1)}),
    "dilated": (13, 16, {"kernel": (3, 2), "stride": (2, 4), "padding": (2, 1, 3, 0), "dilation": (2, 3)}),
    "rows left": (12, 12, {"kernel": (2, 2), "stride": (3, 3)}),
}


def problem(height: int, width: int, options: dict[str, Any]) -> tp.Conv2dBackwardInputDescriptor:
    fields = {"batch": 2, "in_channels": 3, "out_channels": 8, "height": height, "width": width, **options}
    desc = tp.Conv2dBackwardInputDescriptor(element="f16", **fields)
    last = {o.name: tp.Layout.strided(unit_axis=1, alignment=16, stride_multiple=8) for o in desc.operands()}
    return desc.replace(layouts={**last, "dx": tp.Layout.strided(unit_axis=1), "weight": tp.Layout()})


def interpreted(launch: Launch, tensors: dict[str, Tensor]) -> None:
    """``tensors``: by argument, scratch; by operand, the others."""

    def value(name: str, arg: Any) -> Any:
        if isinstance(arg, tuple):
            return tuple(value(name, a) for a in arg)
        if isinstance(arg, Stride):
            return tensors[arg.operand].stride(arg.axis)
        if isinstance(arg, Int):
            return arg.value
        return None if arg is None else tensors[name if isinstance(arg, Scratch) else arg.operand]

    given = {name: value(name, arg) for name, arg in launch.args.items()}
    launch.kernel[(launch.grid,)](**given, **{**launch.constexprs, "OVERLAPS": False})


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, special: bool) -> None:
    """Sums of small integers are exact. An infinity of dout reaches the pixels alone whose taps met it."""
    desc = problem(*CASES[name])
    g = torch.Generator().manual_seed(0)
    x = {o.name: torch.randint(-2, 3, o.shape, generator=g).half() for o in desc.operands()}
    x = {name: t.contiguous(memory_format=torch.channels_last) if name != "weight" else t for name, t in x.items()}
    if special:
        x["dout"][0, 1, 1, 2], x["dout"][1, 0, 0, 0], x["weight"][2, 1, 0, 0] = torch.inf, torch.nan, -torch.inf
    compute = tp.TABLE.reference(desc.op).compute
    assert compute is not None
    wanted = compute(desc, {k: t.double() for k, t in x.items() if k != "dx"})["dx"]

    plan = tp.plan(desc, target=H200, kernel="interleaved")
    filters, *main, last = plan.launches
    assert len(main) == 1
    inner = interleaved._inner(desc)
    assert inner is not None
    weight = torch.full(inner.operand("weight").shape, torch.nan).half().contiguous(memory_format=torch.channels_last)
    interpreted(filters, {**x, "out": weight})
    above, below, left, right = inner.padding
    padded = torch.nn.functional.pad(x["dout"].double(), (left, right, above, below))
    source = torch.nn.functional.conv2d(padded, weight.double()).half()
    x["dx"].fill_(torch.nan)
    interpreted(last, {**x, "source": source.contiguous(memory_format=torch.channels_last)})
    torch.testing.assert_close(x["dx"].double(), wanted, rtol=0, atol=0, equal_nan=True)
    assert wanted.isfinite().all() != special


def test_what_it_refuses() -> None:
    sizes = CASES["odd"][:2]
    for more, why in (
        ({"stride": (1, 1)}, "strides of 1"),
        ({"in_channels": 33}, "33 channels; it takes 1 to 32"),
        ({"padding": (1, 9, 1, 1)}, "leave out"),
        ({"padding": (9, 9, 1, 1)}, "leave out"),
    ):
        desc = problem(*sizes, {**CASES["odd"][2], **more})
        with pytest.raises(tp.Unsupported, match=why):
            tp.plan(desc, target=H200, kernel="interleaved")
