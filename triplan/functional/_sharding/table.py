"""The axes of every registered op, as ``engine`` reads them: a line an op, or a function of its arguments.

What an argument names in elements (sizes, positions, padding) is right for a part only if the axis is whole: such axes
are ``.`` here. Tensors are described by their ``shape`` and ``tensor_meta``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

#: The axes from the arguments; None: whole tensors.
Rule = Callable[..., "str | None"]
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _but(rank: int, *whole: int) -> str:
    """A letter for each axis, ``.`` for those in ``whole``."""
    at = {d % rank for d in whole} if rank else set()
    return "".join("." if i in at else _LETTERS[i] for i in range(rank))


def _dots(axes: int) -> str:
    return "." * axes


def _along(count: int) -> Rule:
    """``count`` tensors of one shape and a result of it, whose lines along the argument ``dim`` stay whole."""

    def rule(*args: Any) -> str:
        axes = _but(len(args[0].shape), args[count])
        return f"{', '.join([axes] * count)} -> {axes}"

    return rule


def _joined(*args: Any) -> str | None:
    *tensors, dim = args
    rank = len(tensors[0].shape)
    axes = _but(rank, dim)
    return f"{', '.join([axes] * len(tensors))} -> {axes}"


# --- products ---


def _gemm_backward(dc: Any, a: Any, b: Any, to_a: bool, to_b: bool, to_bias: bool, alpha: Any) -> str:
    return f"mn, mk, kn -> {'mk+n' * to_a}, {'kn+m' * to_b}, {'n+m' * to_bias}"


def _conv(grouped: str, plain: str) -> Rule:
    return lambda *args: grouped if args[-1] != 1 else plain


# --- rows ---


def _norm(x: Any, axes: int, weight: Any, bias: Any, residual: Any, *_: Any) -> str:
    row = _dots(axes)
    return f"*{row}, {row}, {row}, *{row} -> *{row}, *, *, *{row}"


def _rms(*args: Any) -> str:
    """Without a mean, in whose place an empty tensor stands."""
    given, _, made = _norm(*args).partition("->")
    out, _, rstd, summed = made.split(",")
    return f"{given} -> {out}, , {rstd}, {summed if args[4] is not None else ''}"


def _layer(*args: Any) -> str:
    text = _norm(*args)
    return text if args[4] is not None else text[: text.rindex(",") + 1]


def _norm_backward(mean: str) -> Rule:
    def rule(dout: Any, x: Any, _: Any, rstd: Any, weight: Any, bias: Any, dsummed: Any, axes: int, *__: Any) -> str:
        row = _dots(axes)
        sums = [f"{row}+*" if p is not None else "" for p in (weight, bias)]
        branch = f"*{row}" if dout.tensor_meta.dtype != x.tensor_meta.dtype else ""
        return f"*{row}, *{row}, {mean}, *, {row}, {row}, *{row} -> *{row}, {sums[0]}, {sums[1]}, {branch}"

    return rule


def _images(x: Any) -> str:
    return _dots(len(x.shape) - 2)


def _group_norm(x: Any, *_: Any) -> str:
    return f"n.{_images(x)}, ., . -> n.{_images(x)}, n., n."


def _group_norm_backward(dout: Any, x: Any, mean: Any, rstd: Any, weight: Any, bias: Any, *_: Any) -> str:
    row, sums = f"n.{_images(x)}", [".+n" if p is not None else "" for p in (weight, bias)]
    return f"{row}, {row}, n., n., ., . -> {row}, {sums[0]}, {sums[1]}"


def _batch_norm(x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *_: Any) -> str:
    image, running = f"{'.' if training else 'n'}c{_images(x)}", "c" if mean is not None and training else ""
    return f"{image}, c, c, c, c, {image} -> {image}, c, c, {running}, {running}"


def _batch_norm_backward(
    dout: Any, x: Any, mean: Any, rstd: Any, weight: Any, bias: Any, training: bool, out: Any, residual: bool
) -> str:
    image, rows = f"{'.' if training else 'n'}c{_images(x)}", "" if training else "+n"
    sums = [f"c{rows}" if p is not None else "" for p in (weight, bias)]
    return f"{image}, {image}, c, c, c, c, {image} -> {image}, {sums[0]}, {sums[1]}, {image * residual}"


# --- reductions ---


def _reduced(axes: str, rank: int, op: str, dims: Sequence[int], keepdim: bool) -> tuple[str, str]:
    """The axes of the result, and over which a sum of parts is the result of the whole."""
    gone = {d % max(rank, 1) for d in dims}
    kept = [("." if i in gone else c) for i, c in enumerate(axes) if keepdim or i not in gone]
    return "".join(kept), "".join(axes[i] for i in sorted(gone) if i < rank and op == "sum")


def _reduce(op: str, input: Any, dims: Sequence[int], keepdim: bool, *_: Any) -> str:
    rank = len(input.shape)
    kept, sums = _reduced(_but(rank), rank, op, dims, keepdim)
    axes = _but(rank) if op == "sum" else _but(rank, *dims)
    return f"{axes} -> {kept}{'+' + sums if sums else ''}"


def _extremum(op: str, input: Any, dims: Sequence[int], keepdim: bool, *_: Any) -> str:
    rank = len(input.shape)
    kept, _sums = _reduced(_but(rank), rank, op, dims, keepdim)
    return f"{_but(rank, *dims)} -> {kept}, {kept}"


def _reduced_expression(*args: Any) -> str:
    *tensors, _, _, op, dims, keepdim, _ = args
    rank = max(len(t.shape) for t in tensors)
    axes = _but(rank) if op == "sum" else _but(rank, *dims)
    kept, sums = _reduced(_but(rank), rank, op, dims, keepdim)
    return f"{', '.join([axes] * len(tensors))} -> {kept}{'+' + sums if sums else ''}"


# --- indexing ---


def _shared(dim: int, *tensors: Any) -> str | None:
    """Axes beside ``dim`` on which all ``tensors`` have one extent; None if their ranks differ."""
    rank = len(tensors[0].shape)
    if not rank or any(len(t.shape) != rank for t in tensors):
        return None
    apart = [d for d in range(rank) if len({t.shape[d] for t in tensors}) > 1]
    return _but(rank, dim, *apart)


def _with(axes: str, dim: int, letter: str) -> str:
    at = dim % len(axes)
    return axes[:at] + letter + axes[at + 1 :]


def _gather(input: Any, dim: int, index: Any, *_: Any) -> str | None:
    axes = _shared(dim, input, index)
    return axes and f"{axes}, {_with(axes, dim, 'z')} -> {_with(axes, dim, 'z')}"


def _gather_backward(grad: Any, dim: int, index: Any, shape: Sequence[int], *_: Any) -> str | None:
    rank = len(shape)
    if not rank or len(grad.shape) != rank:
        return None
    line = _with(_dots(rank), dim, "z")
    return f"{line}, {line} -> {_dots(rank)}+z"


def _scatter(sums: bool) -> Rule:
    def rule(input: Any, dim: int, index: Any, src: Any, *_: Any) -> str | None:
        axes = _shared(dim, input, index, src)
        if not axes:
            return None
        if not sums or index.shape[dim] != src.shape[dim]:
            return f"{axes}, {axes}, {axes} -> {axes}"
        line = _with(axes, dim, "z")
        return f"{axes}+z, {line}, {line} -> {axes}+z"

    return rule


def _index_select(input: Any, dim: int, index: Any, *_: Any) -> str | None:
    rank = len(input.shape)
    axes = _but(rank, dim)
    return f"{axes}, z -> {_with(axes, dim, 'z')}" if rank and len(index.shape) == 1 else None


def _index_select_backward(grad: Any, dim: int, index: Any, shape: Sequence[int], *_: Any) -> str | None:
    rank = len(shape)
    if not rank or len(index.shape) != 1:
        return None
    return f"{_with(_dots(rank), dim, 'z')}, z -> {_dots(rank)}+z"


def _index_add(input: Any, dim: int, index: Any, source: Any, *_: Any) -> str | None:
    rank = len(input.shape)
    if not rank or len(index.shape) != 1 or len(source.shape) != rank:
        return None
    axes = _but(rank, dim)
    return f"{axes}+z, z, {_with(axes, dim, 'z')} -> {axes}+z"


# --- copies ---


def _move(x: Any, op: str, amounts: Sequence[int], *_: Any) -> str:
    each = 2 if op == "pad" else 1
    moved = [a for a in range(len(x.shape)) if any(amounts[each * a : each * a + each])]
    axes = _but(len(x.shape), *moved)
    return f"{axes} -> {axes}"


# --- attention and rotary ---


def _attention(
    q: Any, k: Any, v: Any, sink: Any, mask: Any, starts: Any, key_starts: Any, slopes: Any, state: Any, *_: Any
) -> str | None:
    if state is not None:  # dropout draws by the number of a row among all
        return None
    return "b.h., b.h., b.h., h, bh.., ., ., h, . -> b.h., bh."


def _attention_backward(*args: Any) -> str | None:
    if args[10] is not None:
        return None
    return "b.h., b.h., b.h., b.h., b.h., bh., bh.., ., ., h, . -> b.h., b.h., b.h."


def _turned(q: Any, heads_first: bool, positions: Any, has_tables: bool) -> tuple[str, str]:
    """The axes of the heads, and of the tables, frequencies and positions."""
    token = "t" if positions is not None and len(q.shape) != 3 else "."
    batch = "b" * (len(q.shape) == 4)
    heads = f"{batch}h{token}." if heads_first else f"{batch}{token}h."
    return heads, f"b.., b.., ., b{token}"


def _rotary(q: Any, k: Any, cos: Any, sin: Any, freq: Any, positions: Any, *how: Any) -> str:
    heads, angles = _turned(q, how[3], positions, cos is not None)
    return f"{heads}, {heads}, {angles} -> {heads}, {heads if k is not None else ''}"


def _normed_rotary(q: Any, k: Any, q_weight: Any, k_weight: Any, eps: float, *rest: Any) -> str:
    cos, _, _, positions, *how = rest
    heads, angles = _turned(q, how[3], positions, cos is not None)
    keys = heads if k is not None else ""
    return f"{heads}, {heads}, ., ., {angles} -> {heads}, {keys}, {heads[:-1]}, {keys[:-1]}"


# --- losses ---


def _loss(results: int) -> Rule:
    """Rows are losses of their own, or terms of a sum; a mean needs the divisor of all rows."""

    def rule(x: Any, target: Any, weight: Any, bytes: Any, reduction: str, *_: Any) -> str | None:
        loss = {"none": "n*", "sum": "+n*"}.get(reduction)
        return None if loss is None else f"n.*, n*, ., . -> {loss}{', n*' * (results - 1)}"

    return rule


def _loss_backward(lse: bool) -> Rule:
    def rule(dloss: Any, x: Any, target: Any, *rest: Any) -> str | None:
        reduction = rest[3 if lse else 2]
        incoming = {"none": "n*", "sum": ""}.get(reduction)
        return None if incoming is None else f"{incoming}, n.*, n*{', n*' * lse}, ., . -> n.*"

    return rule


def _linear_loss(
    x: Any, linear: Any, bias: Any, target: Any, weight: Any, cap: float, wants: int, wide: bool, *how: Any
) -> str | None:
    loss = {"none": "n", "sum": "+n"}.get(how[0])
    if loss is None:
        return None
    wants = wants if how[0] == "sum" else 0
    grads = f"{'n.' if wants & 1 else ''}, {'..+n' if wants & 2 else ''}, {'.+n' if wants & 4 else ''}"
    return f"n., .., ., n, . -> {loss}, n, , {grads}"


def _linear_loss_backward(*args: Any) -> str | None:
    wants, reduction = args[8], args[9]
    if reduction != "none":
        return None
    grads = f"{'n.' if wants & 1 else ''}, {'..+n' if wants & 2 else ''}, {'.+n' if wants & 4 else ''}"
    return f"n, n., .., ., n, ., n -> {grads}"


RULES: dict[str, str | Rule] = {
    "linear": "*k, nk, n+k -> *n+k",
    "mm": "mk, kn -> mn+k",
    "bmm": "bmk, bkn -> bmn+k",
    "broadcast_bmm": "*mk, *kn -> *mn+k",
    "addmm": "mn+k, mk, kn -> mn+k",
    "baddbmm": "bmn+k, bmk, bkn -> bmn+k",
    "addbmm": "mn+kb, bmk, bkn -> mn+kb",
    "gemm_backward": _gemm_backward,
    "conv2d": _conv("n..., ...., . -> n...", "nc.., oc.., o+c -> no..+c"),
    "conv2d_backward_input": _conv("n..., .... -> n...", "no.., oc.. -> nc..+o"),
    "conv2d_backward_weight": _conv("n..., n... -> ....+n", "nc.., no.. -> oc..+n"),
    "softmax": _along(1),
    "softmax_backward": _along(2),
    "log_softmax": _along(1),
    "log_softmax_backward": _along(2),
    "cumsum": _along(1),
    "cumprod": _along(1),
    "cumprod_backward": _along(3),
    "packed_gate": _along(1),
    "packed_gate_backward": _along(2),
    "layer_norm": _layer,
    "layer_norm_backward": _norm_backward("*"),
    "rms_norm": _rms,
    "rms_norm_backward": _norm_backward("."),
    "l2_norm": "n. -> n., n",
    "l2_norm_backward": "n., n., n -> n.",
    "group_norm": _group_norm,
    "group_norm_backward": _group_norm_backward,
    "batch_norm": _batch_norm,
    "batch_norm_backward": _batch_norm_backward,
    "reduce": _reduce,
    "extremum": _extremum,
    "attention": _attention,
    "attention_backward": _attention_backward,
    "attention_qkvpacked": "b... -> b..., b..",
    "attention_qkvpacked_backward": "b..., b..., b..., b.. -> b...",
    "rotary": _rotary,
    "normed_rotary": _normed_rotary,
    "embedding": ".e, * -> *e",
    "embedding_backward": "*e, * -> .e+*",
    "normed_embedding": ".., *, . -> *., *., *",
    "gather": _gather,
    "gather_backward": _gather_backward,
    "scatter_add": _scatter(sums=True),
    "scatter": _scatter(sums=False),
    "scatter_reduce": _scatter(sums=False),
    "index_select": _index_select,
    "index_select_backward": _index_select_backward,
    "index_add": _index_add,
    "cross_entropy": _loss(2),
    "cross_entropy_backward": _loss_backward(lse=True),
    "nll_loss": _loss(1),
    "nll_loss_backward": _loss_backward(lse=False),
    "linear_cross_entropy": _linear_loss,
    "linear_cross_entropy_backward": _linear_loss_backward,
    "cast": "* -> *",
    "contiguous": "* -> *",
    "copy": "*, * -> *",
    "fill": "* -> *",
    "masked_fill": "*, * -> *",
    "move": _move,
    "triangle": "*.. -> *..",
    "sample": "r., r, r, r, r, r, r -> r",
    "max_pool2d": "nc.. -> nc.., nc..",
    "max_pool2d_backward": "nc.., nc.. -> nc..",
}
RULES |= {
    f"{name}2d{back}": "nc.. -> nc.."
    for name in ("avg_pool", "adaptive_avg_pool", "upsample_nearest", "upsample_bilinear")
    for back in ("", "_backward")
}
#: Ops that draw by the number of an element among all, write it, or choose where they write by values.
WHOLE = {"topk", "kthvalue", "sort", "argsort", "searchsorted"}
WHOLE |= {"random", "bernoulli", "dropout", "dropout_and_keep", "arange", "index_put", "masked_scatter"}


def rule_of(name: str) -> str | Rule | None:
    """The rule of the op ``name`` (without its namespace); None: whole tensors."""
    found = RULES.get(name)
    if found is not None:
        return found
    family, _, numbers = name.rpartition("_")
    if family == "reduced_expression":
        return _reduced_expression
    if family == "cat":
        return _joined
    family, _, tensors = family.rpartition("_")
    if family == "expression":
        return f"{', '.join('*' * int(tensors))} -> {', '.join('*' * int(numbers))}"
    return None
