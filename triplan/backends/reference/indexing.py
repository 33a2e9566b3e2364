"""The indexing family in plain torch, from the definitions. Shares nothing with the kernels but the descriptors.

Sums run in the element of the inputs, one contribution after another in ascending order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from triplan.backends.table import Compute, reference
from triplan.descriptors import (
    EmbeddingBackwardDescriptor,
    EmbeddingDescriptor,
    GatherBackwardDescriptor,
    GatherDescriptor,
    IndexAddDescriptor,
    IndexPutDescriptor,
    IndexSelectBackwardDescriptor,
    IndexSelectDescriptor,
    ScatterAddDescriptor,
    ScatterDescriptor,
)
from triplan.descriptors.bad_indices import NO_BAD_INDEX
from triplan.sku import Duplicates, ElementKind, IndexElementKind, MathPrecision, PrecisionGuarantee, Tolerance

Tensor = torch.Tensor
Outputs = Mapping[str, Tensor]
COPIED = ("f16", "bf16", "f32", "f64", "i32", "i64", "bool")
ADDED = ("f16", "bf16", "f32", "f64", "i32", "i64")


# --- guarantees ---


def _written(desc: Any, guarantee: PrecisionGuarantee) -> dict[str, PrecisionGuarantee]:
    exact = PrecisionGuarantee.exact(ElementKind.I64)
    return {o.name: exact if o.name == "status" else guarantee for o in desc.operands() if o.is_written}


def _copies(desc: Any) -> Mapping[str, PrecisionGuarantee]:
    return _written(desc, PrecisionGuarantee.exact(desc.element))


def _last(desc: Any) -> Mapping[str, PrecisionGuarantee]:
    exact = PrecisionGuarantee.exact(desc.element)
    return _written(desc, exact.replace(order_invariant=False, duplicates=Duplicates.LAST))


def _sums(desc: Any) -> Mapping[str, PrecisionGuarantee]:
    element, compute = desc.element, desc.element.compute
    floating = element.is_floating_point
    u, final = compute.unit_roundoff, element.unit_roundoff
    # Serial sums of at most as many terms as there are indices: (1 + u)^n - 1, then one rounding into the element.
    terms = max(math.prod(o.shape) for o in desc.operands() if o.name in ("index", "indices", "src", "dout", "values"))
    ctol = math.expm1(min((terms + 3) * math.log1p(u), 700.0)) * (1 + final)
    smallest = torch.finfo(element.torch).smallest_normal * torch.finfo(element.torch).eps if floating else 0.0
    return _written(
        desc,
        PrecisionGuarantee(
            math_precision=MathPrecision(compute.value) if floating else MathPrecision.EXACT,
            accumulator=compute,
            deterministic=True,
            bit_stable_on_same_hardware=True,
            batch_invariant=not floating,
            order_invariant=not floating,
            duplicates=Duplicates.SUM,
            tolerance=Tolerance(
                rtol=final if compute is not element else 0.0, ctol=ctol, underflow=smallest * (terms + 3)
            )
            if floating
            else Tolerance(),
        ),
    )


def _puts(desc: IndexPutDescriptor) -> Mapping[str, PrecisionGuarantee]:
    return _sums(desc) if desc.accumulate else _last(desc)


def _declare(op: str, adds: bool | None) -> Callable[[Compute], Compute]:
    """Registers a reference; ``adds`` None means that the descriptor decides."""
    guarantee = (
        _puts
        if adds is None
        else _sums
        if adds
        else _copies
        if op in ("gather", "index_select", "embedding")
        else _last
    )
    elements = ADDED if adds else COPIED
    return reference(op=op, elements=elements, index_elements=tuple(IndexElementKind), guarantee=guarantee)


# --- indices ---


def _resolve(desc: Any, index: Tensor, extent: int) -> tuple[Tensor, Tensor]:
    """Positions (0 where unusable) and whether each may be touched."""
    at = index.to(torch.int64)
    if desc.wrap_negative:
        at = torch.where(at < 0, at + extent, at)
    if desc.out_of_bounds == "clamp" and extent > 0:
        at = at.clamp(0, extent - 1)
    valid = (at >= 0) & (at < extent)
    return torch.where(valid, at, 0), valid


def _with_status(desc: Any, outputs: dict[str, Tensor], valid: Tensor) -> Outputs:
    if desc.out_of_bounds == "error":
        bad = (~valid).reshape(-1).nonzero()
        outputs["status"] = bad[0].clone() if len(bad) else torch.tensor([NO_BAD_INDEX])
    return outputs


def _coordinates(shape: tuple[int, ...]) -> list[Tensor]:
    """One open coordinate grid an axis. An empty problem has no coordinates, however long its other axes are."""
    if 0 in shape:
        return [torch.zeros((1,) * len(shape), dtype=torch.int64) for _ in shape]
    return [torch.arange(n).reshape([-1 if a == d else 1 for a in range(len(shape))]) for d, n in enumerate(shape)]


def _cells(desc: Any, index: Tensor, dim: int, extent: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """For every element of a full index, the coordinates of the table's cell, and whether it exists."""
    at, valid = _resolve(desc, index, extent)
    grid = _coordinates(tuple(index.shape))
    grid[dim] = at
    return tuple(g.expand(index.shape) for g in grid), valid


