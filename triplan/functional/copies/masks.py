"""``masked_fill``: elementwise's ``where`` of a mask, a number and a tensor, also in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from triplan.facade import plan_type
from triplan.functional._ops import RECORDED, Op
from triplan.functional._plans import run
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import at_least_1d, broadcast, check_same_device
from triplan.functional.copies.conversions import converted, overwrite
from triplan.functional.copies.engine import Number, Tensor, check_fillable, known, number

__all__ = ["masked_fill", "masked_fill_"]


def _shape(target: Tensor, mask: Tensor, value: Number) -> Sequence[int]:
    check_same_device("masked_fill", target, mask)
    if mask.dtype is not torch.bool:
        raise RuntimeError(f"masked_fill only supports boolean masks, but got mask with dtype {mask.dtype}")
    check_fillable("masked_fill", target.dtype)
    if not known(target.dtype):
        raise NotImplementedError(f"masked_fill(): {target.dtype} is not supported")
    return broadcast(target.shape, mask.shape)


def _select(out: Tensor, target: Tensor, mask: Tensor, value: Number) -> None:
    found = number(value, target.dtype)  # refuses what does not fit
    if not (target.dtype.is_floating_point or target.dtype is torch.bool):
        found = int(value)  # ``number`` gives unsigned elements the signed integers of the same bits
    mask, target, out = map(at_least_1d, (mask, target, out))  # layouts without axes cannot say how they are aligned
    run(plan_type("where"), {"x": mask, "z": target, "out": out}, scalars={"y": found}, op="where")


def _update(out: Tensor, mask: Tensor, value: Number) -> None:
    # A bool result may replace the mask only.
    _select(out, out.clone() if out.dtype is torch.bool else out, mask, value)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.shape = inputs[0].shape


def _back(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    (mask,) = ctx.saved_tensors
    return _filled(g, mask, 0.0).sum_to_size(ctx.shape), None, None


_filled = Op(
    "masked_fill",
    "Tensor target, Tensor mask, Scalar value",
    axes="*, * -> *",
    shape=_shape,
    fill=_select,
    update=_update,
    setup=_setup,
    backward=_back,
)


def _selected(input: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    if value.dim():
        raise RuntimeError(
            f"masked_fill only supports a 0-dimensional value tensor, but got tensor with {value.dim()} dimension(s)."
        )
    value = converted(value.to(input.device), input.dtype)
    made: Tensor = RECORDED["expression_3_1"](mask, value, input, "where ttt", [])
    return made


@replayed
def masked_fill(input: Tensor, mask: Tensor, value: Number | Tensor) -> Tensor:
    """``input`` with ``value``, a number or a tensor of one, wherever ``mask`` is True: as ``torch.masked_fill``.

    ``input`` and ``mask`` broadcast. Raises ``RuntimeError`` if the mask is no bool tensor or the number does not fit.
    """
    return _selected(input, mask, value) if isinstance(value, Tensor) else _filled(input, mask, value)


@replayed
def masked_fill_(input: Tensor, mask: Tensor, value: Number | Tensor) -> Tensor:
    """``masked_fill`` in place, of a mask that broadcasts to ``input``: as ``Tensor.masked_fill_``."""
    if broadcast(input.shape, mask.shape) != input.shape:
        raise RuntimeError(
            f"masked_fill_(): output with shape {list(input.shape)} doesn't match the broadcast shape "
            f"{list(broadcast(input.shape, mask.shape))}"
        )
    if isinstance(value, Tensor):
        return overwrite.in_place(input, _selected(input, mask, value))
    return _filled.in_place(input, mask, value)
