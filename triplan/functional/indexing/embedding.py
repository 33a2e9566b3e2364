"""embedding and embedding_bag, with torch's semantics: rows of a table, and their sums, means or maxima by bag.

The backward adds to the rows that the forward read. Indices are i32 or i64, of any shape. A bag is a segment of
``index_add``, or of ``scatter_reduce``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import Function

from triplan.descriptors.fields import MAX_RANK
from triplan.errors import Unsupported, shown
from triplan.facade import EmbeddingBackwardPlan, EmbeddingPlan
from triplan.functional._forward import Linearity
from triplan.functional._ops import Op
from triplan.functional._plans import always_checks, run
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import check_index_dtype, check_same_device, integer
from triplan.functional._sharding import as_blocks, block, copies, divides, is_dtensor, joined, local_part, terms
from triplan.functional.indexing.copies import index_copy_
from triplan.functional.indexing.gather import scatter_add
from triplan.functional.indexing.reduce import scatter_reduce
from triplan.functional.indexing.select import index_add, index_select
from triplan.sku import ElementKind

__all__ = ["embedding", "embedding_bag"]

Tensor = torch.Tensor


def _embedding_shape(
    weight: Tensor, indices: Tensor, padding_idx: int | None = None, check_indices: bool = False
) -> Sequence[int]:
    if weight.dim() != 2:
        raise RuntimeError("embedding(): 'weight' must be 2-D")
    check_index_dtype("embedding", indices)
    check_same_device("embedding", weight, indices)
    return (*indices.shape, weight.size(1))


def _as_rows(indices: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """``indices`` and the ``rows`` that belong to them, flattened if descriptors do not take their rank."""
    if 1 <= indices.dim() < MAX_RANK:
        return indices, rows
    return indices.reshape(-1), rows.reshape(indices.numel(), rows.size(-1))


def _embedding_fill(
    out: Tensor, weight: Tensor, indices: Tensor, padding_idx: int | None = None, check_indices: bool = False
) -> None:
    index, rows = _as_rows(indices, out)
    run(EmbeddingPlan, {"weight": weight, "index": index, "out": rows}, check_indices=check_indices)


def _embedding_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    weight, indices, ctx.padding_idx, _ = inputs
    ctx.save_for_backward(indices)
    ctx.num_embeddings = weight.size(0)


def _embedding_grad(ctx: Any, grad: Tensor) -> Any:
    (indices,) = ctx.saved_tensors
    return _embedding_backward(grad, indices, ctx.num_embeddings, ctx.padding_idx), None, None, None


_embedding = Op(
    "embedding",
    "Tensor weight, Tensor indices, SymInt? padding_idx=None, bool check_indices=False",
    axes=".e, * -> *e",
    shape=_embedding_shape,
    fill=_embedding_fill,
    setup=_embedding_setup,
    backward=_embedding_grad,
    linearity=Linearity((0,)),
)


def _embedding_backward_shape(
    grad: Tensor,
    indices: Tensor,
    num_embeddings: int,
    padding_idx: int | None = None,
) -> Sequence[int]:
    check_index_dtype("embedding_backward", indices)
    check_same_device("embedding_backward", grad, indices)
    if grad.shape[:-1] != indices.shape:
        raise RuntimeError(f"embedding_backward(): grad is {list(grad.shape)}, but indices {list(indices.shape)}")
    return (num_embeddings, grad.size(-1))


def _embedding_backward_fill(
    out: Tensor,
    grad: Tensor,
    indices: Tensor,
    num_embeddings: int,
    padding_idx: int | None = None,
) -> None:
    index, rows = _as_rows(indices, grad)
    operands = {"dout": rows, "index": index, "dweight": out}
    run(EmbeddingBackwardPlan, operands, padding_idx=padding_idx, accumulate=False)


def _embedding_backward_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, indices, _, ctx.padding_idx = inputs
    ctx.save_for_backward(indices)


def _embedding_backward_grad(ctx: Any, grad: Tensor) -> Any:
    (indices,) = ctx.saved_tensors
    read = _embedding(grad, indices, None, False)
    if ctx.padding_idx is not None:
        read = read.masked_fill((indices == ctx.padding_idx).unsqueeze(-1), 0)
    return read, None, None, None


_embedding_backward = Op(
    "embedding_backward",
    "Tensor grad, Tensor indices, SymInt num_embeddings, SymInt? padding_idx=None",
    axes="*e, * -> .e+*",
    shape=_embedding_backward_shape,
    fill=_embedding_backward_fill,
    setup=_embedding_backward_setup,
    backward=_embedding_backward_grad,
    linearity=Linearity((0,)),
)


class _Scaled(Function):
    """``rows`` themselves; their gradient is multiplied by ``scale``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, scale: Tensor) -> Tensor:
        return rows.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (scale,) = ctx.saved_tensors
        return (grad * scale).to(grad.dtype), None

    @staticmethod
    def jvp(ctx: Any, rows: Tensor, scale: Any) -> Tensor:
        return rows.clone()


