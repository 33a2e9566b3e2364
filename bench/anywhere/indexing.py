"""Draws of gathers, scatters, accumulation by index and embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

import triplan as tp
from bench.anywhere.drawing import HIDDEN, Draw, Peer, Tensors, described
from bench.gemm.run import ROOFS
from triplan.descriptors import Role

#: The fields with the dense operand's shape, the axis, and the table's extent, of ops that have an axis.
AXES = {
    **dict.fromkeys(("gather", "gather_backward"), ("out_shape", "gather_dim", "src_dim_size")),
    **dict.fromkeys(("index_select", "index_select_backward"), ("out_shape", "select_dim", "src_dim_size")),
    "index_add": ("src_shape", "add_dim", "out_dim_size"),
}
SCATTERS = ("src_shape", "scatter_dim", "out_dim_size")
#: Those that torch takes i32 indices for.
NARROW = ("index_select", "index_select_backward", "index_add", "embedding", "embedding_backward")
REDUCTIONS = {"scatter_prod": "prod", "scatter_amax": "amax", "scatter_amin": "amin"}


def draw(op: str, d: Draw) -> tp.Descriptor:
    element, cls = d.element(op), tp.descriptor_types()[op]
    options: dict[str, Any] = {"element": element}
    if op in NARROW and d.chance(0.3):
        options["index_element"] = "i32"
    if "accumulate" in cls.model_fields:
        options["accumulate"] = d.chance(0.5)
    full = op.startswith(("gather", "scatter"))
    # `count` rows of the dense operand, each with its index, per row of the table: from 1/64 to 64.
    ratio = d.near(1 / 64, 64)
    row = element.itemsize * (1 + ratio) + (8 * ratio if full else 0)
    width = d.extent(1, max(min(round(d.bytes / row), 1 << 15), 1), HIDDEN)
    rows = d.bytes / (row * width)
    count, rows = (d.extent(max(round(n * 4 / 5), 1), max(round(n), 1)) for n in (rows * ratio, rows))
    sizes: dict[str, Any]
    if "embedding" in op:
        sizes = {"index_shape": d.folded(count), "num_embeddings": rows, "embedding_dim": width}
    elif op == "index_put":
        out: tuple[int, ...] = (rows, width)
        indices = 1
        if d.chance(0.2) and rows > 3:  # two axes with indices
            first = d.extent(2, rows // 2)
            out, indices = (first, rows // first, width), 2
        sizes = {"out_shape": out, "index_shape": (count,), "num_indices": indices}
    else:
        shape, axis, extent = AXES.get(op, SCATTERS)
        outer = d.weighed({1: 7, width: 2, d.extent(1, width): 1})  # axes before that of the indices
        dense = [n for n in (outer, count, width // outer) if n > 1 or n == count]
        sizes = {shape: tuple(dense), axis: 1 if outer > 1 else 0, extent: rows}
    return described(op, **sizes, **options)


def complete(desc: tp.Descriptor, t: Tensors) -> None:
    """Factors are odd: of even ones a product is 0 after a few runs, and what is 0 no factor changes."""
    if desc.op == "scatter_prod":
        src = t["src"]
        for axis in desc.operand("src").layout.zero_axes:
            src = src.narrow(axis, 0, 1)
        src.mul_(2).add_(1)


def floor_us(desc: Any) -> float:
    """Dense operands and indices are streamed. Of a table no more is read than there are contributions, or added to."""
    dense = max(
        o.numel for o in desc.operands() if o.name in ("out", "src", "dout", "values") and not _is_table(desc, o)
    )
    moved = 0.0
    for o in desc.operands():
        if not o.is_tensor:
            continue
        part = min(o.numel, dense) if _is_table(desc, o) and o.role is not Role.OUTPUT else o.numel * o.count
        moved += part * o.element.itemsize * (2 if o.role is Role.IN_OUT else 1)
    return moved / (ROOFS[0] * 1e6)


def _is_table(desc: Any, o: Any) -> bool:
    """Whether indices point into ``o``."""
    if desc.op in ("gather", "index_select"):
        return bool(o.name == "src")
    return o.name in ("weight", "dweight", "dsrc") or (o.name == "out" and o.role is Role.IN_OUT)


def peers(desc: Any) -> dict[str, Peer]:
    if desc.op == "embedding":
        return {"torch": lambda t: {"out": _lying(desc, "out", t, embedding(t["index"], t["weight"]))}}
    if desc.op == "embedding_backward":
        found: dict[str, Peer] = {"torch": lambda t: _embedding_backward(desc, t)}
        return {**found, "torch index_add": lambda t: _added(desc, t)} if desc.accumulate else found
    if desc.op == "normed_embedding":
        return {"torch": lambda t: _normed(desc, t)}
    call = _calls(desc)
    (name,) = (o.name for o in desc.operands() if o.is_written)
    return {"torch": lambda t: {name: call(t)}}


def _calls(desc: Any) -> Callable[[Tensors], Tensor]:
    """torch's op, which writes the result if it can."""
    op, axis = desc.op, getattr(desc, AXES.get(desc.op, SCATTERS)[1], 0)
    keeps = getattr(desc, "accumulate", True)  # else the table is zero before

    def table(t: Tensors) -> Tensor:
        found: Tensor = t["dsrc"]
        return found if keeps else found.zero_()

    if op in ("gather", "index_select"):
        read = torch.gather if op == "gather" else torch.index_select
        return lambda t: read(t["src"], axis, t["index"], out=t["out"])
    if op == "gather_backward":
        return lambda t: table(t).scatter_add_(axis, t["index"], t["dout"])
    if op == "index_select_backward":
        return lambda t: table(t).index_add_(axis, t["index"], t["dout"])
    if op == "index_add":
        return lambda t: t["out"].index_add_(axis, t["index"], t["src"])
    if op == "index_put":
        return lambda t: t["out"].index_put_(tuple(t["indices"]), t["values"], desc.accumulate)
    if op == "scatter_add":
        return lambda t: t["out"].scatter_add_(axis, t["index"], t["src"])
    if op == "scatter":
        return lambda t: t["out"].scatter_(axis, t["index"], t["src"])
    how = REDUCTIONS[op]
    return lambda t: t["out"].scatter_reduce_(axis, t["index"], t["src"], how)


def _lying(desc: Any, name: str, t: Tensors, found: Tensor) -> Tensor:
    """``found`` where the result is to lie: packed results are torch's own, others it must copy."""
    return found if desc.operand(name).layout.packed else t[name].copy_(found)


def _embedding_backward(desc: Any, t: Tensors) -> Tensors:
    found = torch.ops.aten.embedding_dense_backward(t["dout"], t["index"], desc.num_embeddings, -1, False)
    return {"dweight": t["dweight"].add_(found) if desc.accumulate else _lying(desc, "dweight", t, found)}


def _added(desc: Any, t: Tensors) -> Tensors:
    rows = t["dout"].reshape(-1, desc.embedding_dim)
    return {"dweight": t["dweight"].index_add_(0, t["index"].reshape(-1), rows)}


def _normed(desc: Any, t: Tensors) -> Tensors:
    rows = embedding(t["index"], t["weight"])
    wide = rows.to(desc.element.compute.torch)
    rstd = (wide.square().mean(-1) + desc.eps).rsqrt()
    out = (wide * rstd.unsqueeze(-1) * t["norm_weight"]).to(rows.dtype)
    return {"rows": _lying(desc, "rows", t, rows), "out": _lying(desc, "out", t, out), "rstd": rstd}
