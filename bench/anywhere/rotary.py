"""Draws of rotary embedding: tables that positions look up, or angles of the tokens in order; caches that are full."""

from __future__ import annotations

from typing import Any

import torch

import triplan as tp
from bench.anywhere.drawing import HEADS, Draw, Peer, Tensors, described, streamed_us
from bench.gemm.run import ROOFS
from bench.rotary import normed, turned
from triplan.testing.placing import write

#: Half of the elements of a head.
HALVES = (32, 40, 48, 64, 128)


def draw(op: str, d: Draw) -> tp.Descriptor:
    element, table = d.element(op), d.chance(0.5)
    half = d.extent(4, min(256, max(d.bytes // 128, 4)), HALVES)
    head = 4 * half * element.itemsize
    heads = d.extent(1, min(64, d.bytes // head), HEADS)
    cached = op == "cached_rotary"
    k_heads = d.one_of((*(() if cached else (None,)), heads, max(heads // 4, 1)))
    moved = heads + (2 if cached else 1) * (k_heads or 0)
    tokens = max(d.bytes // (moved * head + (8 * half if table else 0)), 1)
    batch = 1 if cached else d.extent(1, min(tokens, 64))
    shape = (batch, tokens // batch, heads, 2 * half)
    fields: dict[str, Any] = {"table_rows": shape[1], "positions": True} if table else {}
    if cached:
        page_size = d.extent(1, min(tokens, 64))
        fields |= {"pages": -(-tokens // page_size), "page_size": page_size, "eps": d.one_of((None, 1e-6))}
    pairs = d.one_of(("half", "interleaved"))
    return described(op, element=element, q_shape=shape, k_heads=k_heads, pairs=pairs, **fields)


def complete(desc: Any, t: Tensors) -> None:
    """Each token has a slot of its own."""
    if "slots" in t:
        slots = torch.randperm(desc.slots, device=t["slots"].device)[: t["slots"].numel()]
        write(t["slots"], slots.reshape(t["slots"].shape).to(t["slots"].dtype))


def floor_us(desc: Any) -> float:
    """Of caches, what is written is as much as is read of k and v."""
    found = streamed_us(desc)
    for name, cache in (("k", "k_cache"), ("v", "v_cache")) if desc.op == "cached_rotary" else ():
        found -= (2 * desc.operand(cache).nbytes - desc.operand(name).nbytes) / (ROOFS[0] * 1e6)
    return found


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
        if "slots" in t:
            rows = (t["slots"] // desc.page_size, t["slots"] % desc.page_size)
            t["k_cache"][rows], t["v_cache"][rows] = found["k_out"], t["v"]
            found = {"q_out": found["q_out"], "k_cache": t["k_cache"], "v_cache": t["v_cache"]}
        return found

    return {"torch": formula}
