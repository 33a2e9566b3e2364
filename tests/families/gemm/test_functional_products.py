"""What products take besides matrices of one dtype: linear's other operands, ``out=``, autocast, infinities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases.functional import integers

import triplan.functional as F  # noqa: N812


def leaves(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


# --- linear's other weights and biases ---


LINEAR: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None], ...] = (
    *(((16,), (24, 16), bias) for bias in ((), (1,), (1, 24))),
    *(((5, 16), (24, 16), bias) for bias in ((), (1,), (1, 24), (5, 1), (1, 1), (5, 24))),
    *(((2, 5, 16), (24, 16), bias) for bias in ((), (1,), (1, 24), (5, 24), (2, 5, 24))),
    *(((0, 16), (24, 16), bias) for bias in ((), (1, 24))),
    *((input, (16,), None) for input in ((16,), (5, 16), (2, 5, 16), (0, 16))),
)


@pytest.mark.parametrize(("input_shape", "weight_shape", "bias_shape"), LINEAR)
def test_linear_takes_what_torchs_takes(
    input_shape: tuple[int, ...], weight_shape: tuple[int, ...], bias_shape: tuple[int, ...] | None, device: str
) -> None:
    shapes = [s for s in (input_shape, weight_shape, bias_shape) if s is not None]
    found = []
    for which in (F.linear, torch.nn.functional.linear):
        each = [integers(s, torch.float64, device, i).requires_grad_() for i, s in enumerate(shapes)]
        out = which(*each)
        weight = integers(tuple(out.shape), torch.float64, device, 9)
        found.append((out, *torch.autograd.grad(out, each, weight)))
    for got, want in zip(*found, strict=True):
        assert got.shape == want.shape
        assert torch.equal(got, want)


def test_linear_of_one_output(device: str) -> None:
    """A weight of one axis with a bias of none: torch says that it takes them, and does so for a vector."""
    x, w, bias = (integers(s, torch.float64, device, i) for i, s in enumerate(((2, 5, 16), (16,), ())))
    assert torch.equal(F.linear(x[0, 0], w, bias), torch.nn.functional.linear(x[0, 0], w, bias))
    assert torch.equal(F.linear(x, w, bias), x @ w + bias)


# --- out= ---


def test_matmul_into(device: str) -> None:
    a, b = (integers(s, torch.float64, device, i) for i, s in enumerate(((6, 1, 2, 4), (5, 4, 3))))
    out = torch.empty(6, 5, 2, 3, dtype=torch.float64, device=device)
    assert F.matmul(a, b, out=out) is out
    assert torch.equal(out, a @ b)
    vector = torch.empty(0, dtype=torch.float64, device=device)
    assert F.matmul(a, b[0, :, 0], out=vector) is vector
    assert torch.equal(vector, a @ b[0, :, 0])
    with pytest.warns(UserWarning, match="resized"):
        F.matmul(a[0, 0], b[0], out=out)
    assert torch.equal(out, a[0, 0] @ b[0])
    with pytest.raises(RuntimeError, match="dtype"):
        F.matmul(a, b, out=out.float())
    with pytest.raises(RuntimeError, match="automatic differentiation"):
        F.matmul(a.requires_grad_(), b, out=out)


def test_out_may_be_a_lazy_negative(device: str) -> None:
    a, b = (integers(s, torch.float64, device, i) for i, s in enumerate(((3, 4), (4, 5))))
    memory = torch.zeros(3, 5, dtype=torch.complex128, device=device)
    out = memory.conj().imag
    assert out.is_neg()
    assert F.mm(a, b, out=out) is out
    assert torch.equal(out, a @ b)
    assert torch.equal(memory.imag, -(a @ b))


# --- what is not finite, and what is not wanted ---


def test_what_is_not_differentiated_again_does_not_count(device: str) -> None:
    """An infinite factor times the zeros of a cotangent that there is none of would be NaN."""
    found = []
    for which in (F.mm, torch.mm):
        a, b = (integers(s, torch.float64, device, i) for i, s in enumerate(((3, 4), (4, 5))))
        b[0, 0] = torch.inf
        g = integers((3, 5), torch.float64, device, 3).requires_grad_()
        to_b = torch.autograd.grad(which(a.requires_grad_(), b.requires_grad_()), (a, b), g, create_graph=True)[1]
        found.append(torch.autograd.grad(to_b, g, torch.ones_like(to_b))[0])
    assert torch.equal(*found)
    assert bool(found[0].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factors_that_alpha_takes_away_are_not_read(dtype: torch.dtype, device: str) -> None:
    a, b = torch.full((3, 4), torch.nan, dtype=dtype, device=device), torch.ones(4, 5, dtype=dtype, device=device)
    for input in (integers((3, 5), dtype, device, 1), integers((5,), dtype, device, 1)):
        for beta in (2, 1, 0):
            # As in BLAS; torch's own does so on some devices only.
            assert torch.equal(F.addmm(input, a, b, alpha=0, beta=beta), beta * input.expand(3, 5))


def test_a_scaled_bias_gradient_alone(device: str) -> None:
    dc, a, w = (integers(s, torch.float64, device, 1) for s in ((5, 24), (5, 16), (16, 24)))
    args = (dc, a, w, False, False, True, 2.0)
    torch.library.opcheck(torch.ops.triplan.gemm_backward.default, args)
    assert torch.equal(torch.ops.triplan.gemm_backward(*args)[2], dc.sum(0))


# --- autocast ---

Call = tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], tuple[torch.Tensor, ...], dict[str, Any]]
PRODUCTS = ("mm", "bmm", "addmm", "linear", "linear_no_bias", "linear_scalar_bias", "matmul", "matmul_vector")


def calls(device: str, how: str) -> dict[str, Call]:
    """Of f32 factors, of f64's, or (``mixed``) of a narrow first operand among f32's."""

    def x(*shape: int) -> torch.Tensor:
        return integers(shape, torch.float64 if how == "f64" else torch.float32, device, len(shape))

    torch_linear = torch.nn.functional.linear
    found: dict[str, Call] = {
        "mm": (F.mm, torch.mm, (x(5, 16), x(16, 24)), {}),
        "bmm": (F.bmm, torch.bmm, (x(3, 5, 16), x(3, 16, 24)), {}),
        "addmm": (F.addmm, torch.addmm, (x(24), x(5, 16), x(16, 24)), {"alpha": -1, "beta": 2}),
        "linear": (F.linear, torch_linear, (x(2, 5, 16), x(24, 16), x(24)), {}),
        "linear_no_bias": (F.linear, torch_linear, (x(5, 16), x(24, 16)), {}),
        "linear_scalar_bias": (F.linear, torch_linear, (x(5, 16), x(24, 16), x()), {}),
        "matmul": (F.matmul, torch.matmul, (x(2, 3, 16), x(2, 16, 8)), {}),
        "matmul_vector": (F.matmul, torch.matmul, (x(16), x(16)), {}),
    }
    if how == "mixed":
        for name, (ours, theirs, (first, *others), keywords) in found.items():
            found[name] = (ours, theirs, (first.bfloat16(), *others), keywords)
    return found


@pytest.mark.parametrize("how", ["f32", "mixed", "f64"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_autocast_is_torchs(name: str, how: str, device: str) -> None:
    """The result's dtype and value, and gradients in the dtypes of what was passed."""
    ours, theirs, tensors, keywords = calls(device, how)[name]
    found = []
    for which in (ours, theirs):
        inputs = leaves(tensors)
        with torch.autocast(device, dtype=torch.bfloat16):
            out = which(*inputs, **keywords)
        weight = integers(tuple(out.shape), out.dtype, device, 10)
        found.append((out, *torch.autograd.grad(out, inputs, weight)))
    assert found[0][0].dtype == (torch.float64 if how == "f64" else torch.bfloat16)
    for got, want in zip(*found, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", PRODUCTS)
def test_autocast_compiles_whole(name: str, device: str) -> None:
    ours, _, tensors, keywords = calls(device, "mixed")[name]
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: ours(*x, **keywords), fullgraph=True, backend="aot_eager")
    mine, others = leaves(tensors), leaves(tensors)
    with torch.autocast(device, dtype=torch.bfloat16):
        got, want = compiled(*mine), ours(*others, **keywords)
    assert got.dtype == want.dtype == torch.bfloat16
    assert torch.equal(got, want)
    for g, w in zip(*(torch.autograd.grad(x.sum(), y) for x, y in ((got, mine), (want, others))), strict=True):
        assert torch.equal(g, w)


def test_out_is_not_autocast(device: str) -> None:
    a, b = (integers(s, torch.float32, device, 1) for s in ((3, 4), (4, 5)))
    with torch.autocast(device, dtype=torch.bfloat16):
        for ours, theirs in ((F.mm, torch.mm), (F.matmul, torch.matmul)):
            out, want = torch.empty(3, 5, device=device), torch.empty(3, 5, device=device)
            assert torch.equal(ours(a, b, out=out), theirs(a, b, out=want))
