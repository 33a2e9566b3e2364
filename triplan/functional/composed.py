"""Functions of several families: losses of differences, what a decoder does beside sampling, runs of equal elements.

A loss of differences is one launch, or two where its mean or sum is divided between programs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from triplan import expr
from triplan.errors import Unsupported, shown
from triplan.functional._autocast import widened
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import axis
from triplan.functional._sharding import copied, reshaped
from triplan.functional.copies import arange, cat
from triplan.functional.elementwise.expressions import expression
from triplan.functional.elementwise.maths import ne, sub
from triplan.functional.indexing import gather, index_select
from triplan.functional.losses.shared import legacy
from triplan.functional.reduced_expressions import reduce_expression
from triplan.functional.reductions import any, sum
from triplan.functional.sampling import sample
from triplan.functional.scans import cumprod, cumsum
from triplan.functional.sorting import searchsorted

__all__ = [
    "adjust_logits",
    "huber_loss",
    "l1_loss",
    "mse_loss",
    "smooth_l1_loss",
    "speculative_sample",
    "unique_consecutive",
]

Tensor = torch.Tensor
Tree = Callable[..., Any]  # of operands, as ``expression`` takes it


def _smooth(x: Any, y: Any, bound: Any) -> Any:
    apart = expr.abs(x - y)
    return expr.where(expr.lt(apart, bound), 0.5 * apart * apart / bound, apart - 0.5 * bound)


def _huber(x: Any, y: Any, bound: Any) -> Any:
    apart = expr.abs(x - y)
    return expr.where(expr.lt(apart, bound), 0.5 * apart * apart, bound * (apart - 0.5 * bound))


_TREES: dict[str, Tree] = {
    "l1_loss": lambda x, y: expr.abs(x - y),
    "mse_loss": lambda x, y: expr.square(x - y),
    "smooth_l1_loss": _smooth,
    "huber_loss": _huber,
}


def _quotient(x: Any, y: Any) -> Any:
    return x / y


def _weighted(tree: Tree) -> Tree:
    return lambda *operands: tree(*operands[:-1]) * operands[-1]


_WEIGHTED = {name: _weighted(tree) for name, tree in _TREES.items()}


def _loss(name: str, input: Tensor, target: Tensor, reduction: str, weight: Tensor | None, *bound: float) -> Tensor:
    """The elements' losses by the expression of ``name``, or their mean or sum."""
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{shown(reduction)} is not a valid value for reduction; valid are none, mean, sum")
    if input.shape != target.shape:
        warnings.warn(
            f"{name}(): a target of size {list(target.shape)} is broadcast against an input of {list(input.shape)}",
            stacklevel=4,
        )
    if weight is not None and weight.shape != input.shape:
        raise ValueError("Weights and input must have the same size.")
    input, target = widened(name, input, target)
    tree, operands = _TREES[name], [input, target, *bound]
    if weight is not None:
        tree, operands = _WEIGHTED[name], [*operands, weight]
    if reduction == "none":
        losses: Tensor = expression(tree, *operands)
        return losses
    if reduction != "mean" or weight is None or name == "huber_loss":
        return reduce_expression(reduction, tree, *operands)
    # torch divides a weighted mean by the sum of weights, except that of huber_loss.
    quotient: Tensor = expression(_quotient, reduce_expression("sum", tree, *operands), sum(weight))
    return quotient


@replayed
def mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """(input - target)^2, and its "mean" or "sum" unless ``reduction`` is "none" (torch.nn.functional.mse_loss).

    ``weight``, of the input's shape, multiplies the elements; a mean is then divided by its sum.
    """
    return _loss("mse_loss", input, target, legacy(reduction, size_average, reduce), weight)


@replayed
def l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """|input - target|, and its mean or sum (torch.nn.functional.l1_loss). ``weight``: as in ``mse_loss``."""
    return _loss("l1_loss", input, target, legacy(reduction, size_average, reduce), weight)


@replayed
def smooth_l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> Tensor:
    """d^2 / (2 beta) where d = |input - target| < beta, and d - beta / 2 elsewhere; its mean or sum
    (torch.nn.functional.smooth_l1_loss). Raises ``RuntimeError`` for a negative beta.
    """
    if beta < 0:
        raise RuntimeError(f"smooth_l1_loss does not support negative values for beta, but got {beta}")
    reduction = legacy(reduction, size_average, reduce)
    if beta == 0:
        return _loss("l1_loss", input, target, reduction, None)
    return _loss("smooth_l1_loss", input, target, reduction, None, float(beta))