def _renormalise(weight: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> None:
    """Scale the rows of ``weight`` that ``indices`` name, in place, to a norm of at most ``max_norm``."""
    with torch.no_grad():
        at = indices.reshape(-1)
        rows = index_select(weight.detach(), 0, at)
        norms = torch.linalg.vector_norm(rows, norm_type, dim=1, keepdim=True)
        # 1e-7 as in torch. Where an index repeats, all writes are equal.
        index_copy_(weight.detach(), 0, at, torch.where(norms > max_norm, rows * (max_norm / (norms + 1e-7)), rows))


def _row(name: str, padding_idx: int | None, rows: int) -> int | None:
    if padding_idx is None:
        return None
    if not isinstance(padding_idx := integer(padding_idx), (int, torch.SymInt)):  # the backward would refuse it
        raise TypeError(f"{name}(): padding_idx = {shown(padding_idx)} must be an int")
    if not -rows <= padding_idx < rows:
        raise RuntimeError(f"{name}(): padding_idx = {shown(padding_idx)} must be within num_embeddings = {rows}")
    return padding_idx + (rows if padding_idx < 0 else 0)


def _of_divided_table(weight: Any, indices: Any, padding_idx: int | None, check_indices: bool) -> Tensor:
    """The rows of a table whose rows are divided: each rank reads those that it has. Others are 0 there, and the result
    is the sum of what ranks have, exactly: one term of it is not 0."""
    weight = as_blocks(weight)
    # By axis of the mesh: of indices that are divided too, where the table is whole, ranks read their own.
    mesh = weight.device_mesh
    given, made, of_weight = list[Any](), list[Any](), list[Any]()
    for p, q in zip(indices.placements, weight.placements, strict=True):
        own = p if q.is_replicate() and p.is_shard() else copies()
        given.append(own)
        made.append(terms() if q.is_shard(0) else type(q)(indices.dim()) if q.is_shard() else own)
        of_weight.append(terms() if own.is_shard() else q)
    own_indices = indices.redistribute(placements=given).to_local()
    if check_indices or always_checks(weight.device):
        bad = own_indices[(own_indices < 0) | (own_indices >= weight.size(0))]
        if len(bad):
            raise IndexError(f"embedding: index {int(bad[0])} is out of bounds for extent {weight.size(0)}")
    (count, _), (first, _) = block(weight)
    table = local_part(weight, of_weight)
    here = (own_indices >= first) & (own_indices < first + count)
    if not count:  # this rank has no rows
        rows = table.new_zeros((*own_indices.shape, table.size(1))) + table.sum()
    else:
        padding = None if padding_idx is None or not first <= padding_idx < first + count else padding_idx - first
        rows = _embedding(table, torch.where(here, own_indices - first, 0), padding, False)
        rows = rows.masked_fill(~here.unsqueeze(-1), 0)
    return joined(rows, mesh, made, (*indices.shape, weight.size(1)))


@replayed
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    check_indices: bool = False,
) -> Tensor:
    """``out[..., :] = weight[input[...], :]`` (torch.nn.functional.embedding).

    ``input``: indices, i32 or i64, of any shape. ``weight``: (rows, width). ``padding_idx``: a row that receives no
    gradient; a negative one counts from the end. ``max_norm``: rows that are read are first scaled, in ``weight``
    itself, to a ``norm_type`` norm of at most this. ``scale_grad_by_freq``: gradients are divided by how often their
    index occurs. Returns a tensor of the shape of ``input`` followed by the width. Differentiable in ``weight``.

    Raises ``IndexError`` on the CPU for an index outside the rows; on CUDA such a row is 0, unless ``check_indices`` is
    set: then the call synchronises and raises. Raises ``RuntimeError`` for dtypes, shapes and devices that do not fit,
    and for a ``padding_idx`` outside the rows; ``Unsupported`` for ``sparse``.
    """
    if sparse:
        raise Unsupported("embedding(): sparse gradients are not supported; the gradient of weight is dense")
    padding_idx = _row("embedding", padding_idx, weight.size(0))
    if max_norm is not None:
        _embedding_shape(weight, input)
        _renormalise(weight, input, max_norm, norm_type)
    if divides(weight, (0,)) and is_dtensor(input) and not torch.compiler.is_compiling():
        rows = _of_divided_table(weight, input, padding_idx, check_indices)
    else:
        rows = _embedding(weight, input, padding_idx, check_indices)
    if not scale_grad_by_freq:
        return rows
    at = input.reshape(-1).long()
    counts = scatter_add(at.new_zeros(weight.size(0)), 0, at, torch.ones_like(at))
    scaled: Any = _Scaled.apply
    result: Tensor = scaled(rows, (1 / index_select(counts, 0, at)).reshape(*input.shape, 1))
    return result


