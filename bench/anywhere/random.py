"""Draws of random numbers: of any shape and element, as parts of streams, with seeds on the host and on the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

import triplan as tp
from bench.anywhere.drawing import Draw, Peer, Tensors, described, placed
from triplan.descriptors.random import READING
from triplan.testing.placing import write

#: Parameters that leave no choice: results are then compared with torch's. All others are 1.
CERTAIN: dict[str, dict[str, float]] = {
    "normal": {"std": 0.0},
    "exponential": {"lambd": math.inf},
    "randint": {"high": 2},
    "dropout": {"p": 1e-12},
}


def draw(op: str, d: Draw) -> tp.Descriptor:
    element = d.element(op)
    rows, n = d.matrix(max(d.bytes // (element.itemsize * (2 if op in READING else 1)), 1))
    return described(op, element=element, out_shape=(*d.folded(rows), n), state="device" if d.chance(0.3) else "host")


def complete(desc: tp.Descriptor, t: Tensors) -> None:
    t.update(CERTAIN.get(desc.op, {}))
    if desc.op == "bernoulli":
        write(t["x"], (t["x"] > 0).to(t["x"].dtype))


def peers(desc: Any) -> dict[str, Peer]:
    functions: dict[str, Callable[[Tensors, torch.Tensor], torch.Tensor]] = {
        "uniform": lambda t, out: out.uniform_(t["low"], t["high"]),
        "normal": lambda t, out: out.normal_(t["mean"], t["std"]),
        "exponential": lambda t, out: out.exponential_(t["lambd"]),
        "randint": lambda t, out: out.random_(t["low"], t["high"]),
        "bernoulli_p": lambda t, out: out.bernoulli_(t["p"]),
        "bernoulli": lambda t, out: torch.bernoulli(t["x"], out=out),
        "dropout": lambda t, out: torch.nn.functional.dropout(t["x"], t["p"]),
    }
    assert functions.keys() == set(tp.RandomDescriptor.ops())
    return {"torch": placed(lambda t: {"out": functions[desc.op](t, t["out"])})}
