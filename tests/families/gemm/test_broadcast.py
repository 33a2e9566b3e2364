"""Products of factors that broadcast or are empty, and ``out=`` that overlaps itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases.functional import integers

import triplan.functional as F  # noqa: N812
from triplan.functional._plans import PLANS

OUT_SHAPES = {"mm": ((3, 4), (4, 5)), "bmm": ((2, 3, 4), (2, 4, 5)), "matmul": ((2, 3, 4), (4, 5))}


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("name", [*OUT_SHAPES, "addmm"])
def test_an_out_that_overlaps_itself_is_refused_untouched(name: str, fits: bool, device: str) -> None:
    factors = [torch.ones(shape, device=device) for shape in OUT_SHAPES.get(name, OUT_SHAPES["mm"])]
    args = [torch.ones(5, device=device), *factors] if name == "addmm" else factors
    expected = getattr(torch, name)(*args)
    base = torch.full((1,) * expected.dim(), 99.0, device=device)
    out = base.expand(expected.shape if fits else (expected.size(0) + 1, *expected.shape[1:]))
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        getattr(F, name)(*args, out=out)
    assert base.item() == 99


# --- gradients of factors that broadcast ---

BROADCAST: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((4, 8), (64, 8, 6)),
    ((64, 4, 8), (8, 6)),
    ((8,), (64, 8, 6)),
    ((1, 4, 8), (64, 8, 6)),
    ((64, 1, 4, 8), (3, 8, 6)),
    ((64, 3, 4, 8), (1, 3, 8, 6)),
    ((2, 1, 4, 8), (2, 64, 8, 6)),
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("a_shape", "b_shape"), BROADCAST)
def test_the_gradient_of_a_factor_that_broadcasts_is_rounded_once(
    a_shape: tuple[int, ...], b_shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    """Large terms cancel, so that products rounded one by one would leave their errors."""
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=g).to(device, dtype) for shape in (a_shape, b_shape))
    shape = torch.matmul(a, b).shape
    axis = shape.index(64)
    half = 64 * torch.randn((*shape[:axis], 32, *shape[axis + 1 :]), generator=g).to(device, dtype)
    dout = torch.cat([half, -half], axis)
    # The second half of what is not broadcast over the batch is almost the first.
    for t in (a, b):
        if 64 in t.shape:
            at = t.shape.index(64)
            t.narrow(at, 32, 32).copy_(t.narrow(at, 0, 32) * (1 + 2**-6))
    found = []
    for make, which in ((dtype, F.matmul), (torch.float64, torch.matmul)):
        each = [t.to(make).requires_grad_() for t in (a, b)]
        out = which(*each)
        found.append((out, *torch.autograd.grad(out, each, dout.to(make))))
    assert found[0][0].is_contiguous()
    for got, want in zip(*found, strict=True):
        assert got.shape == want.shape
        error = (got.double() - want).abs().max() / want.abs().max()
        assert error <= torch.finfo(dtype).eps


@pytest.mark.parametrize(("a_shape", "b_shape"), BROADCAST)
def test_the_forward_is_one_plan_with_and_without_gradients(
    a_shape: tuple[int, ...], b_shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hence the bits are equal."""
    found: list[str] = []
    get = PLANS.get

    def noted(desc: Any, **options: Any) -> Any:
        found.append(desc.key)
        return get(desc, **options)

    monkeypatch.setattr(PLANS, "get", noted)
    for requires_grad in (False, True):
        F.matmul(*(torch.ones(shape, dtype=torch.float16, requires_grad=requires_grad) for shape in (a_shape, b_shape)))
    assert len(found) == 2
    assert found[0] == found[1]


def test_the_op_of_factors_that_broadcast(device: str) -> None:
    a, b = integers((2, 1, 2, 3), torch.float32, device, 1), integers((4, 3, 2), torch.float32, device, 2)
    op = torch.ops.triplan.broadcast_bmm.default
    torch.library.opcheck(op, (a.requires_grad_(), b[None].requires_grad_()))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        op(a, b[None].mT)


def test_second_derivatives_of_a_factor_that_broadcasts(device: str) -> None:
    a, b = integers((2, 1, 2, 3), torch.float16, device, 1), integers((4, 3, 2), torch.float16, device, 2)
    found = []
    for which in (F.matmul, torch.matmul):
        each = [t.clone().requires_grad_() for t in (a, b)]
        grads = torch.autograd.grad(which(*each).square().sum(), each, create_graph=True)
        found.append((*grads, *torch.autograd.grad(sum(x.sum() for x in grads), each)))
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


# --- empty tensors ---


@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("strides", [(1, 0), (0, 1), (0, 0), (3, 1)])
@pytest.mark.parametrize("k", [0, 5])
def test_gradients_of_empty_products(k: int, strides: tuple[int, int], rows: int, device: str) -> None:
    weight = torch.ones(20, device=device).as_strided((3, k), strides)
    for bias in (torch.ones(3, device=device), None):
        x = torch.ones(rows, k, device=device, requires_grad=True)
        given = [x, weight.detach().requires_grad_(), *([] if bias is None else [bias.clone().requires_grad_()])]
        found = torch.autograd.grad(F.linear(*given).sum(), given)
        want = torch.autograd.grad(torch.nn.functional.linear(*given).sum(), given)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
