"""Indexing in plain torch, from the definitions. Shares nothing with the kernels but descriptors and error bounds.

Sums are kept in the element of the inputs; contributions are added one after another in ascending order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from triplan.backends.table import CheckRules, Compute, Guarantee, reference
from triplan.backends.triton.common.bounds import (
    EXACT,
    compounded,
    guarantee,
    of_outputs,
    rounded,
    smallest_subnormal,
    stored,
    tolerance,
)
from triplan.descriptors import (
    EmbeddingBackwardDescriptor,
    EmbeddingDescriptor,
    GatherBackwardDescriptor,
    GatherDescriptor,
    IndexAddDescriptor,
    IndexPutDescriptor,
    IndexSelectBackwardDescriptor,
    IndexSelectDescriptor,
    NormedEmbeddingDescriptor,
    ScatterAddDescriptor,
    ScatterDescriptor,
    ScatterReduceDescriptor,
)
from triplan.descriptors.fields import NO_BAD_INDEX
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import Duplicates, IndexElementKind, MathPrecision, PrecisionGuarantee

Tensor = torch.Tensor
Outputs = Mapping[str, Tensor]
COPIED = ("f16", "bf16", "f32", "f64", "i8", "u8", "i16", "i32", "i64", "bool")
ADDED = ("f16", "bf16", "f32", "f64", "i32", "i64")


# --- guarantees ---


def _gathers(desc: IndexingDescriptor) -> Mapping[str, PrecisionGuarantee]:
    return of_outputs(desc, PrecisionGuarantee.exact(desc.element))


def _stores(desc: IndexingDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """Of several writes to one element, the one from the largest position wins."""
    return of_outputs(desc, stored(desc.element, Duplicates.LAST))


def _contributions(desc: IndexingDescriptor) -> int:
    """The most contributions that one element can receive: those along the axis of an op with one index per element,
    else one for each index."""
    (index,) = (o for o in desc.operands() if o.index_extents)
    if isinstance(desc, GatherBackwardDescriptor):
        return index.shape[desc.gather_dim]
    if isinstance(desc, ScatterAddDescriptor):
        return index.shape[desc.scatter_dim]
    return index.numel


def _sums(desc: IndexingDescriptor) -> Mapping[str, PrecisionGuarantee]:
    element, compute = desc.element, desc.element.compute
    if not element.is_floating_point:  # addition modulo 2^n is associative: no order changes a bit
        exact = MathPrecision.EXACT
        return of_outputs(
            desc, guarantee(compute, EXACT, math_precision=exact, batch=True, order=True, duplicates=Duplicates.SUM)
        )
    # Three more roundings cover alpha and its product, which alone can underflow: additions cannot.
    terms = _contributions(desc)
    bound = tolerance(
        element,
        compute,
        per_term=compounded((terms + 3) * math.log1p(compute.unit_roundoff)),
        last=element.unit_roundoff,
        lost=(terms * smallest_subnormal(compute),),
    )
    return of_outputs(desc, guarantee(compute, bound, duplicates=Duplicates.SUM))


def _reductions(desc: ScatterReduceDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """Exact, and in any order the same; of NaN not the bits."""
    compute, every = desc.element.compute, Duplicates.SUM
    precision = MathPrecision(compute.value) if compute.is_floating_point else MathPrecision.EXACT
    found = guarantee(compute, EXACT, math_precision=precision, batch=True, order=True, duplicates=every)
    return of_outputs(desc, found)


def _puts(desc: IndexPutDescriptor) -> Mapping[str, PrecisionGuarantee]:
    return _sums(desc) if desc.accumulate else _stores(desc)


def _declare(op: str, elements: Sequence[str], guarantee: Guarantee) -> Callable[[Compute], Compute]:
    """Register the decorated function as the reference of ``op``."""
    return reference(op=op, elements=elements, index_elements=tuple(IndexElementKind), guarantee=guarantee)


# --- indices ---


def _resolve(desc: IndexingDescriptor, index: Tensor, extent: int) -> tuple[Tensor, Tensor]:
    """Each index as a position (0 where out of bounds), and whether it is in bounds."""
    at = index.to(torch.int64)
    if desc.wrap_negative:
        at = torch.where(at < 0, at + extent, at)
    if desc.out_of_bounds == "clamp" and extent > 0:
        at = at.clamp(0, extent - 1)
    valid = (at >= 0) & (at < extent)
    return torch.where(valid, at, 0), valid


def _with_status(desc: IndexingDescriptor, outputs: dict[str, Tensor], valid: Tensor) -> Outputs:
    if desc.out_of_bounds == "error":
        bad = (~valid).reshape(-1).nonzero()
        outputs["status"] = bad[0].clone() if len(bad) else torch.tensor([NO_BAD_INDEX])
    return outputs


def _coordinates(shape: tuple[int, ...]) -> list[Tensor]:
    """For each axis its coordinates, of shape (1, .., n, .., 1).

    Single zeros if any axis is empty: the others may be longer than memory.
    """
    if 0 in shape:
        return [torch.zeros((1,) * len(shape), dtype=torch.int64) for _ in shape]
    return [torch.arange(n).reshape([-1 if a == d else 1 for a in range(len(shape))]) for d, n in enumerate(shape)]


def _cells(desc: IndexingDescriptor, index: Tensor, dim: int, extent: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """For every element of ``index``, the coordinates of the table element it selects, and whether that exists."""
    at, valid = _resolve(desc, index, extent)
    grid = _coordinates(tuple(index.shape))
    grid[dim] = at
    return tuple(g.expand(index.shape) for g in grid), valid


def _slice_cells(
    desc: IndexingDescriptor, index: Tensor, shape: tuple[int, ...], dim: int, extent: int
) -> tuple[tuple[Tensor, ...], Tensor]:
    """``_cells`` for a 1-D index along ``dim`` of a dense tensor of ``shape``."""
    full = index.reshape([-1 if a == dim else 1 for a in range(len(shape))]).expand(shape)
    return _cells(desc, full, dim, extent)


def _read(table: Tensor, cells: tuple[Tensor, ...], valid: Tensor) -> Tensor:
    if table.numel() == 0:
        return table.new_zeros(valid.shape)
    return torch.where(valid, table[cells], torch.zeros((), dtype=table.dtype))


def _add(table: Tensor, cells: tuple[Tensor, ...], values: Tensor, valid: Tensor) -> Tensor:
    """``table`` with ``values`` added to the elements at ``cells``, or to the slices behind them, in ascending order.

    torch's CPU ``index_add_`` along one axis is a plain loop. ``index_put_`` with ``accumulate`` is not: in f32 its
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
    """Row-major numbers of the elements at ``cells``."""
    number = torch.zeros(cells[0].shape, dtype=torch.int64)
    for c, n in zip(cells, shape, strict=False):
        number = number * n + c
    return number