@replayed
def huber_loss(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0, weight: Tensor | None = None
) -> Tensor:
    """d^2 / 2 where d = |input - target| < delta, and delta (d - delta / 2) elsewhere; its mean or sum
    (torch.nn.functional.huber_loss). ``weight``, of the input's shape, multiplies the elements. Raises ``RuntimeError``
    unless delta > 0.
    """
    if delta <= 0:
        raise RuntimeError(f"huber_loss does not support non-positive values for delta, but got {delta}")
    return _loss("huber_loss", input, target, reduction, weight, float(delta))


# --- decoding ---

#: Bits of a word of a mask.
_WORD = 32


@cache
def _adjusted(names: tuple[str, ...]) -> Tree:
    """The expression of ``adjust_logits`` with operands of these names."""

    def tree(*operands: Any) -> Any:
        given = dict(zip(names, operands, strict=True))
        x, counts = given["logits"], given.get("counts", 0)
        if "bias" in given:
            x = x + given["bias"]
        if "repetition" in given:
            seen = [counts > 0] if "counts" in given else []
            seen += [given["prompt"]] if "prompt" in given else []
            known = seen[0] if len(seen) == 1 else expr.logical_or(*seen)
            x = expr.where(known, expr.where(x > 0, x / given["repetition"], x * given["repetition"]), x)
        if "frequency" in given:
            x = x - given["frequency"] * counts
        if "presence" in given:
            x = x - expr.where(counts > 0, given["presence"], 0)
        if "words" in given:
            x = expr.where(expr.ne((given["words"] >> given["places"]) & 1, 0), x, -math.inf)
        elif "allowed" in given:
            x = expr.where(given["allowed"], x, -math.inf)
        return x

    return tree


