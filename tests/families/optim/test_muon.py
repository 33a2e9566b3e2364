"""Muon beside float64 and torch's: moves, state dicts, groups, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases.functional import DEVICES

import triplan as tp
import triplan.optim

Tensor = torch.Tensor
SHAPES = ((8, 24), (8, 24), (30, 12), (1, 5), (16, 16))
FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "plain momentum, rates as AdamW's": {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
    "no decay, other coefficients": {"weight_decay": 0.0, "ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 3},
}


def matrices(device: str = "cpu") -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=g).to(device).requires_grad_() for s in SHAPES]


def give_gradients(params: list[Tensor], seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=g).to(p.device)


def expected(p: Tensor, grads: list[Tensor], lr: float, **form: Any) -> Tensor:
    """The published algorithm in float64 (Jordan et al., 2024), matrix by matrix."""
    how: dict[str, Any] = {"nesterov": True, "adjust_lr_fn": None, "weight_decay": 0.1, "ns_steps": 5}
    how |= {"ns_coefficients": (3.4445, -4.7750, 2.0315), **form}
    (a, b, c), p = how["ns_coefficients"], p.detach().double()
    momentum = torch.zeros_like(p)
    rows, columns = p.shape
    scale = 0.2 * max(rows, columns) ** 0.5 if how["adjust_lr_fn"] else max(1, rows / columns) ** 0.5
    for grad in grads:
        momentum = 0.95 * momentum + 0.05 * grad.double()
        x = 0.05 * grad.double() + 0.95 * momentum if how["nesterov"] else momentum
        x = x / x.norm()
        for _ in range(how["ns_steps"]):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        p = (1 - lr * how["weight_decay"]) * p - lr * scale * x
    return p


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
def test_no_further_from_float64_than_torchs(form: str, device: str) -> None:
    distances = []
    for module in (triplan.optim, torch.optim):
        params = matrices(device)
        start = [p.detach().clone() for p in params]
        optimizer = module.Muon(params, lr=0.02, **FORMS[form])
        grads: list[list[Tensor]] = [[] for _ in params]
        for seed in range(4):
            give_gradients(params, seed)
            for kept, p in zip(grads, params, strict=True):
                assert p.grad is not None
                kept.append(p.grad)
            optimizer.step()
        wanted = [expected(p, g, 0.02, **FORMS[form]) for p, g in zip(start, grads, strict=True)]
        distances.append([float((p.detach().double() - w).norm()) for p, w in zip(params, wanted, strict=True)])
        assert all(float((w - p.double()).norm()) > 0.01 for w, p in zip(wanted, start, strict=True))
    ours, theirs = (torch.tensor(d).norm() for d in distances)  # of a single matrix either may round luckily
    assert ours <= 1.1 * theirs


def test_state_dicts_go_both_ways() -> None:
    optimizers = []
    for first, second in ((triplan.optim, torch.optim), (torch.optim, triplan.optim)):
        params = matrices()
        one, other = (m.Muon(params, lr=0.02) for m in (first, second))
        for seed in range(2):
            give_gradients(params, seed)
            one.step()
        other.load_state_dict(one.state_dict())
        give_gradients(params, 2)
        other.step()
        optimizers.append((params, other))
    for p, q in zip(optimizers[0][0], optimizers[1][0], strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-3)


def test_a_restored_state_gives_the_same_bits() -> None:
    def trained(pause: bool) -> list[Tensor]:
        params = matrices()
        optimizer = triplan.optim.Muon(params, lr=torch.tensor(0.02))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for seed in range(4):
            if pause and seed == 2:
                kept = optimizer.state_dict()
                optimizer = triplan.optim.Muon(params, lr=1.0)
                optimizer.load_state_dict(kept)
                schedule.optimizer = optimizer
            give_gradients(params, seed)
            optimizer.step()
            schedule.step()
        return params

    assert all(torch.equal(p, q) for p, q in zip(trained(False), trained(True), strict=True))


def test_other_groups_are_adamws() -> None:
    drawn = [torch.randn(7, generator=torch.Generator().manual_seed(s)) for s in (1, 2)]
    ours, theirs = ([t.clone().requires_grad_() for t in drawn] for _ in range(2))
    groups = [{"params": matrices()}, {"params": ours, "use_muon": False, "lr": 0.1, "weight_decay": 0.2}]
    muon = triplan.optim.Muon(groups, lr=0.02)
    adamw = triplan.optim.AdamW(theirs, lr=0.1, weight_decay=0.2)
    for seed in range(3):
        for params in (ours, theirs):
            give_gradients(params[:1] if seed == 1 else params, seed)
        muon.step()
        adamw.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
    assert not muon.state[groups[0]["params"][0]]  # it had no gradient


def test_what_is_refused() -> None:
    vector, (matrix, *_) = torch.zeros(3, requires_grad=True), matrices()
    for bad in ({"lr": -1.0}, {"momentum": -1.0}, {"weight_decay": -1.0}, {"adjust_lr_fn": "x"}, {"ns_steps": 100}):
        with pytest.raises(ValueError, match=r"Invalid|not supported|less than 100"):
            triplan.optim.Muon([matrix], **bad)
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        triplan.optim.Muon([matrix, vector])
    matrix.grad = torch.zeros(8, 24).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        triplan.optim.Muon([matrix]).step()
    apart = torch.zeros(4, 8)[:, ::2].requires_grad_()
    apart.grad = torch.ones(4, 4)
    with pytest.raises(tp.InvalidProblem, match="dense"):
        triplan.optim.Muon([apart]).step()


@pytest.mark.gpu
def test_a_captured_step_gives_the_same_bits() -> None:
    found = []
    for captured in (False, True):
        params = matrices("cuda")
        optimizer = triplan.optim.Muon(params, lr=torch.tensor(0.02, device="cuda"))
        give_gradients(params, 0)
        optimizer.step()
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                optimizer.step()
        for rate in (0.02, 0.01):
            optimizer.param_groups[0]["lr"].fill_(rate)
            graph.replay() if captured else optimizer.step()
        found.append(params)
    assert all(torch.equal(p, q) for p, q in zip(*found, strict=True))
