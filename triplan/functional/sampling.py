"""Sampling of tokens from logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triplan.descriptors.sampling import FILTERS
from triplan.facade import SamplePlan
from triplan.functional._ops import Recorded
from triplan.functional._plans import run
from triplan.functional._replay.replay import replayed
from triplan.functional._sharding import copied

__all__ = ["sample"]

_LOGITS = (torch.float16, torch.bfloat16, torch.float32)


def _compute(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, *filters: Tensor | None) -> Tensor:
    out = torch.empty(logits.shape[:1], dtype=torch.int64, device=logits.device)
    given = {name: t for name, t in zip(FILTERS, filters, strict=True) if t is not None}
    operands = {"logits": logits, "temperature": temperature, **given, "seed": seed, "position": position, "out": out}
    if out.numel():
        run(SamplePlan, operands)
    return out


_sample = Recorded(
    "sample",
    "(Tensor logits, Tensor temperature, Tensor seed, Tensor position, Tensor? top_k, Tensor? top_p, Tensor? min_p)"
    " -> Tensor",
    _compute,
    lambda logits, *rest: logits.new_empty(logits.shape[:1], dtype=torch.int64),
    axes="r., r, r, r, r, r, r -> r",
    setup=lambda ctx, inputs, output: ctx.mark_non_differentiable(output),
    backward=lambda ctx, g: (None,) * 7,
)


def _each(name: str, value: Any, logits: Tensor, dtype: torch.dtype) -> Tensor:
    """One value a row, of a number or a tensor of such."""
    rows = logits.shape[0]
    if not isinstance(value, Tensor):
        return copied(torch.full((rows,), value, dtype=dtype, device=logits.device), logits)
    if value.shape not in ((), (1,), (rows,)) or value.device != logits.device:
        raise RuntimeError(
            f"sample(): {name} of shape {tuple(value.shape)} on {value.device}; expected a number or ({rows},) on "
            f"{logits.device}, one value a row of the logits"
        )
    return value.to(dtype).expand(rows).contiguous()


@replayed
def sample(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    seed: int | Tensor,
    position: int | Tensor = 0,
) -> Tensor:
    """One token of each row of ``logits``, drawn from softmax(logits / temperature) of the tokens that filters keep.

    A row's token depends on its logits, parameters, seed and position alone: not on other rows, nor on its place. The
    parameters are numbers, or tensors of one value a row. Nothing waits for the device. Not differentiable.

    Args:
        logits: [rows, vocabulary] of f16, bf16 or f32; at most 2**22 tokens.
        temperature: 0 or less takes the first of the largest logits.
        top_k: a token stays if fewer than ``top_k`` logits are greater; ties of the last one stay. 0: all stay.
        top_p: of what top_k keeps, a token stays if the mass of greater logits is less than ``top_p``.
        min_p: a token stays if its mass is at least ``min_p`` of the largest.
        seed: that of a request: with one seed for all rows, rows at one position draw the same number.
        position: number of the token within its request.

    Returns:
        [rows] of i64; -1 of a row that holds a NaN, or nothing but -inf.

    Raises:
        RuntimeError: the logits are no matrix, or a parameter has another shape or device.
        NotImplementedError: another dtype.
    """
    if logits.dim() != 2:
        raise RuntimeError(f"sample(): logits of shape {tuple(logits.shape)}; expected (rows, vocabulary)")
    if logits.dtype not in _LOGITS:
        raise NotImplementedError(f"sample(): {logits.dtype} is not supported, only f16, bf16 and f32")
    i64, f32 = torch.int64, torch.float32
    filters = (
        None if value is None else _each(name, value, logits, dtype)
        for name, value, dtype in (("top_k", top_k, i64), ("top_p", top_p, f32), ("min_p", min_p, f32))
    )
    found: Tensor = _sample(
        logits.detach(),
        _each("temperature", temperature, logits, f32),
        _each("seed", seed, logits, i64),
        _each("position", position, logits, i64),
        *filters,
    )
    return found