def _slice_cells(
    desc: Any, index: Tensor, shape: tuple[int, ...], dim: int, extent: int
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The same for a 1-D index along ``dim``."""
    full = index.reshape([-1 if a == dim else 1 for a in range(len(shape))]).expand(shape)
    return _cells(desc, full, dim, extent)


def _read(table: Tensor, cells: tuple[Tensor, ...], valid: Tensor) -> Tensor:
    if table.numel() == 0:
        return table.new_zeros(valid.shape)
    return torch.where(valid, table[cells], torch.zeros((), dtype=table.dtype))


def _add(table: Tensor, cells: tuple[Tensor, ...], values: Tensor, valid: Tensor) -> Tensor:
    """Adds ``values`` to the cells, or to the slices behind them, in ascending order of position.

    torch's CPU ``index_add_`` on one axis is a plain loop; ``index_put_`` with ``accumulate`` is not: in f32 its
    threads add atomically, in any order.
    """
    width = math.prod(table.shape[len(cells) :])
    number = _numbers(tuple(c[valid] for c in cells), table.shape)
    if len(number) == 0 or width == 0:
        return table.clone()
    number = (number[:, None] * width + torch.arange(width)).reshape(-1)
    out = table.clone().reshape(-1).index_add_(0, number, values[valid].reshape(-1))
    return out.reshape(table.shape)


def _numbers(cells: tuple[Tensor, ...], shape: Sequence[int]) -> Tensor:
    """Row-major numbers of the cells."""
    number = torch.zeros(cells[0].shape, dtype=torch.int64)
    for c, n in zip(cells, shape, strict=False):
        number = number * n + c
    return number


def _overwrite(table: Tensor, cells: tuple[Tensor, ...], values: Tensor, valid: Tensor) -> Tensor:
    """The largest position in ``values`` that writes a cell wins.

    (Written by positions, not by mask: torch hands a mask's single bf16 value through float, which changes NaNs.)
    """
    values = values[valid]
    number = _numbers(tuple(c[valid] for c in cells), table.shape)
    winner = torch.full((table.numel(),), -1, dtype=torch.int64)
    winner.scatter_reduce_(0, number, torch.arange(len(values)), "amax")
    written = winner >= 0
    out = table.clone().reshape(-1)
    out[written.nonzero()[:, 0]] = values[winner[written]]
    return out.reshape(table.shape)


def _start(desc: Any, table: Tensor | None, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What a backward adds into: the caller's tensor, or zeros."""
    return table if desc.accumulate and table is not None else like.new_zeros(shape)


# --- ops ---


@_declare("gather", adds=False)
def gather(desc: GatherDescriptor, x: Mapping[str, Any]) -> Outputs:
    cells, valid = _cells(desc, x["index"], desc.gather_dim, desc.src_dim_size)
    return _with_status(desc, {"out": _read(x["src"], cells, valid)}, valid)


@_declare("gather_backward", adds=True)
def gather_backward(desc: GatherBackwardDescriptor, x: Mapping[str, Any]) -> Outputs:
    cells, valid = _cells(desc, x["index"], desc.gather_dim, desc.src_dim_size)
    start = _start(desc, x.get("dsrc"), x["dout"], desc.operand("dsrc").shape)
    return _with_status(desc, {"dsrc": _add(start, cells, x["dout"], valid)}, valid)


@_declare("scatter_add", adds=True)
def scatter_add(desc: ScatterAddDescriptor, x: Mapping[str, Any]) -> Outputs:
    cells, valid = _cells(desc, x["index"], desc.scatter_dim, desc.out_dim_size)
    return _with_status(desc, {"out": _add(x["out"], cells, x["src"], valid)}, valid)


@_declare("scatter", adds=False)
def scatter(desc: ScatterDescriptor, x: Mapping[str, Any]) -> Outputs:
    cells, valid = _cells(desc, x["index"], desc.scatter_dim, desc.out_dim_size)
    return _with_status(desc, {"out": _overwrite(x["out"], cells, x["src"], valid)}, valid)


@_declare("index_select", adds=False)
def index_select(desc: IndexSelectDescriptor, x: Mapping[str, Any]) -> Outputs:
    cells, valid = _slice_cells(desc, x["index"], desc.out_shape, desc.select_dim, desc.src_dim_size)
    _, known = _resolve(desc, x["index"], desc.src_dim_size)
    return _with_status(desc, {"out": _read(x["src"], cells, valid)}, known)


@_declare("index_select_backward", adds=True)
def index_select_backward(desc: IndexSelectBackwardDescriptor, x: Mapping[str, Any]) -> Outputs:
    cells, valid = _slice_cells(desc, x["index"], desc.out_shape, desc.select_dim, desc.src_dim_size)
    _, known = _resolve(desc, x["index"], desc.src_dim_size)
    start = _start(desc, x.get("dsrc"), x["dout"], desc.operand("dsrc").shape)
    return _with_status(desc, {"dsrc": _add(start, cells, x["dout"], valid)}, known)


@_declare("index_add", adds=True)
def index_add(desc: IndexAddDescriptor, x: Mapping[str, Any]) -> Outputs:
    cells, valid = _slice_cells(desc, x["index"], desc.src_shape, desc.add_dim, desc.out_dim_size)
    _, known = _resolve(desc, x["index"], desc.out_dim_size)
    src = x["src"] if x.get("alpha") is None else x["src"] * x["alpha"]
    return _with_status(desc, {"out": _add(x["out"], cells, src, valid)}, known)


@_declare("embedding", adds=False)
def embedding(desc: EmbeddingDescriptor, x: Mapping[str, Any]) -> Outputs:
    at, valid = _resolve(desc, x["index"], desc.num_embeddings)
    if desc.num_embeddings == 0:
        rows = x["weight"].new_zeros((*desc.index_shape, desc.embedding_dim))
    else:
        rows = torch.where(valid[..., None], x["weight"][at], torch.zeros((), dtype=x["weight"].dtype))
    return _with_status(desc, {"out": rows}, valid)


@_declare("embedding_backward", adds=True)
def embedding_backward(desc: EmbeddingBackwardDescriptor, x: Mapping[str, Any]) -> Outputs:
    at, valid = _resolve(desc, x["index"], desc.num_embeddings)
    used = valid if desc.padding_idx is None else valid & (at != desc.padding_idx)
    start = _start(desc, x.get("dweight"), x["dout"], desc.operand("dweight").shape)
    return _with_status(desc, {"dweight": _add(start, (at,), x["dout"], used)}, valid)


@_declare("index_put", adds=None)
def index_put(desc: IndexPutDescriptor, x: Mapping[str, Any]) -> Outputs:
    k, rest = desc.num_indices, desc.out_shape[desc.num_indices :]
    found = [_resolve(desc, index, desc.out_shape[a]) for a, index in enumerate(x["indices"])]
    valid = torch.stack([v for _, v in found]).all(0)
    if x["out"].numel() == 0:
        return _with_status(desc, {"out": x["out"]}, valid)
    if not desc.accumulate:
        # Rows of the table's leading axes, numbered together, so that "last" is decided row by row.
        rows = math.prod(desc.out_shape[:k])
        number = torch.zeros(desc.index_shape, dtype=torch.int64)
        for (at, _), n in zip(found, desc.out_shape, strict=False):
            number = number * n + at
        winner = torch.full((rows,), -1, dtype=torch.int64)
        order = torch.arange(int(valid.sum()))
        winner.scatter_reduce_(0, number[valid], order, "amax")
        written = winner >= 0
        out = x["out"].clone().reshape(rows, *rest)
        out[written.nonzero()[:, 0]] = x["values"][valid][winner[written]]
        return _with_status(desc, {"out": out.reshape(desc.out_shape)}, valid)
    out = _add(x["out"], tuple(at for at, _ in found), x["values"], valid)
    return _with_status(desc, {"out": out}, valid)
