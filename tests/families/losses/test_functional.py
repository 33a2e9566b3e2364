"""cross_entropy and nll_loss of triplan.functional, and nn.CrossEntropyLoss, beside torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases.derivatives import LOSSES as NAMES, loss_problem as problem, losses as calls
from cases.functional import FLOATS
from torch.nn import functional

import triplan as tp
import triplan.functional as F  # noqa: N812
from triplan import nn


def logits(device: str) -> torch.Tensor:
    return torch.randn(4, 5, dtype=torch.float64, device=device, requires_grad=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_results_and_gradients_are_torchs(name: str, dtype: torch.dtype, device: str) -> None:
    """Of narrow elements torch's are taken from their values in f32: torch rounds log-probabilities in between."""
    eps = torch.finfo(dtype).eps
    shape = (2, 6, 3)
    x = problem(shape, dtype, device)[0]
    wide = x.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    for smoothing, weighted in ((0.0, False), (0.2, True)):
        ours, theirs = (f(t) for f, t in zip(calls(name, device, shape, smoothing, weighted), (x, wide), strict=True))
        g = torch.randn(theirs.shape, dtype=torch.float64).to(dtype).to(device)
        (got,), (wanted,) = torch.autograd.grad(ours, x, g), torch.autograd.grad(theirs, wide, g.to(wide.dtype))
        assert ours.dtype == got.dtype == dtype
        for a, b in ((ours, theirs), (got, wanted)):
            torch.testing.assert_close(a.to(wide.dtype), b, rtol=8 * eps, atol=32 * eps, equal_nan=True)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad: bool, device: str) -> None:
    ops: Any = torch.ops.triplan
    target, weight = torch.tensor([1, 2, -100, 4], device=device), torch.rand(5, dtype=torch.float64, device=device)
    x = logits(device).detach().requires_grad_(requires_grad)
    for reduction, w in (("mean", None), ("none", weight)):
        torch.library.opcheck(ops.cross_entropy.default, (x, target, w, None, reduction, -100, 0.1, False))
        torch.library.opcheck(ops.nll_loss.default, (x, target, w, None, reduction, -100, 0.0, False))
    lse, dloss = torch.logsumexp(x.detach(), 1), torch.ones((), dtype=torch.float64, device=device)
    last = (weight, weight, "byte_mean", -100, 0.0, False)
    dloss.requires_grad_(requires_grad)
    torch.library.opcheck(ops.cross_entropy_backward.default, (dloss, x, target, lse, *last))
    torch.library.opcheck(ops.nll_loss_backward.default, (dloss, x, target, *last))


# --- the gradient that the forward writes ---


def test_a_retained_graph_never_scales_twice(device: str) -> None:
    x, target = logits(device), torch.tensor([1, 2, 0, 4], device=device)
    loss, wanted = F.cross_entropy(x, target), functional.cross_entropy(x, target)
    for scale, retained in ((3.0, True), (0.0, True), (1.0, True), (-2.0, True), (5.0, False)):
        g = torch.tensor(scale, dtype=torch.float64, device=device)
        (got,) = torch.autograd.grad(loss, x, g, retain_graph=retained)
        (ref,) = torch.autograd.grad(wanted, x, g, retain_graph=True)
        torch.testing.assert_close(got, ref)
        got.fill_(torch.nan)  # what was given away is the receiver's
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, x)


def test_gradients_add_up_over_calls(device: str) -> None:
    """A leaf may take the gradient that it is given as its own, and add the next one into it."""
    x, target = logits(device), torch.tensor([1, 2, 0, 4], device=device)
    loss = F.cross_entropy(x, target)
    for retained in (True, True, False):
        loss.backward(retain_graph=retained)
    F.cross_entropy(x, target).backward()
    (once,) = torch.autograd.grad(functional.cross_entropy(x, target), x)
    torch.testing.assert_close(x.grad, 4 * once)


@pytest.mark.parametrize("retained", [False, True])
def test_one_loss_of_several(retained: bool, device: str) -> None:
    x, target = logits(device), torch.tensor([1, 2, 0, 4], device=device)

    def total(f: Callable[..., torch.Tensor]) -> torch.Tensor:
        y = x * 2
        return 3 * f(y, target) + f(y + 1, target.flip(0), reduction="sum") + y.sum()

    loss, wanted = total(F.cross_entropy), total(functional.cross_entropy)
    for _ in range(1 + retained):
        (got,) = torch.autograd.grad(loss, x, retain_graph=retained)
        torch.testing.assert_close(got, torch.autograd.grad(wanted, x, retain_graph=True)[0])


