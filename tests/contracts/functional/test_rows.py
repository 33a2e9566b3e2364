"""softmax, log_softmax, rms_norm and layer_norm of triplan.functional beside torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases.derivatives import ROWS as NAMES, rows as call
from cases.functional import FLOATS
from torch.nn import functional

import triplan as tp
import triplan.functional as F  # noqa: N812


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_results_and_gradients_are_torchs(name: str, dtype: torch.dtype, device: str) -> None:
    """torch rounds narrow results once or twice: a few of their roundings apart at most."""
    ours, theirs, args = call(name, device, dtype, (5, 7, 33))
    out, wanted = ours(*args), theirs(*args)
    eps = torch.finfo(dtype).eps
    assert out.dtype == dtype
    torch.testing.assert_close(out, wanted, rtol=4 * eps, atol=8 * eps)
    weight = torch.randn_like(out)
    for got, ref in zip(torch.autograd.grad(out, args, weight), torch.autograd.grad(wanted, args, weight), strict=True):
        torch.testing.assert_close(got, ref, rtol=8 * eps, atol=8 * eps * max(1.0, float(ref.abs().max())))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
@pytest.mark.usefixtures("fresh_compiler")
def test_what_was_added_has_a_gradient_each(name: str, compiled: bool, device: str) -> None:
    """Leaves may keep the gradients that they are given, and add the next ones into them."""
    x, residual = (torch.randn(3, 2, 4, device=device, requires_grad=True) for _ in range(2))

    def total(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        out, summed = getattr(F, name)(x, (4,), residual=residual)
        return (out * summed).sum()

    f = torch.compile(total, fullgraph=True, backend="aot_eager") if compiled else total
    f(x, residual).backward()
    assert x.grad is not None
    assert residual.grad is not None
    assert x.grad.data_ptr() != residual.grad.data_ptr()
    once = x.grad.clone()
    f(x, residual).backward()
    for grad in (x.grad, residual.grad):
        torch.testing.assert_close(grad, 2 * once)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_only_the_sum_is_used(name: str, device: str) -> None:
    x, residual = (torch.randn(3, 4, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2))
    _, summed = getattr(F, name)(x, (4,), residual=residual)
    for grad in torch.autograd.grad((summed**2).sum(), (x, residual)):
        torch.testing.assert_close(grad, 2 * (x + residual))


@pytest.mark.parametrize("element", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_parameters_of_a_wider_element(name: str, element: torch.dtype, device: str) -> None:
    """Nothing but the result is rounded: all is computed in the wider element."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, 33, generator=g).to(element).to(device).requires_grad_()
    parameters = [torch.randn(33, generator=g).to(device).requires_grad_() for _ in range(1 + (name == "layer_norm"))]
    wide = x.detach().float().requires_grad_()
    out, wanted = getattr(F, name)(x, (33,), *parameters), getattr(functional, name)(wide, (33,), *parameters)
    assert out.dtype == element
    assert torch.equal(out, getattr(F, name)(wide, (33,), *parameters).to(element))
    torch.testing.assert_close(out.float(), wanted, rtol=2 * torch.finfo(element).eps, atol=1e-5)
    dout = torch.randn(out.shape, generator=g).to(element).to(device)
    got = torch.autograd.grad(out, [x, *parameters], dout)
    for grad, like, ref in zip(
        got, [x, *parameters], torch.autograd.grad(wanted, [wide, *parameters], dout.float()), strict=True
    ):
        assert grad.dtype == like.dtype
        torch.testing.assert_close(grad.float(), ref, rtol=2 * torch.finfo(grad.dtype).eps, atol=1e-5)


def test_parameters_of_any_floating_element_as_in_torch(device: str) -> None:
    x, weight = torch.randn(3, 4, device=device), torch.rand(4, device=device)
    for element in FLOATS:
        got, wanted = (f.rms_norm(x, (4,), weight.to(element)) for f in (F, functional))
        assert got.dtype == wanted.dtype == x.dtype
        torch.testing.assert_close(got, wanted)
    with pytest.raises(RuntimeError, match="floating-point"):
        F.rms_norm(x, (4,), weight.int())


