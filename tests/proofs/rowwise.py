"""The rowwise family's problems for the proofs: ``n`` rows of LENGTH elements, and Σ|terms| of each op."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import triplan as tp
from proofs import Kind, Outputs, Problem, Values, Variant, draw, joins
from triplan.sku import interpreting

#: No multiples of a block. With so many elements some rounding of a sum shows in narrow results too; the longer rows
#: take several blocks of every kernel that has such. There is more of them where a GPU does it.
LENGTH, LONG, LONG_ROWS = 1030, *((40_000, 24) if torch.cuda.is_available() and not interpreting() else (17_000, 12))


class Softmax(Problem):
    """softmax and its kin along the last axis of (n, LENGTH)."""

    def __init__(self, desc: tp.Descriptor, values: Values) -> None:
        self.desc, self.values = desc, values

    def _with(self, values: Values) -> Softmax:
        shape = tuple(next(iter(values.values())).shape)
        return Softmax(self.desc.replace(input_shape=shape), values)

    def parts(self) -> Iterator[Variant]:
        n = self.desc.input_shape[0]  # type: ignore[attr-defined]
        for kept in (torch.tensor([n - 1]), torch.arange(0, n, 2), torch.arange(n).flip(0)[: n // 3 + 1]):
            part = self._with({name: t[kept].clone() for name, t in self.values.items()})
            yield Variant(part, _only, lambda out, kept=kept: _only(out)[kept])  # type: ignore[misc]

    def reordered(self) -> Variant:
        length = self.desc.input_shape[1]  # type: ignore[attr-defined]
        order = torch.randperm(length, generator=torch.Generator().manual_seed(1))
        other = self._with({name: t[:, order].clone() for name, t in self.values.items()})
        return Variant(other, _only, lambda out: _only(out)[:, order])


def size(n: int, long: bool) -> tuple[int, int]:
    """Rows and their length, for a problem that is to have ``n`` contributions: fewer rows, as each is long."""
    return (max(n // 64, LONG_ROWS), LONG) if long else (max(n // 8, 16), LENGTH)


def _only(out: Outputs) -> Tensor:
    (found,) = out.values()
    return found


def softmax_values(op: str, n: int, length: int, element: tp.ElementKind, kind: Kind) -> dict[str, Tensor]:
    """Rows that softmax meets; for the adjoints, what softmax makes of them."""
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
    n, length = size(n, long)
    desc = tp.descriptor_types()[op](input_shape=(n, length), softmax_axis=1, element=element)
    return Softmax(desc, softmax_values(op, n, length, element, kind))


# --- Σ|terms|, from absolute values ---


def no_terms(desc: Any, x: Mapping[str, Any]) -> Outputs:
    """All terms are positive: the error is relative to the result."""
    return {"out": torch.zeros(desc.input_shape, dtype=torch.float64)}


def log_softmax_terms(desc: Any, x: Mapping[str, Any]) -> Outputs:
    """The logarithm's argument is a sum of exponentials, the largest of which is 1."""
    return {"out": torch.ones(desc.input_shape, dtype=torch.float64)}


def softmax_backward_terms(desc: Any, x: Mapping[str, Any]) -> Outputs:
    y, dy = x["out"], x["dout"]
    return {"dx": y * (dy + (y * dy).sum(desc.softmax_axis, keepdim=True))}


def log_softmax_backward_terms(desc: Any, x: Mapping[str, Any]) -> Outputs:
    # ``out`` is a logarithm of at most 1.
    return {"dx": x["dout"] + (-x["out"]).exp() * x["dout"].sum(desc.softmax_axis, keepdim=True)}


TERMS: dict[str, Callable[[Any, Mapping[str, Any]], Outputs]] = {
    "softmax": no_terms,
    "log_softmax": log_softmax_terms,
    "softmax_backward": softmax_backward_terms,
    "log_softmax_backward": log_softmax_backward_terms,
}

# --- norms ---


def rms_norm_terms(desc: Any, x: Mapping[str, Any]) -> Outputs:
    """All terms of the mean square are positive: errors are relative to the results."""
    zeros = torch.zeros(desc.input_shape, dtype=torch.float64)
    return {"out": zeros, "rstd": zeros[..., 0], "norm": zeros[..., 0], "summed": zeros}


