"""Attention, on plans (docs/attention.md): of batches, of packed sequences, and with torch's arguments."""

from __future__ import annotations

from typing import Literal

import torch

from triplan.errors import shown
from triplan.functional._autocast import narrowed
from triplan.functional._replay.replay import replayed
from triplan.functional._seeds import device_state
from triplan.functional._shapes import broadcast, check_same_device
from triplan.functional.attention.ops import attention_op
from triplan.functional.attention.plain import plain, wide
from triplan.functional.attention.shared import How, Tensor, check, check_shapes

__all__ = ["attention", "attention_varlen", "scaled_dot_product_attention"]


@replayed
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    align: Literal["start", "end"] = "end",
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """``softmax(scale * q @ k.T + mask) @ v`` for each head, and lse, the logarithms of the sums of exponentials.

    ``q`` (batch, queries, heads, width), ``k`` and ``v`` (batch, keys, key_heads, width; v's may differ), of f16, bf16,
    f32 or f64 and any strides; heads is a multiple of key_heads. ``mask`` broadcasts to (batch, heads, queries, keys):
    bool, where True lets a query see a key, or f32 or q's dtype, which is added. ``scale``: by default
    ``width ** -0.5``.

    Query i stands at key i, or with ``align="end"`` the last query at the last key. With ``causal`` it sees no key
    after its own; ``window_left`` and ``window_right`` bound how many it sees on each side. ``softcap`` c > 0 replaces
    each score s by ``c * tanh(s / c)``. ``slopes`` (heads,) times the key's position less the query's is added to a
    score (ALiBi). ``sink`` (heads,) is one more score of each query, of a key of value 0. A query that sees no key
    gives 0, and lse -inf (or the sink). With ``dropout_p``, a probability is 0 with that probability, and else divided
    by ``1 - dropout_p``, after lse; the backward draws again from the seed that ``generator`` gave. On CUDA, f32 is
    multiplied by tensor cores, at least as precisely as ``math="tf32x3"`` of the descriptor says.

    Returns (batch, queries, heads, width of v) in q's dtype, and (batch, heads, queries) in f32 (f64 for f64), which
    has no gradient. Differentiable in q, k, v and ``sink`` any number of times, and in ``mask`` and ``slopes``, in
    plain torch with memory for all scores. Raises ``RuntimeError`` for shapes, dtypes and devices that do not fit.
    """
    q, k, v = narrowed("scaled_dot_product_attention", q, k, v)
    check("attention", q, k, v, mask)
    check_shapes(q, k, v)
    if mask is not None:
        mask = mask.expand(q.size(0), q.size(2), q.size(1), k.size(1))
    how = How(scale, causal, align, window_left, window_right, softcap, float(dropout_p))
    return _attend("attention", q, k, v, mask, how, slopes=slopes, sink=sink, generator=generator)


