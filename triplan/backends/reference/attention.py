"""Attention in plain torch, from its definition: shares no computation with the kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from triplan.backends.reference.philox import MASK, philox
from triplan.backends.table import CheckRules, reference
from triplan.backends.triton.attention.guarantees import errors, guarantee
from triplan.descriptors import AttentionBackwardDescriptor, AttentionDescriptor
from triplan.descriptors.attention import AttendingDescriptor
from triplan.sku import ElementKind, PrecisionGuarantee

FLOATS = ("f16", "bf16", "f32", "f64")
Tensors = Mapping[str, Any]
#: Inputs of shape (batch, row, head, element).
_BY_ROW = ("q", "k", "v", "dout", "out")


def _scale(desc: AttendingDescriptor, x: Tensors) -> float:
    found: float | None = x.get("scale")
    return float(desc.head_dim**-0.5) if found is None else found


def _by_head(desc: AttendingDescriptor, t: Tensor) -> Tensor:
    """Keys or values (batch, key, key head, width) as (batch, head, key, width), repeated for each query head."""
    return t.transpose(1, 2).repeat_interleave(desc.group, 1)


def _distance(desc: AttendingDescriptor) -> Tensor:
    """The key's position minus the query's, (queries, keys)."""
    return torch.arange(desc.keys) - torch.arange(desc.queries)[:, None] - desc.shift


def _visible(desc: AttendingDescriptor, x: Tensors) -> Tensor:
    """Which queries see which keys, (queries, keys) or (batch, heads, queries, keys)."""
    distance = _distance(desc)
    found = torch.ones(desc.queries, desc.keys, dtype=torch.bool)
    if desc.window_left is not None:
        found &= distance >= -desc.window_left
    if desc.right is not None:
        found &= distance <= desc.right
    return found & x["mask"] if desc.mask is ElementKind.BOOL else found


def _scores(desc: AttendingDescriptor, x: Tensors) -> tuple[Tensor, Tensor | None]:
    """(scores, the softcap's derivative or None), (batch, heads, queries, keys); -inf where a query does not see the
    key."""
    s = _scale(desc, x) * (x["q"].transpose(1, 2) @ _by_head(desc, x["k"]).mT)
    steepness = None
    if desc.softcap:
        # 1 / cosh(x)**2; 1 - tanh(x)**2 would cancel where the cap is nearly reached.
        e = torch.exp(-2 * (s / desc.softcap).abs())
        steepness = 4 * e / (1 + e) ** 2
        s = desc.softcap * torch.tanh(s / desc.softcap)
    if desc.mask is not None and desc.mask is not ElementKind.BOOL:
        s = s + x["mask"].to(s.dtype)
    if desc.slopes:
        s = s + x["slopes"][:, None, None].to(s.dtype) * _distance(desc)
    return s.masked_fill(~_visible(desc, x), -torch.inf), steepness


def _softmax(s: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(probabilities, lse) of scores; a row of only -inf has 0 and -inf. A sink (heads,) is one more score a row."""
    if sink is not None:
        p, lse = _softmax(torch.cat((s, sink[:, None, None].to(s.dtype).expand(*s.shape[:-1], 1)), -1))
        return p[..., :-1], lse
    if s.shape[-1] == 0:
        return s, s.new_full(s.shape[:-1], -torch.inf)
    top = s.amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0)
    e = (s - top).exp()
    total = e.sum(-1, keepdim=True)
    return e / total.masked_fill(total == 0, 1), (top + total.log()).squeeze(-1)


def _probabilities(s: Tensor, lse: Tensor) -> Tensor:
    """exp(s - lse); 0 in rows whose lse is -inf."""
    return (s - lse.masked_fill(lse == -torch.inf, torch.inf)[..., None].to(s.dtype)).exp()


def _slopes(desc: AttentionBackwardDescriptor, x: Tensors, p: Tensor, steepness: Tensor | None) -> Tensor:
    """The gradient with respect to each scaled score, before the softcap."""
    dout, out = x["dout"].transpose(1, 2), x["out"].transpose(1, 2)
    ds = p * (x["factors"] * (dout @ _by_head(desc, x["v"]).mT) - (dout * out).sum(-1, keepdim=True))
    found: Tensor = ds if steepness is None else ds * steepness
    return found


def _grouped(desc: AttentionBackwardDescriptor, t: Tensor) -> Tensor:
    """(batch, heads, keys, width) summed over the query heads that share a head of k and v."""
    found: Tensor = t.reshape(len(t), desc.key_heads, desc.group, *t.shape[2:]).sum(2).transpose(1, 2)
    return found


