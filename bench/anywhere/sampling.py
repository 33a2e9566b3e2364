"""Draws of logits for sampling: the token of the largest logit, which torch gives too, after the same filters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import triplan as tp
from bench.anywhere.drawing import Draw, Peer, Tensors, described
from triplan.descriptors.sampling import FILTERS, MOST_TOKENS

TOP_K, TOP_P, MIN_P = 50, 0.9, 0.05
#: At this temperature no other logit has mass, but the filters are searched for, as they are not for greedy rows.
COLD = 1e-30


def draw(op: str, d: Draw) -> tp.Descriptor:
    element = d.element(op)
    rows, n = d.matrix(max(d.bytes // element.itemsize, 1))
    if n > MOST_TOKENS:
        rows, n = rows * (n // MOST_TOKENS), MOST_TOKENS
    filters = {name: d.chance(0.5) for name in FILTERS}
    return described(op, element=element, rows=rows, vocabulary=n, **filters)


def complete(desc: tp.Descriptor, t: Tensors) -> None:
    """Greedy rows without filters, else cold ones of which one logit is the largest: the token is certain."""
    t["temperature"].zero_()
    filters = {name: value for name, value in zip(FILTERS, (TOP_K, TOP_P, MIN_P), strict=True) if name in t}
    for name, value in filters.items():
        t[name].fill_(value)
    rows = t["logits"][:1] if t["logits"].stride(0) == 0 else t["logits"]
    if filters and rows.numel():
        t["temperature"].fill_(COLD)
        most = 2 * rows.abs().amax(1, keepdim=True) + 1
        rows.scatter_(1, torch.randint(rows.shape[1], most.shape, device=rows.device), most)


def peers(desc: Any) -> dict[str, Peer]:
    return {"torch": lambda t: {"out": torch.argmax(_filtered(t["logits"].float(), t), 1)}}


def _filtered(x: Tensor, t: Tensors) -> Tensor:
    """The logits, -inf where a filter refuses the token, by torch's sorts."""
    if "top_k" in t:
        k = min(TOP_K, x.shape[1])
        x = x.masked_fill(x < x.topk(k, sorted=False).values.amin(1, keepdim=True), -math.inf)
    if "min_p" in t:
        p = x.softmax(1)
        x = x.masked_fill(p < MIN_P * p.amax(1, keepdim=True), -math.inf)
    if "top_p" in t:
        down, order = x.sort(1, descending=True)
        p = down.softmax(1)
        x = x.scatter(1, order, down.masked_fill(p.cumsum(1) - p >= TOP_P, -math.inf))
    return x