def _columns(given: dict[str, Any], start: int, end: int, words: Tensor | None) -> Tensor:
    """``adjust_logits`` of some columns; with ``words`` of a mask, of whole ones or of the last."""
    bits = min(end - start, _WORD)
    split = (-1, bits) if words is not None else (end - start,)
    found = {}
    for name, value in given.items():
        if isinstance(value, Tensor) and name in ("bias", "counts", "prompt", "logits", "allowed"):
            value = value[..., start:end].reshape(*value.shape[:-1], *split)
        elif isinstance(value, Tensor):  # one value a row
            value = value.reshape(-1, *[1] * len(split))
        found[name] = value
    if words is not None:
        found["words"] = words[:, start // _WORD : -(-end // _WORD), None]
        found["places"] = arange(bits, dtype=words.dtype, device=words.device)
    out: Tensor = expression(_adjusted(tuple(found)), *found.values())
    return out.flatten(1) if words is not None else out


@replayed
def adjust_logits(
    logits: Tensor,
    *,
    bias: Tensor | None = None,
    counts: Tensor | None = None,
    prompt: Tensor | None = None,
    repetition_penalty: float | Tensor = 1.0,
    frequency_penalty: float | Tensor = 0.0,
    presence_penalty: float | Tensor = 0.0,
    allowed: Tensor | None = None,
) -> Tensor:
    """Logits as requests want them before ``sample``, in one launch: bias, then penalties, then a mask.

    1. ``x + bias``.
    2. Of tokens that the request has seen (``counts > 0``, or in ``prompt``), ``x / repetition_penalty`` where x > 0
       and ``x * repetition_penalty`` elsewhere (Keskar et al., 2019, CTRL).
    3. ``x - frequency_penalty * counts - presence_penalty * (counts > 0)``, as OpenAI's API defines these.
    4. -inf for tokens that are not ``allowed``.

    Penalties are numbers, or tensors of one value a row: a batch of requests mixes them.

    Args:
        logits: [rows, vocabulary], floats.
        bias: [vocabulary] or [rows, vocabulary], floats.
        counts: [rows, vocabulary], integers: how often the request has generated each token.
        prompt: [rows, vocabulary], bool: the tokens of the request's prompt.
        allowed: [rows, vocabulary], bool; or [rows, ceil(vocabulary / 32)], i32, of which bit ``i % 32`` of word
            ``i // 32`` allows token i, as grammars give it. A vocabulary that is no multiple of 32 takes two launches
            more for the latter.

    Returns:
        [rows, vocabulary] of torch's promotion of the operands: f32 where penalties or biases are tensors of it. If
        nothing is to be done, ``logits``.

    Raises:
        RuntimeError: a shape, a dtype or a device does not fit; a penalty without the ``counts`` that it needs.
    """
    if logits.dim() != 2 or not logits.is_floating_point():
        raise RuntimeError(f"adjust_logits(): {logits.dtype} {tuple(logits.shape)}; expected a matrix of floats")
    rows, n = logits.shape
    words = allowed if allowed is not None and allowed.dtype is torch.int32 else None
    if words is not None and tuple(words.shape) != (rows, -(-n // _WORD)):
        raise RuntimeError(f"adjust_logits(): allowed is {tuple(words.shape)}; expected {(rows, -(-n // _WORD))} words")
    mask = allowed if words is None else None
    for name, tensor in {"bias": bias, "counts": counts, "prompt": prompt, "allowed": mask}.items():
        if tensor is None:
            continue
        kind = {"counts": "integers", "bias": "floats"}.get(name, "bool")
        found = "floats" if tensor.is_floating_point() else "bool" if tensor.dtype is torch.bool else "integers"
        if found != kind or tuple(tensor.shape) not in ([(rows, n), (n,)] if name == "bias" else [(rows, n)]):
            raise RuntimeError(
                f"adjust_logits(): {name} is {tensor.dtype} {tuple(tensor.shape)}; expected {kind} {(rows, n)}"
            )
    given: dict[str, Any] = {"logits": logits, "bias": bias, "allowed": mask}
    penalties = {"repetition": repetition_penalty, "frequency": frequency_penalty, "presence": presence_penalty}
    for name, value in penalties.items():
        if isinstance(value, Tensor) and value.shape not in ((), (1,), (rows,)):
            raise RuntimeError(f"adjust_logits(): {name}_penalty is {tuple(value.shape)}; expected ({rows},)")
        if not isinstance(value, Tensor) and value == (1 if name == "repetition" else 0):
            continue
        if counts is None and (name != "repetition" or prompt is None):
            raise RuntimeError(f"adjust_logits(): {name}_penalty needs counts" + " or prompt" * (name == "repetition"))
        given |= {name: value, "counts": counts}
        given |= {"prompt": prompt} if name == "repetition" else {}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) == 1 and words is None:
        return logits
    if words is None or n % _WORD == 0 or n < _WORD:
        return _columns(given, 0, n, words)
    whole = n // _WORD * _WORD
    return cat([_columns(given, 0, whole, words), _columns(given, whole, n, words)], 1)


#: Added to the positions at which acceptance draws: tokens of a request are drawn at smaller ones.
_ACCEPTANCE = 1 << 62


def _chances(p: Any, q: Any, draft: Any, side: Any) -> Any:
    """The logarithm of the chance min(1, p / q) that a token of the draft is accepted; on side 0, that it is not."""
    chance = expr.where(expr.logical_and(p > 0, draft >= 0), expr.where(p >= q, 1.0, p / q), 0.0)
    return expr.log(expr.where(expr.eq(side, 1), chance, 1.0 - chance))


def _places(row: Any, count: Any, position: Any, length: Any) -> Any:
    """Where the row's next distribution stands, the one of the draft there, the latter's token; the next position."""
    last = expr.minimum(count, length - 1)
    return row * (length + 1) + count, row * length + last, last, position + count


def _rest(p: Any, q: Any, place: Any, token: Any, count: Any, length: Any) -> Any:
    """log(max(p - q, 0)), of p alone where nothing was rejected; and where rounding leaves nothing, log(p) - 69.

    ``q`` is negative if the draft was certain of its ``token``.
    """
    proposed = expr.where(q < 0, expr.where(expr.eq(place, token), p, 0.0), q)
    rejected = expr.where(expr.logical_and(count < length, token >= 0), proposed, 0.0)
    return expr.log(expr.maximum(p - rejected, 0.0) + p * 1e-30)


def _joined(place: Any, count: Any, draft: Any, last: Any) -> Any:
    return expr.where(place < count, draft, expr.where(expr.eq(place, count), last, -1))


def _sum(x: Any, y: Any, z: Any) -> Any:
    return x + y + z


def _at_least_0(x: Any) -> Any:
    return expr.maximum(x, 0)


@replayed
def speculative_sample(
    draft: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    *,
    seed: int | Tensor,
    position: int | Tensor = 0,
) -> tuple[Tensor, Tensor]:
    """The tokens of a draft that a target model accepts, and one more, so that all are distributed as the target's.

    Token x of the draft is accepted with probability ``min(1, p(x) / q(x))``. At the first that is not, the next token
    is drawn from ``max(p - q, 0)``, normalised; if all are, from the target's distribution behind the draft (Leviathan
    et al., 2023, Fast Inference from Transformers via Speculative Decoding). A row's tokens depend on that row, its
    seed and its position alone. Nothing waits for the device; the steps are launches of their own. Not differentiable.

    Args:
        draft: [rows, length] of i64, length >= 1; -1 behind the end of a shorter draft.
        draft_probs: [rows, length, vocabulary] of f32, what the draft was drawn from; None: it was certain (q = 1).
        target_probs: [rows, length + 1, vocabulary] of f32.
        seed: that of a request, or one for all; as in ``sample``.
        position: number of the draft's first token within its request.

    Returns:
        tokens [rows, length + 1] of i64, -1 behind the last; and how many of the draft were accepted, [rows] of i64.

    Raises:
        RuntimeError: a shape or dtype does not fit.
    """
    rows, length = draft.shape if draft.dim() == 2 else (-1, -1)
    n = target_probs.shape[-1]
    shapes = {"draft": (draft, (rows, length)), "target_probs": (target_probs, (rows, length + 1, n))}
    if draft_probs is not None:
        shapes["draft_probs"] = (draft_probs, (rows, length, n))
    for name, (tensor, shape) in shapes.items():
        dtype = torch.int64 if name == "draft" else torch.float32
        if length < 1 or tuple(tensor.shape) != shape or tensor.dtype is not dtype:
            raise RuntimeError(f"speculative_sample(): {name} is {tensor.dtype} {tuple(tensor.shape)}; see its shapes")
    device = draft.device
    at = position.reshape(-1, 1).expand(rows, 1) if isinstance(position, Tensor) else position
    seeds = seed.reshape(-1, 1).expand(rows, length).reshape(-1) if isinstance(seed, Tensor) else seed
    row, place, token = (copied(arange(count, device=device), draft) for count in (rows, length + 1, n))

    known = expression(_at_least_0, draft)[:, :, None]
    p = gather(target_probs[:, :length], 2, known)
    q = gather(draft_probs, 2, known) if draft_probs is not None else 1.0
    chances = expression(_chances, p, q, draft[:, :, None], place[:2])
    drawn_at = expression(_sum, place[None, :length].expand(rows, length), at, _ACCEPTANCE)
    accepted = sample(reshaped(chances, (rows * length, 2)), seed=seeds, position=drawn_at.reshape(-1)).view(
        rows, length
    )
    count = sum(cumprod(accepted, 1), 1)

    after, before, last, then = expression(_places, row, count, position, length)
    p = index_select(reshaped(target_probs, (-1, n)), 0, after)
    q = index_select(reshaped(draft_probs, (-1, n)), 0, before) if draft_probs is not None else -1.0
    missed = gather(draft, 1, last[:, None])
    rest = expression(_rest, p, q, token, missed, count[:, None], length)
    found = sample(rest, seed=seed, position=then)
    whole = cat([draft, missed], 1)  # one column more, which is not the draft's
    tokens: Tensor = expression(_joined, place, count[:, None], whole, found[:, None])
    return tokens, count


# --- runs of equal elements ---


def unique_consecutive(
    input: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """The first element of each run of equal ones (torch.unique_consecutive).

    Args:
        input: floats, integers or bool of any shape and strides. NaN equals nothing, -0.0 equals 0.0.
        return_inverse: also return, for each element, the number of its run, in i64.
        return_counts: also return the length of each run, in i64.
        dim: the slices along this axis are compared instead; None: the elements, row-major.

    Returns:
        The first elements, or a tuple of them, numbers and counts. The gradient of the first elements goes to them.

    How many runs there are decides the size of the result, so the host waits for the device, once. Calls are therefore
    neither replayed nor captured in CUDA graphs. Raises ``IndexError`` for ``dim``, ``RuntimeError`` for complex
    numbers and where ``dim`` leaves slices without elements, ``Unsupported`` under capture.
    """
    if input.is_complex():
        raise RuntimeError(f"unique_consecutive(): {input.dtype} is not supported; expected floats, integers or bool")
    if input.is_cuda and torch.cuda.is_current_stream_capturing():
        raise Unsupported(
            "unique_consecutive() cannot be captured in a CUDA graph, as the host must wait for the number of runs"
        )
    if dim is not None and input.dim() == 0:
        raise IndexError(f"Dimension specified as {dim} but tensor has no dimensions")
    at = 0 if dim is None else axis(dim, input.dim())
    items = input.reshape(-1) if dim is None else input.movedim(at, 0)
    n = items.shape[0]
    if dim is not None and not items[:1].numel() and (n or items.shape[1:].numel() == 0):
        raise RuntimeError("There are 0 sized dimensions, and they aren't selected, so unique cannot be applied")
    if n:
        values = items.detach()
        differs = ne(values[1:], values[:-1])
        if items.dim() > 1:
            differs = any(differs.reshape(n - 1, items.shape[1:].numel()), 1)
        inverse = cat([torch.zeros(1, dtype=torch.int64, device=input.device), cumsum(differs, 0)])
        runs = int(inverse[-1]) + 1
    else:
        inverse, runs = torch.zeros(0, dtype=torch.int64, device=input.device), 0
    first = searchsorted(inverse, arange(runs + 1, device=input.device))
    found = index_select(items, 0, first[:-1]) if dim is None else index_select(input, at, first[:-1])
    more = [inverse.reshape(input.shape) if dim is None else inverse] if return_inverse else []
    if return_counts:
        more.append(sub(first[1:], first[:-1]))
    return (found, *more) if more else found
