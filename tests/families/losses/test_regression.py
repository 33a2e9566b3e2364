"""Losses of differences beside torch's: weights, reductions, broadcasting, bounds, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import triplan.functional as F  # noqa: N812

torchs = torch.nn.functional
NAMES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
SOME: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"reduce": False},
    {"size_average": False},
]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def compare(name: str, x: torch.Tensor, y: torch.Tensor, **options: Any) -> None:
    leaves = [x.requires_grad_(), y.requires_grad_()]
    results = [getattr(m, name)(x, y, **options) for m in (F, torchs)]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(out.sum(), leaves) for out in results))


@pytest.mark.parametrize("options", SOME, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_reductions_and_weights_are_torchs(name: str, options: dict[str, Any]) -> None:
    if name == "huber_loss" and not options.keys() <= {"reduction"}:
        with pytest.raises(TypeError):
            F.huber_loss(drawn(3), drawn(3, seed=1), **options)
        return
    compare(name, drawn(4, 7), drawn(4, 7, seed=1), **options)
    if name != "smooth_l1_loss":
        compare(name, drawn(4, 7), drawn(4, 7, seed=1), weight=drawn(4, 7, seed=2).abs(), **options)


@pytest.mark.filterwarnings("ignore:.*target size.*:UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_targets_of_another_shape_are_broadcast_with_a_warning(name: str) -> None:
    with pytest.warns(UserWarning, match=r"target of size \[7\]"):
        compare(name, drawn(4, 7), drawn(7, seed=1))
    assert getattr(F, name)(drawn(0, 3), drawn(0, 3)).isnan()


def test_bounds() -> None:
    x, y = 2 * drawn(50), drawn(50, seed=1)
    for bound in (0.25, 1.0, 3):
        compare("smooth_l1_loss", x.detach(), y.detach(), beta=bound)
        compare("huber_loss", x.detach(), y.detach(), delta=bound)
    compare("smooth_l1_loss", x.detach(), y.detach(), beta=0.0)
    with pytest.raises(RuntimeError, match="negative values for beta"):
        F.smooth_l1_loss(x, y, beta=-1.0)
    with pytest.raises(RuntimeError, match="non-positive values for delta"):
        F.huber_loss(x, y, delta=0.0)
    with pytest.raises(ValueError, match="not a valid value for reduction"):
        F.mse_loss(x, y, reduction="byte_mean")
    with pytest.raises(ValueError, match="same size"):
        F.l1_loss(x, y, weight=x[:3])
