"""Rotary position embedding of queries and keys, in one launch, which also writes a cache of keys and values.

The backward of ``rotary`` is the same op with sin negated. It is linear in q and k, so it is its own derivative, of any
order.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from triplan.facade import CachedRotaryPlan, NormedRotaryPlan, Plan, RotaryPlan
from triplan.functional._forward import Linearity
from triplan.functional._ops import RECORDED, Recorded, Writing
from triplan.functional._plans import run
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import check_index_dtype, check_same_device, require

__all__ = ["cached_rotary", "rotary"]

Tensor = torch.Tensor
Pairs = Literal["half", "interleaved"]


@overload
def rotary(
    q: Tensor,
    k: None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    inv_freq: Tensor | None = None,
    scale: float = 1.0,
    rotary_dim: int | None = None,
    pairs: Pairs = "half",
    seq_dim: int = -2,
    inverse: bool = False,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    check_indices: bool = False,
) -> Tensor: ...


@overload
def rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    inv_freq: Tensor | None = None,
    scale: float = 1.0,
    rotary_dim: int | None = None,
    pairs: Pairs = "half",
    seq_dim: int = -2,
    inverse: bool = False,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    check_indices: bool = False,
) -> tuple[Tensor, Tensor]: ...


@replayed
def rotary(
    q: Tensor,
    k: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    inv_freq: Tensor | None = None,
    scale: float = 1.0,
    rotary_dim: int | None = None,
    pairs: Pairs = "half",
    seq_dim: int = -2,
    inverse: bool = False,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    check_indices: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Each pair (x, y) of elements of a head becomes ``(x * cos - y * sin, y * cos + x * sin)`` (RoFormer, 2021).

    ``q``, ``k``: f16, bf16, f32 or f64 of shape (heads, sequence, elements), with ``seq_dim`` -3 (sequence, heads,
    elements), with or without a batch before these; their heads may differ in number, and their strides be any. ``k``
    is rotated in the same launch. The first ``rotary_dim`` elements of a head are rotated, others copied. ``pairs``:
    "half" rotates element i with element i + rotary_dim / 2, "interleaved" 2 * i with 2 * i + 1.

    ``cos``, ``sin``: (positions, rotary_dim / 2) or, with each value twice, (positions, rotary_dim), in q's dtype or
    f32; with a batch before these, a table for each of the batch. By default they have one column for each element
    of a head, or one for each pair of ``rotary_dim``. Or ``inv_freq`` of shape (rotary_dim / 2,): cos and sin are then
    computed from the angles ``position * inv_freq`` in f32 (f64 for f64), and multiplied by ``scale``.

    ``positions``: i32 or i64 of shape (sequence,) or (batch, sequence); by default 0, 1, 2, ... One outside the tables
    raises ``IndexError`` on the CPU, and on CUDA with ``check_indices``, which synchronises; else its rotated elements
    are 0.

    With ``q_weight`` (and ``k_weight``), vectors of q's dtype, each head is normalised first, in the same launch and
    without a rounding between: ``x / sqrt(mean(x**2) + eps) * weight``.

    Returns a new tensor with q's shape (with ``k``, a tuple of two), and its strides if they have no gaps. ``inverse``
    negates sin. Differentiable in q, k and the weights, any number of times. Raises ``RuntimeError`` for shapes, dtypes
    and devices that do not fit, and for tables that require a gradient.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (cos, sin, inv_freq)):
        raise RuntimeError("rotary(): cos, sin and inv_freq get no gradient; pass them without (Tensor.detach)")
    how = _how(q, cos, sin, inv_freq, positions, scale, rotary_dim, pairs, seq_dim)
    how = (*how, inverse, check_indices)
    if q_weight is None and k_weight is None:
        out = _rotary(q, k, *how)
    elif q_weight is None or (k is None) != (k_weight is None) or inverse:
        raise RuntimeError("rotary(): takes a weight of q, and one of k if there is a k; the norm has no inverse")
    else:
        out = _normed(q, k, q_weight, k_weight, eps, *how)
    found: tuple[Tensor, Tensor] = out[:2]
    return found[0] if k is None else found


def _how(
    q: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    inv_freq: Tensor | None,
    positions: Tensor | None,
    scale: float,
    rotary_dim: int | None,
    pairs: Pairs,
    seq_dim: int,
) -> tuple[Any, ...]:
    """These as the registered ops take them: of tables with each value twice one of each."""
    if cos is not None and sin is not None:
        length = q.size(-1)
        rotated = rotary_dim or (length if cos.size(-1) == length else 2 * cos.size(-1))
        if cos.size(-1) == rotated:
            half, repeated = rotated // 2, pairs == "half"
            cos, sin = (t[..., :half] if repeated else t[..., ::2] for t in (cos, sin))
    interleaved = {"half": False, "interleaved": True}[pairs]
    heads_first = {-2: True, -3: False}[seq_dim]
    return cos, sin, inv_freq, positions, scale, rotary_dim, interleaved, heads_first


def _check(
    name: str,
    q: Tensor,
    k: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    inv_freq: Tensor | None,
    positions: Tensor | None,
    rotary_dim: int | None,
    heads_first: bool,
) -> None:
    def refuse(text: str) -> None:
        raise RuntimeError(f"{name}(): {text}")

    if q.dim() not in (3, 4) or not q.is_floating_point():
        refuse(f"expected q of rank 3 or 4 and a floating-point dtype, but got {q.dtype} of {list(q.shape)}")
    if k is not None and (k.dim() != q.dim() or k.dtype != q.dtype):
        refuse(f"q is {q.dtype} of {list(q.shape)}, but k {k.dtype} of {list(k.shape)}")
    seq = -2 if heads_first else -3
    if k is not None and (_tokens(k, seq) != _tokens(q, seq) or k.size(-1) != q.size(-1)):
        refuse(f"q {list(q.shape)} and k {list(k.shape)} may differ in their heads only")
    tables = [t for t in (cos, sin) if t is not None]
    if len(tables) == 1 or bool(tables) == (inv_freq is not None):
        refuse("takes either cos and sin, or inv_freq")
    check_same_device(name, *(t for t in (q, k, *tables, inv_freq, positions) if t is not None))
    batch, sequence = _tokens(q, seq)
    angles = tables or [t for t in (inv_freq,) if t is not None]
    half = angles[0].size(-1)
    if 2 * half > q.size(-1) or (rotary_dim is not None and rotary_dim != 2 * half):
        refuse(f"{half} pairs do not fit heads of {q.size(-1)} elements with rotary_dim {rotary_dim}")
    if inv_freq is not None and (inv_freq.dim() != 1 or inv_freq.dtype != _compute(q)):
        refuse(f"expected inv_freq of rank 1 and {_compute(q)}, but got {inv_freq.dtype} of {list(inv_freq.shape)}")
    for t in tables:
        if t.shape != tables[0].shape or t.dim() not in (2, 3) or (t.dim() == 3 and t.size(0) not in (1, batch)):
            refuse(f"cos {list(tables[0].shape)} and sin {list(tables[1].shape)} do not fit a batch of {batch}")
        if t.dtype != tables[0].dtype or t.dtype not in (q.dtype, torch.float32):
            refuse(f"expected tables of {q.dtype} or f32, but got {tables[0].dtype} and {tables[1].dtype}")
    if tables and positions is None:
        rows = tables[0].size(-2)
        require(rows >= sequence, lambda: f"{name}(): tables of {rows} rows for {sequence} tokens")
    if positions is not None:
        check_index_dtype(name, positions)
        if tuple(positions.shape) not in ((sequence,), (batch, sequence), (1, sequence)):
            refuse(f"positions are {list(positions.shape)}; expected ({sequence},) or ({batch}, {sequence})")


def _check_weights(function: str, q: Tensor, q_weight: Tensor | None, k_weight: Tensor | None) -> None:
    for name, t in {"q_weight": q_weight, "k_weight": k_weight}.items():
        if t is not None and (t.shape != q.shape[-1:] or t.dtype != q.dtype or t.device != q.device):
            raise RuntimeError(
                f"{function}(): expected {name} of [{q.size(-1)}], {q.dtype} and on {q.device}, but got "
                f"{list(t.shape)}, {t.dtype} and on {t.device}"
            )


def _tokens(t: Tensor, seq: int) -> tuple[int, int]:
    """(batch, sequence)."""
    return (t.size(0) if t.dim() == 4 else 1), t.size(seq)


def _compute(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def _fake(q: Tensor, k: Tensor | None, *how: Any) -> tuple[Tensor, Tensor]:
    cos, sin, inv_freq, positions, _, rotary_dim, _, heads_first, *_ = how
    _check("rotary", q, k, cos, sin, inv_freq, positions, rotary_dim, heads_first)
    return torch.empty_like(q), q.new_empty(0) if k is None else torch.empty_like(k)


def _run(
    plan: type[Plan[Any, Any]], heads: dict[str, Tensor | None], others: dict[str, Tensor], how: Any, **options: Any
) -> None:
    """Run ``plan`` on operands of ``heads``, of the rank of q. ``how``: the arguments from ``cos`` on."""
    cos, sin, inv_freq, positions, scale, _, interleaved, heads_first, _, check_indices = how
    operands = dict(others)
    for name, t in heads.items():
        if t is not None:
            t = t.transpose(-3, -2) if heads_first else t
            t = t if t.dim() == 4 else t.unsqueeze(0)
            operands[name] = t[..., 0] if name.endswith("_rstd") else t
    batch, sequence = operands["q"].shape[:2]
    for name, t in {"cos": cos, "sin": sin}.items():
        if t is not None:
            operands[name] = t.expand(batch, t.size(-2), t.size(-1))
    if inv_freq is not None:
        operands["inv_freq"] = inv_freq
    if positions is not None:
        operands["positions"] = positions.expand(batch, sequence)
    scalars = None if inv_freq is None else {"scale": scale}
    options["pairs"] = "interleaved" if interleaved else "half"
    run(plan, operands, check_indices=check_indices, scalars=scalars, **options)


def _kernel(q: Tensor, k: Tensor | None, *how: Any) -> tuple[Tensor, Tensor]:
    found = _fake(q, k, *how)
    heads = {"q": q, "q_out": found[0], "k": k, "k_out": None if k is None else found[1]}
    _run(RotaryPlan, heads, {}, how, inverse=how[-2])
    return found


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, k, *angles, ctx.scale, ctx.rotary_dim, ctx.interleaved, ctx.heads_first, ctx.inverse, _ = inputs
    ctx.has_k = k is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*angles)


def _back(ctx: Any, angles: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The gradients, rotated back."""
    first, second = (dk, None) if dq is None else (dq, dk)
    if first is None:
        return None, None
    how = (ctx.scale, ctx.rotary_dim, ctx.interleaved, ctx.heads_first, not ctx.inverse, False)
    found = _rotary(first, second, *angles, *how)
    return (None, found[0]) if dq is None else (found[0], None if dk is None else found[1])


