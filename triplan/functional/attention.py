"""Attention, on plans (docs/attention.md): of batches, of packed sequences, and with torch's arguments.

The backward is a registered op of its own. Its derivative, and attention with a mask that requires grad, are in plain
torch, with memory for all scores: both are rare.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from triplan.errors import shown
from triplan.facade import AttentionBackwardPlan, AttentionPlan
from triplan.functional._autocast import narrowed
from triplan.functional._ops import RECORDED, Recorded
from triplan.functional._plans import run
from triplan.functional._replay.replay import replayed
from triplan.functional._seeds import device_state
from triplan.functional._shapes import broadcast, check_same_device, require

__all__ = ["attention", "attention_varlen", "scaled_dot_product_attention"]

Tensor = torch.Tensor
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
OTHERS = ", ".join(f"Tensor? {name}" for name in ABSENT)
HOW = "float? scale, bool causal, str align, int? left, int? right, float softcap, float dropout_p"


# --- what is checked ---


def _check(name: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    check_same_device(name, q, k, v, *(() if mask is None else (mask,)))
    if q.dtype not in _DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise RuntimeError(
            f"{name}(): expected query, key and value of one dtype, f16, bf16, f32 or f64, but got {q.dtype}, "
            f"{k.dtype} and {v.dtype}"
        )
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, q.dtype):
        raise RuntimeError(f"{name}(): expected a mask of bool, f32 or query's dtype, but got {mask.dtype}")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4:
            raise RuntimeError(f"attention(): {name} must be (batch, length, heads, width), got {t.dim()} axes")
    (b, _, h, d), (_, n, g, _) = q.shape, k.shape
    require(
        k.size(0) == b and v.size(0) == b and k.size(3) == d and v.size(1) == n and v.size(2) == g,
        lambda: f"attention(): q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit together",
    )
    require(g > 0 and h % max(g, 1) == 0, lambda: f"attention(): {h} heads of q are no multiple of the {g} of k and v")


# --- registered ops ---


def _fields(how: How) -> dict[str, Any]:
    found: dict[str, Any] = {"causal": how.causal, "align": how.align, "softcap": how.softcap}
    return found | {"window_left": how.left, "window_right": how.right}


def _operands(*others: Tensor | None, **operands: Tensor) -> dict[str, Tensor]:
    return operands | {name: t for name, t in zip(ABSENT, others, strict=True) if t is not None}


def _scalars(how: How, operands: dict[str, Tensor]) -> dict[str, Any]:
    found = {} if how.scale is None else {"scale": how.scale}
    return found | {"dropout_p": how.dropout_p} if "state" in operands else found


def _empty(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    b, m, h, _ = q.shape
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((b, m, h, v.size(3))), q.new_empty((b, h, m), dtype=wide)


def _forward(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    others, how = options[: len(ABSENT)], How(*options[len(ABSENT) :])
    out, lse = _empty(q, k, v)
    operands = _operands(*others, q=q, k=k, v=v, out=out, lse=lse) | ({} if sink is None else {"sink": sink})
    run(AttentionPlan, operands, scalars=_scalars(how, operands), **_fields(how))
    return out, lse


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, sink, *others = inputs
    others, ctx.how = others[: len(ABSENT)], others[len(ABSENT) :]
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, sink, *others)


def _grad(ctx: Any, dout: Tensor, _: Any) -> Any:
    q, k, v, out, lse, sink, *others = ctx.saved_tensors
    rest = (None,) * (len(ctx.how) + len(ABSENT))
    if sink is None:
        return *_attention_backward(dout, q, k, v, out, lse, *others, *ctx.how), None, *rest
    if torch.is_grad_enabled():  # second derivatives: lse, which has the sink, has no gradient

        def out_of(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
            return _plain(q, k, v, sink, How(*ctx.how), *others)[0]

        return *torch.func.vjp(out_of, q, k, v, sink)[1](dout), *rest
    found = _attention_backward(dout, q, k, v, out, lse, *others, *ctx.how)
    share = (sink[:, None] - lse.masked_fill(lse == -torch.inf, torch.inf)).exp()
    of_sink = -(share * (dout.to(lse.dtype) * out).sum(-1).transpose(1, 2)).sum((0, 2))
    return *found, of_sink, *rest


def _empty_gradients(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Each packed: strides of q, k and v need not be of a dense tensor."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    others, how = options[: len(ABSENT)], How(*options[len(ABSENT) :])
    dq, dk, dv = found = _empty_gradients(dout, q, k, v)
    operands = _operands(*others, dout=dout, q=q, k=k, v=v, out=out, lse=lse, dq=dq, dk=dk, dv=dv)
    run(AttentionBackwardPlan, operands, scalars=_scalars(how, operands), **_fields(how))
    return found


def _backward_setup(ctx: Any, inputs: Any, output: Any) -> None:
    dout, q, k, v, _, _, *others = inputs
    others, ctx.how = others[: len(ABSENT)], others[len(ABSENT) :]
    ctx.save_for_backward(dout, q, k, v, *others)


def _backward_grad(ctx: Any, of_dq: Tensor, of_dk: Tensor, of_dv: Tensor) -> Any:
    """The derivative of the backward as a function of dout, q, k and v alone: out and lse follow from these.

    With ds = p * (dp - sum(p * dp)), dp = dout @ v.T, and g the gradient that comes to ds: p's is r, dp's is e. Dropout
    multiplies dout @ v.T, and p where it multiplies values, by its factors.
    """
    dout, q, k, v, *others = ctx.saved_tensors
    how, dtype = How(*ctx.how), q.dtype
    group = q.size(2) // k.size(2)
    dout, q, of_dq = (t.transpose(1, 2).to(_wide(dtype)) for t in (dout, q, of_dq))
    k, v, of_dk, of_dv = (_repeated(t, group).to(_wide(dtype)) for t in (k, v, of_dk, of_dv))
    *others, state = others
    s, bent = _scores(q, k, how, *others)
    p, scale = _softmax(s), _scale(q, how)
    factors = 1 if state is None else _factors(s, state, how, *others[1:3])

    def centred(t: Tensor) -> Tensor:
        return p * (t - (p * t).sum(-1, keepdim=True))

    dp = factors * (dout @ v.mT)
    ds = centred(dp)
    slope = 1 if bent is None else 1 - bent * bent
    incoming = scale * (of_dq @ k.mT + q @ of_dk.mT)
    g = incoming * slope
    e = factors * centred(g)
    r = g * (dp - (p * dp).sum(-1, keepdim=True)) - (p * g).sum(-1, keepdim=True) * dp
    r = r + factors * (dout @ of_dv.mT)
    to_s = centred(r) * slope
    if bent is not None:
        to_s = to_s - incoming * ds * bent * slope * (2 / how.softcap)
    ds = ds * slope
    to_dout = ((factors * p) @ of_dv + e @ v).transpose(1, 2)
    to_q = (scale * (to_s @ k + ds @ of_dk)).transpose(1, 2)
    to_k, to_v = (_summed(t, group) for t in (scale * (to_s.mT @ q + ds.mT @ of_dq), e.mT @ dout))
    return *(t.to(dtype) for t in (to_dout, to_q, to_k, to_v)), *(None,) * (len(ctx.how) + 2 + len(ABSENT))


_attention = Recorded(
    "attention",
    f"(Tensor q, Tensor k, Tensor v, Tensor? sink, {OTHERS}, {HOW}) -> (Tensor, Tensor)",
    _forward,
    _empty,
    setup=_setup,
    backward=_grad,
)
_attention_backward = Recorded(
    "attention_backward",
    f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {OTHERS}, {HOW}) -> (Tensor, Tensor, Tensor)",
    _backward,
    _empty_gradients,
    setup=_backward_setup,
    backward=_backward_grad,
)


# --- in plain torch: (batch, heads, length, width), in the compute dtype ---


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _repeated(t: Tensor, group: int) -> Tensor:
    return t.transpose(1, 2).repeat_interleave(group, 1)


def _summed(t: Tensor, group: int) -> Tensor:
    """The inverse of ``_repeated`` for gradients."""
    b, h, *rest = t.shape
    found: Tensor = t.reshape(b, h // group, group, *rest).sum(2).transpose(1, 2)
    return found


def _scale(q: Tensor, how: How) -> float:
    return float(q.size(-1) ** -0.5) if how.scale is None else how.scale


def _segments(starts: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row its sequence (from 1 on), and its place in that; of each sequence its length."""
    edges = torch.nn.functional.pad(starts.long(), (1, 0))  # before the first sequence: number 0
    edges = torch.cat((edges, edges.new_full((1,), rows))).clamp(0, rows)
    at = torch.arange(rows, device=starts.device)
    number = torch.searchsorted(edges[1:-1], at, right=True)
    return number, at - edges[number], edges.diff()


