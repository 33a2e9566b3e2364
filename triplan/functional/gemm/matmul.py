"""linear and matmul, as torch has them: matrix products of tensors of any rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from triplan.functional._autocast import narrowed
from triplan.functional._forward import Linearity
from triplan.functional._ops import Op, composed
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import broadcast, require
from triplan.functional._sharding import divides, reshaped
from triplan.functional._watching import needs_grad, transformed
from triplan.functional.gemm.products import _addbmm, _addmm, _bmm, _check_factors, _gradients, _mm, _run_product

__all__ = ["linear", "matmul"]

Tensor = torch.Tensor


# --- linear ---


def _linear_shape(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Sequence[int]:
    if weight.dim() != 2 or input.dim() < 1:
        raise RuntimeError(
            f"linear(): input is {list(input.shape)} and weight {list(weight.shape)}; a matrix is needed"
        )
    _check_factors("linear", input, weight, *(() if bias is None else (bias,)))
    require(
        input.size(-1) == weight.size(1),
        lambda: (
            f"linear(): mat1 and mat2 shapes cannot be multiplied (input {list(input.shape)}, weight "
            f"{list(weight.shape)})"
        ),
    )
    if bias is not None:
        require(
            bias.dim() == 1 and bias.size(0) == weight.size(0),
            lambda: f"linear(): bias is {list(bias.shape)}; [{weight.size(0)}] is expected",
        )
    return (*input.shape[:-1], weight.size(0))


def _as_matrix(t: Tensor) -> Tensor:
    return t if t.dim() == 2 else reshaped(t, (math.prod(t.shape[:-1]), t.size(-1)))


def _linear_fill(out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    if out.dim() == 2 or out.is_contiguous():
        _run_product(_as_matrix(input), weight.t(), _as_matrix(out), bias=bias)
        return
    # An ``out`` of more than two axes whose rows may have no common stride: it cannot be viewed as a matrix.
    packed = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    _run_product(_as_matrix(input), weight.t(), _as_matrix(packed), bias=bias)
    out.copy_(packed)


def _linear_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    input, weight, _ = inputs
    ctx.save_for_backward(input, weight)


def _linear_grad(ctx: Any, grad: Tensor) -> Any:
    input, weight = ctx.saved_tensors
    to_input, to_weight, to_bias = (*ctx.needs_input_grad, False)[:3]
    if input.dim() == 3 and (divides(grad, (1,)) or divides(input, (1,))):
        # Ranks have a part of each sequence, which would be no part of a matrix: their products are summed as batches.
        total = weight.new_empty(weight.shape)  # not read
        return (
            _linear(grad, weight.t(), None) if to_input else None,
            _addbmm(total, grad.mT, input, 0, 1) if to_weight else None,
            grad.sum((0, 1)) if to_bias else None,
        )
    rows = _as_matrix(grad)
    # Gradients of input @ weight.t(): db is the transpose of weight's.
    da, db, dbias = _gradients(rows, _as_matrix(input), weight.t(), to_input, to_weight, to_bias)
    return None if da is None else da.reshape(input.shape), None if db is None else db.t(), dbias


_linear = Op(
    "linear",
    "Tensor input, Tensor weight, Tensor? bias=None",
    axes="*k, nk, n+k -> *n+k",
    shape=_linear_shape,
    fill=_linear_fill,
    setup=_linear_setup,
    backward=_linear_grad,
    linearity=Linearity(terms=(2,), factors=(0, 1)),
)


@replayed
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """``input @ weight.T + bias`` (torch.nn.functional.linear), rounded once.

    ``input`` (..., k), ``weight`` (n, k) and ``bias`` (n,), or a bias that broadcasts to the result, have one dtype, as
    for ``mm``; the result is (..., n). With a weight (k,), the result is (...) and the bias has no axis. Differentiable
    in all three. Raises ``RuntimeError`` for shapes, dtypes and devices that do not fit.
    """
    if out is not None:
        return composed(
            "linear",
            out,
            tuple(t for t in (input, weight, bias) if t is not None),
            lambda: _any_linear(input, weight, bias),
        )
    return _any_linear(*narrowed("linear", input, weight), *narrowed("linear", bias))


def _any_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.dim() == 1 and (bias is None or bias.dim() == 0):
        return _any_linear(input, weight.unsqueeze(0), bias).squeeze(-1)
    if bias is None or weight.dim() != 2 or input.dim() == 0 or (bias.dim() == 1 and bias.size(0) != 1):
        return _linear(input, weight, bias)
    shape = (*input.shape[:-1], weight.size(0))
    if bias.dim() > 2 or (bias.dim() == 2 and bias.size(0) != 1 and input.dim() != 2):
        bias = _as_matrix(bias.expand(shape))
    return _addmm(bias, _as_matrix(input), weight.t(), 1, 1).reshape(shape)


# --- matmul ---


@replayed
def matmul(input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``input @ other`` (torch.matmul): vectors, matrices, and batches of matrices whose axes broadcast.

    Composed of ``mm`` and ``bmm``: a vector becomes a matrix of one row or column, and if ``other`` is no batch, all
    rows of ``input`` form one matrix. The gradient of a factor that broadcasts is one product, too, rounded once.
    Raises as ``mm`` and ``bmm`` do.
    """
    if out is None:
        return _matmul(*narrowed("matmul", input, other))
    return composed("matmul", out, (input, other), lambda: _matmul(input, other))