def layer_norm_terms(desc: Any, x: Mapping[str, Any]) -> Outputs:
    """Deviations have errors of a standard deviation's size, whatever their mean; then come weight and bias."""
    ones = torch.ones(desc.input_shape, dtype=torch.float64)
    out = ones if x.get("weight") is None else ones * (x["weight"] + desc.weight_offset)
    out = out if x.get("bias") is None else out + x["bias"]
    v = x["x"] + x["residual"] if desc.residual else x["x"]
    return {"out": out, "mean": v.mean(-1), "rstd": 0 * v.mean(-1), "summed": 0 * v}


def norm_backward_terms(desc: Any, x: Mapping[str, Any]) -> Outputs:
    dy, rstd = x["dout"], x["rstd"].unsqueeze(-1)
    centred = desc.op.startswith("layer_norm")
    hat = (x["x"] + (x["mean"].unsqueeze(-1) if centred else 0)) * rstd
    g = dy if x.get("weight") is None else dy * (x["weight"] + desc.weight_offset)
    dx = g + hat * (g * hat).mean(-1, keepdim=True) + (g.mean(-1, keepdim=True) if centred else 0)
    rows = tuple(range(dy.dim() - 1))
    return {
        "dx": dx * rstd + (x["dsummed"] if desc.residual else 0),
        "dweight": (dy * hat).sum(rows),
        "dbias": dy.sum(rows),
    }


def l2_norm_backward_terms(desc: Any, x: Mapping[str, Any]) -> Outputs:
    length = x["norm"].clamp(min=desc.eps).unsqueeze(-1)
    hat = x["x"] / length
    return {"dx": (x["dout"] + hat * (x["dout"] * hat).sum(-1, keepdim=True)) / length}


TERMS |= {
    "l2_norm": rms_norm_terms,
    "l2_norm_backward": l2_norm_backward_terms,
    "rms_norm": rms_norm_terms,
    "layer_norm": layer_norm_terms,
    "rms_norm_backward": norm_backward_terms,
    "layer_norm_backward": norm_backward_terms,
}


