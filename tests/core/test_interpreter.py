"""What ``triplan.backends.runtime.interpreter`` replaces of Triton's interpreter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import reduce
from itertools import product
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter

import triplan as tp
from triplan.backends.runtime.interpreter import _repair, interpret
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


INTEGERS = (tl.int1, tl.int8, tl.int16, tl.int32, tl.int64, tl.uint8, tl.uint16, tl.uint32, tl.uint64)
TYPES = (*INTEGERS, tl.float16, tl.bfloat16, tl.float32, tl.float64)
NUMBERS = (False, True, 0, -1, 200, 2**31, -(2**31) - 1, 2**63, -(2**63), 2**64, 0.0, 2.5, -1e39, float("inf"))


def operands() -> dict[str, Any]:
    """Scalars and blocks of each type, pointers among them, and numbers."""
    found: dict[str, Any] = {f"number {n!r}": n for n in NUMBERS}
    for dtype in (*TYPES, tl.pointer_type(tl.float32)):
        held = triton_interpreter._get_np_dtype(dtype)
        for shape in ((), (2, 4), (2, 1)):
            data = (np.arange(prod(shape)) % 2 + 1).astype(held).reshape(shape or 1)
            handle = triton_interpreter.TensorHandle(data, dtype)
            found[f"{dtype} {shape}"] = tl.tensor(handle, tl.block_type(dtype, list(shape)) if shape else dtype)
    return found


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    """Types and bytes of what a function gives, or the error that it raises."""
    try:
        found = function(triton_interpreter.TritonSemantic(triton_interpreter.interpreter_builder), *args)
    except Exception as e:
        return type(e)
    held = [(t, t.handle.data) for t in (found if isinstance(found, tuple) else (found,))]
    return [(str(t.type), str(t.dtype), data.dtype, data.shape, data.tobytes()) for t, data in held]


@pytest.mark.parametrize("flags", list(product((False, True), (False, True), (False, True))), ids=str)
def test_operands_become_what_triton_makes_of_them(flags: tuple[bool, bool, bool]) -> None:
    """Of operands of all types, beside each other and beside numbers."""
    _repair()
    ours, (pointers, arithmetic, div) = triton_interpreter.TritonSemantic.binary_op_type_checking_impl, flags
    tritons = inspect.getclosurevars(ours).nonlocals["check"]
    every, results = operands(), []
    for (a, lhs), (b, rhs) in product(every.items(), every.items()):
        args = (lhs, rhs, pointers, pointers, arithmetic, div)
        results.append(outcome(ours, *args))
        assert results[-1] == outcome(tritons, *args), (a, b)
    assert sum(isinstance(result, list) for result in results) > len(results) / 2


@pytest.mark.parametrize("to", TYPES, ids=str)
def test_conversions_are_tritons(to: Any) -> None:
    _repair()
    ours = triton_interpreter.TritonSemantic.cast
    for name, value in operands().items():
        if isinstance(value, tl.tensor) and not value.dtype.is_ptr():
            given = tl.tensor(value.handle, value.type)
            assert outcome(ours, given, to) == outcome(inspect.getclosurevars(ours).nonlocals["cast"], given, to), name


EXTENDED = np.finfo(np.longdouble).nmant >= 63


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        (tl.float32, 23),
        pytest.param(tl.float64, 31, marks=pytest.mark.skipif(not EXTENDED, reason="long double is f64")),
    ],
    ids=str,
)
def test_products_of_an_fma_are_not_rounded(dtype: Any, bits: int) -> None:
    """(1 + e)**2 - (1 + 2e) is e**2, of which a rounded product would leave nothing; infinities and NaN pass."""
    _repair()
    held, e, inf, nan = triton_interpreter._get_np_dtype(dtype), 2.0**-bits, float("inf"), float("nan")
    rows = [[1 + e, 1 + e, -1 - 2 * e], [inf, 1.0, 2.0], [inf, 1.0, -inf], [nan, 1.0, 2.0]]
    x, y, z = (triton_interpreter.TensorHandle(np.array(c, held), dtype) for c in zip(*rows, strict=True))
    with np.errstate(invalid="ignore"):
        found = triton_interpreter.interpreter_builder.create_fma(x, y, z)
    assert found.data.dtype == held
    np.testing.assert_array_equal(found.data, np.array([e * e, inf, nan, nan], held))
