"""bf16 and f16 parameters that lose no small steps: f32 masters, and rounding at random."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import triplan as tp
import triplan.optim as ours
from triplan.backends.triton.common.tables import CHUNK
from triplan.sku import interpreting

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = (0, 1, CHUNK + 13, 77)
MAKES = {"adamw": ours.AdamW, "sgd": ours.SGD, "lion": ours.Lion}


def params_of(dtype: torch.dtype, device: str) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(n, generator=g).to(device, dtype).requires_grad_() for n in SIZES]


def step(optimizer: Any, params: list[Tensor], seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=g).to(p.device, p.dtype)
    optimizer.step()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MAKES)
def test_masters_are_what_f32_parameters_become(name: str, dtype: torch.dtype, device: str) -> None:
    params = params_of(dtype, device)
    wide = [p.detach().float().requires_grad_() for p in params]
    optimizer, peer = MAKES[name](params, lr=1e-3, master_weights=True), MAKES[name](wide, lr=1e-3)
    for seed in range(1, 4):
        step(optimizer, params, seed)
        for p, w in zip(params, wide, strict=True):
            assert p.grad is not None
            w.grad = p.grad.float()
        peer.step()
    for p, w in zip(params, wide, strict=True):
        state = optimizer.state[p]
        assert torch.equal(state["master"], w)
        assert torch.equal(p, w.to(dtype))
        assert {t.dtype for t in state.values()} == {torch.float32}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options", [{"master_weights": True}, {"stochastic_rounding": True}], ids=lambda o: next(iter(o))
)
def test_a_restored_state_gives_the_same_bits(options: dict[str, bool], device: str) -> None:
    params = params_of(torch.bfloat16, device)
    optimizer = ours.AdamW(params, **options)  # type: ignore[arg-type]
    step(optimizer, params, 1)
    others = [p.detach().clone().requires_grad_() for p in params]
    again = ours.AdamW(others, **options)  # type: ignore[arg-type]
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in (2, 3):
        step(optimizer, params, seed)
        step(again, others, seed)
    for p, other in zip(params, others, strict=True):
        assert torch.equal(p, other)
        for name, t in optimizer.state[p].items():
            assert torch.equal(t, again.state[other][name])


@pytest.mark.parametrize("device", DEVICES)
def test_rounding_at_random_is_exact_on_average(device: str) -> None:
    """The steps are 3/1024 of a unit in the last place of 1: rounded to nearest, none moves anything."""
    n, steps, unit = 4096, 64, 2.0**-7
    torch.manual_seed(0)
    p = torch.ones(n, device=device, dtype=torch.bfloat16).requires_grad_()
    optimizer = ours.SGD([p], lr=3 / 1024 * unit, stochastic_rounding=True)
    for _ in range(steps):
        p.grad = -torch.ones_like(p)
        optimizer.step()
    moved = (p.detach().double() - 1).mean().item() / unit
    # A sum of steps * n draws of 0 or 1, once in a million further than five deviations away.
    chance = 3 / 1024
    assert abs(moved - steps * chance) < 5 * (steps * chance * (1 - chance) / n) ** 0.5
    steady = torch.ones_like(p).requires_grad_()
    steady.grad = -torch.ones_like(p)
    ours.SGD([steady], lr=3 / 1024 * unit).step()
    assert torch.equal(steady, torch.ones_like(p))


def run(target: tp.Target, device: str, seed: int, values: dict[str, list[Tensor]]) -> list[Tensor]:
    sizes = tuple(t.numel() for t in values["param"])
    desc = tp.SGDDescriptor(element="bf16", grad_element="f32", sizes=sizes, momentum=False, stochastic=True)
    given = {name: [t.to(device, copy=True) for t in tensors] for name, tensors in values.items()}
    steps, hyper = torch.zeros(len(sizes), device=device), torch.tensor([1.0, 0, 0, 0], device=device).double()
    args = tp.SGDArgs(**given, steps=steps, hyper=hyper, seed=torch.tensor([seed], device=device))  # type: ignore[arg-type]
    plan = tp.plan(desc, target=target)
    plan.run(args, tp.Workspace.allocate(plan, device) if plan.workspace_size() else None)
    return [t.cpu() for t in given["param"]]


def kernel_draws_what_the_reference_draws(target: tp.Target, device: str) -> None:
    """Sums of bf16 and f32 that f32 holds exactly, so that no rounding but the random one differs."""
    g = torch.Generator().manual_seed(3)
    sizes = (5, 0, CHUNK + 11) if not interpreting() else (5, 0, 700)
    param = [(torch.randint(-128, 128, (n,), generator=g) / 64).bfloat16() for n in sizes]
    grad = [torch.randint(-(2**12), 2**12, (n,), generator=g) / 2.0**18 for n in sizes]
    param[0][:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    found = run(target, device, 2**40 + 7, {"param": param, "grad": grad})
    expected = run(tp.Target.cpu(), "cpu", 2**40 + 7, {"param": param, "grad": grad})
    other = run(tp.Target.cpu(), "cpu", 2**40 + 8, {"param": param, "grad": grad})
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.view(torch.int16)[~a.isnan()], b.view(torch.int16)[~b.isnan()])
        assert torch.equal(a.isnan(), b.isnan())
    assert not torch.equal(other[2], expected[2])


@pytest.mark.interpret
def test_interpreted_kernels_draw_what_the_reference_draws() -> None:
    kernel_draws_what_the_reference_draws(tp.Target.cpu(interpret=True), "cpu")


@pytest.mark.gpu
def test_kernels_draw_what_the_reference_draws() -> None:
    kernel_draws_what_the_reference_draws(tp.Target.of("cuda"), "cuda")


def test_refusals() -> None:
    p = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(ValueError, match="masters are f32"):
        ours.AdamW([p], master_weights=True, stochastic_rounding=True)
    for fields in ({"element": "f32"}, {"element": "bf16", "copy_element": "bf16"}):
        with pytest.raises(tp.InvalidProblem, match="stochastic"):
            tp.AdamDescriptor(sizes=(3,), stochastic=True, **fields)  # type: ignore[arg-type]
