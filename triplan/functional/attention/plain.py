"""Attention in plain torch: tensors are (batch, heads, length, width), in the compute dtype."""

from __future__ import annotations

import torch

from triplan.functional._ops import RECORDED
from triplan.functional.attention.shared import How, Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def repeated(t: Tensor, group: int) -> Tensor:
    return t.transpose(1, 2).repeat_interleave(group, 1)


def summed(t: Tensor, group: int) -> Tensor:
    """The inverse of ``repeated`` for gradients."""
    b, h, *rest = t.shape
    found: Tensor = t.reshape(b, h // group, group, *rest).sum(2).transpose(1, 2)
    return found


def scale_of(q: Tensor, how: How) -> float:
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


def scores(
    q: Tensor,
    k: Tensor,
    how: How,
    mask: Tensor | None,
    query_starts: Tensor | None = None,
    key_starts: Tensor | None = None,
    slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scores, and the tanh of the softcap."""
    s, bent = scale_of(q, how) * (q @ k.mT), None
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


def factors_of(
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


def softmax(s: Tensor, sink: Tensor | None = None) -> Tensor:
    """Probabilities; 0 in rows of -inf, and with gradients of 0 there. A sink is one more score."""
    if sink is not None:
        return softmax(torch.cat((s, sink[:, None, None].to(s.dtype).expand(*s.shape[:-1], 1)), -1))[..., :-1]
    alive = (s != -torch.inf).any(-1, keepdim=True)
    return torch.where(alive, torch.softmax(torch.where(alive, s, 0), -1), 0)


def plain(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, how: How, *others: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out and lse, differentiable in everything."""
    group, dtype = q.size(2) // k.size(2), q.dtype
    q, k, v = (t.to(wide(dtype)) for t in (q.transpose(1, 2), repeated(k, group), repeated(v, group)))
    s, _ = scores(q, k, how, *others[:-1])
    lse = s.detach().logsumexp(-1)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.detach()[:, None].to(lse.dtype))
    factors = 1 if others[-1] is None else factors_of(s, others[-1], how, *others[1:3])
    return ((factors * softmax(s, sink)) @ v).transpose(1, 2).to(dtype), lse