def _factors(desc: AttendingDescriptor, x: Tensors) -> Tensor:
    """What multiplies each probability, (batch, heads, queries, keys): 0, or 1 / (1 - dropout_p). Of packed sequences,
    keys count from the start of their sequence."""
    seed, offset = (int(n) for n in x["state"])
    groups = -(-desc.keys // 4)
    counter = torch.arange(desc.batch * desc.heads * desc.queries * groups)
    rest = [torch.full_like(counter, n & MASK) for n in (offset, offset >> 32)]
    words = torch.stack(philox([counter & MASK, counter >> 32, *rest], (seed & MASK, seed >> 32 & MASK)), -1)
    words = words.reshape(desc.batch, desc.heads, desc.queries, 4 * groups)[..., : desc.keys]
    p = x["dropout_p"]
    scale = 0.0 if p >= 1 else 1 / (1 - torch.tensor(p, dtype=torch.float64))
    kept = words.double() >= p * 2.0**32
    found: Tensor = kept.to(x["q"].dtype) * scale
    return found


def _growth(x: Tensors) -> float:
    """The factor of what dropout keeps, by which a loss of underflow grows."""
    p = x.get("dropout_p") or 0.0
    return 1 / (1 - p) if p < 1 else 1.0


# --- packed sequences ---


def _sequences(desc: AttendingDescriptor, x: Tensors) -> list[tuple[slice, slice]]:
    """(queries, keys) of each sequence, in order. Rows before the first and after the last sequence have no partner."""
    each = []
    for name, rows in (("query_starts", desc.queries), ("key_starts", desc.keys)):
        starts = x[name].clamp(0, rows).cummax(0).values.tolist()
        each.append([slice(a, b) for a, b in pairwise([0, *starts, rows])])
    (before, *queries, after), (early, *keys, late) = each
    none = slice(0, 0)
    ends = ((before, none), (none, early)), ((after, none), (none, late))
    return [*ends[0], *zip(queries, keys, strict=True), *ends[1]]


def _by_sequence(compute: Callable[[Any, Tensors, Any], Tensors]) -> Callable[[Any, Tensors], Tensors]:
    """Apply ``compute(desc, x, whole)`` to each sequence separately; ``whole`` is the descriptor of all together."""

    @wraps(compute)
    def computed(desc: Any, x: Tensors) -> Tensors:
        x = {**x, "factors": _factors(desc, x) if desc.dropout else 1.0}
        if desc.sequences is None:
            return compute(desc, x, desc)
        parts = []
        for queries, keys in _sequences(desc, x):
            m, n = queries.stop - queries.start, keys.stop - keys.start
            own = {name: t[:, keys if name in "kv" else queries] for name, t in x.items() if name in _BY_ROW}
            own |= {name: x.get(name) for name in ("scale", "slopes", "sink", "dropout_p")} | (
                {"lse": x["lse"][..., queries]} if "lse" in x else {}
            )
            own["factors"] = x["factors"][:, :, queries, :n] if desc.dropout else 1.0
            parts.append(compute(desc.replace(sequences=None, queries=m, keys=n, layouts={}), own, desc))
        return {name: torch.cat([p[name] for p in parts], 2 if name == "lse" else 1) for name in parts[0]}

    return computed


def _inputs(desc: AttendingDescriptor, x: Tensors) -> dict[str, Any]:
    """Random starts, sorted and in range: sequences of various lengths, and rows that belong to none. Probabilities
    of dropout in [0, 1)."""
    found: dict[str, Any] = {"dropout_p": abs(x["dropout_p"]) % 1 or 0.625} if desc.dropout else {}
    if desc.sequences is not None:
        rows = {"query_starts": desc.queries, "key_starts": desc.keys}
        found |= {name: (x[name] % (n + 1)).sort().values for name, n in rows.items()}
    return found


# --- what checks must know ---


def _magnitude(desc: AttendingDescriptor, x: Tensors) -> Tensor:
    """E of the error analysis (triton/attention/guarantees.py) of each score; 0 where a query does not see the key."""
    found: Tensor
    found = abs(_scale(desc, x)) * (x["q"].abs().transpose(1, 2) @ _by_head(desc, x["k"].abs()).mT) + desc.softcap
    if desc.mask is not None and desc.mask is not ElementKind.BOOL:
        found = found + x["mask"].abs()
    if desc.slopes:
        found = found + x["slopes"].abs()[:, None, None] * _distance(desc).abs()
    return found.masked_fill(~_visible(desc, x) | (found == torch.inf), 0)


@_by_sequence
def _terms(desc: AttentionDescriptor, x: Tensors, whole: AttentionDescriptor) -> Tensors:
    s, _ = _scores(desc, x)
    sink = x.get("sink")
    p, lse = _softmax(s, sink)
    most = _magnitude(desc, x).amax(-1, keepdim=True) if desc.keys else s.sum(-1, keepdim=True)
    if sink is not None:
        most = most.maximum(sink.abs().masked_fill(sink == -torch.inf, 0)[:, None, None])
    known = errors(whole, "out")
    each = p * (1 + 2 * known.weight * most) + known.lost / known.of_terms * s.isfinite().double()
    out = (x["factors"] * each) @ _by_head(desc, x["v"].abs())
    out = out + (_growth(x) - 1) * known.flushed / known.of_terms
    return {"out": out.transpose(1, 2), "lse": 1 + most.squeeze(-1) + lse.masked_fill(lse == -torch.inf, 0).abs()}


@_by_sequence
def _backward_terms(desc: AttentionBackwardDescriptor, x: Tensors, whole: AttentionBackwardDescriptor) -> Tensors:
    dout, out = x["dout"].transpose(1, 2), x["out"].transpose(1, 2)
    s, steepness = _scores(desc, x)
    p, seen = _probabilities(s, x["lse"]), s.isfinite().double()  # (bool times a number is f32: tiny ones become 0)
    size = _magnitude(desc, x) + x["lse"].masked_fill(x["lse"] == -torch.inf, 0).abs()[..., None]
    ds = (_slopes(desc, x, p, steepness)).abs()
    b = x["factors"] * (dout.abs() @ _by_head(desc, x["v"].abs()).mT) + (dout * out).abs().sum(-1, keepdim=True)

    def of_ds(name: str) -> Tensor:
        known = errors(whole, name)
        lost = known.lost / known.of_terms
        each = ((known.share + 2 * known.weight * size) * p + lost * seen) * b
        found: Tensor = ds + each + _growth(x) * lost * seen
        return found * abs(_scale(desc, x))

    known = errors(whole, "dv")
    of_p = x["factors"] * (p * (1 + 2 * known.weight * size) + known.lost / known.of_terms * seen)
    return {
        "dq": (of_ds("dq") @ _by_head(desc, x["k"].abs())).transpose(1, 2),
        "dk": _grouped(desc, of_ds("dk").mT @ x["q"].abs().transpose(1, 2)),
        "dv": _grouped(desc, of_p.mT @ dout.abs()) + (_growth(x) - 1) * known.flushed / known.of_terms,
    }


@_by_sequence
def _attend(desc: AttendingDescriptor, x: Tensors, _: Any) -> Tensors:
    p, lse = _softmax(_scores(desc, x)[0], x.get("sink"))
    return {"out": ((x["factors"] * p) @ _by_head(desc, x["v"])).transpose(1, 2), "lse": lse}


def _results(desc: AttentionBackwardDescriptor, x: Tensors) -> Tensors:
    """``out`` and ``lse`` must be what the forward op returns."""
    drawn = _inputs(desc, x)
    wide = {name: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for name, t in x.items()}
    found = _attend(desc, {**wide, **drawn})
    return {"out": found["out"].contiguous().to(x["out"].dtype), "lse": found["lse"].to(x["lse"].dtype), **drawn}


# --- ops ---


def _on_the_cpu(desc: AttendingDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """Never batch-invariant: torch may divide sums into blocks that depend on the batch."""
    return guarantee(desc, batch=False)


@reference(
    op="attention",
    elements=FLOATS,
    guarantee=_on_the_cpu,
    checks=CheckRules(_terms, _inputs, ("unit",), signed=True),
)
def attention(desc: AttentionDescriptor, x: Tensors) -> Tensors:
    return _attend(desc, x)


@reference(
    op="attention_backward",
    elements=FLOATS,
    guarantee=_on_the_cpu,
    checks=CheckRules(_backward_terms, _results, ("unit",), signed=True),
)
@_by_sequence
def attention_backward(desc: AttentionBackwardDescriptor, x: Tensors, _: Any) -> Tensors:
    s, steepness = _scores(desc, x)
    p = _probabilities(s, x["lse"])
    ds = _slopes(desc, x, p, steepness) * _scale(desc, x)
    return {
        "dq": (ds @ _by_head(desc, x["k"])).transpose(1, 2),
        "dk": _grouped(desc, ds.mT @ x["q"].transpose(1, 2)),
        "dv": _grouped(desc, (x["factors"] * p).mT @ x["dout"].transpose(1, 2)),
    }