def _grad(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> Any:
    return *_back(ctx, ctx.saved_tensors, dq, dk if ctx.has_k else None), *(None,) * 10


def _turned(q: Any, heads_first: bool, positions: Any) -> tuple[str, str]:
    """The axes of the heads, and of the tables, frequencies and positions."""
    token = "t" if positions is not None and len(q.shape) != 3 else "."
    batch = "b" * (len(q.shape) == 4)
    heads = f"{batch}h{token}." if heads_first else f"{batch}{token}h."
    return heads, f"b.., b.., ., b{token}"


def _axes(q: Any, k: Any, cos: Any, sin: Any, freq: Any, positions: Any, *how: Any) -> str:
    heads, angles = _turned(q, how[3], positions)
    return f"{heads}, {heads}, {angles} -> {heads}, {heads if k is not None else ''}"


_ANGLES = (
    "Tensor? cos, Tensor? sin, Tensor? inv_freq, Tensor? positions, float scale, SymInt? rotary_dim, bool interleaved, "
    "bool heads_first"
)
_HOW = f"{_ANGLES}, bool inverse, bool check_indices"
_rotary = Recorded(
    "rotary",
    f"(Tensor q, Tensor? k, {_HOW}) -> (Tensor, Tensor)",
    _kernel,
    _fake,
    axes=_axes,
    setup=_setup,
    backward=_grad,
    linearity=Linearity((0, 1)),
)


# --- a norm of each head before ---


def _normed_fake(
    q: Tensor, k: Tensor | None, q_weight: Tensor, k_weight: Tensor | None, eps: float, *how: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_weights("rotary", q, q_weight, k_weight)
    q_rstd = q.new_empty(q.shape[:-1], dtype=_compute(q))
    return *_fake(q, k, *how), q_rstd, q.new_empty(0) if k is None else k.new_empty(k.shape[:-1], dtype=_compute(q))


def _normed_kernel(
    q: Tensor, k: Tensor | None, q_weight: Tensor, k_weight: Tensor | None, eps: float, *how: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = _normed_fake(q, k, q_weight, k_weight, eps, *how)
    heads: dict[str, Tensor | None] = {"q": q, "q_out": found[0], "q_rstd": found[2].unsqueeze(-1)}
    others = {"q_weight": q_weight}
    if k is not None and k_weight is not None:
        heads |= {"k": k, "k_out": found[1], "k_rstd": found[3].unsqueeze(-1)}
        others["k_weight"] = k_weight
    _run(NormedRotaryPlan, heads, others, how, eps=eps)
    return found


def _normed_setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, q_weight, k_weight, _, *angles, ctx.scale, ctx.rotary_dim, ctx.interleaved, ctx.heads_first, _, _ = inputs
    ctx.inverse = False
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, q_weight, k_weight, output[2], None if k is None else output[3], *angles)


def _normed_grad(ctx: Any, *grads: Tensor | None) -> Any:
    q, k, q_weight, k_weight, q_rstd, k_rstd, *angles = ctx.saved_tensors
    turned = _back(ctx, angles, grads[0], None if k is None else grads[1])
    found: list[Tensor | None] = []
    for x, weight, rstd, g, drstd in (
        (q, q_weight, q_rstd, turned[0], grads[2]),
        (k, k_weight, k_rstd, turned[1], grads[3]),
    ):
        if x is None or (g is None and drstd is None):
            found += [None, None]
            continue
        g = torch.zeros_like(x) if g is None else g
        dx, dweight, *_ = RECORDED["rms_norm_backward"](g, x, x.new_empty(0), rstd, weight, None, None, 1, 0)
        if drstd is not None:  # only second derivatives reach the statistics
            dx = dx - (x * (drstd * rstd**3 / x.size(-1)).unsqueeze(-1)).to(x.dtype)
        found += [dx, dweight]
    return found[0], found[2], found[1], found[3], *(None,) * 11


def _normed_axes(q: Any, k: Any, q_weight: Any, k_weight: Any, eps: float, *rest: Any) -> str:
    _, _, _, positions, *how = rest
    heads, angles = _turned(q, how[3], positions)
    keys = heads if k is not None else ""
    return f"{heads}, {heads}, ., ., {angles} -> {heads}, {keys}, {heads[:-1]}, {keys[:-1]}"


_normed = Recorded(
    "normed_rotary",
    f"(Tensor q, Tensor? k, Tensor q_weight, Tensor? k_weight, float eps, {_HOW}) -> (Tensor, Tensor, Tensor, Tensor)",
    _normed_kernel,
    _normed_fake,
    axes=_normed_axes,
    setup=_normed_setup,
    backward=_normed_grad,
)


# --- keys and values into a paged cache ---


@replayed
def cached_rotary(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    inv_freq: Tensor | None = None,
    scale: float = 1.0,
    rotary_dim: int | None = None,
    pairs: Pairs = "half",
    seq_dim: int = -2,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    check_indices: bool = False,
) -> Tensor:
    """``rotary`` of q and k for inference, whose launch also writes the rotated k, and v, into a paged cache.

    ``k_cache``, ``v_cache``: (pages, page_size, heads of k, elements) of q's dtype and any strides, so that (pages,
    heads, page_size, elements) is passed transposed; they are written in place. ``v``: as k, but the elements of a
    head, which may be another number. ``slots``: i32 or i64 of shape (batch, sequence), or (sequence,) of one sequence:
    token (b, s) is written to place ``slots[b, s] % page_size`` of page ``slots[b, s] // page_size``. A token with a
    negative slot is padding: its k and v are not written. All else in the caches stays as it is.

    Tokens that are written should have slots of their own. Of several with one slot any stays on CUDA, each element by
    itself; in torch's deterministic mode the last, which takes two launches more. A slot at or beyond the end is not
    written; it raises ``IndexError`` on the CPU, and on CUDA with ``check_indices``, which synchronises. So does a
    position outside the tables.

    The other arguments are those of ``rotary``, with weights of both q and k, or neither. Returns the rotated q, as
    ``rotary`` does. Raises ``RuntimeError`` for shapes, dtypes and devices that do not fit, for DTensors, and where an
    argument requires a gradient.
    """
    if (q_weight is None) != (k_weight is None):
        raise RuntimeError("cached_rotary(): takes weights of both q and k, or neither")
    how = _how(q, cos, sin, inv_freq, positions, scale, rotary_dim, pairs, seq_dim)
    norm = (q_weight, k_weight, None if q_weight is None else eps)
    found: Tensor = _cached(q, k, v, k_cache, v_cache, slots, *norm, *how, check_indices)
    return found


def _cached_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float | None,
    *how: Any,
) -> Tensor:
    name = "cached_rotary"
    cos, sin, inv_freq, positions, _, rotary_dim, _, heads_first, _ = how
    _check(name, q, k, cos, sin, inv_freq, positions, rotary_dim, heads_first)
    _check_weights(name, q, q_weight, k_weight)
    check_index_dtype(name, slots)
    check_same_device(name, q, v, k_cache, v_cache, slots)
    if v.shape[:-1] != k.shape[:-1] or v.dtype != q.dtype:
        raise RuntimeError(
            f"{name}(): expected v of {[*k.shape[:-1], 'any']} and {q.dtype}, but got {list(v.shape)} and {v.dtype}"
        )
    heads = k.size(-3 if heads_first else -2)
    for which, cache, length in (("k_cache", k_cache, k.size(-1)), ("v_cache", v_cache, v.size(-1))):
        if cache.dim() != 4 or cache.shape != (*k_cache.shape[:2], heads, length) or cache.dtype != q.dtype:
            raise RuntimeError(
                f"{name}(): expected {which} of (pages, page_size, {heads}, {length}), the pages of k_cache and "
                f"{q.dtype}, but got {list(cache.shape)} and {cache.dtype}"
            )
    batch, sequence = _tokens(q, -2 if heads_first else -3)
    if slots.shape != (batch, sequence) and (slots.shape != (sequence,) or batch != 1):
        raise RuntimeError(f"{name}(): slots are {list(slots.shape)}; expected ({batch}, {sequence})")
    return torch.empty_like(q)


def _cached_kernel(*args: Any) -> Tensor:
    q, k, v, k_cache, v_cache, slots, q_weight, k_weight, eps, *how, check_indices = args
    found = _cached_fake(*args)
    slots = slots if slots.dim() == 2 else slots.unsqueeze(0)
    written = {"slots": slots, "k_cache": k_cache, "v_cache": v_cache}
    weights = {} if q_weight is None else {"q_weight": q_weight, "k_weight": k_weight}
    heads = {"q": q, "q_out": found, "k": k, "v": v}
    _run(CachedRotaryPlan, heads, {**written, **weights}, (*how, False, check_indices), eps=eps)
    return found


_cached = Writing(
    "cached_rotary",
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, Tensor? q_weight, "
    f"Tensor? k_weight, float? eps, {_ANGLES}, bool check_indices) -> Tensor",
    _cached_kernel,
    _cached_fake,
)
