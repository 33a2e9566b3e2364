"""What ``triplan.backends.runtime.interpreter`` replaces of Triton's interpreter."""

from __future__ import annotations

from functools import reduce
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import triplan as tp
from triplan.backends.runtime.interpreter import interpret
from triplan.backends.runtime.launch import Launch, Ptr

pytestmark = pytest.mark.interpret


@triton.jit
def composed(a, b, c, d):  # type: ignore[no-untyped-def]
    """x -> c * (a * x + b) + d: the order of neighbours matters."""
    return c * a, c * b + d


@triton.jit
def reduce_kernel(a, b, x, y, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr, KEEP: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    found = tl.reduce((tl.load(a + at), tl.load(b + at)), AXIS, composed, keep_dims=KEEP)
    if AXIS is None:
        to = tl.zeros((1, 1), tl.int32) if KEEP else 0
    elif AXIS == 0:
        to = tl.arange(0, N)[None, :] if KEEP else tl.arange(0, N)
    else:
        to = tl.arange(0, M)[:, None] if KEEP else tl.arange(0, M)
    tl.store(x + to, found[0])
    tl.store(y + to, found[1])


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("axis", [0, 1, None])
@pytest.mark.parametrize("shape", [(4, 8), (1, 2), (2, 1)])
def test_reductions_keep_the_order_of_neighbours(shape: tuple[int, int], axis: int | None, keep: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-3, 4, shape, generator=generator, dtype=torch.int32) for _ in range(2))
    lines = list(zip(a.view(-1).tolist(), b.view(-1).tolist(), strict=True))
    if axis is not None:
        rows = torch.arange(a.numel()).view(shape).movedim(axis, -1).reshape(-1, shape[axis])
    else:
        rows = torch.arange(a.numel())[None]
    expected = [
        reduce(lambda f, g: (g[0] * f[0], g[0] * f[1] + g[1]), [lines[i] for i in row]) for row in rows.tolist()
    ]
    x, y = torch.zeros(2, len(rows), dtype=torch.int32)
    args: Any = SimpleNamespace(a=a, b=b, x=x, y=y)
    pointers = {name: Ptr(name, tp.ElementKind.I32, 4) for name in "abxy"}
    constants = {"M": shape[0], "N": shape[1], "AXIS": axis, "KEEP": keep}
    interpret([Launch(reduce_kernel, 1, pointers, constants)], args, None)
    assert list(zip(x.tolist(), y.tolist(), strict=True)) == expected
