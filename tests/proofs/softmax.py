"""softmax and its kin for the proofs: ``n`` rows of LENGTH elements."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

import triplan as tp
from proofs import Kind, draw, joins
from proofs.rows import Rows, size

OPS = ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward")


class Softmax(Rows):
    moves_rows = False


def softmax_values(op: str, n: int, length: int, element: tp.ElementKind, kind: Kind) -> dict[str, Tensor]:
    """Rows that softmax meets; for the backward, what softmax makes of them."""
    g = torch.Generator().manual_seed(0)
    if kind == "cancelling":
        x = on_the_edge(n, length, element, g)
        if op == "log_softmax":
            # The logarithm is of one, and of others that each alone would vanish beside it.
            x = torch.randn(n, length, generator=g, dtype=torch.float64) / 2 - 10 - math.log(length)
            x[torch.arange(n), torch.randint(0, length, (n,), generator=g)] = 0
            x = x.to(element.torch)
    else:
        x = draw((n, length), element, kind, length, g)
    if not op.endswith("_backward"):
        return {"x": x}
    out = (torch.log_softmax if op.startswith("log_") else torch.softmax)(x.double(), 1).to(element.torch)
    dout = torch.randn(n, length, generator=g, dtype=torch.float64)
    if kind == "cancelling":
        # Equal and opposite terms: of the sum nothing is left but the rounding of one order.
        half = length // 2
        dout *= 2.0 ** torch.randint(-6, 7, dout.shape, generator=g)
        out[:, half : 2 * half] = out[:, :half]
        dout[:, half : 2 * half] = -dout[:, :half]
        if op == "log_softmax_backward":
            out[:, 0], dout[:, 0], dout[:, half] = 0, 0, 0  # where the sum alone is the gradient
    return {"dout": dout.to(element.torch), "out": out}


def on_the_edge(n: int, length: int, element: tp.ElementKind, g: torch.Generator) -> Tensor:
    """Rows whose largest elements have results half-way between two numbers of ``element``, so close that the rounding
    of their sum of exponentials decides: any other order of adding shows, in narrow results as well."""
    x = (-1 - torch.randn(n, length, generator=g, dtype=torch.float64).abs()).to(element.torch)
    # 32 ones, then room for more of them and for what makes the sum exactly as wanted, then whatever else.
    room = 32 + length // 16
    x[:, :32], x[:, 32:room] = 0, -math.inf
    kept = x[:, room:].double().exp().sum(1)
    total = x.double().exp().sum(1)
    near = (1 / (total * 1.03)).to(element.torch)
    wanted = 2 / (near.double() + _stepped(near, -1).double())
    # Some rows are a little off, as approximate exponentials are.
    off = torch.linspace(-1, 1, n, dtype=torch.float64)
    wanted *= 1 + 2e-7 * off**3
    ones = torch.arange(room - 24) < (wanted - kept).floor()[:, None]
    x[:, : room - 24] = torch.where(ones, 0, -math.inf).to(x.dtype)
    for at in range(room - 24, room):
        left = wanted - kept - x[:, :room].double().exp().sum(1)
        v = left.clamp(min=1e-300).log().to(element.torch)
        v = torch.where(v.double().exp() > left, _stepped(v, 1), v)
        x[:, at] = torch.where(left > 0, v.clamp(max=0), -math.inf)
    return x


def _stepped(v: Tensor, away: int) -> Tensor:
    """The next number away from zero, or (-1) towards it."""
    return (v.view(tp.ElementKind.of(v.dtype).bits.torch) + away).view(v.dtype)


def softmax_problem(op: str, n: int, element: tp.ElementKind, kind: Kind, long: bool = False) -> Softmax:
    n, length = size(n, long, element)
    desc = tp.descriptor_types()[op](input_shape=(n, length), softmax_axis=1, element=element)
    return Softmax(desc, partial(softmax_values, op, n, length, element, kind))


for _op in OPS:
    joins(_op, {}, {"long": True})(partial(softmax_problem, _op))