def _distances(queries: int, keys: int, how: How, query_starts: Tensor, key_starts: Tensor) -> tuple[Tensor, Tensor]:
    """Of packed sequences: how far a key stands after a query, and whether they are of one sequence."""
    (i, at, m), (j, to, n) = _segments(query_starts, queries), _segments(key_starts, keys)
    position = at + (n - m)[i] if how.align == "end" else at
    same = (i[:, None] == j) & (j > 0) & (j < len(m) - 1)
    return to - position[:, None], same


def _scores(
    q: Tensor,
    k: Tensor,
    how: How,
    mask: Tensor | None,
    query_starts: Tensor | None = None,
    key_starts: Tensor | None = None,
    slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scores, and the tanh of the softcap."""
    s, bent = _scale(q, how) * (q @ k.mT), None
    if how.softcap:
        bent = torch.tanh(s / how.softcap)
        s = how.softcap * bent
    m, n = s.shape[-2:]
    if query_starts is not None and key_starts is not None:
        at, same = _distances(m, n, how, query_starts, key_starts)
        s = s.masked_fill(~same, -torch.inf)
    else:
        at = torch.arange(n, device=s.device) - torch.arange(m, device=s.device)[:, None]
        at = at - (n - m if how.align == "end" else 0)
    if slopes is not None:
        s = s + slopes[:, None, None].to(s.dtype) * at
    right = 0 if how.causal else how.right
    if right is not None:
        s = s.masked_fill(at > right, -torch.inf)
    if how.left is not None:
        s = s.masked_fill(at < -how.left, -torch.inf)
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask.to(s.dtype)
    return s, bent


def _factors(
    s: Tensor, state: Tensor, how: How, query_starts: Tensor | None = None, key_starts: Tensor | None = None
) -> Tensor:
    """What dropout multiplies probabilities of the scores ``s`` by: the numbers of the op ``dropout`` for rows of whole
    groups of 4 keys."""
    *rows, keys = s.shape
    ones = torch.ones((*rows, (keys + 3) // 4 * 4), dtype=s.dtype, device=s.device)
    found: Tensor = RECORDED["dropout"](ones, state, 0, 0, how.dropout_p, 0)
    if key_starts is None:
        return found[..., :keys]
    return found[..., _segments(key_starts, keys)[1]]  # keys count from the start of their sequence


def _softmax(s: Tensor, sink: Tensor | None = None) -> Tensor:
    """Probabilities; 0 in rows of -inf, and with gradients of 0 there. A sink is one more score."""
    if sink is not None:
        return _softmax(torch.cat((s, sink[:, None, None].to(s.dtype).expand(*s.shape[:-1], 1)), -1))[..., :-1]
    alive = (s != -torch.inf).any(-1, keepdim=True)
    return torch.where(alive, torch.softmax(torch.where(alive, s, 0), -1), 0)


def _plain(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, how: How, *others: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out and lse, differentiable in everything."""
    group, dtype = q.size(2) // k.size(2), q.dtype
    q, k, v = (t.to(_wide(dtype)) for t in (q.transpose(1, 2), _repeated(k, group), _repeated(v, group)))
    s, _ = _scores(q, k, how, *others[:-1])
    lse = s.detach().logsumexp(-1)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.detach()[:, None].to(lse.dtype))
    factors = 1 if others[-1] is None else _factors(s, others[-1], how, *others[1:3])
    return ((factors * _softmax(s, sink)) @ v).transpose(1, 2).to(dtype), lse


