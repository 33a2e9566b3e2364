"""MultiheadAttention: torch's module, with the same parameters, state and options, over our kernels; and attention as
models of the transformers library call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from triplan import functional
from triplan.errors import Unsupported
from triplan.functional._replay.replay import replayed
from triplan.nn._modules import parameter

__all__ = ["MultiheadAttention", "transformers_attention"]

Tensor = torch.Tensor


class MultiheadAttention(torch.nn.MultiheadAttention):
    """torch.nn.MultiheadAttention, computed by ``triplan.functional.attention`` and ``linear``.

    With ``need_weights`` the probabilities of all scores exist, and the result is computed from them, by ``matmul`` and
    ``softmax``; a query that sees no key then gives NaN, as in torch, and 0 without.

    ``forward`` raises ``RuntimeError`` for shapes and dtypes that do not fit.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(result, probabilities or None).

        ``query`` (queries, batch, embed_dim), ``key`` and ``value`` (keys, batch, kdim or vdim), with ``batch_first``
        the batch comes first, or without a batch; the result has query's shape. ``key_padding_mask`` (batch, keys) and
        ``attn_mask`` (queries, keys) or (batch * num_heads, queries, keys): bool, where True hides a key, or what is
        added to the scores. ``is_causal`` says that ``attn_mask`` is the causal mask, which is then not read, unless
        there is a ``key_padding_mask`` or the probabilities are wanted. These are (batch, queries, keys), averaged over
        the heads, or (batch, num_heads, queries, keys).
        """
        if is_causal and attn_mask is None:
            raise RuntimeError("MultiheadAttention: is_causal needs attn_mask, as in torch")
        if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
            raise RuntimeError(
                "MultiheadAttention: query, key and value must all have 2 or all 3 axes, got "
                f"{query.dim()}, {key.dim()} and {value.dim()}"
            )
        projected = self.out_proj
        out, weights = _multi_head(
            query,
            key,
            value,
            self.num_heads,
            self.batch_first,
            self.add_zero_attn,
            is_causal and key_padding_mask is None and not need_weights,
            need_weights,
            self.dropout if self.training else 0.0,
            parameter(projected, "weight"),
            parameter(projected, "bias"),
            parameter(self, "in_proj_weight"),
            parameter(self, "q_proj_weight"),
            parameter(self, "k_proj_weight"),
            parameter(self, "v_proj_weight"),
            parameter(self, "in_proj_bias"),
            parameter(self, "bias_k"),
            parameter(self, "bias_v"),
            key_padding_mask,
            attn_mask,
        )
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if query.dim() == 2:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights


@replayed
def _multi_head(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: int,
    batch_first: bool,
    add_zero_attn: bool,
    causal: bool,
    need_weights: bool,
    dropout_p: float,
    out_weight: Tensor,
    out_bias: Tensor | None = None,
    in_weight: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    v_weight: Tensor | None = None,
    in_bias: Tensor | None = None,
    bias_k: Tensor | None = None,
    bias_v: Tensor | None = None,
    padding: Tensor | None = None,
    attn_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The result (batch, queries, embed_dim), and the probabilities (batch, heads, queries, keys) or None.

    One function, so that a call is replayed as a whole. ``causal``: the mask is the causal one, and is not read.
    """
    weights = (in_weight,) if in_weight is not None else (q_weight, k_weight, v_weight)
    projected = _projected(query, key, value, in_bias, *weights)
    batched = query.dim() == 3
    ordered = (t.unsqueeze(0) if not batched else t if batch_first else t.transpose(0, 1) for t in projected)
    # (batch, length, heads, width), without a copy
    q, k, v = (t.view(*t.shape[:2], heads, t.size(2) // heads) for t in ordered)
    _check_masks(padding, attn_mask, q, k, batched)
    shape, before = (k.size(0), 1, *k.shape[2:]), k.size(1)
    if bias_k is not None and bias_v is not None:
        k, v = (
            torch.cat((t, b.to(t.dtype).view(1, 1, *shape[2:]).expand(shape)), 1) for t, b in ((k, bias_k), (v, bias_v))
        )
    if add_zero_attn:
        k, v = (torch.cat((t, t.new_zeros(shape)), 1) for t in (k, v))
    mask = None if causal else _merged(padding, attn_mask, q, k.size(1) - before)
    if need_weights:
        found = functional.dropout(_probabilities(q, k, mask), dropout_p)
        out = functional.matmul(found, v.transpose(1, 2)).transpose(1, 2)
    else:
        found = None
        out, _ = functional.attention(q, k, v, mask=mask, causal=causal, align="start", dropout_p=dropout_p)
    return functional.linear(out.flatten(2), out_weight, out_bias), found


def _projected(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, weight: Any, *others: Any
) -> Sequence[Tensor]:
    """Equal inputs share a product; q, k and v are then slices of its result, which attention reads in place."""
    if not others and query is key is value:
        return _parts(functional.linear(query, weight, bias), -1, 3)
    weights = (weight, *others) if others else _parts(weight, 0, 3)
    biases = (None,) * 3 if bias is None else _parts(bias, 0, 3)
    if not others and key is value:
        width = weight.size(1)
        both = functional.linear(key, weight[width:], None if bias is None else bias[width:])
        return [functional.linear(query, weights[0], biases[0]), *_parts(both, -1, 2)]
    return [functional.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]


def _parts(t: Tensor, dim: int, count: int) -> list[Tensor]:
    """``t.chunk(count, dim)``; replays know views of one tensor each."""
    width = t.size(dim) // count
    return [t.narrow(dim, i * width, width) for i in range(count)]


def _check_masks(padding: Tensor | None, mask: Tensor | None, q: Tensor, k: Tensor, batched: bool) -> None:
    """Masks must have the whole shapes: a broadcast would take one meaning for another."""
    (batch, queries, heads, _), keys = q.shape, k.size(1)
    shapes = (
        ("key_padding_mask", padding, [(batch, keys) if batched else (keys,)]),
        ("attn_mask", mask, [(queries, keys), (batch * heads, queries, keys)]),
    )
    for name, given, wanted in shapes:
        if given is None:
            continue
        if tuple(given.shape) not in wanted:
            raise RuntimeError(
                f"MultiheadAttention: {name} must be {' or '.join(map(str, wanted))}, got {tuple(given.shape)}"
            )
        if given.dtype != torch.bool and not given.is_floating_point():
            raise RuntimeError(f"MultiheadAttention: {name} must be of bool or floating point, got {given.dtype}")


def _merged(padding: Tensor | None, mask: Tensor | None, q: Tensor, extra: int) -> Tensor | None:
    """Both masks as ``functional.attention`` takes one: bool, True where a key is seen, or what is added.

    ``extra`` appended keys are seen by all.
    """
    batch, _, heads, _ = q.shape
    masks = []
    if padding is not None:
        masks.append(padding.view(batch, 1, 1, padding.size(-1)))
    if mask is not None:
        masks.append(mask if mask.dim() == 2 else mask.view(batch, heads, *mask.shape[1:]))
    if extra:
        masks = [torch.nn.functional.pad(m, (0, extra)) for m in masks]  # by False or 0
    if not masks:
        return None
    if any(m.dtype != torch.bool for m in masks):
        masks = [
            torch.zeros(m.shape, dtype=q.dtype, device=m.device).masked_fill(m, -torch.inf)
            if m.dtype == torch.bool
            else m
            for m in masks
        ]
        return masks[0] if len(masks) == 1 else masks[0] + masks[1]
    return ~(masks[0] if len(masks) == 1 else masks[0] | masks[1])


def _probabilities(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """(batch, heads, queries, keys)."""
    scores = functional.matmul(q.transpose(1, 2) * q.size(-1) ** -0.5, k.permute(0, 2, 3, 1))
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return functional.softmax(scores, -1)


#: What some models pass that changes the result, and that no kernel takes: None is all that may be passed.
_REFUSED = ("head_mask", "position_bias")


def transformers_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """``functional.attention`` as models of the transformers library call it (its AttentionInterface)::

        AttentionInterface.register("triplan", triplan.nn.transformers_attention)
        AttentionMaskInterface.register("triplan", transformers.masking_utils.sdpa_mask)

    Without the second line a model passes no mask, and the padding of a batch is seen.

    ``query`` (batch, heads, queries, width), ``key`` and ``value`` (batch, key_heads, keys, width), of which heads are
    not repeated; ``attention_mask`` broadcasts to (batch, heads, queries, keys or more): bool, where True lets a query
    see a key, or what is added. It says all that a query sees. Without it, the last query stands at the last key, and
    a causal query (``is_causal``, by default ``module.is_causal`` or True) sees the last ``sliding_window`` keys to
    its own, or all. ``dropout`` is ``attention``'s ``dropout_p``. ``s_aux`` (heads,) has the model's sinks.
    ``cu_seq_lens_q`` and ``cu_seq_lens_k`` (sequences + 1,) of i32 say where sequences begin that are packed into a
    batch of 1, without a mask.

    Returns (batch, queries, heads, width) and None for the probabilities. Raises ``Unsupported`` (a
    ``NotImplementedError``) for what no kernel takes (biases of positions, head masks, masks of packed
    sequences), and for a window that is neither causal nor in the mask; ``RuntimeError`` for what does not fit.
    """
    name = "transformers_attention"
    given = [n for n in _REFUSED if others.get(n) is not None]
    if given:
        raise Unsupported(f"{name}(): {', '.join(given)}: only None is supported")
    causal, left = False, None
    if attention_mask is not None:
        attention_mask = attention_mask[..., : key.size(-2)]  # a cache of fixed size has a longer one
    else:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if sliding_window is not None and key.size(-2) > sliding_window:
            if not causal:
                raise Unsupported(f"{name}(): sliding_window = {sliding_window}, not causal: give it by attention_mask")
            left = sliding_window - 1
    options: dict[str, Any] = {"scale": scaling, "causal": causal, "window_left": left, "softcap": softcap or 0.0}
    options |= {"sink": s_aux, "dropout_p": dropout}
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        if attention_mask is not None or query.size(0) != 1:
            raise Unsupported(
                f"{name}(): cu_seq_lens_q: needs a batch of 1 (not {query.size(0)}) and no attention_mask"
            )
        q, k, v = (t.transpose(1, 2).squeeze(0) for t in (query, key, value))
        out, _ = functional.attention_varlen(q, k, v, cu_seq_lens_q, cu_seq_lens_k, **options)
        return out.unsqueeze(0), None
    return _transposed(query, key, value, attention_mask, **options), None


@replayed
def _transposed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    causal: bool,
    window_left: int | None,
    softcap: float,
    sink: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """Attention whose heads come before positions in the operands: a call and its transposes are one node."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    how: dict[str, Any] = {"scale": scale, "causal": causal, "window_left": window_left, "softcap": softcap}
    out, _ = functional.attention(q, k, v, mask=mask, **how, sink=sink, dropout_p=dropout_p)
    return out
