"""cross_entropy and nll_loss with class indices, as torch has them, and their mean over bytes."""

from __future__ import annotations

from typing import Any, get_args

import torch

from triplan.descriptors.fields import MAX_RANK
from triplan.descriptors.losses import Reduction
from triplan.functional import _losses
from triplan.functional._autocast import widened, without
from triplan.functional._losses import How
from triplan.functional._ops import _nothing_watches, _transformed, needs_grad
from triplan.functional._shapes import check_index_dtype, check_same_device, require

__all__ = ["cross_entropy", "nll_loss"]

Tensor = torch.Tensor
REDUCTIONS = get_args(Reduction)


def _checked(
    name: str, input: Tensor, target: Tensor, weight: Tensor | None, bytes: Tensor | None, how: How
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Input and target with a batch axis and few others, and tables in the element that is computed in."""
    if not input.is_floating_point():
        raise RuntimeError(f"{name}(): expected a floating-point tensor, but got {input.dtype}")
    if how.reduction not in REDUCTIONS:
        raise ValueError(f"{how.reduction} is not a valid value for reduction; valid are {', '.join(REDUCTIONS)}")
    if not 0 <= how.label_smoothing <= 1:
        raise RuntimeError(f"label_smoothing must be between 0.0 and 1.0. Got: {how.label_smoothing}")
    if (bytes is not None) != (how.reduction == "byte_mean"):
        raise ValueError(f"{name}(): bytes are given for reduction 'byte_mean', and for no other")
    if input.dim() == 0:
        raise RuntimeError(f"{name}(): expected an input of at least 1 dimension, but got a scalar")
    if target.is_floating_point():
        raise RuntimeError(f"{name}(): expected class indices as target, not probabilities ({target.dtype})")
    target = target.int() if target.dtype == torch.uint8 else target
    check_index_dtype(name, target)
    check_same_device(name, input, target, *(t for t in (weight, bytes) if t is not None))
    wanted = (*input.shape[:1], *input.shape[2:]) if input.dim() > 1 else ()
    require(
        target.dim() == len(wanted) and all(n == m for n, m in zip(target.shape, wanted, strict=True)),
        lambda: f"{name}(): Expected target of size {list(wanted)}, but got {list(target.shape)}",
    )
    classes = input.size(1 if input.dim() > 1 else 0)
    for what, table in (("weight", weight), ("bytes", bytes)):
        if table is None:
            continue
        if torch.is_grad_enabled() and table.requires_grad:
            raise RuntimeError(
                f"The function '{name}' is not differentiable with respect to argument '{what}'. This input cannot "
                "have requires_grad True."
            )
        require(
            table.dim() == 1 and table.size(0) == classes,
            lambda what=what, table=table: (  # type: ignore[misc]
                f"{name}(): {what} should be defined for all {classes} classes or not at all, but got a tensor of "
                f"shape {list(table.shape)}"
            ),
        )
    if input.dim() == 1:
        input, target = input.unsqueeze(0), target.unsqueeze(0)
    if input.dim() > MAX_RANK:
        input, target = input.flatten(2), target.flatten(1)
    compute = _losses.compute_dtype(input)
    weight, bytes = (None if t is None else t.detach().to(compute).contiguous() for t in (weight, bytes))
    return input, target.contiguous(), weight, bytes


def _shaped(out: Tensor, input: Tensor, target: Tensor, how: How) -> Tensor:
    """Losses of rows in the input's dtype and the target's shape."""
    return out if how.reduction != "none" else out.reshape(target.shape).to(input.dtype)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    bytes: Tensor | None = None,
    check_indices: bool = False,
) -> Tensor:
    """Cross-entropy of logits with class indices (torch.nn.functional.cross_entropy, without its deprecated arguments).

    ``input``: f16, bf16, f32 or f64, of shape (C), (N, C) or (N, C, ...) and any strides; under autocast it goes to
    f32. ``target``: u8, i32 or i64, of ``input``'s shape without C; rows of ``ignore_index`` count nothing. ``weight``:
    one a class, not negative. ``reduction``: ``"mean"`` (over the targets' weights), ``"sum"``, ``"none"``, or
    ``"byte_mean"``: ``sum(loss * bytes[target]) / sum(bytes[target])`` with ``bytes``, one a class. Computed in f32,
    f64 for f64.

    Returns a 0-d tensor, with ``"none"`` one of ``target``'s shape, in ``input``'s dtype. Differentiable in ``input``,
    any number of times; infinities and NaN as in torch, but rows that are ignored always have gradients of 0.
    Raises ``IndexError`` for a target outside the classes on the CPU; on CUDA such a row is ignored, or with
    ``check_indices`` the call synchronises and raises. ``RuntimeError`` or ``ValueError`` for what does not fit,
    a ``weight`` or ``bytes`` that wants a gradient among it.
    """
    (input,) = widened(input)
    how = How(reduction, ignore_index, label_smoothing, check_indices)
    given = _checked("cross_entropy", input, target, weight, bytes, how)
    with without(input):
        if (
            reduction != "none"
            and not torch.compiler.is_compiling()
            and input.dtype != torch.float16
            and needs_grad((input,))
            and not _transformed()
            and _nothing_watches(tuple(t for t in given if t is not None))
        ):
            apply: Any = _losses.WithGradient.apply
            recorded: Tensor = apply(*given, how)[0]
            return recorded
    return _shaped(_losses.cross_entropy(*given, *how)[0], input, target, how)


def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    bytes: Tensor | None = None,
    check_indices: bool = False,
) -> Tensor:
    """Negative log-likelihood of log-probabilities with class indices (torch.nn.functional.nll_loss): as
    ``cross_entropy``, of an ``input`` that log_softmax gave.
    """
    (input,) = widened(input)
    how = How(reduction, ignore_index, 0.0, check_indices)
    given = _checked("nll_loss", input, target, weight, bytes, how)
    return _shaped(_losses.nll_loss(*given, *how), input, target, how)
