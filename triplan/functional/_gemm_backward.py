"""Gradients of a matrix product, several of them by one plan, as a registered op that can be differentiated again."""

from __future__ import annotations

from typing import Any

import torch

from triplan.facade import GemmBackwardPlan
from triplan.functional._ops import _LIBRARY, _nothing_watches, _register, needs_grad
from triplan.functional._plans import run

Tensor = torch.Tensor
_precision: Any = getattr(torch._C, "_get_fp32_precision_getter", None)


def tf32_allowed(t: Tensor) -> bool:
    """Whether torch's settings allow f32 products on CUDA to be multiplied in tf32."""
    if t.dtype != torch.float32 or not t.is_cuda:
        return False
    if _precision is not None:  # the legacy flag cannot be read once this one is set
        return bool(_precision("cuda", "matmul") == "tf32")
    return bool(torch._C._get_cublas_allow_tf32())


def _fake(
    dc: Tensor, a: Tensor, b: Tensor, to_a: bool, to_b: bool, to_bias: bool, alpha: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the gradients, laid out as the factors are where these are dense; empty for what is not wanted."""
    return (
        torch.empty_like(a) if to_a else a.new_empty(0),
        torch.empty_like(b) if to_b else b.new_empty(0),
        dc.new_empty(dc.shape[1] if to_bias else 0),
    )


def _kernel(
    dc: Tensor, a: Tensor, b: Tensor, to_a: bool, to_b: bool, to_bias: bool, alpha: float
) -> tuple[Tensor, Tensor, Tensor]:
    da, db, dbias = found = _fake(dc, a, b, to_a, to_b, to_bias, alpha)
    operands: dict[str, Any] = {"dc": dc}
    operands |= {"a": a} if to_b else {}
    operands |= {"b": b, "da": da} if to_a else {}
    operands |= {"db": db} if to_b else {}
    operands |= {"dbias": dbias} if to_bias else {}
    math: dict[str, Any] = {"math": "tf32"} if tf32_allowed(dc) else {}
    scalars = {"alpha": alpha} if alpha != 1 and (to_a or to_b) else {}
    run(GemmBackwardPlan, operands, scalars=scalars, **math)
    return found


_overload = _register(
    "gemm_backward",
    "(Tensor dc, Tensor a, Tensor b, bool to_a, bool to_b, bool to_bias, Scalar alpha) -> (Tensor, Tensor, Tensor)",
    _kernel,
    _fake,
)


def gemm_backward(
    dc: Tensor, a: Tensor, b: Tensor, to_a: bool, to_b: bool, to_bias: bool, alpha: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(da, db, dbias) of ``alpha * a @ b + bias`` from ``dc``: (m, k), (k, n) and (m, n) of one dtype; da and db lie as
    a and b do. What is not wanted is empty."""
    given = (dc, a, b, to_a, to_b, to_bias, alpha)
    # The kernel itself where nothing watches.
    short = not torch.compiler.is_compiling() and not needs_grad(given) and _nothing_watches(given)
    found: tuple[Tensor, Tensor, Tensor] = (_kernel if short else _overload)(*given)
    return found


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    dc, a, b, *ctx.wanted, ctx.alpha = inputs
    ctx.save_for_backward(dc, a, b)
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, of_da: Tensor | None, of_db: Tensor | None, of_dbias: Tensor | None) -> Any:
    """da = alpha * dc @ b.T and db = alpha * a.T @ dc are linear in each of their factors.

    A cotangent that is None adds nothing: no zeros of it, which would make NaN of an infinite factor.
    """
    mm, alpha = torch.ops.triplan.mm.default, ctx.alpha
    dc, a, b = ctx.saved_tensors
    of_da, of_db, of_dbias = (g if on else None for g, on in zip((of_da, of_db, of_dbias), ctx.wanted, strict=True))
    to_dc, to_a, to_b = ctx.needs_input_grad[:3]
    parts: list[Tensor] = []
    if to_dc and of_da is not None:
        parts.append(mm(of_da, b, alpha))
    if to_dc and of_db is not None:
        parts.append(mm(a, of_db, alpha))
    if to_dc and of_dbias is not None:
        parts.append(of_dbias.expand_as(dc))
    return (
        sum(parts[1:], parts[0]) if parts else None,
        mm(dc, of_db.t(), alpha) if to_a and of_db is not None else None,
        mm(of_da.t(), dc, alpha) if to_b and of_da is not None else None,
        *(None,) * 4,
    )


torch.library.register_autograd("triplan::gemm_backward", _grad, setup_context=_setup, lib=_LIBRARY)