@replayed
def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
    *,
    check_indices: bool = False,
) -> Tensor:
    """The ``"sum"``, ``"mean"`` or ``"max"`` (``mode``) of the rows of each bag (torch.nn.functional.embedding_bag).

    ``input``: indices, (bags, length), or a vector with ``offsets``, where each bag begins; with
    ``include_last_offset`` its last is the end. ``per_sample_weights``: factors of the rows, of the shape of ``input``,
    with ``"sum"`` only. Rows of ``padding_idx`` belong to no bag; an empty bag is 0. The other arguments and errors
    are those of ``embedding``. Differentiable in ``weight`` and ``per_sample_weights``. Where rows of a bag share a
    maximum, its gradient is divided among them (torch gives it to the first).
    """
    if mode not in ("sum", "mean", "max"):
        raise ValueError(f"embedding_bag(): mode has to be one of sum, mean or max, but got {shown(mode)}")
    if per_sample_weights is not None and mode != "sum":
        raise NotImplementedError(f"embedding_bag(): per_sample_weights is only supported for mode='sum', not {mode!r}")
    if per_sample_weights is not None and per_sample_weights.shape != input.shape:
        raise ValueError(
            f"embedding_bag(): per_sample_weights is {list(per_sample_weights.shape)}, but input {list(input.shape)}"
        )
    options = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if input.dim() == 2 and offsets is None and padding_idx is None:
        rows = embedding(input, weight, *options, check_indices=check_indices)
        return _reduced(rows, mode, per_sample_weights)
    bags, of = _bags(input, offsets, include_last_offset)
    at = input.reshape(-1)
    rows = embedding(at, weight, *options, check_indices=check_indices)
    padding_idx = _row("embedding_bag", padding_idx, weight.size(0))
    size = bags
    if padding_idx is not None:  # what is left out goes to one bag more
        of, size = torch.where(at != padding_idx, of, bags), bags + 1
    if mode == "max":
        index = of.unsqueeze(1).expand(rows.shape)
        table = rows.new_zeros(size, weight.size(1))
        return scatter_reduce(table, 0, index, rows, "amax", include_self=False)[:bags]
    if mode == "mean" or per_sample_weights is not None:  # rounded once
        rows = rows.to(ElementKind.of(weight.dtype).compute.torch)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape(-1, 1)
    result = index_add(rows.new_zeros(size, weight.size(1)), 0, of, rows)[:bags]
    if mode == "mean":
        counts = scatter_add(of.new_zeros(size), 0, of, torch.ones_like(of))[:bags]
        result = result / counts.clamp(min=1).unsqueeze(1)
    return result.to(weight.dtype)


def _reduced(rows: Tensor, mode: str, factors: Tensor | None) -> Tensor:
    """``embedding_bag`` of bags of one length: ``rows`` is (bags, length, width). Rounded once."""
    if factors is not None:
        rows, dtype = rows.to(ElementKind.of(rows.dtype).compute.torch), rows.dtype
        return (rows * factors.unsqueeze(-1)).sum(1).to(dtype)
    if mode == "sum" or rows.size(1) == 0:
        return rows.sum(1)
    return rows.mean(1) if mode == "mean" else rows.amax(1)


def _bags(input: Tensor, offsets: Tensor | None, include_last_offset: bool) -> tuple[int, Tensor]:
    """How many bags there are, and the bag of each index."""
    if input.dim() == 2:
        if offsets is not None:
            raise ValueError("embedding_bag(): if input is 2D, then offsets has to be None")
        of = torch.arange(input.size(0), device=input.device).unsqueeze(1).expand(input.shape)
        return input.size(0), of.reshape(-1)
    if input.dim() != 1 or offsets is None or offsets.dim() != 1:
        raise ValueError("embedding_bag(): expected a 2D input, or a 1D input with a 1D tensor of offsets")
    check_same_device("embedding_bag", input, offsets)
    starts = offsets[:-1] if include_last_offset else offsets
    positions = torch.arange(input.numel(), device=input.device, dtype=offsets.dtype)
    return starts.numel(), (torch.searchsorted(starts.contiguous(), positions, right=True) - 1)