def _attend(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    how: How,
    starts: tuple[Tensor | None, Tensor | None] = (None, None),
    slopes: Tensor | None = None,
    sink: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    if not 0 <= how.dropout_p <= 1:
        raise ValueError(f"{name}(): dropout_p = {shown(how.dropout_p)}: must be between 0 and 1")
    for what, t in (("slopes", slopes), ("sink", sink)):
        if t is not None and (tuple(t.shape) != (q.size(2),) or not t.is_floating_point()):
            raise RuntimeError(f"attention(): {what} must be ({q.size(2)},), one for each head, got {list(t.shape)}")
    slopes, sink = (None if t is None else t.to(wide(q.dtype)) for t in (slopes, sink))
    state = None if how.dropout_p == 0 else device_state(q, generator)
    learned = [t for t in (mask, slopes) if t is not None and t.requires_grad]
    if learned and torch.is_grad_enabled():
        return plain(q, k, v, sink, how, mask, *starts, slopes, state)
    if mask is not None and q.dtype == torch.float64:
        # No kernel takes a mask of bools for f64, nor with dropout one of f32.
        mask = torch.where(mask, 0.0, -torch.inf) if mask.dtype == torch.bool else mask
        mask = mask.to(q.dtype)
    found: tuple[Tensor, Tensor] = attention_op(q, k, v, sink, mask, *starts, slopes, state, *how)
    return found


@replayed
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    align: Literal["start", "end"] = "end",
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """``attention`` of sequences of any lengths, packed one after the other without padding.

    ``q`` (all queries, heads, width), ``k`` and ``v`` (all keys, key_heads, width; v's may differ). ``cu_seqlens_q``
    and ``cu_seqlens_k`` (sequences + 1,) of i32 on the same device must not decrease, which is not checked: sequence s
    has the queries from ``cu_seqlens_q[s]`` up to ``cu_seqlens_q[s + 1]``, and keys likewise; perhaps none. Rows of no
    sequence give 0, lse -inf, and gradients of 0. Callers of other libraries may pass ``max_seqlen_q`` and
    ``max_seqlen_k``, which are not needed and not read. The other arguments are as in ``attention``, within each
    sequence.

    Returns (all queries, heads, width of v) in q's dtype, and lse (heads, all queries) in f32 (f64 for f64), which has
    no gradient. Differentiable as ``attention`` is; second derivatives are in plain torch, with memory
    for the scores of all queries with all keys. Raises ``RuntimeError`` for shapes, dtypes and devices that do not fit.
    """
    name = "attention_varlen"
    q, k, v = narrowed("scaled_dot_product_attention", q, k, v)
    check(name, q, k, v, None)
    check_same_device(name, q, cu_seqlens_q, cu_seqlens_k)
    for what, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 3:
            raise RuntimeError(f"{name}(): {what} must be (rows, heads, width), got {t.dim()} axes")
    starts = (cu_seqlens_q, cu_seqlens_k)
    if any(t.dtype != torch.int32 or t.dim() != 1 for t in starts) or not 0 < starts[0].numel() == starts[1].numel():
        raise RuntimeError(
            f"{name}(): expected cu_seqlens_q and cu_seqlens_k of i32 and one shape (sequences + 1,), but got "
            f"{starts[0].dtype} {list(starts[0].shape)} and {starts[1].dtype} {list(starts[1].shape)}"
        )
    q, k, v = (t.unsqueeze(0) for t in (q, k, v))
    check_shapes(q, k, v)
    how = How(scale, causal, align, window_left, window_right, softcap, float(dropout_p))
    out, lse = _attend(name, q, k, v, None, how, starts, slopes, sink, generator)
    return out.squeeze(0), lse.squeeze(0)


@replayed
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of (..., heads, length, width) (torch.nn.functional.scaled_dot_product_attention).

    ``attn_mask`` (bool, f32 or query's dtype) broadcasts to (..., heads, queries, keys). ``is_causal`` aligns the first
    query with the first key. With ``enable_gqa``, heads of ``query`` are a multiple of those of ``key`` and ``value``.
    All else is as in ``attention``, dropout too: other numbers than torch's, from its default generator. Under autocast
    it is computed in the autocast dtype. Raises ``RuntimeError`` for arguments that do not fit, ``ValueError`` for a
    ``dropout_p`` outside [0, 1].
    """
    name = "scaled_dot_product_attention"
    if attn_mask is not None and is_causal:
        raise RuntimeError(f"{name}(): Explicit attn_mask should not be set when is_causal=True")
    query, key, value = narrowed(name, query, key, value)
    check(name, query, key, value, attn_mask)
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise RuntimeError(f"{name}(): query, key and value must all be at least 2 dimensional")
    rank = max(query.dim(), key.dim(), value.dim(), 4)
    given = [t.reshape((1,) * (rank - t.dim()) + tuple(t.shape)) for t in (query, key, value)]
    heads = [t.size(-3) for t in given]
    shared = 1 if enable_gqa else 0
    lead = broadcast(*(t.shape[: -2 - shared] for t in given))
    whole = [(*lead, *t.shape[len(lead) :]) for t in given]
    if not enable_gqa:
        heads = [lead[-1]] * 3
    q, k, v = (t.expand(w).reshape(-1, *w[-3:]).transpose(1, 2) for t, w in zip(given, whole, strict=True))
    check_shapes(q, k, v)
    mask = attn_mask
    if mask is not None:
        full = (*whole[0][:-3], heads[0], query.size(-2), key.size(-2))
        mask = mask.expand(full).reshape(-1, *full[-3:]) if len(full) > 4 else mask.expand(full)
    out, _ = _attend(name, q, k, v, mask, How(scale, is_causal, "start", None, None, 0.0, float(dropout_p)))
    rank = max(query.dim(), key.dim(), value.dim())
    shape = (*whole[0][:-3], heads[0], query.size(-2), value.size(-1))
    return out.transpose(1, 2).reshape(shape[len(shape) - rank :])
