"""The modules of triplan.nn beside torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from triplan import nn


@pytest.mark.parametrize("options", [{}, {"elementwise_affine": False}, {"eps": 1e-3}, {"bias": False}], ids=str)
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_state_results_and_gradients_are_torchs(name: str, options: dict[str, Any], device: str) -> None:
    if name == "RMSNorm" and "bias" in options:
        pytest.skip("torch's has no bias")
    theirs = getattr(torch.nn, name)((4, 6), **options, dtype=torch.float64, device=device)
    ours = getattr(nn, name)((4, 6), **options, dtype=torch.float64, device=device)
    for p in theirs.parameters():
        torch.nn.init.normal_(p)
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert repr(ours) == repr(theirs)
    x = torch.randn(3, 4, 6, dtype=torch.float64, device=device, requires_grad=True)
    torch.testing.assert_close(ours(x), theirs(x))
    dout = torch.randn_like(x)
    for got, ref in zip(
        torch.autograd.grad(ours(x), [x, *ours.parameters()], dout),
        torch.autograd.grad(theirs(x), [x, *theirs.parameters()], dout),
        strict=True,
    ):
        torch.testing.assert_close(got, ref)
    out, summed = ours(x, 2 * x)
    torch.testing.assert_close(summed, 3 * x)
    torch.testing.assert_close(out, theirs(3 * x))


def test_weights_that_are_stored_less_one(device: str) -> None:
    plain, offset = nn.RMSNorm(8, device=device), nn.RMSNorm(8, weight_offset=1, device=device)
    assert torch.equal(offset.weight, torch.zeros_like(offset.weight))
    assert "weight_offset=1" in repr(offset)
    x = torch.randn(3, 8, device=device)
    assert torch.equal(plain(x), offset(x))
    for options in ({"weight_offset": 2}, {"weight_offset": 1, "elementwise_affine": False}):
        with pytest.raises(ValueError, match="weight_offset"):
            nn.RMSNorm(8, **options)  # type: ignore[arg-type]


@pytest.mark.usefixtures("fresh_compiler")
def test_compiles_whole(device: str) -> None:
    model = torch.nn.Sequential(nn.LayerNorm(6), torch.nn.Linear(6, 6), nn.RMSNorm(6)).to(device)
    x = torch.randn(5, 6, device=device)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_narrow_inputs_as_in_torch(name: str, device: str) -> None:
    theirs, ours = getattr(torch.nn, name)(6, device=device), getattr(nn, name)(6, device=device)
    x = torch.randn(3, 6, device=device).bfloat16()
    got = ours(x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, theirs(x.float()).bfloat16())  # not every torch takes x beside wider parameters
    got.sum().backward()
    assert ours.weight.grad is not None
    assert ours.weight.grad.dtype == torch.float32
    with torch.autocast(device, dtype=torch.bfloat16):
        torch.testing.assert_close(ours(x.float()), theirs(x.float()))


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_a_parametrised_weight(name: str, device: str) -> None:
    module, x = getattr(nn, name)(6, device=device), torch.randn(3, 6, device=device)
    expected = -module(x)
    torch.nn.utils.parametrize.register_parametrization(module, "weight", Negated())
    assert torch.equal(module(x), expected)


class Negated(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return -weight
