"""An embedding and its RMSNorm in one launch: the first two ops of a language model.

The backward is that of the norm, then that of the embedding: sums in a fixed order if determinism is required.
"""

from __future__ import annotations

from typing import Any

import torch

from triplan.facade import NormedEmbeddingPlan
from triplan.functional._ops import RECORDED, Recorded
from triplan.functional._plans import run
from triplan.functional._replay.replay import replayed
from triplan.functional.indexing.embedding import _embedding_backward, _embedding_shape, _row
from triplan.sku import ElementKind

__all__ = ["embedding_rms_norm"]

Tensor = torch.Tensor


@replayed
def embedding_rms_norm(
    input: Tensor,
    weight: Tensor,
    norm_weight: Tensor,
    eps: float = 1e-5,
    padding_idx: int | None = None,
    *,
    check_indices: bool = False,
) -> tuple[Tensor, Tensor]:
    """``rows = embedding(input, weight)`` and ``rms_norm(rows, norm_weight, eps)``, in one launch.

    ``input``: indices, i32 or i64, of any shape. ``weight``: (rows, width), f16, bf16, f32 or f64; ``norm_weight``:
    (width,), of the same dtype. ``padding_idx`` and indices out of bounds are as in ``embedding``. Returns the norm and
    the rows, each of the shape of ``input`` followed by the width. Differentiable in both weights, any number of times.
    Raises ``RuntimeError`` for shapes, dtypes and devices that do not fit, ``Unsupported`` for more than 16384 columns
    (8192 of f64) on a GPU.
    """
    padding_idx = _row("embedding_rms_norm", padding_idx, weight.size(0))
    out, rows, _ = _normed(weight, input, norm_weight, eps, padding_idx, check_indices)
    return out, rows


def _fake(weight: Tensor, indices: Tensor, norm_weight: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape = _embedding_shape(weight, indices)
    if norm_weight.shape != weight.shape[1:] or norm_weight.dtype != weight.dtype or not weight.is_floating_point():
        raise RuntimeError(
            f"embedding_rms_norm(): expected a floating-point weight and a norm_weight of its width and dtype, but got "
            f"{weight.dtype} of {list(weight.shape)} and {norm_weight.dtype} of {list(norm_weight.shape)}"
        )
    if norm_weight.device != weight.device:
        raise RuntimeError(f"embedding_rms_norm(): weight is on {weight.device}, norm_weight on {norm_weight.device}")
    rstd = weight.new_empty(indices.shape, dtype=ElementKind.of(weight.dtype).compute.torch)
    return weight.new_empty(shape), weight.new_empty(shape), rstd


def _kernel(
    weight: Tensor, indices: Tensor, norm_weight: Tensor, eps: float, padding_idx: int | None, check_indices: bool
) -> tuple[Tensor, Tensor, Tensor]:
    out, rows, rstd = found = _fake(weight, indices, norm_weight)
    flat, width = indices.reshape(-1).contiguous(), weight.size(1)
    operands = {"weight": weight, "index": flat, "norm_weight": norm_weight.contiguous()}
    operands |= {"rows": rows.view(flat.numel(), width), "out": out.view(flat.numel(), width), "rstd": rstd.view(-1)}
    run(NormedEmbeddingPlan, operands, check_indices=check_indices, eps=eps)
    return found


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    weight, indices, norm_weight, _, ctx.padding_idx, _ = inputs
    ctx.num_embeddings = weight.size(0)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(indices, norm_weight, *output[1:])


def _grad(ctx: Any, dout: Tensor | None, drows: Tensor | None, drstd: Tensor | None) -> Any:
    indices, norm_weight, rows, rstd = ctx.saved_tensors
    dout = torch.zeros_like(rows) if dout is None else dout
    dx, dnorm, *_ = RECORDED["rms_norm_backward"](dout, rows, rows.new_empty(0), rstd, norm_weight, None, drows, 1, 0)
    if drstd is not None:  # only second derivatives reach the statistic
        dx = dx - (rows * (drstd * rstd**3 / rows.size(-1)).unsqueeze(-1)).to(rows.dtype)
    dweight = _embedding_backward(dx, indices, ctx.num_embeddings, ctx.padding_idx)
    return dweight, None, dnorm, None, None, None


_normed = Recorded(
    "normed_embedding",
    "(Tensor weight, Tensor indices, Tensor norm_weight, float eps, SymInt? padding_idx, bool check_indices)"
    " -> (Tensor out, Tensor rows, Tensor rstd)",
    _kernel,
    _fake,
    axes=".., *, . -> *., *., *",
    setup=_setup,
    backward=_grad,
)
