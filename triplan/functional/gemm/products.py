"""Products of matrices and of batches of matrices: mm, bmm, addmm, baddbmm and addbmm, as torch has them.

The gradients of a product are products with one transposed factor. A transposed factor is one of other strides, which
plans take as they are, so nothing is copied. ``gemm_backward`` computes several gradients of one product in one plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from triplan.errors import Unsupported
from triplan.facade import BatchedGemmPlan, GemmBackwardPlan, GemmPlan
from triplan.facade.check import check_storage
from triplan.functional._autocast import narrowed
from triplan.functional._forward import Linearity
from triplan.functional._ops import Op, Recorded
from triplan.functional._plans import run, tf32_allowed
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import check_same_device, require
from triplan.functional._watching import transformed

__all__ = ["addbmm", "addmm", "baddbmm", "bmm", "mm"]

Tensor = torch.Tensor
Gradients = tuple["Tensor | None", "Tensor | None", "Tensor | None"]
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Multiplied exactly into i32, of which the result keeps the low byte, as torch does. Signs do not change that byte.
_BYTES = (torch.int8, torch.uint8)


def _check_factors(op: str, first: Tensor, second: Tensor, *others: Tensor) -> None:
    check_same_device(op, first, second, *others)
    for t in (second, *others):
        if t.dtype != first.dtype:
            raise RuntimeError(
                f"{op}(): expected m1 and m2 to have the same dtype, but got: {first.dtype} != {t.dtype}"
            )
    if first.dtype not in (*_DTYPES, *_BYTES):
        raise Unsupported(
            f"{op}(): {first.dtype} factors are not supported, only f16, bf16, f32, f64 and, exactly, i8 and u8 "
            "(torch multiplies wider integers on the CPU only)"
        )


def _run_product(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    alpha: float = 1,
    beta: float = 1,
    c0: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    """Run a plan: c = alpha * a @ b + beta * c0 + bias, for matrices or batches of matrices."""
    if c.dtype in _BYTES:
        whole = torch.empty(c.shape, dtype=torch.int32, device=c.device)
        c0, bias = (None if t is None else t.int() for t in (c0, bias))
        _run_product(a.view(torch.int8), b.view(torch.int8), whole, alpha=alpha, beta=beta, c0=c0, bias=bias)
        c.copy_(whole)
        return
    operands = {"a": a, "b": b, "c": c}
    options: dict[str, Any] = {}
    scalars: dict[str, Any] = {} if alpha == 1 else {"alpha": alpha}
    if c0 is not None:
        operands["c0"] = c0
        scalars |= {} if beta == 1 else {"beta": beta}
    if bias is not None:
        operands["bias"] = bias
        options["epilogue"] = "bias"
    if tf32_allowed(a, "matmul"):
        options["math"] = "tf32"
    run(GemmPlan if a.dim() == 2 else BatchedGemmPlan, operands, scalars=scalars, **options)


# --- mm ---


def _mm_shape(input: Tensor, mat2: Tensor, alpha: float = 1) -> Sequence[int]:
    for name, t in (("self", input), ("mat2", mat2)):
        if t.dim() != 2:
            raise RuntimeError(f"mm(): {name} must be a matrix, got {t.dim()}-D tensor")
    _check_factors("mm", input, mat2)
    require(
        input.size(1) == mat2.size(0),
        lambda: (
            f"mm(): mat1 and mat2 shapes cannot be multiplied ({input.size(0)}x{input.size(1)} and "
            f"{mat2.size(0)}x{mat2.size(1)})"
        ),
    )
    return (input.size(0), mat2.size(1))


def _mm_fill(out: Tensor, input: Tensor, mat2: Tensor, alpha: float = 1) -> None:
    _run_product(input, mat2, out, alpha=alpha)


def _mm_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    input, mat2, ctx.alpha = inputs
    ctx.save_for_backward(input, mat2)


def _mm_grad(ctx: Any, grad: Tensor) -> Any:
    input, mat2 = ctx.saved_tensors
    to_input, to_mat2 = ctx.needs_input_grad[:2]
    return (*_gradients(grad, input, mat2, to_input, to_mat2, alpha=ctx.alpha)[:2], None)


_mm = Op(
    "mm",
    "Tensor input, Tensor mat2, Scalar alpha=1",
    axes="mk, kn -> mn+k",
    shape=_mm_shape,
    fill=_mm_fill,
    setup=_mm_setup,
    backward=_mm_grad,
    linearity=Linearity(factors=(0, 1)),
)


@replayed
def mm(input: Tensor, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``input @ mat2`` (torch.mm) of (m, k) and (k, n): f16, bf16, f32 or f64, one dtype for both, of any strides.

    i8 and u8 too: they accumulate exactly, and the result wraps around, as in torch; wider integers are refused. f16
    and bf16 accumulate in f32. f32 multiplies in f32, or in tf32 where torch's settings allow it. Differentiable in
    both. Under autocast the product has the autocast dtype, except for f64 and with ``out=``, as in torch. Raises
    ``RuntimeError`` for ranks, shapes, dtypes and devices that do not fit.
    """
    if out is not None:
        return _mm.into(out, input, mat2, 1)
    return _mm(*narrowed("mm", input, mat2), 1)


