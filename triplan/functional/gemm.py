"""Matrix products: mm, bmm, matmul, addmm and linear, as torch has them.

The gradients of a product are products with one transposed factor. A transposed factor is one of other strides, which
plans take as they are, so nothing is copied. ``gemm_backward`` computes several gradients of one product in one plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from triplan.facade import BatchedGemmPlan, GemmBackwardPlan, GemmPlan
from triplan.functional._autocast import narrowed
from triplan.functional._ops import Op, Recorded, _transformed, check_out, needs_grad
from triplan.functional._plans import Ran, run
from triplan.functional._shapes import broadcast, check_same_device, require

__all__ = ["addmm", "bmm", "linear", "matmul", "mm"]

Tensor = torch.Tensor
Gradients = tuple["Tensor | None", "Tensor | None", "Tensor | None"]
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_precision: Any = getattr(torch._C, "_get_fp32_precision_getter", None)


def _tf32_allowed(t: Tensor) -> bool:
    """Whether torch's settings let f32 products on CUDA multiply in tf32."""
    if t.dtype != torch.float32 or not t.is_cuda:
        return False
    if _precision is not None:  # once this setting is set, torch refuses to read the legacy flag
        return bool(_precision("cuda", "matmul") == "tf32")
    return bool(torch._C._get_cublas_allow_tf32())


def _check_factors(op: str, first: Tensor, second: Tensor, *others: Tensor) -> None:
    check_same_device(op, first, second, *others)
    for t in (second, *others):
        if t.dtype != first.dtype:
            raise RuntimeError(
                f"{op}(): expected m1 and m2 to have the same dtype, but got: {first.dtype} != {t.dtype}"
            )
    if first.dtype not in _DTYPES:
        raise NotImplementedError(f'"{op}" not implemented for {first.dtype}')


def _run_product(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    alpha: float = 1,
    beta: float = 1,
    c0: Tensor | None = None,
    bias: Tensor | None = None,
) -> Ran | None:
    """Run a plan: c = alpha * a @ b + beta * c0 + bias, for matrices or batches of matrices.

    None if the call depends on more than its tensors, so that it must not be repeated from them alone.
    """
    operands = {"a": a, "b": b, "c": c}
    options: dict[str, Any] = {}
    scalars: dict[str, Any] = {} if alpha == 1 else {"alpha": alpha}
    if c0 is not None:
        operands["c0"] = c0
        scalars |= {} if beta == 1 else {"beta": beta}
    if bias is not None:
        operands["bias"] = bias
        options["epilogue"] = "bias"
    if tf32 := _tf32_allowed(a):
        options["math"] = "tf32"
    ran = run(GemmPlan if a.dim() == 2 else BatchedGemmPlan, operands, scalars=scalars, **options)
    # A repeated call would not notice other scalars, nor a change of torch's precision setting.
    return None if scalars or tf32 or a.dtype == torch.float32 else ran


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


def _mm_fill(out: Tensor, input: Tensor, mat2: Tensor, alpha: float = 1) -> Ran | None:
    return _run_product(input, mat2, out, alpha=alpha)


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
    shape=_mm_shape,
    fill=_mm_fill,
    setup=_mm_setup,
    backward=_mm_grad,
)


