"""An embedding and its RMSNorm: torch's two calls, gradients, padding, indices out of bounds, the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import places
from hypothesis import given, settings, strategies as st
from proofs import target

import triplan as tp
import triplan.functional as F  # noqa: N812
from triplan.nn import FusedEmbeddingRMSNorm
from triplan.testing import check_plan, descriptors

Tensor = torch.Tensor
INDEX = torch.tensor([[3, 0, 3], [6, 1, 3]])


def weights() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    table, weight = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in ((7, 5), (5,)))
    return table.requires_grad_(), weight.requires_grad_()


def theirs(table: Tensor, weight: Tensor, padding_idx: int | None = None) -> tuple[Tensor, Tensor]:
    rows = torch.nn.functional.embedding(INDEX, table, padding_idx)
    return torch.nn.functional.rms_norm(rows, (5,), weight, 1e-3), rows


@pytest.mark.parametrize("padding_idx", [None, 3, -4])
def test_results_and_gradients_are_torchs(padding_idx: int | None) -> None:
    """Of the norm, of the rows, and of both."""
    given, grad = weights(), torch.arange(30, dtype=torch.float64).reshape(2, 3, 5)
    for used in ((0,), (1,), (0, 1)):
        found, expected = F.embedding_rms_norm(INDEX, *given, 1e-3, padding_idx), theirs(*given, padding_idx)
        torch.testing.assert_close(found, expected)
        results = [
            torch.autograd.grad([out[i] for i in used], given, [grad] * len(used), allow_unused=True, retain_graph=True)
            for out in (found, expected)
        ]
        torch.testing.assert_close(results[0][0], results[1][0])
        if 0 in used:
            torch.testing.assert_close(results[0][1], results[1][1])


def test_derivatives_and_registration() -> None:
    given = weights()

    def ours(table: Tensor, weight: Tensor) -> Any:
        return F.embedding_rms_norm(INDEX, table, weight, 1e-3)

    assert torch.autograd.gradcheck(ours, given)
    assert torch.autograd.gradgradcheck(ours, given)
    op = torch.ops.triplan.normed_embedding.default
    names = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(op, (given[0], INDEX, given[1], 1e-3, 3, False), test_utils=names)


@pytest.mark.parametrize(("where", "kernel"), places("normed_rows"))
@settings(max_examples=8)
@given(data=st.data())
def test_drawn_shapes_and_layouts(where: str, kernel: str | None, data: st.DataObject) -> None:
    fixed = {"element": data.draw(st.sampled_from(("bf16", "f32"))), "eps": 1e-5}
    desc = data.draw(descriptors(tp.NormedEmbeddingDescriptor, 1 << 11, fixed=fixed))
    try:
        plan = tp.plan(desc, target=target(where), preference=tp.PlanPreference(kernel=kernel))
    except tp.Unsupported:
        return  # all but the table must be packed
    check_plan(plan)


def test_indices_out_of_bounds_and_refusals() -> None:
    table, weight = weights()
    with pytest.raises(IndexError, match=r"index\[1\] = 7 is out of bounds for extent 7"):
        F.embedding_rms_norm(torch.tensor([0, 7]), table, weight)
    for wrong in (weight[:4], weight.float()):
        with pytest.raises(RuntimeError, match="norm_weight of its width and dtype"):
            F.embedding_rms_norm(INDEX, table, wrong)


def test_the_module_is_torchs_embedding_with_a_weight_more() -> None:
    module = FusedEmbeddingRMSNorm(7, 5, padding_idx=2, dtype=torch.float64)
    assert set(module.state_dict()) == {"weight", "norm_weight"}
    assert module.weight[2].count_nonzero() == 0
    expected = torch.nn.functional.rms_norm(module.weight[INDEX], (5,), None, 1e-5)
    torch.testing.assert_close(module(INDEX), (expected, module.weight[INDEX]))
