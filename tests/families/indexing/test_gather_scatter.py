"""Gather and scatter_add on small problems that can be checked by eye, and on one of each that cannot."""

from __future__ import annotations

import pytest
import torch

import triplan.functional as F  # noqa: N812


def test_gather_1d_simple(device: str) -> None:
    src = torch.tensor([10.0, 20.0, 30.0, 40.0], device=device)
    assert F.gather(src, 0, torch.tensor([3, 0, 0, 2], device=device)).tolist() == [40, 10, 10, 30]


def test_gather_2d(device: str) -> None:
    src = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], device=device)
    index = torch.tensor([[2, 0], [1, 1]], device=device)
    assert F.gather(src, 0, index).tolist() == [[5, 2], [3, 4]]
    assert F.gather(src, 1, torch.tensor([[1], [0], [1]], device=device)).tolist() == [[2], [3], [6]]


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_gather_3d(device: str, dim: int) -> None:
    src = torch.randn(4, 5, 6, device=device)
    index = torch.randint(0, src.shape[dim], (4, 5, 6), device=device)
    assert torch.equal(F.gather(src, dim, index), torch.gather(src, dim, index))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gather_half(device: str, dtype: torch.dtype) -> None:
    src = torch.randn(64, 32, device=device).to(dtype)
    index = torch.randint(0, 64, (16, 32), device=device)
    assert torch.equal(F.gather(src, 0, index), torch.gather(src, 0, index))


def test_gather_large(device: str) -> None:
    src = torch.randn(10_007, 129, device=device)
    index = torch.randint(0, 10_007, (5_003, 129), device=device)
    assert torch.equal(F.gather(src, 0, index), torch.gather(src, 0, index))


def test_gather_single_element(device: str) -> None:
    src, index = torch.tensor([[7.0]], device=device), torch.zeros(1, 1, dtype=torch.int64, device=device)
    assert F.gather(src, 0, index).tolist() == [[7]]
    assert F.gather(src[0, 0], 0, index[0, 0]).item() == 7


def test_gather_int32_index(device: str) -> None:
    src = torch.randn(9, 8, device=device)
    index = torch.randint(0, 9, (5, 8), device=device)
    assert torch.equal(F.gather(src, 0, index.int()), torch.gather(src, 0, index))


def test_gather_backward(device: str) -> None:
    index = torch.tensor([[2, 0], [1, 1]], device=device)
    src = torch.zeros(3, 2, device=device, requires_grad=True)
    F.gather_with_grad(src, 0, index).backward(torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device))
    assert src.grad is not None
    assert src.grad.tolist() == [[0, 2], [3, 4], [1, 0]]


def test_gather_backward_duplicate_idx(device: str) -> None:
    src = torch.zeros(2, device=device, requires_grad=True)
    index = torch.tensor([1, 1, 0, 1], device=device)
    F.gather_with_grad(src, 0, index).backward(torch.tensor([1.0, 2.0, 4.0, 8.0], device=device))
    assert src.grad is not None
    assert src.grad.tolist() == [4, 11]


def test_scatter_add_simple(device: str) -> None:
    out = F.scatter_add(
        torch.zeros(4, device=device), 0, torch.tensor([3, 1], device=device), torch.ones(2, device=device)
    )
    assert out.tolist() == [0, 1, 0, 1]


def test_scatter_add_accumulate(device: str) -> None:
    index = torch.tensor([1, 1, 0, 1], device=device)
    out = F.scatter_add(torch.tensor([5.0, 6.0], device=device), 0, index, torch.ones(4, device=device))
    assert out.tolist() == [6, 9]


def test_scatter_add_values(device: str) -> None:
    index = torch.tensor([[0, 1, 0], [1, 1, 0]], device=device)
    src = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]], device=device)
    assert F.scatter_add(torch.zeros(2, 3, device=device), 0, index, src).tolist() == [[1, 0, 36], [8, 18, 0]]


def test_scatter_add_half(device: str) -> None:
    index = torch.randint(0, 8, (16, 32), device=device)
    src = torch.randint(-4, 5, (16, 32), device=device).half()  # small integers: every sum is exact
    start = torch.zeros(8, 32, dtype=torch.float16, device=device)
    assert torch.equal(F.scatter_add(start, 0, index, src), start.scatter_add(0, index, src))


def test_scatter_add_large(device: str) -> None:
    index = torch.randint(0, 1_000, (20_011, 65), device=device)
    src = torch.randint(-4, 5, (20_011, 65), device=device).float()
    start = torch.randint(-4, 5, (1_000, 65), device=device).float()
    assert torch.equal(F.scatter_add(start, 0, index, src), start.scatter_add(0, index, src))


def test_scatter_add_empty(device: str) -> None:
    start = torch.randn(3, 4, device=device)
    index = torch.zeros(0, 4, dtype=torch.int64, device=device)
    assert torch.equal(F.scatter_add(start, 0, index, torch.zeros(0, 4, device=device)), start)
    nothing = torch.zeros(0, 4, device=device)
    assert F.scatter_add(nothing, 0, index, torch.zeros(0, 4, device=device)).shape == (0, 4)