def mm(input: Tensor, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``input @ mat2`` (torch.mm) of (m, k) and (k, n): f16, bf16, f32 or f64, one dtype for both, of any strides.

    f16 and bf16 accumulate in f32. f32 multiplies in f32, or in tf32 where torch's settings allow it. Differentiable in
    both. Under autocast the product has the autocast dtype, except for f64 and with ``out=``, as in torch. Raises
    ``RuntimeError`` for ranks, shapes, dtypes and devices that do not fit.
    """
    if out is not None:
        return _mm.into(out, input, mat2, 1)
    return _mm(*narrowed(input, mat2), 1)


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
    options: dict[str, Any] = {"math": "tf32"} if _tf32_allowed(dc) else {}
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


_gemm_backward = Recorded(
    "gemm_backward",
    "(Tensor dc, Tensor a, Tensor b, bool to_a, bool to_b, bool to_bias, Scalar alpha) -> (Tensor, Tensor, Tensor)",
    _run_backward,
    _empty_gradients,
    setup=_backward_setup,
    backward=_backward_grad,
)


def _gradients(
    grad: Tensor, a: Tensor, b: Tensor, to_a: bool, to_b: bool, to_bias: bool = False, *, alpha: float = 1
) -> Gradients:
    """The wanted gradients of ``alpha * a @ b + bias``, each differentiable again."""
    if to_a + to_b + to_bias > 1 and not _transformed():
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
    shape=_bmm_shape,
    fill=_mm_fill,
    setup=_mm_setup,
    backward=_bmm_grad,
)


def bmm(input: Tensor, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``input[i] @ mat2[i]`` for each i (torch.bmm) of (b, m, k) and (b, k, n). All else is as in ``mm``.

    A factor that ``expand`` repeats over the batch is not copied.
    """
    if out is not None:
        return _bmm.into(out, input, mat2, 1)
    return _bmm(*narrowed(input, mat2), 1)


# --- addmm ---


def _addmm_shape(input: Tensor, mat1: Tensor, mat2: Tensor, beta: float = 1, alpha: float = 1) -> Sequence[int]:
    for name, t in (("mat1", mat1), ("mat2", mat2)):
        if t.dim() != 2:
            raise RuntimeError(f"addmm(): {name} must be a matrix, got {t.dim()}-D tensor")
    _check_factors("addmm", mat1, mat2, input)
    require(
        mat1.size(1) == mat2.size(0),
        lambda: (
            f"addmm(): mat1 and mat2 shapes cannot be multiplied ({mat1.size(0)}x{mat1.size(1)} and "
            f"{mat2.size(0)}x{mat2.size(1)})"
        ),
    )
    shape = (mat1.size(0), mat2.size(1))
    if input.dim() > 2:
        raise RuntimeError(f"addmm(): input of shape {list(input.shape)} cannot be expanded to {list(shape)}")
    for n, m in zip(reversed(input.shape), reversed(shape), strict=False):
        require(
            n == m or n == 1,
            lambda: f"addmm(): input of shape {list(input.shape)} cannot be expanded to {list(shape)}",
        )
    return shape


def _addmm_fill(
    out: Tensor, input: Tensor, mat1: Tensor, mat2: Tensor, beta: float = 1, alpha: float = 1
) -> Ran | None:
    if alpha == 0:  # the factors are not read: NaN in them must not reach the result
        mat1, mat2 = mat1[:, :0], mat2[:0]
    if beta == 0:
        return _run_product(mat1, mat2, out, alpha=alpha)
    row = input if input.dim() == 1 else input[0] if input.dim() == 2 and input.size(0) == 1 else None
    if beta == 1 and row is not None and row.size(0) == out.size(1):
        return _run_product(mat1, mat2, out, alpha=alpha, bias=row)
    return _run_product(mat1, mat2, out, alpha=alpha, beta=beta, c0=input.expand(out.shape))


def _addmm_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    input, mat1, mat2, ctx.beta, ctx.alpha = inputs
    ctx.save_for_backward(mat1, mat2)
    ctx.shape = input.shape


def _addmm_grad(ctx: Any, grad: Tensor) -> Any:
    mat1, mat2 = ctx.saved_tensors
    to_input, to_mat1, to_mat2 = ctx.needs_input_grad[:3]
    row = to_input and tuple(ctx.shape) in ((grad.size(1),), (1, grad.size(1)))  # one bias for every row
    to_1, to_2, added = _gradients(grad, mat1, mat2, to_mat1, to_mat2, row, alpha=ctx.alpha)
    if to_input:
        added = grad.sum_to_size(ctx.shape) if added is None else added.reshape(ctx.shape)
        added = added if ctx.beta == 1 else added * ctx.beta
    return added, to_1, to_2, None, None


_addmm = Op(
    "addmm",
    "Tensor input, Tensor mat1, Tensor mat2, Scalar beta=1, Scalar alpha=1",
    shape=_addmm_shape,
    fill=_addmm_fill,
    setup=_addmm_setup,
    backward=_addmm_grad,
)


def addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None
) -> Tensor:
    """``beta * input + alpha * mat1 @ mat2`` (torch.addmm), rounded once.

    ``mat1`` (m, k) and ``mat2`` (k, n) are as for ``mm``; ``input`` has their dtype and broadcasts to (m, n). With beta
    = 0, ``input`` is not read; with alpha = 0, the factors are not. Differentiable in all three. Raises
    ``RuntimeError`` for shapes, dtypes and devices that do not fit.
    """
    if out is not None:
        return _addmm.into(out, input, mat1, mat2, beta, alpha)
    return _addmm(*narrowed(input, mat1, mat2), beta, alpha)


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
    return t if t.dim() == 2 else t.reshape(math.prod(t.shape[:-1]), t.size(-1))