@pytest.mark.parametrize("eps", [1.0, 2.5, 0.0, -0.5])
def test_any_eps(eps: float, device: str) -> None:
    # (A mean square close to -eps would amplify every rounding.) The last row's is smaller: NaN.
    x = torch.linspace(-3, 5, 12, device=device).reshape(3, 4) * torch.tensor([[1.0], [1.0], [0.1]], device=device)
    for name in ("rms_norm", "layer_norm"):
        got, wanted = (getattr(f, name)(x, (4,), eps=eps) for f in (F, functional))
        torch.testing.assert_close(got, wanted, equal_nan=True)
    torch.testing.assert_close(F.l2_norm(x, 1, eps), functional.normalize(x, dim=1, eps=eps))
    for bad in (float("inf"), float("nan")):
        with pytest.raises(tp.InvalidProblem, match="eps"):
            F.layer_norm(x, (4,), eps=bad)


@pytest.mark.parametrize("name", NAMES)
def test_strided_inputs(name: str, device: str) -> None:
    ours, theirs, args = call(name, device, shape=(6, 5, 6))
    x = args[0].detach().transpose(0, 2)
    torch.testing.assert_close(ours(x, *args[1:]), theirs(x, *args[1:]))
    x = args[0].detach()[::2].expand(3, 5, 6)
    rest = [a[::2] if a.dim() == 3 else a for a in args[1:]]
    torch.testing.assert_close(ours(x, *rest), theirs(x, *rest))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad: bool, device: str) -> None:
    def t(*shape: int) -> torch.Tensor:
        return torch.rand(shape, dtype=torch.float64, device=device, requires_grad=requires_grad)

    ops: Any = torch.ops.triplan
    for op in (ops.softmax, ops.log_softmax):
        torch.library.opcheck(op.default, (t(3, 4), 1))
        torch.library.opcheck(op.default, (t(3, 4, 2), -2))
    for op in (ops.softmax_backward, ops.log_softmax_backward):
        torch.library.opcheck(op.default, (t(3, 4), t(3, 4), 0))
    torch.library.opcheck(ops.rms_norm.default, (t(3, 4), 1, t(4), None, t(3, 4), 1e-5, 1))
    torch.library.opcheck(ops.rms_norm.default, (t(2, 3, 4), 2, None, None, None, 1e-5, 0))
    torch.library.opcheck(ops.rms_norm.default, (t(3, 4).detach().float(), 1, t(4), None, None, 1e-5, 0))
    torch.library.opcheck(ops.layer_norm.default, (t(3, 4), 1, t(4), t(4), t(3, 4), 1e-5, 1))
    torch.library.opcheck(ops.layer_norm.default, (t(3, 4), 1, None, None, None, 1e-5, 0))
    torch.library.opcheck(ops.l2_norm.default, (t(3, 4), 1e-12))
    dout, x, mean, rstd, weight, bias = (t(*shape) for shape in ((3, 4), (3, 4), (3,), (3,), (4,), (4,)))
    added, absent = t(3, 4), t(0)
    torch.library.opcheck(ops.rms_norm_backward.default, (dout, x, absent, rstd, weight, None, added, 1, 1))
    torch.library.opcheck(ops.layer_norm_backward.default, (dout, x, mean, rstd, weight, bias, None, 1, 0))
    torch.library.opcheck(ops.l2_norm_backward.default, (dout, x, rstd, 1e-12))