def _overwrite(table: Tensor, cells: tuple[Tensor, ...], values: Tensor, valid: Tensor) -> Tensor:
    """``table`` with ``values`` written to ``cells``, or to the slices behind them; of several writes the last wins.

    (Written by positions, not by mask: torch converts a mask's single bf16 value through float, which changes NaNs.)
    """
    values = values[valid]
    slots = math.prod(table.shape[: len(cells)])
    number = _numbers(tuple(c[valid] for c in cells), table.shape)
    last = torch.full((slots,), -1, dtype=torch.int64)
    last.scatter_reduce_(0, number, torch.arange(len(values)), "amax")
    written = last >= 0
    out = table.clone().reshape(slots, *table.shape[len(cells) :])
    out[written.nonzero()[:, 0]] = values[last[written]]
    return out.reshape(table.shape)


def _start(table: Tensor | None, accumulate: bool, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What a backward op adds into: the caller's tensor, or zeros."""
    return table if accumulate and table is not None else like.new_zeros(shape)


# --- ops ---


@_declare("gather", COPIED, _gathers)
def gather(desc: GatherDescriptor, x: Mapping[str, Any]) -> Outputs:
    cells, valid = _cells(desc, x["index"], desc.gather_dim, desc.src_dim_size)
    return _with_status(desc, {"out": _read(x["src"], cells, valid)}, valid)


@_declare("gather_backward", ADDED, _sums)
def gather_backward(desc: GatherBackwardDescriptor, x: Mapping[str, Any]) -> Outputs:
    cells, valid = _cells(desc, x["index"], desc.gather_dim, desc.src_dim_size)
    start = _start(x.get("dsrc"), desc.accumulate, x["dout"], desc.operand("dsrc").shape)
    return _with_status(desc, {"dsrc": _add(start, cells, x["dout"], valid)}, valid)


@_declare("scatter_add", ADDED, _sums)
def scatter_add(desc: ScatterAddDescriptor, x: Mapping[str, Any]) -> Outputs:
    cells, valid = _cells(desc, x["index"], desc.scatter_dim, desc.out_dim_size)
    return _with_status(desc, {"out": _add(x["out"], cells, x["src"], valid)}, valid)


@_declare("scatter", COPIED, _stores)
def scatter(desc: ScatterDescriptor, x: Mapping[str, Any]) -> Outputs:
    cells, valid = _cells(desc, x["index"], desc.scatter_dim, desc.out_dim_size)
    return _with_status(desc, {"out": _overwrite(x["out"], cells, x["src"], valid)}, valid)


@_declare("scatter_prod", ("i32", "i64"), _reductions)
@_declare("scatter_amax", ADDED, _reductions)
@_declare("scatter_amin", ADDED, _reductions)
def scatter_reduce(desc: ScatterReduceDescriptor, x: Mapping[str, Any]) -> Outputs:
    cells, valid = _cells(desc, x["index"], desc.scatter_dim, desc.out_dim_size)
    start: Tensor = x["out"]
    number, flat = _numbers(tuple(c[valid] for c in cells), start.shape), start.reshape(-1)
    out = flat.scatter_reduce(0, number, x["src"][valid], desc.op.removeprefix("scatter_"))
    out[number] += 0  # of zeros 0, not -0
    return _with_status(desc, {"out": out.reshape(start.shape)}, valid)


@_declare("index_select", COPIED, _gathers)
def index_select(desc: IndexSelectDescriptor, x: Mapping[str, Any]) -> Outputs:
    cells, valid = _slice_cells(desc, x["index"], desc.out_shape, desc.select_dim, desc.src_dim_size)
    _, known = _resolve(desc, x["index"], desc.src_dim_size)
    return _with_status(desc, {"out": _read(x["src"], cells, valid)}, known)


@_declare("index_select_backward", ADDED, _sums)
def index_select_backward(desc: IndexSelectBackwardDescriptor, x: Mapping[str, Any]) -> Outputs:
    cells, valid = _slice_cells(desc, x["index"], desc.out_shape, desc.select_dim, desc.src_dim_size)
    _, known = _resolve(desc, x["index"], desc.src_dim_size)
    start = _start(x.get("dsrc"), desc.accumulate, x["dout"], desc.operand("dsrc").shape)
    return _with_status(desc, {"dsrc": _add(start, cells, x["dout"], valid)}, known)


@_declare("index_add", ADDED, _sums)
def index_add(desc: IndexAddDescriptor, x: Mapping[str, Any]) -> Outputs:
    cells, valid = _slice_cells(desc, x["index"], desc.src_shape, desc.add_dim, desc.out_dim_size)
    _, known = _resolve(desc, x["index"], desc.out_dim_size)
    src = x["src"] if x.get("alpha") is None else x["src"] * x["alpha"]
    return _with_status(desc, {"out": _add(x["out"], cells, src, valid)}, known)


@_declare("embedding", COPIED, _gathers)
def embedding(desc: EmbeddingDescriptor, x: Mapping[str, Any]) -> Outputs:
    at, valid = _resolve(desc, x["index"], desc.num_embeddings)
    if desc.num_embeddings == 0:
        rows = x["weight"].new_zeros((*desc.index_shape, desc.embedding_dim))
    else:
        rows = torch.where(valid[..., None], x["weight"][at], torch.zeros((), dtype=x["weight"].dtype))
    return _with_status(desc, {"out": rows}, valid)


def _normed(desc: NormedEmbeddingDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """Rows are copied. A rounding for each addition to the sum of squares, and 12 for all else."""
    roundings, compute = desc.embedding_dim + 12, desc.element.compute
    found = {name: rounded(desc.operand(name).element, compute, roundings) for name in ("out", "rstd")}
    return {**of_outputs(desc, PrecisionGuarantee.exact(desc.element)), **found}


#: Squares of wide values would leave the range of f32.
_RULES = CheckRules(terms=CheckRules.no_terms, passes=("unit",), integers=lambda desc: False)


@reference(
    op="normed_embedding",
    elements=ADDED[:4],
    index_elements=tuple(IndexElementKind),
    guarantee=_normed,
    checks=_RULES,
)
def normed_embedding(desc: NormedEmbeddingDescriptor, x: Mapping[str, Any]) -> Outputs:
    found = embedding(desc, x)
    rows = found["out"]
    rstd = 1 / (rows.square().mean(-1) + desc.eps).sqrt()
    return {**found, "rows": rows, "out": rows * rstd.unsqueeze(-1) * x["norm_weight"], "rstd": rstd}


@_declare("embedding_backward", ADDED, _sums)
def embedding_backward(desc: EmbeddingBackwardDescriptor, x: Mapping[str, Any]) -> Outputs:
    at, valid = _resolve(desc, x["index"], desc.num_embeddings)
    used = valid if desc.padding_idx is None else valid & (at != desc.padding_idx)
    start = _start(x.get("dweight"), desc.accumulate, x["dout"], desc.operand("dweight").shape)
    return _with_status(desc, {"dweight": _add(start, (at,), x["dout"], used)}, valid)


@_declare("index_put", COPIED, _puts)
def index_put(desc: IndexPutDescriptor, x: Mapping[str, Any]) -> Outputs:
    found = [_resolve(desc, index, desc.out_shape[a]) for a, index in enumerate(x["indices"])]
    valid = torch.stack([v for _, v in found]).all(0)
    out = x["out"]
    if out.numel():
        put = _add if desc.accumulate else _overwrite
        out = put(out, tuple(at for at, _ in found), x["values"], valid)
    return _with_status(desc, {"out": out}, valid)