def _matmul(input: Tensor, other: Tensor) -> Tensor:
    if input.dim() == 0 or other.dim() == 0:
        raise RuntimeError(
            f"matmul(): both arguments to matmul need to be at least 1D, but they are {input.dim()}D and {other.dim()}D"
        )
    a = input.unsqueeze(0) if input.dim() == 1 else input
    b = other.unsqueeze(1) if other.dim() == 1 else other
    if b.dim() == 2:
        result = _mm(_as_matrix(a), b, 1).reshape((*a.shape[:-1], b.size(1)))
    else:
        lead = broadcast(a.shape[:-2], b.shape[:-2])
        a, b = (t.reshape((1,) * (len(lead) + 2 - t.dim()) + t.shape) for t in (a, b))
        if a.shape[:-2] != b.shape[:-2] and (needs_grad((a, b)) or transformed()):
            result = _broadcast_bmm(a, b)
        else:
            result = _bmm(*_batches(a, b), 1).reshape((*lead, a.size(-2), b.size(-1)))
    if input.dim() == 1:
        result = result.squeeze(-2)
    return result.squeeze(-1) if other.dim() == 1 else result


def _batches(input: Tensor, mat2: Tensor) -> list[Tensor]:
    """Both factors with one batch axis, over which they are broadcast. Copied only where strides cannot say that."""
    lead = broadcast(input.shape[:-2], mat2.shape[:-2])
    return [t.expand((*lead, *t.shape[-2:])).reshape((math.prod(lead), *t.shape[-2:])) for t in (input, mat2)]


def _broadcast_shape(input: Tensor, mat2: Tensor) -> Sequence[int]:
    _check_factors("bmm", input, mat2)
    lead = broadcast(input.shape[:-2], mat2.shape[:-2])
    require(
        input.size(-1) == mat2.size(-2),
        lambda: f"matmul(): {list(input.shape)} and {list(mat2.shape)} cannot be multiplied",
    )
    return (*lead, input.size(-2), mat2.size(-1))


def _broadcast_fill(out: Tensor, input: Tensor, mat2: Tensor) -> None:
    first, second = _batches(input, mat2)
    _run_product(first, second, out.view((first.size(0), *out.shape[-2:])))


def _broadcast_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _broadcast_grad(ctx: Any, grad: Tensor) -> Any:
    input, mat2 = ctx.saved_tensors
    to_input, to_mat2 = ctx.needs_input_grad
    return (
        _summed_product(grad, mat2.mT, input.shape) if to_input else None,
        _summed_product(input.mT, grad, mat2.shape) if to_mat2 else None,
    )


def _summed_product(a: Tensor, b: Tensor, shape: Sequence[int]) -> Tensor:
    """``a @ b``, summed over the batch axes that ``shape`` does not have, within one product.

    A product accumulates in f32; a sum of products would round each of them to 16 bits.
    """
    m = len(shape) - 2
    lead = broadcast(a.shape[:-2], b.shape[:-2])
    summed = [d for d in range(m) if shape[d] != lead[d]]
    kept = [d for d in range(m) if d not in summed]
    a, b, k = a.permute(*kept, m, *summed, m + 1), b.permute(*kept, *summed, m, m + 1), len(kept)
    # (torch batches no flatten in autograd.grad.)
    a = a.reshape(*a.shape[: k + 1], math.prod(a.shape[k + 1 :]))
    b = b.reshape(*b.shape[:k], math.prod(b.shape[k:-1]), b.shape[-1])
    return (_broadcast_bmm(a, b) if kept else _mm(a, b, 1)).reshape(shape)


#: As ``_bmm`` of the factors broadcast, bits too, but for the gradients of what is broadcast.
_broadcast_bmm = Op(
    "broadcast_bmm",
    "Tensor input, Tensor mat2",
    axes="*mk, *kn -> *mn+k",
    shape=_broadcast_shape,
    fill=_broadcast_fill,
    setup=_broadcast_setup,
    backward=_broadcast_grad,
    linearity=Linearity(factors=(0, 1)),
)