def test_edges(device: str) -> None:
    assert F.softmax(torch.tensor(3.0, device=device), 0).item() == 1
    assert F.softmax(torch.ones(0, 3, device=device), 1).shape == (0, 3)
    assert F.log_softmax(torch.ones(3, 0, device=device), 1).shape == (3, 0)
    deep = torch.randn(1, 2, 1, 2, 1, 2, 1, 2, 3, device=device)
    torch.testing.assert_close(F.softmax(deep, 3), torch.softmax(deep, 3))
    whole = torch.ones(2, 3, device=device, dtype=torch.int64)
    torch.testing.assert_close(F.softmax(whole, 0, torch.float32), torch.softmax(whole, 0, torch.float32))
    weight = torch.randn(3, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(F.rms_norm(torch.ones(0, 3, device=device), (3,), weight).sum(), weight)
    assert torch.equal(grad, torch.zeros_like(weight))


def test_what_does_not_fit_is_refused_as_torch_does(device: str) -> None:
    x = torch.randn(2, 3, device=device)
    for ours, theirs in ((F.softmax, torch.softmax), (F.log_softmax, torch.log_softmax)):
        for f in (ours, theirs):
            with pytest.raises(IndexError, match="Dimension out of range"):
                f(x, 2)
            with pytest.raises(RuntimeError):
                f(x.int(), 0)
        with pytest.raises(TypeError, match="dim"):
            ours(x, None)
    for norm in (F.layer_norm, functional.layer_norm, F.rms_norm, functional.rms_norm):
        with pytest.raises(RuntimeError, match="normalized_shape"):
            norm(x, (4,))
        with pytest.raises(RuntimeError, match="same shape"):
            norm(x, (3,), torch.ones(2, device=device))


@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_default_eps_is_torchs(dtype: torch.dtype, eps: float | None, device: str) -> None:
    x = torch.full((1, 8), 1e-3 if dtype != torch.float64 else 1e-8, dtype=dtype, device=device)
    torch.testing.assert_close(F.rms_norm(x, (8,), eps=eps), functional.rms_norm(x, (8,), eps=eps))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_l2_norm_of_a_contiguous_tensor_is_contiguous(dim: int, device: str) -> None:
    x = torch.randn(3, 4, 5, device=device, requires_grad=True)
    out = F.l2_norm(x, dim)
    assert out.stride() == functional.normalize(x, dim=dim).stride()
    assert torch.allclose(out, functional.normalize(x, dim=dim))
    assert F.l2_norm(x.movedim(dim, -1), -1).is_contiguous()


@pytest.mark.parametrize("element", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_a_branch_of_16_bits_is_added_to_a_wider_sum(name: str, element: torch.dtype, device: str) -> None:
    """The branch and the norm stay narrow, under autocast too; the sum and its gradient are never rounded to them."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, 40, generator=g).to(element).to(device).requires_grad_()
    rest = [torch.randn(5, 40, generator=g), *(torch.randn(40, generator=g) for _ in range(1 + (name == "layer_norm")))]
    residual, *parameters = (t.to(device).requires_grad_() for t in rest)
    wide = x.detach().float().requires_grad_()
    leaves, wides = [x, residual, *parameters], [wide, residual, *parameters]
    eps = {"eps": 1e-5}
    for turn in range(4):  # written out, recorded, replayed
        with torch.autocast(device, torch.bfloat16, enabled=turn == 3):
            out, summed = getattr(F, name)(x, (40,), *parameters, residual=residual, **eps)
        assert (out.dtype, summed.dtype) == (element, torch.float32)
        total = wide + residual
        wanted = getattr(functional, name)(total, (40,), *parameters, **eps)
        assert torch.equal(summed, total)
        torch.testing.assert_close(out.float(), wanted, rtol=2 * torch.finfo(element).eps, atol=1e-5)
        dout = torch.randn(out.shape, generator=g).to(element).to(device)
        dsummed = torch.randn(out.shape, generator=g).to(device)
        got = torch.autograd.grad((out, summed), leaves, (dout, dsummed))
        refs = torch.autograd.grad((wanted, total), wides, (dout.float(), dsummed))
        for grad, like, ref in zip(got, leaves, refs, strict=True):
            assert grad.dtype == like.dtype
            torch.testing.assert_close(grad.float(), ref, rtol=8 * torch.finfo(grad.dtype).eps, atol=1e-5)
    with pytest.raises(RuntimeError, match="residual is"):
        getattr(F, name)(residual, (40,), *parameters, residual=x)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_second_derivatives_of_a_branch(name: str, device: str) -> None:
    """Of values that bf16 has exactly, by a residual of f64: what is rounded is the results alone."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 8, generator=g).bfloat16().to(device).requires_grad_()
    residual = torch.randn(3, 8, generator=g, dtype=torch.float64).to(device).requires_grad_()
    dout = torch.randn(3, 8, generator=g).bfloat16().to(device)
    out, _ = getattr(F, name)(x, (8,), eps=1e-3, residual=residual)
    first, of_branch = torch.autograd.grad(out, (residual, x), dout, create_graph=True)
    wanted = getattr(functional, name)(x.double() + residual, (8,), eps=1e-3)
    (ref,) = torch.autograd.grad(wanted, residual, dout.double(), create_graph=True)
    torch.testing.assert_close(first, ref)
    assert torch.equal(of_branch, first.bfloat16())
    for found, like in ((first, ref), (of_branch, ref)):  # rounding has the derivative 1
        (grad,) = torch.autograd.grad(found, residual, dout.to(found.dtype), retain_graph=True)
        (other,) = torch.autograd.grad(like, residual, dout.double(), retain_graph=True)
        torch.testing.assert_close(grad, other)
