"""Cross-entropy of a linear layer's output, without the logits of all rows (Hsu et al., "Liger Kernel", 2024).

Rows are taken in chunks. The logits of a chunk are multiplied, their losses and gradients found, and the gradients
multiplied further, before the next chunk's logits take their place. So the forward of a reduced loss also computes the
gradients, of the sum of the losses; the backward only scales them. With reduction ``"none"`` each row has a factor of
its own: the backward computes the logits again.

The gradient of the weight is accumulated over chunks, by products that are added to it (beta = 1): in the compute
element, or where memory matters more (torch's ``acc_policy="compact"``) in its own. Second derivatives are in plain
torch, with all logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from triplan import expr
from triplan.facade import CrossEntropyBackwardPlan, CrossEntropyPlan
from triplan.facade.check import check_storage
from triplan.facade.plan import plan_type
from triplan.functional import _plans
from triplan.functional._autocast import narrowed, widened
from triplan.functional._ops import RECORDED, Recorded
from triplan.functional._plans import run, run_expression, run_reduced_expression
from triplan.functional._replay.recording import is_plain
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import check_same_device
from triplan.functional._sharding import any_dtensor
from triplan.functional._watching import transformed
from triplan.functional.losses.cross_entropy import _by_class, _shares, _softmax, cross_entropy
from triplan.functional.losses.shared import HOW, How, checked, compute_dtype, raise_if_any, run_loss

__all__ = ["linear_cross_entropy"]

Tensor = torch.Tensor
#: Bytes of logits, and of copies of their shape, that exist at a time, or up to a half more: with 131,072 classes,
#: 2,048 rows of bf16. Of fewer rows, the products would take less time than the weight's gradient, which each chunk
#: reads and writes. Untuned.
CHUNK_BYTES = 512 << 20
#: Rows of a chunk are a multiple of this, the tile of a product.
CHUNK_ROWS = 128

_z, _y, _cap = (expr.operand(name) for name in ("z", "y", "cap"))
_CAPPED, _UNCAPPED = expr.softcap_tanh(_z, _cap), _y * (1 - expr.square(expr.tanh(_z / _cap)))
_target, _classes, _ignored = (expr.operand(name) for name in ("target", "classes", "ignored"))
_losses, _divisor, _g, _dloss = (expr.operand(name) for name in ("losses", "divisor", "g", "dloss"))
#: 1 for a row that is kept.
_KEPT = expr.where(expr.ge(_target, 0) & expr.lt(_target, _classes) & expr.ne(_target, _ignored), 1.0, 0.0)
#: The gradient of the loss from ``g``, that of the sum of losses. A mean over no row has none.
_SCALED = _g * expr.where(expr.gt(_divisor, 0), _dloss / _divisor, 0.0)


@replayed
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: object = None,
    softcap: float = 0.0,
    check_indices: bool = False,
) -> Tensor:
    """``cross_entropy(linear(input, linear_weight, linear_bias), target)`` (torch.nn.functional.linear_cross_entropy),
    without the logits of all rows: at most 1.5 times ``CHUNK_BYTES`` (512 MiB) of logits exist at a time, or 128
    rows more than that. The gradient of the weight takes as much memory as the weight in f32, until the backward;
    with ``options`` as little as it can.

    ``input``: f16, bf16, f32 or f64 of shape (N, features) or (features); ``linear_weight``: (C, features);
    ``linear_bias``: (C). All have one dtype, under autocast the autocast dtype; logits are rounded to it. (A weight of
    f32 is rounded to it for the products, and its gradient is not.) ``target``:
    u8, i32 or i64 class indices of shape (N) or (). ``weight``, ``reduction`` (``"mean"``, ``"sum"`` or ``"none"``),
    ``ignore_index`` (by default -100) and ``label_smoothing`` as in ``cross_entropy``. ``softcap`` c > 0 replaces each
    logit z by ``c * tanh(z / c)``.
    ``options``: torch's ``LinearCrossEntropyOptions``, or anything hashable with its attributes. With its
    ``acc_policy`` of ``"compact"`` or ``"auto"``, at most half as many logits exist, and the gradient of an f16 or bf16
    weight is summed in its own dtype: it is rounded once for each chunk. The backward then writes over what the forward
    kept, so that a second one raises ``RuntimeError``, unless ``allow_retain_graph``. Other attributes change nothing.

    Class probabilities as ``target``, and weights of more than two axes, are computed in plain torch, with all logits.

    Returns a 0-d tensor, or with ``"none"`` one of ``target``'s shape, in ``input``'s dtype. Deterministic.
    Differentiable in input, weight and bias, any number of times. A mean over no row is NaN, and its gradient 0. Raises
    ``IndexError`` for a target outside the classes on the CPU; on CUDA such a row is ignored, or with ``check_indices``
    the call synchronises and raises. ``RuntimeError`` or ``ValueError`` for arguments that do not fit.
    """
    classes, features = linear_weight.shape[:1], linear_weight.shape[1:-1]
    if input.dim() not in (1, 2) or linear_weight.dim() < 2 or input.size(-1) != linear_weight.size(-1):
        raise RuntimeError(
            f"linear_cross_entropy(): input of {list(input.shape)} and linear_weight of {list(linear_weight.shape)} do "
            "not fit: expected (N, features) or (features), and (C, features)"
        )
    if linear_bias is not None and linear_bias.shape != classes + features:
        raise RuntimeError(
            f"linear_cross_entropy(): expected linear_bias of {list(classes + features)}, but got "
            f"{list(linear_bias.shape)}"
        )
    if softcap < 0:
        raise ValueError(f"linear_cross_entropy(): softcap = {softcap}: must be 0 (none) or positive")
    if features and input.dim() == 1:
        raise RuntimeError("linear_cross_entropy(): with a weight of more than two axes, input must be a matrix")
    probabilities = target.shape == input.shape[:-1] + classes + features
    if probabilities and ignore_index is not None:
        raise RuntimeError("linear_cross_entropy(): class probabilities have no ignore_index")
    ignored = -100 if ignore_index is None else ignore_index
    (input,) = narrowed("linear", input)
    (linear_bias,) = narrowed("linear", linear_bias)
    if probabilities or features:
        (linear_weight,) = narrowed("linear", linear_weight)
        logits = _logits(input, linear_weight, linear_bias, softcap)
        return cross_entropy(
            logits, target, weight, ignore_index=ignored, reduction=reduction, label_smoothing=label_smoothing
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{reduction:.200} is not a valid value for reduction; valid are mean, sum, none")
    # Under autocast the op itself rounds a weight of f32: its gradient then stays f32.
    (like,) = narrowed("linear", linear_weight.detach().new_empty(0))
    if linear_weight.dtype != torch.float32:
        (linear_weight,) = narrowed("linear", linear_weight)
    tensors = [t for t in (input, linear_weight, linear_bias) if t is not None]
    check_same_device("linear_cross_entropy", *tensors, target)
    if any(t.dtype != input.dtype for t in (input, like, *tensors[2:])):
        raise RuntimeError(f"linear_cross_entropy(): dtypes differ: {', '.join(str(t.dtype) for t in tensors)}")
    how = How(reduction, ignored, label_smoothing, check_indices)
    if not torch.compiler.is_compiling() and any_dtensor(tensors):
        return _of_dtensors(input, linear_weight, linear_bias, target, weight, softcap, how)
    logits = input.detach().new_empty(1).expand(*input.shape[:-1], *classes)  # a shape alone
    _, rows, weight, _ = checked("linear_cross_entropy", logits, target, weight, None, how)
    every = transformed() or torch.compiler.is_compiling()
    wanted = [torch.is_grad_enabled() and t is not None and (every or t.requires_grad) for t in (*tensors, None)[:3]]
    matrix = input if input.dim() == 2 else input.unsqueeze(0)
    bits = sum(1 << i for i, wants in enumerate(wanted) if wants)
    wide = widened("nll_loss", input.detach().new_empty(0))[0].dtype != input.dtype
    # (An f32 weight that autocast rounds has a gradient of f32, which is not summed in less.)
    compact = getattr(options, "acc_policy", None) in ("compact", "auto") and linear_weight.dtype == input.dtype
    once = compact and not getattr(options, "allow_retain_graph", False)
    out: Tensor = _op(matrix, linear_weight, linear_bias, rows, weight, softcap, bits, wide, compact, once, *how)[0]
    # (fully_shard warns of modules that return a view.)
    return out.reshape(target.shape) if reduction == "none" else out


def _of_dtensors(
    x: Tensor, linear: Tensor, bias: Tensor | None, target: Tensor, weight: Tensor | None, softcap: float, how: How
) -> Tensor:
    """With the logits of all rows. Each rank has those of the classes, or of the rows, that it has."""
    logits = RECORDED["linear"](x, linear.to(x.dtype), bias)
    if softcap:
        logits = RECORDED["expression_1_1"](logits, "softcap_tanh tn", [softcap])
    return cross_entropy(
        logits,
        target,
        weight,
        reduction=how.reduction,
        ignore_index=how.ignore_index,
        label_smoothing=how.label_smoothing,
        check_indices=how.check_indices,
    )


def _logits(x: Tensor, linear_weight: Tensor, bias: Tensor | None, softcap: float) -> Tensor:
    """In plain torch: (N, C), and further axes of the weight."""
    flat = None if bias is None else bias.flatten()
    z = functional.linear(x, linear_weight.flatten(0, -2), flat).reshape(*x.shape[:-1], *linear_weight.shape[:-1])
    return softcap * torch.tanh(z / softcap) if softcap else z


class _Chunks:
    """The chunks of one call, and what their logits are multiplied into."""

    def __init__(
        self, x: Tensor, linear: Tensor, bias: Tensor | None, softcap: float, copies: int, compact: bool
    ) -> None:
        """``copies``: further buffers of the logits' shape. ``compact``: half as many bytes of logits, and the
        weight's gradient in the element."""
        self.x, self.linear, self.bias, self.softcap = x, linear.to(x.dtype), bias, softcap
        self.dlinear_dtype = x.dtype if compact else compute_dtype(x)
        n, classes = x.size(0), linear.size(0)
        each = max(classes, 1) * x.element_size() * (1 + (softcap > 0) + copies)
        # Chunks of one size: a last one of few rows would take almost as long as the others.
        chunks = max(round(n * each * (1 + compact) / CHUNK_BYTES), 1)
        self.rows = min(n, -(-n // (chunks * CHUNK_ROWS)) * CHUNK_ROWS)
        self.starts = range(0, n, max(self.rows, 1))
        self.z = x.new_empty(self.rows, classes)
        self.y = torch.empty_like(self.z) if softcap else self.z
        self.grads: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)

    def wants(self, which: int) -> None:
        """Allocate the gradients of input (1), weight (2) and bias (4)."""
        compute, (n, features), classes = compute_dtype(self.x), self.x.shape, self.linear.size(0)
        self.grads = (
            self.x.new_empty(n, features) if which & 1 else None,
            self.x.new_empty(classes, features, dtype=self.dlinear_dtype) if which & 2 else None,
            self.x.new_zeros(classes, dtype=compute) if which & 4 else None,
        )
        if n == 0 and self.grads[1] is not None:
            self.grads[1].zero_()

    def logits(self, start: int) -> Tensor:
        """Those of the chunk at row ``start``."""
        x = self.x[start : start + self.rows]
        z, y = self.z[: x.size(0)], self.y[: x.size(0)]
        operands = {"a": x, "b": self.linear.t(), "c": z}
        if self.bias is not None:
            run(plan_type("gemm"), {**operands, "bias": self.bias}, epilogue="bias")
        else:
            run(plan_type("gemm"), operands)
        if self.softcap:
            run_expression({"z": z, "y": y}, "y", _CAPPED, {"cap": self.softcap})
        return y

    def accumulate(self, start: int, dlogits: Tensor) -> None:
        """Multiply the gradients of a chunk's logits on."""
        x = self.x[start : start + self.rows]
        if self.softcap:
            operands = {"y": dlogits, "z": self.z[: x.size(0)], "out": dlogits}  # over what is read no more
            run_expression(operands, "out", _UNCAPPED, {"cap": self.softcap})
        dx, dlinear, dbias = self.grads
        if dx is not None:
            run(plan_type("gemm"), {"a": dlogits, "b": self.linear, "c": dx[start : start + self.rows]})
        if dlinear is not None:
            added = {"c0": dlinear} if start else {}
            run(plan_type("gemm"), {"a": dlogits.t(), "b": x, "c": dlinear, **added})
        if dbias is not None:
            part = torch.empty_like(dbias)
            run(plan_type("gemm_backward"), {"dc": dlogits, "dbias": part}, wants_da=False, wants_db=False)
            dbias += part


def _fake(
    x: Tensor,
    linear: Tensor,
    bias: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    softcap: float,
    wants: int,
    wide: bool,
    compact: bool,
    once: bool,
    *how: Any,
) -> tuple[Tensor, ...]:
    """(loss, lse, divisor, gradients of the sum of losses); where nothing is wanted, empty.

    ``wide``: whether the loss is in the compute dtype, not in x's. ``compact``: whether the weight's gradient is in
    x's. ``once``: whether the backward may write over the gradients.
    """
    compute, reduced = compute_dtype(x), How(*how).reduction != "none"
    wants = wants if reduced else 0
    return (
        x.new_empty(() if reduced else target.shape, dtype=compute if wide else x.dtype),
        x.new_empty(target.shape, dtype=compute),
        x.new_empty((), dtype=compute),
        x.new_empty(x.shape if wants & 1 else (0,)),
        x.new_empty(linear.shape if wants & 2 else (0,), dtype=x.dtype if compact else compute),
        x.new_empty(linear.shape[:1] if wants & 4 else (0,), dtype=compute),
    )


def _kernel(
    x: Tensor,
    linear: Tensor,
    bias: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    softcap: float,
    wants: int,
    wide: bool,
    compact: bool,
    once: bool,
    *options: Any,
) -> tuple[Tensor, ...]:
    for t in (x, linear, bias, target, weight):
        if t is not None:
            check_storage("linear_cross_entropy", "an argument", t)  # before torch's ops, which do not look
    how, compute, classes = How(*options), compute_dtype(x), linear.size(0)
    if how.check_indices or _plans.always_checks(x.device):
        outside = ((target < 0) | (target >= classes)) & (target != how.ignore_index)
        raise_if_any("linear_cross_entropy", target, outside, classes)
    reduced = how.reduction != "none"
    gradient = reduced and wants != 0
    chunks = _Chunks(x, linear, bias, softcap, 0, compact)
    if gradient:
        chunks.wants(wants)
    losses, lse = (x.new_empty(target.shape, dtype=compute) for _ in range(2))
    each = how._replace(reduction="sum" if gradient else "none", check_indices=False)
    for start in chunks.starts:
        y, part = chunks.logits(start), slice(start, start + chunks.rows)
        operands = {"x": y, "target": target[part], "losses": losses[part], "lse": lse[part], "weight": weight}
        if gradient:
            operands["loss"] = x.new_empty(1)
        run_loss(CrossEntropyPlan, each, operands, gradient=gradient, in_place=gradient)
        if gradient:
            chunks.accumulate(start, y)
    grads = (x.new_empty(0), x.new_empty(0, dtype=chunks.dlinear_dtype), x.new_empty(0, dtype=compute))
    found = tuple(e if g is None else g for e, g in zip(grads, chunks.grads, strict=True))
    dtype = compute if wide else x.dtype
    if not reduced:
        return losses.to(dtype), lse, losses.new_ones(()), *found
    if how.reduction == "sum":
        return losses.sum().to(dtype), lse, losses.new_ones(()), *found
    loss, divisor = _mean(losses, target, weight, classes, how.ignore_index, dtype)
    return loss, lse, divisor, *found


def _mean(
    losses: Tensor, target: Tensor, weight: Tensor | None, classes: int, ignored: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The mean of the rows that are kept, NaN if none is, and its divisor."""
    if weight is not None or not len(target):
        kept = (target >= 0) & (target < classes) & (target != ignored)
        table = losses.new_ones(classes) if weight is None else weight
        divisor = torch.where(kept, table[torch.where(kept, target, 0).long()], 0).sum()
        return (losses.sum() / divisor).to(dtype), divisor
    divisor, loss = losses.new_empty(()), losses.new_empty((), dtype=dtype)
    numbers = {"classes": classes, "ignored": ignored}
    run_reduced_expression("sum", {"target": target, "out": divisor}, (0,), _KEPT, numbers)
    run_reduced_expression("sum", {"losses": losses, "divisor": divisor, "out": loss}, (0,), _losses / _divisor)
    return loss, divisor


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, linear, bias, target, weight, ctx.softcap, _, _, ctx.compact, ctx.once, *ctx.how = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, linear, bias, target, weight, *output[1:])


def _grad(ctx: Any, dloss: Tensor | None, *_: Any) -> Any:
    nothing = (None,) * (7 + len(ctx.how))
    if dloss is None:
        return None, None, None, *nothing
    x, linear, bias, target, weight, lse, divisor, *grads = ctx.saved_tensors
    how, wanted = How(*ctx.how)._replace(check_indices=False), ctx.needs_input_grad[:3]
    given = [g.numel() > 0 or t.numel() == 0 for g, t in zip(grads, (x, linear, linear), strict=True)]
    reduced = how.reduction != "none"
    if torch.is_grad_enabled() or (reduced and any(w and not g for w, g in zip(wanted, given, strict=True))):
        return *_plain(dloss, x, linear, bias, target, weight, ctx.softcap, how), *nothing
    if not reduced:
        bits = sum(1 << i for i, wants in enumerate(wanted) if wants)
        grads = list(_backward(dloss, x, linear, bias, target, weight, lse, ctx.softcap, bits, ctx.compact, *how))
        dloss = torch.ones_like(divisor)
    dtypes = (x.dtype, linear.dtype, x.dtype)
    found = [
        _scaled(g, dt, dloss, divisor, ctx.once) if w else None for g, dt, w in zip(grads, dtypes, wanted, strict=True)
    ]
    return *found, *nothing


def _scaled(g: Tensor, dtype: torch.dtype, dloss: Tensor, divisor: Tensor, once: bool) -> Tensor:
    """``g * dloss / divisor``, or 0 for a divisor of 0; rounded to ``dtype`` once. With ``once`` an eager call writes
    over ``g``, if it has that dtype: autograd then refuses to give it a second time."""
    if not is_plain(g, dloss):
        factor = torch.where(divisor > 0, dloss.to(divisor.dtype) / divisor, 0)
        return (g.to(factor.dtype) * factor).to(dtype)  # (a factor without axes would be rounded to g's dtype)
    over = once and g.dtype == dtype
    if over:
        torch.autograd.graph.increment_version(g)
    out = g if over else torch.empty_like(g, dtype=dtype)
    # The layout of a tensor without axes cannot say that it is aligned less.
    operands = {"g": g, "dloss": dloss.reshape(1), "divisor": divisor, "out": out}
    run_expression(operands, "out", _SCALED)
    return out


def _plain(
    dloss: Tensor,
    x: Tensor,
    linear: Tensor,
    bias: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    softcap: float,
    how: How,
) -> tuple[Tensor | None, ...]:
    """The gradients in torch's differentiable ops, with all logits: see ``cross_entropy`` on shares."""
    compute, wide = compute_dtype(x), linear.dtype
    linear = linear.to(x.dtype)
    y = _logits(x, linear, bias, softcap).to(compute)
    shares = _shares(linear.size(0), target, weight, None, how, compute)
    whole, p = _softmax(y, shares)
    dz = _by_class(dloss, p) * (whole * p - shares)
    if softcap:
        dz = dz * (1 - (y / softcap) ** 2)
    dz = dz.to(x.dtype)
    return dz @ linear, (dz.t() @ x).to(wide), None if bias is None else dz.sum(0)


def _backward_fake(dloss: Tensor, x: Tensor, linear: Tensor, *others: Any) -> tuple[Tensor, ...]:
    wants, compact = others[5:7]
    compute = compute_dtype(x)
    shapes, dtypes = (x.shape, linear.shape, linear.shape[:1]), (x.dtype, x.dtype if compact else compute, compute)
    return tuple(
        x.new_empty(shape if wants & 1 << i else (0,), dtype=dtype)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    )


def _backward_kernel(
    dloss: Tensor,
    x: Tensor,
    linear: Tensor,
    bias: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    softcap: float,
    wants: int,
    compact: bool,
    *options: Any,
) -> tuple[Tensor, ...]:
    """The gradients where each row has its own ``dloss``: the logits are computed again."""
    how, dloss = How(*options), dloss.to(compute_dtype(x)).contiguous()
    chunks = _Chunks(x, linear, bias, softcap, 1, compact)
    chunks.wants(wants)
    d = torch.empty_like(chunks.z)
    for start in chunks.starts:
        y, part = chunks.logits(start), slice(start, start + chunks.rows)
        dy = d[: y.size(0)]
        operands = {"dloss": dloss[part], "x": y, "target": target[part], "lse": lse[part], "dx": dy, "weight": weight}
        run_loss(CrossEntropyBackwardPlan, how, operands)
        chunks.accumulate(start, dy)
    empty = _backward_fake(dloss, x, linear, bias, target, weight, lse, softcap, 0, compact)
    return tuple(e if g is None else g for e, g in zip(empty, chunks.grads, strict=True))


def _refuse(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError("linear_cross_entropy_backward is not differentiable")


def _gradient_axes(wants: int) -> str:
    return f"{'n.' if wants & 1 else ''}, {'..+n' if wants & 2 else ''}, {'.+n' if wants & 4 else ''}"


def _axes(*args: Any) -> str | None:
    wants, reduction = args[6], args[10]
    loss = {"none": "n", "sum": "+n"}.get(reduction)
    grads = _gradient_axes(wants if reduction == "sum" else 0)
    return None if loss is None else f"n., .., ., n, . -> {loss}, n, , {grads}"


def _backward_axes(*args: Any) -> str | None:
    wants, reduction = args[8], args[10]
    return f"n, n., .., ., n, ., n -> {_gradient_axes(wants)}" if reduction == "none" else None


_TENSORS = "Tensor x, Tensor linear, Tensor? bias, Tensor target, Tensor? weight"
_op = Recorded(
    "linear_cross_entropy",
    f"({_TENSORS}, float softcap, int wants, bool wide, bool compact, bool once, {HOW})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _kernel,
    _fake,
    axes=_axes,
    setup=_setup,
    backward=_grad,
)
_backward = Recorded(
    "linear_cross_entropy_backward",
    f"(Tensor dloss, {_TENSORS}, Tensor lse, float softcap, int wants, bool compact, {HOW})"
    " -> (Tensor, Tensor, Tensor)",
    _backward_kernel,
    _backward_fake,
    axes=_backward_axes,
    setup=lambda ctx, inputs, output: None,
    backward=_refuse,
)