# --- gemm_backward ---


def _empty_gradients(
    dc: Tensor, a: Tensor, b: Tensor, to_a: bool, to_b: bool, to_bias: bool, alpha: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for da, db and dbias. da and db have the strides of dense factors; what is not wanted is empty."""
    return (
        torch.empty_like(a) if to_a else a.new_empty(0),
        torch.empty_like(b) if to_b else b.new_empty(0),
        dc.new_empty(dc.shape[1] if to_bias else 0),
    )


def _run_backward(
    dc: Tensor, a: Tensor, b: Tensor, to_a: bool, to_b: bool, to_bias: bool, alpha: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(da, db, dbias) of ``alpha * a @ b + bias``: dc (m, n), a (m, k) and b (k, n) of one dtype."""
    da, db, dbias = found = _empty_gradients(dc, a, b, to_a, to_b, to_bias, alpha)
    operands: dict[str, Any] = {"dc": dc}
    operands |= {"a": a} if to_b else {}
    operands |= {"b": b, "da": da} if to_a else {}
    operands |= {"db": db} if to_b else {}
    operands |= {"dbias": dbias} if to_bias else {}
    options: dict[str, Any] = {"math": "tf32"} if tf32_allowed(dc, "matmul") else {}
    scalars = {"alpha": alpha} if alpha != 1 and (to_a or to_b) else {}
    run(GemmBackwardPlan, operands, scalars=scalars, **options)
    return found


def _backward_setup(ctx: Any, inputs: Any, output: Any) -> None:
    dc, a, b, *ctx.wanted, ctx.alpha = inputs
    ctx.save_for_backward(dc, a, b)
    ctx.set_materialize_grads(False)


def _backward_grad(ctx: Any, of_da: Tensor | None, of_db: Tensor | None, of_dbias: Tensor | None) -> Any:
    """da = alpha * dc @ b.T and db = alpha * a.T @ dc are linear in each of their factors.

    An incoming gradient that is None contributes nothing: zeros in its place would turn infinite factors into NaN.
    """
    dc, a, b = ctx.saved_tensors
    of_da, of_db, of_dbias = (g if on else None for g, on in zip((of_da, of_db, of_dbias), ctx.wanted, strict=True))
    to_dc, to_a, to_b = ctx.needs_input_grad[:3]
    terms: list[Tensor] = []
    if to_dc and of_da is not None:
        terms.append(_mm(of_da, b, ctx.alpha))
    if to_dc and of_db is not None:
        terms.append(_mm(a, of_db, ctx.alpha))
    if to_dc and of_dbias is not None:
        terms.append(of_dbias.expand_as(dc))
    return (
        sum(terms[1:], terms[0]) if terms else None,
        _mm(dc, of_db.t(), ctx.alpha) if to_a and of_db is not None else None,
        _mm(of_da.t(), dc, ctx.alpha) if to_b and of_da is not None else None,
        *(None,) * 4,
    )


def _backward_axes(dc: Any, a: Any, b: Any, to_a: bool, to_b: bool, to_bias: bool, alpha: Any) -> str:
    return f"mn, mk, kn -> {'mk+n' * to_a}, {'kn+m' * to_b}, {'n+m' * to_bias}"


_gemm_backward = Recorded(
    "gemm_backward",
    "(Tensor dc, Tensor a, Tensor b, bool to_a, bool to_b, bool to_bias, Scalar alpha) -> (Tensor, Tensor, Tensor)",
    _run_backward,
    _empty_gradients,
    axes=_backward_axes,
    setup=_backward_setup,
    backward=_backward_grad,
)


def _gradients(
    grad: Tensor, a: Tensor, b: Tensor, to_a: bool, to_b: bool, to_bias: bool = False, *, alpha: float = 1
) -> Gradients:
    """The wanted gradients of ``alpha * a @ b + bias``, each differentiable again."""
    if to_a + to_b + to_bias > 1 and not transformed():
        da, db, dbias = _gemm_backward(grad, a, b, to_a, to_b, to_bias, alpha)
        return da if to_a else None, db if to_b else None, dbias if to_bias else None
    return (
        _mm(grad, b.t(), alpha) if to_a else None,
        _mm(a.t(), grad, alpha) if to_b else None,
        grad.sum(0) if to_bias else None,
    )


# --- bmm ---


def _bmm_shape(input: Tensor, mat2: Tensor, alpha: float = 1) -> Sequence[int]:
    for name, t in (("batch1", input), ("batch2", mat2)):
        if t.dim() != 3:
            raise RuntimeError(f"bmm(): {name} must be a 3D tensor, got {t.dim()}-D tensor")
    _check_factors("bmm", input, mat2)
    require(
        input.size(0) == mat2.size(0) and input.size(2) == mat2.size(1),
        lambda: (
            f"bmm(): Expected size for first two dimensions of batch2 tensor to be: [{input.size(0)}, {input.size(2)}] "
            f"but got: [{mat2.size(0)}, {mat2.size(1)}]."
        ),
    )
    return (input.size(0), input.size(1), mat2.size(2))


def _bmm_grad(ctx: Any, grad: Tensor) -> Any:
    input, mat2 = ctx.saved_tensors
    to_input, to_mat2 = ctx.needs_input_grad[:2]
    return (
        _bmm(grad, mat2.transpose(1, 2), ctx.alpha) if to_input else None,
        _bmm(input.transpose(1, 2), grad, ctx.alpha) if to_mat2 else None,
        None,
    )


_bmm = Op(
    "bmm",
    "Tensor input, Tensor mat2, Scalar alpha=1",
    axes="bmk, bkn -> bmn+k",
    shape=_bmm_shape,
    fill=_mm_fill,
    setup=_mm_setup,
    backward=_bmm_grad,
    linearity=Linearity(factors=(0, 1)),
)


@replayed
def bmm(input: Tensor, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``input[i] @ mat2[i]`` for each i (torch.bmm) of (b, m, k) and (b, k, n). All else is as in ``mm``.

    A factor that ``expand`` repeats over the batch is not copied.
    """
    if out is not None:
        return _bmm.into(out, input, mat2, 1)
    return _bmm(*narrowed("bmm", input, mat2), 1)


# --- addmm and baddbmm ---


def _add_product(name: str, axes: str, rank: int, factors: tuple[str, str], *, sums: bool = False) -> Op:
    """``beta * input + alpha * first @ second``, of ``factors`` of ``rank`` axes; ``sums``: over the batch too."""

    def shape(input: Tensor, first: Tensor, second: Tensor, beta: float = 1, alpha: float = 1) -> Sequence[int]:
        for which, t in zip(factors, (first, second), strict=True):
            if t.dim() != rank:
                raise RuntimeError(f"{name}(): {which} must have {rank} axes, got {t.dim()}-D tensor")
        _check_factors(name, first, second, input)
        for what, value in (("alpha", alpha), ("beta", beta)):
            if isinstance(value, float) and not first.is_floating_point():
                raise RuntimeError(
                    f"{name}(): For integral input tensors, argument {what} must not be a floating point number."
                )
        require(
            first.size(-1) == second.size(-2) and (rank == 2 or first.size(0) == second.size(0)),
            lambda: (
                f"{name}(): {factors[0]} and {factors[1]} shapes cannot be multiplied ({list(first.shape)} and "
                f"{list(second.shape)})"
            ),
        )
        whole = (*first.shape[sums:-1], second.size(-1))
        refused = f"{name}(): input of shape {list(input.shape)} cannot be expanded to {list(whole)}"
        if input.dim() > len(whole):
            raise RuntimeError(refused)
        for n, m in zip(reversed(input.shape), reversed(whole), strict=False):
            require(n == m or n == 1, lambda: refused)
        return whole

    def fill(out: Tensor, input: Tensor, first: Tensor, second: Tensor, beta: float = 1, alpha: float = 1) -> None:
        if sums:  # one product, over batch and k
            check_storage(name, factors[0], first)  # before torch copies it
            first, second = first.transpose(0, 1).flatten(1), second.flatten(0, 1)
        if alpha == 0:  # the factors are not read: NaN in them must not reach the result
            first, second = first[..., :0], second[..., :0, :]
        if beta == 0:
            _run_product(first, second, out, alpha=alpha)
        elif beta == 1 and _is_row(input.shape, out.size(-1)):
            _run_product(first, second, out, alpha=alpha, bias=input.reshape(-1))
        else:
            _run_product(first, second, out, alpha=alpha, beta=beta, c0=input.expand(out.shape))

    def setup(ctx: Any, inputs: Any, output: Tensor) -> None:
        input, first, second, ctx.beta, ctx.alpha = inputs
        ctx.save_for_backward(first, second)
        ctx.shape = input.shape

    def backward(ctx: Any, grad: Tensor) -> Any:
        first, second = ctx.saved_tensors
        to_input, to_first, to_second = ctx.needs_input_grad[:3]
        added = None
        if rank == 2:
            row = to_input and _is_row(ctx.shape, grad.size(1))  # one bias for every row
            of_1, of_2, added = _gradients(grad, first, second, to_first, to_second, row, alpha=ctx.alpha)
        else:
            each = grad.expand((first.size(0), *grad.shape[-2:]))
            of_1 = _bmm(each, second.transpose(1, 2), ctx.alpha) if to_first else None
            of_2 = _bmm(first.transpose(1, 2), each, ctx.alpha) if to_second else None
        if to_input:
            added = grad.sum_to_size(ctx.shape) if added is None else added.reshape(ctx.shape)
            added = added if ctx.beta == 1 else added * ctx.beta
        return added, of_1, of_2, None, None

    parameters = f"Tensor input, Tensor {factors[0]}, Tensor {factors[1]}, Scalar beta=1, Scalar alpha=1"
    linearity = Linearity(terms=(0,), factors=(1, 2))
    how: dict[str, Any] = {"setup": setup, "backward": backward, "linearity": linearity}
    return Op(name, parameters, axes=axes, shape=shape, fill=fill, **how)


def _is_row(shape: Sequence[int], columns: int) -> bool:
    """Whether a tensor of ``shape`` is one row of ``columns`` elements, which is added to every row."""
    return bool(shape) and shape[-1] == columns and all(n == 1 for n in shape[:-1])


_addmm = _add_product("addmm", "mn+k, mk, kn -> mn+k", 2, ("mat1", "mat2"))
_baddbmm = _add_product("baddbmm", "bmn+k, bmk, bkn -> bmn+k", 3, ("batch1", "batch2"))
_addbmm = _add_product("addbmm", "mn+kb, bmk, bkn -> mn+kb", 3, ("batch1", "batch2"), sums=True)


@replayed
def addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None
) -> Tensor:
    """``beta * input + alpha * mat1 @ mat2`` (torch.addmm), rounded once.

    ``mat1`` (m, k) and ``mat2`` (k, n) are as for ``mm``; ``input`` has their dtype and broadcasts to (m, n). With beta
    = 0, ``input`` is not read; with alpha = 0, the factors are not. Differentiable in all three. Raises
    ``RuntimeError`` for shapes, dtypes and devices that do not fit.
    """
    beta, alpha = _numbers(beta, alpha)
    if out is not None:
        return _addmm.into(out, input, mat1, mat2, beta, alpha)
    return _addmm(*narrowed("addmm", input, mat1, mat2), beta, alpha)


@replayed
def baddbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None
) -> Tensor:
    """``beta * input[i] + alpha * batch1[i] @ batch2[i]`` for each i (torch.baddbmm), rounded once.

    ``batch1`` (b, m, k) and ``batch2`` (b, k, n) are as for ``bmm``; ``input`` broadcasts to (b, m, n). All else is as
    in ``addmm``.
    """
    beta, alpha = _truncated(input, beta, alpha)
    if out is not None:
        return _baddbmm.into(out, input, batch1, batch2, beta, alpha)
    return _baddbmm(*narrowed("baddbmm", input, batch1, batch2), beta, alpha)


def _numbers(*factors: float) -> tuple[float, ...]:
    """``factors`` as kernels take them: a bool is 0 or 1."""
    return tuple(int(f) if isinstance(f, bool) else f for f in factors)


def _truncated(input: Tensor, *factors: float) -> tuple[float, ...]:
    """``factors`` as torch takes them in products of batches: of integers, their integral parts."""
    return _numbers(*factors) if input.is_floating_point() else tuple(map(int, factors))


@replayed
def addbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None
) -> Tensor:
    """``beta * input + alpha * sum(batch1[i] @ batch2[i])`` (torch.addbmm): one product, accumulated over batch and k.

    ``batch1`` (b, m, k) and ``batch2`` (b, k, n) are as for ``bmm``; ``batch1`` is copied unless b or m is 1. All else
    is as in ``addmm``.
    """
    beta, alpha = _truncated(input, beta, alpha)
    if out is not None:
        return _addbmm.into(out, input, batch1, batch2, beta, alpha)
    return _addbmm(*narrowed("addbmm", input, batch1, batch2), beta, alpha)
