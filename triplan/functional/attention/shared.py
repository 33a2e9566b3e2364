"""What attention takes besides q, k and v, and which tensors fit."""

from __future__ import annotations

from typing import NamedTuple

import torch

from triplan.functional._shapes import check_same_device, require

Tensor = torch.Tensor
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class How(NamedTuple):
    """What both ops take besides tensors; the fields of their descriptors."""

    scale: float | None
    causal: bool
    align: str
    left: int | None
    right: int | None
    softcap: float
    dropout_p: float = 0.0


#: The operands that may be absent.
ABSENT = ("mask", "query_starts", "key_starts", "slopes", "state")
NONE = (None,) * len(ABSENT)
OTHERS = ", ".join(f"Tensor? {name}" for name in ABSENT)
HOW = "float? scale, bool causal, str align, int? left, int? right, float softcap, float dropout_p"


def check(name: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    check_same_device(name, q, k, v, *(() if mask is None else (mask,)))
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise RuntimeError(
            f"{name}(): expected query, key and value of one dtype, f16, bf16, f32 or f64, but got {q.dtype}, "
            f"{k.dtype} and {v.dtype}"
        )
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, q.dtype):
        raise RuntimeError(f"{name}(): expected a mask of bool, f32 or query's dtype, but got {mask.dtype}")


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4:
            raise RuntimeError(f"attention(): {name} must be (batch, length, heads, width), got {t.dim()} axes")
    (b, _, h, d), (_, n, g, _) = q.shape, k.shape
    require(
        k.size(0) == b and v.size(0) == b and k.size(3) == d and v.size(1) == n and v.size(2) == g,
        lambda: f"attention(): q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit together",
    )
    require(g > 0 and h % max(g, 1) == 0, lambda: f"attention(): {h} heads of q are no multiple of the {g} of k and v")