def test_without_gradients_only_the_loss_is_computed(device: str, ran: list[Any]) -> None:
    x, target = logits(device), torch.tensor([1, 2, 0, 4], device=device)
    F.cross_entropy(x.detach(), target)
    with torch.no_grad():
        F.cross_entropy(x, target)
    assert [(plan, "dx" in tensors) for plan, tensors in ran] == [(tp.CrossEntropyPlan, False)] * 2
    F.cross_entropy(x, target).backward()
    assert [(plan, "dx" in tensors) for plan, tensors in ran[2:]] == [
        (tp.CrossEntropyPlan, True),
        (tp.ScaleGradientPlan, True),
    ]


@pytest.mark.parametrize("element", [torch.float32, torch.bfloat16], ids=str)
def test_no_logits_are_kept_for_second_derivatives(element: torch.dtype, device: str) -> None:
    """What is kept is the gradient, of which they are found, a few roundings of the element from what they are."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 100, generator=g).to(element).to(device).requires_grad_()
    v = torch.randn(64, 100, generator=g).to(element).to(device)
    target, kept = torch.randint(100, (64,), generator=g).to(device), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss = F.cross_entropy(x, target, label_smoothing=0.1)
    assert sum(t.untyped_storage().nbytes() for t in kept if t.is_floating_point()) <= x.nbytes + x.itemsize
    assert all(t.data_ptr() != x.data_ptr() for t in kept)
    wide = x.detach().double().requires_grad_()

    def both(loss: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        return first.detach(), torch.autograd.grad((first * v).sum(), x)[0]

    wanted = both(functional.cross_entropy(wide, target, label_smoothing=0.1), wide)
    # The gradient is p - q, q the smoothed target: p is found of it with two roundings (once where it was kept, once
    # where q is added) of what is up to 90 times as large. v . (diag(p) - p p^T) passes them on.
    p, size = wide.detach().softmax(1), v.double().abs()
    q = torch.full_like(p, 0.1 / 100).scatter_(1, target[:, None], 0.1 / 100 + 0.9)
    lost = torch.finfo(element).eps * (p - q).abs()
    passed = (lost * (size + (p * size).sum(1, True)) + p * (lost * size).sum(1, True)) / 64
    limits = 8 * torch.finfo(element).eps, float(passed.norm() / wanted[1].norm())
    for got, ref, limit in zip(both(loss, x), wanted, limits, strict=True):
        assert got.dtype == element
        assert float((got.double() - ref).norm() / ref.norm()) < limit


def test_small_gradients_of_f16_survive_a_loss_scale(device: str) -> None:
    """A gradient over the number of rows is below what f16 holds, until the scale is there."""
    x = torch.randn(256, 512, device=device).half().requires_grad_()
    target = torch.randint(512, (256,), device=device)
    scale = torch.tensor(2.0**15, dtype=torch.float16, device=device)
    (got,) = torch.autograd.grad(F.cross_entropy(x, target) * scale, x)
    wide = x.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(functional.cross_entropy(wide, target) * scale.double(), wide)
    torch.testing.assert_close(got.double(), wanted, rtol=2 * torch.finfo(torch.float16).eps, atol=2.0**-24)


# --- edges ---


EDGES: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
    "all ignored": lambda: (torch.randn(3, 4), torch.full((3,), -100)),
    "no rows": lambda: (torch.randn(0, 4), torch.full((0,), -100)),
    "strided": lambda: (torch.randn(6, 5, 4).transpose(0, 2), torch.randint(0, 5, (4, 6))),
    "many axes": lambda: problem((2, 4, 3, 1, 2, 1, 1, 2, 1, 2), torch.float64, "cpu")[:2],
    "one class": lambda: (torch.randn(3, 1), torch.zeros(3, dtype=torch.int64)),
    "targets of i32": lambda: (torch.randn(9, 4), torch.randint(0, 4, (9,)).int()),
    "targets of bytes": lambda: (torch.randn(9, 4), torch.randint(0, 4, (9,)).to(torch.uint8)),
}


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", EDGES)
def test_edges_are_torchs(name: str, reduction: str, expanded: bool, device: str) -> None:
    """And with a gradient of stride 0, as ``sum()`` hands it back."""
    x, target = (t.detach().to(device) for t in EDGES[name]())
    x.requires_grad_()
    got = F.cross_entropy(x, target, reduction=reduction)
    wanted = functional.cross_entropy(x, target.long(), reduction=reduction)
    torch.testing.assert_close(got, wanted, equal_nan=True)
    g = wanted.new_ones(()).expand(wanted.shape) if expanded else torch.randn_like(wanted)
    (dx,) = torch.autograd.grad(got, x, g)
    if name == "all ignored":
        assert not dx.any()
    else:
        torch.testing.assert_close(dx, torch.autograd.grad(wanted, x, g)[0])


def test_a_target_outside_the_classes(device: str) -> None:
    x, target = logits(device), torch.tensor([1, 5, 0, -1], device=device)
    for f in (F.cross_entropy, F.nll_loss):
        with pytest.raises(IndexError, match="out of bounds"):
            f(x, target, check_indices=True)
        if device == "cuda":
            torch.testing.assert_close(f(x, target), f(x, torch.tensor([1, -100, 0, -100], device=device)))


@pytest.mark.parametrize("what", ["weight", "bytes"])
def test_tables_have_no_gradient(what: str, device: str) -> None:
    x, target, weight, counts = problem((5, 7), torch.float32, device)
    tables = {"weight": weight, "bytes": counts}
    tables[what].requires_grad_()
    for f in (F.cross_entropy, F.nll_loss):
        with pytest.raises(RuntimeError, match=f"not differentiable with respect to argument '{what}'"):
            f(x, target, reduction="byte_mean", **tables)
        with torch.no_grad():
            f(x, target, reduction="byte_mean", **tables)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"target": torch.zeros(4)}, RuntimeError, "class probabilities"),
        ({"target": torch.zeros(3, dtype=torch.int64)}, RuntimeError, "target"),
        ({"target": torch.zeros(4, dtype=torch.int16)}, RuntimeError, "int32/int64"),
        ({"input": torch.zeros(4, 5, dtype=torch.int64)}, RuntimeError, "floating-point"),
        ({"weight": torch.zeros(4)}, RuntimeError, "weight"),
        ({"reduction": "median"}, ValueError, "reduction"),
        ({"label_smoothing": 1.5}, RuntimeError, "label_smoothing"),
        ({"reduction": "byte_mean"}, ValueError, "bytes"),
        ({"bytes": torch.zeros(5)}, ValueError, "bytes"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"input": torch.zeros(4, 5), "target": torch.zeros(4, dtype=torch.int64), **change}
    with pytest.raises(error, match=message):
        F.cross_entropy(**given)


def test_the_module_is_torchs(device: str) -> None:
    x, target, weight, counts = problem((5, 7), torch.float32, device)
    theirs = torch.nn.CrossEntropyLoss(weight, ignore_index=0, reduction="sum", label_smoothing=0.1)
    ours = nn.CrossEntropyLoss(torch.ones_like(weight), ignore_index=0, reduction="sum", label_smoothing=0.1)
    ours.load_state_dict(theirs.state_dict())
    given = (weight, False, 0, None, "mean", 0.1)  # the deprecated argument decides: "sum"
    torch.testing.assert_close(*(m.CrossEntropyLoss(*given)(x, target) for m in (nn, torch.nn)))
    shares = x.softmax(1)
    torch.testing.assert_close(*(m.CrossEntropyLoss(weight)(x, shares) for m in (nn, torch.nn)))
    torch.testing.assert_close(ours(x, target), theirs(x, target))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    by_bytes = nn.CrossEntropyLoss(reduction="byte_mean", bytes=counts)
    assert by_bytes.state_dict() == torch.nn.CrossEntropyLoss().state_dict() == {}
    rows = functional.cross_entropy(x, target, reduction="none")
    torch.testing.assert_close(by_bytes(x, target), (rows * counts[target]).sum() / counts[target].sum())
    assert "byte_mean" in repr(by_bytes)
