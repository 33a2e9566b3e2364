"""Sorts in shared memory, whose logic is emulated without a GPU: ranks, exchanges, counts, places."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from cases import H200, compiles, required
from cases.lanes import emulate
from samples import SetConstant

import triplan as tp
from triplan.backends.triton.sorting import onesweep
from triplan.backends.triton.sorting.shared import integers
from triplan.descriptors.sorting import RowOrderProblem

pytestmark = compiles


def drawn(element: str, rows: int, n: int) -> torch.Tensor:
    """Each value of a digit, ties, and what has no usual order."""
    dtype = tp.ElementKind.of(element).torch
    g = torch.Generator().manual_seed(0)
    if not dtype.is_floating_point:
        low, high = (0, 2) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        x = torch.randint(low, high, (rows, n), generator=g).to(dtype)
        x[:, ::3] = x[:, :1]
        return x
    x = (torch.randn(rows, n, generator=g) * 100).to(dtype)
    for step, value in ((3, 1.0), (7, float("nan")), (11, -0.0), (13, 0.0), (17, float("inf")), (19, -float("inf"))):
        x[:, ::step] = value
    return x


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("element", ["bf16", "f32", "f64", "i32", "i64", "u8", "bool"])
@pytest.mark.parametrize(("kernel", "n"), [("block", 20), ("block", 300), ("onesweep", 20), ("onesweep", 600)])
def test_sorts(kernel: str, n: int, element: str, descending: bool, constant: SetConstant) -> None:
    """Programs of a launch in any order; a workspace that holds anything."""
    constant(onesweep, "ITEMS", {1: 2, 2: 1, 4: 1, 8: 1})
    check(tp.SortDescriptor(element=element, rows=2, n=n, descending=descending), kernel, 0, n, descending)


@pytest.mark.parametrize("element", ["bf16", "f32", "i64"])
@pytest.mark.parametrize(("kernel", "n"), [("block", 300), ("onesweep", 600)])
def test_selections(kernel: str, n: int, element: str, constant: SetConstant) -> None:
    """What is not wanted is not written: it would lie outside the results."""
    constant(onesweep, "ITEMS", {1: 2, 2: 1, 4: 1, 8: 1})
    for k in (1, n // 2, n):
        check(tp.TopKDescriptor(element=element, rows=2, n=n, k=k), kernel, 0, k, True)
        check(tp.KthValueDescriptor(element=element, rows=2, n=n, k=k), kernel, k - 1, k, False)


def check(desc: RowOrderProblem, kernel: str, first: int, end: int, descending: bool) -> None:
    """Run ``kernel``, whose results are places ``first`` to ``end`` of the rows in order."""
    plan = required(desc, kernel, H200)
    x = drawn(desc.element.value, desc.rows, desc.n)
    bits = x.view(integers(desc.element).torch).numpy()
    shape = desc.operand("values").shape
    operands = {"x": bits, "values": np.zeros(shape, bits.dtype), "indices": np.full(shape, -1, np.int64)}
    workspace = np.random.default_rng(0).integers(0, 255, plan.workspace_size(), dtype=np.uint8)

    def order(programs: int) -> list[int]:
        return random.Random(desc.n).sample(range(programs), programs)

    for launch in plan.launches:
        if launch.kernel.__name__ == "fill_kernel":
            out, numel = launch.args["out"], launch.args["numel"]
            workspace[out.offset : out.offset + 4 * numel.value] = 0  # type: ignore[union-attr]
        else:
            emulate(launch, operands, workspace, order)
    expected = torch.sort(x, descending=descending, stable=True).indices.numpy()[:, first:end]
    assert (operands["indices"].reshape(expected.shape) == expected).all()
    assert (operands["values"].reshape(expected.shape) == np.take_along_axis(bits, expected, 1)).all()


@pytest.mark.parametrize("element", ["bf16", "f32", "i64"])
@pytest.mark.parametrize("k", [5, 300])
def test_sort_of_what_is_taken(k: int, element: str) -> None:
    """The last launch of ``filtered_sort``, given elements in the order of their positions in longer rows."""
    desc = tp.TopKDescriptor(element=element, rows=2, n=3000, k=k)
    plan = required(desc, "filtered_sort", H200)
    x = drawn(element, 2, k).view(integers(desc.element).torch).numpy()
    at = np.sort(np.random.default_rng(0).permutation(3000)[: 2 * k].reshape(2, k), 1).astype(np.int32)
    operands = {"values": np.zeros(x.shape, x.dtype), "indices": np.full(x.shape, -1, np.int64)}
    workspace = np.zeros(plan.workspace_size(), np.uint8)
    launch = plan.launches[-1]
    for name, data in (("x", x), ("order", at)):
        begin = launch.args[name].offset  # type: ignore[union-attr]
        workspace[begin : begin + data.nbytes] = data.view(np.uint8).flatten()
    emulate(launch, operands, workspace, lambda programs: list(range(programs)))
    expected = torch.sort(drawn(element, 2, k), descending=True, stable=True).indices.numpy()
    assert (operands["values"] == np.take_along_axis(x, expected, 1)).all()
    assert (operands["indices"] == np.take_along_axis(at, expected, 1)).all()