def _linear_fill(out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Ran | None:
    if out.dim() == 2 or out.is_contiguous():
        return _run_product(_as_matrix(input), weight.t(), _as_matrix(out), bias=bias)
    # An ``out`` of more than two axes whose rows may have no common stride: it cannot be viewed as a matrix.
    packed = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    _run_product(_as_matrix(input), weight.t(), _as_matrix(packed), bias=bias)
    out.copy_(packed)
    return None


def _linear_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    input, weight, _ = inputs
    ctx.save_for_backward(input, weight)


def _linear_grad(ctx: Any, grad: Tensor) -> Any:
    input, weight = ctx.saved_tensors
    to_input, to_weight, to_bias = (*ctx.needs_input_grad, False)[:3]
    rows = _as_matrix(grad)
    # Gradients of input @ weight.t(): db is the transpose of weight's.
    da, db, dbias = _gradients(rows, _as_matrix(input), weight.t(), to_input, to_weight, to_bias)
    return None if da is None else da.reshape(input.shape), None if db is None else db.t(), dbias


_linear = Op(
    "linear",
    "Tensor input, Tensor weight, Tensor? bias=None",
    shape=_linear_shape,
    fill=_linear_fill,
    setup=_linear_setup,
    backward=_linear_grad,
)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``input @ weight.T + bias`` (torch.nn.functional.linear), rounded once.

    ``input`` (..., k), ``weight`` (n, k) and ``bias`` (n,), or a bias that broadcasts to the result, have one dtype, as
    for ``mm``; the result is (..., n). With a weight (k,), the result is (...) and the bias has no axis. Differentiable
    in all three. Raises ``RuntimeError`` for shapes, dtypes and devices that do not fit.
    """
    input, weight = narrowed(input, weight)
    (bias,) = narrowed(bias)
    if weight.dim() == 1 and (bias is None or bias.dim() == 0):
        return linear(input, weight.unsqueeze(0), bias).squeeze(-1)
    if bias is None or weight.dim() != 2 or input.dim() == 0 or (bias.dim() == 1 and bias.size(0) != 1):
        return _linear(input, weight, bias)
    shape = (*input.shape[:-1], weight.size(0))
    if bias.dim() > 2 or (bias.dim() == 2 and bias.size(0) != 1 and input.dim() != 2):
        bias = _as_matrix(bias.expand(shape))
    return _addmm(bias, _as_matrix(input), weight.t(), 1, 1).reshape(shape)


# --- matmul ---


def matmul(input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``input @ other`` (torch.matmul): vectors, matrices, and batches of matrices whose axes broadcast.

    Composed of ``mm`` and ``bmm``: a vector becomes a matrix of one row or column, and if ``other`` is no batch, all
    rows of ``input`` form one matrix. A factor of 16-bit elements that broadcasts over an axis and requires grad is
    multiplied with all matrices along that axis in one product, so that its gradient is a product too, rounded once.
    Raises as ``mm`` and ``bmm`` do.
    """
    if out is None:
        return _matmul(*narrowed(input, other))
    result = _matmul(input, other)
    check_out("matmul", out, (input, other), lambda: result.shape)
    return out.copy_(result)


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
        count = math.prod(lead)
        a, b = (t.reshape((1,) * (len(lead) + 2 - t.dim()) + t.shape) for t in (a, b))
        to_columns, to_rows = (_summed_over(t, lead) for t in (a, b))
        if to_rows or to_columns:
            result = _matmul_folded(a, b, lead, to_rows, to_columns)
        else:
            first, second = (t.expand((*lead, *t.shape[-2:])).reshape((count, *t.shape[-2:])) for t in (a, b))
            result = _bmm(first, second, 1).reshape((*lead, a.size(-2), b.size(-1)))
    if input.dim() == 1:
        result = result.squeeze(-2)
    return result.squeeze(-1) if other.dim() == 1 else result


def _summed_over(t: Tensor, lead: Sequence[int]) -> list[int]:
    """The batch axes, of extents ``lead``, over which ``t``, of 16-bit elements, is broadcast and has a gradient."""
    if t.element_size() > 2 or not (needs_grad((t,)) or _transformed()):
        return []
    return [d for d, n in enumerate(lead) if t.size(d) == 1 and n != 1]


def _matmul_folded(
    a: Tensor, b: Tensor, lead: Sequence[int], to_rows: Sequence[int], to_columns: Sequence[int]
) -> Tensor:
    """``a @ b`` of batches of extents ``lead``, with the axes over which a factor is broadcast in the other's matrices.

    ``to_columns``: axes over which ``a`` is broadcast; ``to_rows``: those of ``b``. The gradient of a broadcast factor
    is then a sum within one product, which accumulates in f32, not a sum of products rounded to 16 bits.
    """
    m, n = len(lead), len(lead) + 1
    kept = [d for d in range(m) if d not in to_rows and d not in to_columns]
    order = [*kept, *to_rows, m, *to_columns, n]
    batch = [lead[d] for d in kept]
    whole = ([lead[d] if d in kept else t.size(d) for d in range(m)] for t in (a, b))
    first, second = (t.expand((*s, *t.shape[-2:])).permute(order) for s, t in zip(whole, (a, b), strict=True))
    rows = math.prod(lead[d] for d in to_rows) * a.size(-2)
    columns = math.prod(lead[d] for d in to_columns) * b.size(-1)
    first, second = first.reshape((*batch, rows, a.size(-1))), second.reshape((*batch, b.size(-2), columns))
    if kept:
        count = math.prod(batch)
        result = _bmm(first.reshape((count, *first.shape[-2:])), second.reshape((count, *second.shape[-2:])), 1)
    else:
        result = _mm(first, second, 1)
    shape = (*batch, *(lead[d] for d in to_rows), a.size(-2), *(lead[d] for d in to_columns), b.size(-1))
    back = sorted(range(n + 1), key=order.__getitem__)
    return result.reshape(shape).permute(back).contiguous()
