"""Expressions of lists beside torch, in place and not; unscaling of gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases.functional import DEVICES

import triplan as tp
from triplan import functional as F  # noqa: N812
from triplan.errors import InvalidProblem
from triplan.optim import foreach_expression, foreach_norm, unscale_grads_

Tensor = torch.Tensor
SHAPES = ((3,), (0, 4), (), (7, 11), (2, 3, 5), (16384,), (33000,))


def drawn(device: str, dtype: torch.dtype, seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [(8 * torch.randn(s, generator=g)).to(dtype).to(device) for s in SHAPES]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.int64, torch.float16)], ids=str
)
def test_bits_of_a_call_for_each_tensor(dtypes: tuple[torch.dtype, torch.dtype], device: str) -> None:
    x, y = (drawn(device, dtype, seed) for seed, dtype in enumerate(dtypes))
    s = torch.tensor(0.75, device=device)

    def tree(x: Any, y: Any, s: Any, a: Any) -> Any:
        return tp.expr.sigmoid(x) * y + s * a, x > y

    found = foreach_expression(tree, x, y, s, -2.5)
    for i, (one, other) in enumerate(zip(x, y, strict=True)):
        wanted = F.expression(tree, one, other, s, -2.5)
        for own, w in zip(found, wanted, strict=True):
            assert own[i].dtype == w.dtype
            assert torch.equal(own[i], w)


@pytest.mark.parametrize("device", DEVICES)
def test_operands_are_replaced(device: str) -> None:
    m, g = drawn(device, torch.float32, 0), drawn(device, torch.float32, 1)
    wanted = [torch.lerp(a.double(), b.double(), 0.25) for a, b in zip(m, g, strict=True)]
    before = [t.data_ptr() for t in m]
    moves = [torch.full_like(t, torch.nan, dtype=torch.bfloat16) for t in m]

    def step(m: Any, g: Any) -> Any:
        momentum = m + 0.25 * (g - m)
        return momentum, momentum

    found = foreach_expression(step, m, g, out=(m, moves))
    assert found[0] is m
    assert [t.data_ptr() for t in m] == before
    for a, move, w in zip(m, moves, wanted, strict=True):
        torch.testing.assert_close(a.double(), w, rtol=1e-6, atol=1e-6)
        assert torch.equal(move, a.bfloat16())


def test_an_operand_may_have_the_name_of_a_result() -> None:
    found = foreach_expression(tp.expr.operand("out0") + 1, out0=[torch.ones(3), torch.ones(0)])
    assert [t.tolist() for t in found] == [[2, 2, 2], []]


def test_empty_tensors_take_nothings_place() -> None:
    x, out = [torch.ones(0)], [torch.ones(0, dtype=torch.bfloat16)]
    assert foreach_expression(lambda x: x + 1, x, out=out) is out


@pytest.mark.parametrize("device", DEVICES)
def test_unaligned_tensors(device: str) -> None:
    whole = torch.randn(3 * 16385, device=device)
    x = list(whole.split(16385))  # at addresses that are multiples of 4
    found = foreach_expression(lambda x: x * 3, x)
    assert torch.equal(torch.cat(found), whole * 3)


def test_what_does_not_fit_is_refused() -> None:
    x = [torch.ones(3), torch.ones(2)]
    for call, message in (
        (lambda: foreach_expression(lambda x, y: x + y, x, x[:1]), "other shapes"),
        (lambda: foreach_expression(lambda x: x + 1, torch.ones(3)), "no operand is a list"),
        (lambda: foreach_expression(lambda x, y: x + y, x, torch.ones(3)), r"shape \[3\]"),
        (lambda: foreach_expression(lambda x: x + 1, x, out=[x[0], torch.ones(2)]), "shares memory"),
        (lambda: foreach_expression(lambda x: x + 1, [torch.ones(3), torch.ones(2).half()]), "f32"),
        (lambda: foreach_expression(lambda x: x + 1, [torch.ones(3, 2).T]), "packed"),
    ):
        with pytest.raises(InvalidProblem, match=message):
            call()
    assert foreach_expression(lambda x: x + 1, []) == []


def test_a_result_of_another_element_takes_no_place() -> None:
    x = tp.expr.operand("x")
    with pytest.raises(InvalidProblem, match="cannot take the place"):
        tp.ListExpressionDescriptor.of({"x": x > 1}, (3,), {"x": "bool"}, x=("f32", "list"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_of_each(dtype: torch.dtype, order: float, device: str) -> None:
    x = drawn(device, dtype, 0)
    x[5][7] = torch.nan
    x[6][3] = 1e30
    for t, norm in zip(x, foreach_norm(x, order), strict=True):
        assert (norm.dtype, norm.shape) == (torch.float64, ())
        empty = torch.tensor(0.0 if order > 0 else torch.inf, dtype=torch.float64)
        wanted = torch.linalg.vector_norm(t.double(), order) if t.numel() else empty.to(device)
        torch.testing.assert_close(norm, wanted, rtol=1e-12, atol=0, equal_nan=True)
    assert foreach_norm([]) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [None, torch.inf, torch.nan])
def test_unscaling(bad: float | None, device: str) -> None:
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    params = [torch.zeros(4, 3, device=device, dtype=dtype).requires_grad_() for dtype in dtypes]
    params.append(torch.zeros(3, 5, device=device).requires_grad_())
    for i, p in enumerate(params):
        p.grad = torch.full(p.shape, 8.0 * (i + 1), device=device, dtype=p.dtype)
    params[3].grad = torch.full((5, 3), 32.0, device=device).T
    if bad is not None:
        params[1].grad[2, 1] = bad  # type: ignore[index]
    found = unscale_grads_(params, torch.tensor([4.0], device=device))
    assert (found.shape, found.dtype, float(found)) == ((), torch.float32, float(bad is not None))
    for i in (0, 2, 3):
        assert torch.equal(params[i].grad, torch.full_like(params[i], 2.0 * (i + 1)))  # type: ignore[arg-type]
