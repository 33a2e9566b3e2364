"""Draws of rotary embedding: tables that positions look up, or angles of the tokens in order."""

from __future__ import annotations

from typing import Any

import torch

import triplan as tp
from bench.anywhere.drawing import HEADS, Draw, Peer, Tensors, described
from bench.rotary import normed, turned

#: Half of the elements of a head.
HALVES = (32, 40, 48, 64, 128)


def draw(op: str, d: Draw) -> tp.Descriptor:
    element, table = d.element(op), d.chance(0.5)
    half = d.extent(4, min(256, max(d.bytes // 128, 4)), HALVES)
    head = 4 * half * element.itemsize
    heads = d.extent(1, min(64, d.bytes // head), HEADS)
    k_heads = d.one_of((None, heads, max(heads // 4, 1)))
    tokens = max(d.bytes // ((heads + (k_heads or 0)) * head + (8 * half if table else 0)), 1)
    batch = d.extent(1, min(tokens, 64))
    shape = (batch, tokens // batch, heads, 2 * half)
    angles: dict[str, Any] = {"table_rows": shape[1], "positions": True} if table else {}
    pairs = d.one_of(("half", "interleaved"))
    return described(op, element=element, q_shape=shape, k_heads=k_heads, pairs=pairs, **angles)


def peers(desc: Any) -> dict[str, Peer]:
    def formula(t: Tensors) -> Tensors:
        if desc.table_rows is None:
            at = torch.arange(desc.q_shape[1], device=t["q"].device)
            angle = at.to(t["inv_freq"].dtype).unsqueeze(-1) * t["inv_freq"]
            cos, sin = angle.cos().unsqueeze(-2), angle.sin().unsqueeze(-2)
        else:
            batch = torch.arange(desc.q_shape[0], device=t["q"].device).unsqueeze(1)
            cos, sin = (t[name][batch, t["positions"].long()].unsqueeze(2) for name in ("cos", "sin"))
        found = {}
        for name in ("q", "k"):
            if name in t:
                x = t[name]
                if f"{name}_weight" in t:
                    x, found[f"{name}_rstd"] = normed(x, t[f"{name}_weight"], desc.eps)
                found[f"{name}_out"] = turned(x, cos, sin, desc.pairs).to(t[name].dtype)
        return found

    return {"torch": formula}
