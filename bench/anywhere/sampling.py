"""Draws of logits for sampling: greedy tokens, which torch's argmax gives too, after whatever filters."""

from __future__ import annotations

from typing import Any

import torch

import triplan as tp
from bench.anywhere.drawing import Draw, Peer, Tensors, described
from triplan.descriptors.sampling import FILTERS, MOST_TOKENS


def draw(op: str, d: Draw) -> tp.Descriptor:
    element = d.element(op)
    rows, n = d.matrix(max(d.bytes // element.itemsize, 1))
    if n > MOST_TOKENS:
        rows, n = rows * (n // MOST_TOKENS), MOST_TOKENS
    filters = {name: d.chance(0.5) for name in FILTERS}
    return described(op, element=element, rows=rows, vocabulary=n, **filters)


def complete(desc: tp.Descriptor, t: Tensors) -> None:
    """Temperature 0: the token is certain, and the filters are searched for all the same."""
    t["temperature"].zero_()
    if "top_k" in t:
        t["top_k"].fill_(50)
    for name, value in (("top_p", 0.9), ("min_p", 0.05)):
        if name in t:
            t[name].fill_(value)


def peers(desc: Any) -> dict[str, Peer]:
    return {"torch": lambda t: {"out": torch.argmax(t["logits"], 1)}}