# --- functions ---


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
    by ``1 - dropout_p``, after lse; the backward draws again from the seed that ``generator`` gave.

    Returns (batch, queries, heads, width of v) in q's dtype, and (batch, heads, queries) in f32 (f64 for f64), which
    has no gradient. Differentiable in q, k, v and ``sink`` any number of times, and in ``mask`` and ``slopes``, in
    plain torch with memory for all scores. Raises ``RuntimeError`` for shapes, dtypes and devices that do not fit.
    """
    q, k, v = narrowed("scaled_dot_product_attention", q, k, v)
    _check("attention", q, k, v, mask)
    _check_shapes(q, k, v)
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
    slopes, sink = (None if t is None else t.to(_wide(q.dtype)) for t in (slopes, sink))
    state = None if how.dropout_p == 0 else device_state(q, generator)
    learned = [t for t in (mask, slopes) if t is not None and t.requires_grad]
    if learned and torch.is_grad_enabled():
        return _plain(q, k, v, sink, how, mask, *starts, slopes, state)
    if mask is not None and q.dtype == torch.float64:
        # No kernel takes a mask of bools for f64, nor with dropout one of f32.
        mask = torch.where(mask, 0.0, -torch.inf) if mask.dtype == torch.bool else mask
        mask = mask.to(q.dtype)
    found: tuple[Tensor, Tensor] = _attention(q, k, v, sink, mask, *starts, slopes, state, *how)
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
    _check(name, q, k, v, None)
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
    _check_shapes(q, k, v)
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
    _check(name, query, key, value, attn_mask)
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
    _check_shapes(q, k, v)
    mask = attn_mask
    if mask is not None:
        full = (*whole[0][:-3], heads[0], query.size(-2), key.size(-2))
        mask = mask.expand(full).reshape(-1, *full[-3:]) if len(full) > 4 else mask.expand(full)
    out, _ = _attend(name, q, k, v, mask, How(scale, is_causal, "start", None, None, 0.0, float(dropout_p)))
    rank = max(query.dim(), key.dim(), value.dim())
    shape = (*whole[0][:-3], heads[0], query.size(-2), value.size(-1))
    return out.transpose(1, 2).reshape(shape[len(shape) - rank :])