class Norm(Problem):
    """A norm along the last axis of (n, LENGTH), or the adjoint of one. ``shared`` operands have one value a column."""

    shared = ("weight", "bias")

    def __init__(self, desc: tp.Descriptor, values: Values) -> None:
        self.desc, self.values = desc, values

    def _with(self, rows: Tensor, order: Tensor | None = None) -> Norm:
        found = {}
        for name, t in self.values.items():
            t = t if name in self.shared else t[rows]
            whole = t.dim() == 2 or name in self.shared
            found[name] = (t if order is None or not whole else t[..., order]).clone()
        shape = tuple(found["x"].shape)
        return Norm(self.desc.replace(input_shape=shape), found)

    def parts(self) -> Iterator[Variant]:
        n = self.desc.input_shape[0]  # type: ignore[attr-defined]
        for kept in (torch.tensor([n - 1]), torch.arange(0, n, 2), torch.arange(n).flip(0)[: n // 3 + 1]):
            yield Variant(self._with(kept), _of_rows, lambda out, kept=kept: _of_rows(out)[kept])  # type: ignore[misc]

    def reordered(self) -> Variant:
        n, length = self.desc.input_shape  # type: ignore[attr-defined]
        g = torch.Generator().manual_seed(1)
        rows, order = torch.randperm(n, generator=g), torch.randperm(length, generator=g)
        return Variant(self._with(rows, order), _columns, lambda out: _columns(out, rows, order))


def _of_rows(out: Outputs) -> Tensor:
    """What belongs to one row, as one tensor."""
    return torch.cat([t.reshape(len(t), -1).double() for name, t in out.items() if name not in ("dweight", "dbias")], 1)


def _columns(out: Outputs, rows: Tensor | None = None, order: Tensor | None = None) -> Tensor:
    """All outputs as one tensor, their rows and columns in another order."""
    found = []
    for name, t in out.items():
        if rows is not None and order is not None:
            t = t[order] if name in ("dweight", "dbias") else t[rows][:, order] if t.dim() == 2 else t[rows]
        found.append(t.reshape(-1).double())
    return torch.cat(found)


def norm_values(desc: Any, kind: Kind) -> dict[str, Tensor]:
    """Rows whose squares stay within f32; for the adjoints, with what the norm gave."""
    g = torch.Generator().manual_seed(0)
    (n, length), dtype, half = desc.input_shape, desc.element.torch, desc.input_shape[1] // 2
    narrow = desc.element == "f16"
    x = torch.randn(n, length, generator=g, dtype=torch.float64)
    if kind in ("subnormal", "equal") or (kind == "huge" and narrow):
        x = draw((n, length), desc.element, kind, length, g).double()
    elif kind == "huge":
        compute = torch.finfo(desc.element.compute.torch)
        x = (x.sign() + x.clamp(-3, 3) / 4) * math.sqrt(compute.max / (8 * length))
    elif kind == "wide":
        x *= 2.0 ** torch.randint(-8 if narrow else -40, 9 if narrow else 41, x.shape, generator=g)
    elif kind == "cancelling" and desc.op in ("l2_norm", "rms_norm"):
        # Squares of narrow values add up exactly unless their exponents differ, and a root hides half of what is lost.
        x *= 2.0 ** torch.randint(-6, 7, x.shape, generator=g)
    weight, residual = getattr(desc, "weight", False), getattr(desc, "residual", False)
    backward = desc.op.endswith("_backward")
    if residual and not backward:
        x = x / 2
    found = {"x": x.to(dtype)}
    if weight:
        found["weight"] = torch.randn(length, generator=g, dtype=torch.float64).to(dtype)
    if not backward:
        if getattr(desc, "bias", False):
            found["bias"] = torch.randn(length, generator=g, dtype=torch.float64).to(dtype)
        if residual:
            found["residual"] = x.flip(1).to(dtype)
        return found
    dout = torch.randn(n, length, generator=g, dtype=torch.float64)
    dout *= 2.0 ** torch.randint(-6, 7, dout.shape, generator=g)
    if kind == "cancelling":
        # Equal and opposite terms, and a place where the rounding of their sum alone is the gradient.
        found["x"][:, half : 2 * half] = found["x"][:, :half]
        if weight:
            found["weight"][half : 2 * half] = found["weight"][:half]
        dout[:, half : 2 * half] = -dout[:, :half]
        dout[:, 0], dout[:, half] = 0, 0
        found["x"][:, [0, half]] = 1
        if desc.op.startswith("l2"):
            found["x"] *= 2.0 ** -round(math.log2(length) / 2)  # rows of length 1, or f16 could not hold the rounding
    found["dout"] = dout.to(dtype)
    if residual:
        found["dsummed"] = torch.zeros_like(found["dout"]) if kind == "cancelling" else found["dout"].flip(0)
    centred, v = desc.op.startswith("layer_norm"), found["x"].double()
    if desc.op == "l2_norm_backward":
        found["norm"] = v.square().sum(1).sqrt().to(desc.element.compute.torch)
        return found
    if centred:
        found["mean"] = v.mean(1).to(desc.element.compute.torch)
        v = v - v.mean(1, keepdim=True)
    found["rstd"] = (1 / (v.square().mean(1) + 1e-5).sqrt()).to(desc.element.compute.torch)
    return found


def norm_problem(op: str, n: int, element: tp.ElementKind, kind: Kind, long: bool = False, **options: Any) -> Norm:
    n, length = size(n, long)
    desc = tp.descriptor_types()[op](input_shape=(n, length), element=element, **options)
    return Norm(desc, norm_values(desc, kind))


for _op, _terms in TERMS.items():
    if "softmax" in _op:
        joins(_op, {}, {"long": True}, magnitude=_terms)(partial(softmax_problem, _op))
    else:
        if _op.startswith("l2"):
            _options: tuple[dict[str, Any], ...] = ({}, {"long": True})
        else:
            bare = {"weight": False, **({"bias": False} if _op.startswith("layer_norm") else {})}
            added = {"residual": True, "weight_offset": 1}
            _options = ({}, bare, added, {"long": True}, {"long": True, **bare})
        joins(_op, *_options, magnitude=_terms)(partial(norm_problem, _op))
