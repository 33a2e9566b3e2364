"""Gradients of triplan.functional: right, double, never dropped, deterministic when asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases.functional import DEVICES, FIXED, FLOATS, IN_PLACE, Call, calls, fixed, integers, on_copies
from hypothesis import given, settings, strategies as st
from replaying import forget
from samples import same
from torch.autograd.forward_ad import dual_level, make_dual

import triplan.functional as F  # noqa: N812
from triplan import PlanCache
from triplan.functional import _plans


def gradients(call: Call, which: Any, expanded: bool = False) -> tuple[torch.Tensor, ...]:
    """Of a drawn gradient of the result, or of one number in every place, as ``sum()`` hands it back."""
    values = call.copies(requires_grad=True)
    out = on_copies(call, which)(*values)
    weight = integers((1,) * out.dim() if expanded else tuple(out.shape), out.dtype, str(out.device), 9)
    return torch.autograd.grad(out, values, weight.expand(out.shape))


# --- right ---


@pytest.mark.parametrize("device_type", DEVICES)
@settings(max_examples=150)
@given(data=st.data())
def test_gradients_equal_torchs(device_type: str, data: st.DataObject) -> None:
    call = data.draw(calls(device_type, (torch.float64, torch.float32)))
    same(*(gradients(call, which) for which in (call.ours, call.theirs)))


@pytest.mark.parametrize("expanded", [False, True], ids=["drawn", "expanded"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", FIXED)
def test_gradients_in_every_dtype(name: str, dtype: torch.dtype, expanded: bool, device: str) -> None:
    call = fixed(device, dtype, torch.int32)[name]
    ours, theirs = (gradients(call, which, expanded) for which in (call.ours, call.theirs))
    assert {grad.dtype for grad in ours} == {dtype}
    same(ours, theirs)


@pytest.mark.parametrize("padding_idx", [-1, np.int64(2)], ids=["int", "numpy"])
def test_padding_row_gets_no_gradient(padding_idx: int, device: str) -> None:
    weight = torch.ones(3, 2, device=device, requires_grad=True)
    index = torch.tensor([0, 2, 2, 1], device=device)
    F.embedding(index, weight, padding_idx).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[1, 1], [1, 1], [0, 0]]
    with pytest.raises(TypeError, match=r"padding_idx = 2\.0 must be an int"):
        F.embedding(index, weight, 2.0)  # type: ignore[arg-type]


def test_embedding_without_width(device: str) -> None:
    weight = torch.ones(3, 0, device=device, requires_grad=True)
    out = F.embedding(torch.tensor([0, 2], device=device), weight)
    assert out.shape == (2, 0)
    (grad,) = torch.autograd.grad(out, weight, torch.ones_like(out))
    assert grad.shape == (3, 0)


# --- recorded when, and only when, torch would ---


@pytest.mark.parametrize("name", FIXED)
def test_each_argument_alone_is_recorded(name: str, device: str) -> None:
    call = fixed(device)[name]
    everything = gradients(call, call.ours)
    for at, expected in enumerate(everything):
        values = [v.requires_grad_(i == at) for i, v in enumerate(call.copies())]
        out = on_copies(call, call.ours)(*values)
        assert out.requires_grad
        (got,) = torch.autograd.grad(out, [values[at]], integers(tuple(out.shape), out.dtype, device, 9))
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", FIXED)
def test_nothing_is_recorded_without_need(name: str, device: str) -> None:
    call = fixed(device)[name]
    assert not call.run(call.ours, call.copies()).requires_grad
    with torch.no_grad():
        assert call.run(call.ours, call.copies(requires_grad=True)).grad_fn is None


def test_integers_are_not_differentiated(device: str) -> None:
    x = torch.arange(4, device=device)
    assert not F.gather(x, 0, x).requires_grad


@pytest.mark.parametrize("name", FIXED)
def test_modified_index_is_detected(name: str, device: str) -> None:
    call = fixed(device)[name]
    out = on_copies(call, call.ours)(*call.copies(requires_grad=True))
    index = next(t for a in call.args for t in (a if isinstance(a, tuple) else (a,)) if _is_index(t))
    index.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def _is_index(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and not t.is_floating_point()


# --- in place ---


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_change_of_a_saved_tensor_is_detected(name: str, device: str) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    saved = x.exp()  # its backward reads its result
    getattr(F, name)(saved, 0, torch.tensor([1], device=device), torch.ones(1, device=device))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("view", [False, True])
def test_in_place_refuses_a_leaf_untouched(name: str, view: bool, device: str) -> None:
    leaf = torch.ones(3, device=device, requires_grad=True)
    target = leaf[1:] if view else leaf
    message = "a view of a leaf Variable that requires grad" if view else "a leaf Variable that requires grad"
    with pytest.raises(RuntimeError, match=message):
        getattr(F, name)(target, 0, torch.tensor([1], device=device), torch.ones(1, device=device))
    assert leaf.tolist() == [1, 1, 1]
    with torch.no_grad():
        getattr(F, name)(target, 0, torch.tensor([1], device=device), torch.ones(1, device=device))
    assert leaf.sum().item() == 4


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_on_a_view_reaches_its_base(name: str, device: str) -> None:
    index = torch.tensor([2, 0, 0], device=device)

    def through(which: Any) -> tuple[torch.Tensor, ...]:
        x = integers((5, 4), torch.float64, device, 1).requires_grad_()
        src = integers((3,), torch.float64, device, 2).requires_grad_()
        base = x * x
        view = base[1:, 1]
        assert which(view, 0, index, src * src) is view
        return (base.detach(), *torch.autograd.grad((base * base).sum(), (x, src)))

    same(through(getattr(F, name)), through(getattr(torch.Tensor, name)))


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_makes_a_plain_tensor_part_of_the_graph(name: str, device: str) -> None:
    total, src = torch.zeros(2, device=device), torch.ones(3, device=device, requires_grad=True)
    getattr(F, name)(total, 0, torch.tensor([0, 1, 1], device=device), src)
    (total * torch.tensor([5.0, 7.0], device=device)).sum().backward()
    assert src.grad is not None
    assert src.grad.tolist() == [5, 7, 7]


@pytest.mark.parametrize("op", ["scatter_add_", "index_add_", "scatter_", "index_put_", "gather_out", "index_add_out"])
def test_registered_mutating_ops_refuse_gradients(op: str) -> None:
    x, index = torch.zeros(3, requires_grad=True), torch.zeros(3, dtype=torch.int64)
    args: dict[str, tuple[Any, ...]] = {
        "index_put_": (x.detach(), [index], x),
        "gather_out": (x.detach(), x, 0, index),
        "index_add_out": (x.detach(), x, 0, index, x),
    }
    with pytest.raises(RuntimeError, match="records no gradient"):
        getattr(torch.ops.triplan, op)(*args.get(op, (x.detach(), 0, index, x)))


# --- determinism ---


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", FIXED)
def test_determinism_is_asked_of_every_plan(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PlanCache()
    monkeypatch.setattr(_plans, "PLANS", cache)
    forget()  # a replay asks for no plan
    call = fixed(device)[name]
    out = on_copies(call, call.ours)(*call.copies(requires_grad=True))
    forward = cache.stats()
    assert forward.misses > 0
    out.sum().backward()
    both = cache.stats()
    assert both.hits + both.misses > forward.hits + forward.misses
    for plan in cache._plans.values():
        assert plan.preference.deterministic
        assert plan.precision_guarantee().deterministic


def test_determinism_is_not_asked_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PlanCache()
    monkeypatch.setattr(_plans, "PLANS", cache)
    F.index_add(torch.zeros(3), 0, torch.tensor([0]), torch.ones(1))
    assert [p.preference.deterministic for p in cache._plans.values()] == [False]


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bits_repeat(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(16, 64, generator=g).to("cuda", dtype).requires_grad_()
    index = torch.randint(0, 16, (4096,), generator=g).cuda()
    src = torch.randn(4096, 64, generator=g).to("cuda", dtype).requires_grad_()

    def once() -> tuple[torch.Tensor, ...]:
        out = F.index_add(F.index_select(x, 0, index), 0, index.flip(0), src)
        total = F.scatter_add(x, 0, index[:, None].expand(-1, 64), out)
        return (total, *torch.autograd.grad((total * total).sum(), (x, src)))

    first = once()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("include_self", [True, False])
def test_products_have_an_order(include_self: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own product of floats has none on CUDA, also in its deterministic mode."""
    g = torch.Generator().manual_seed(1)
    x, src = (torch.randn(3, n, generator=g).double() for n in (5, 101))
    index = torch.randint(0, 4, (3, 101), generator=g)
    expected = x.scatter_reduce(1, index, src, "prod", include_self=include_self)
    args = (x.to(device), 1, index.to(device), src.to(device), "prod")
    torchs = torch.Tensor.scatter_reduce_

    def no_product(out: torch.Tensor, dim: int, index: Any, src: Any, reduce: str, **options: Any) -> torch.Tensor:
        assert reduce != "prod"
        return torchs(out, dim, index, src, reduce, **options)

    monkeypatch.setattr(torch.Tensor, "scatter_reduce_", no_product)
    got = [F.scatter_reduce(*args, include_self=include_self) for _ in range(5)]
    assert all(torch.equal(got[0], again) for again in got)
    torch.testing.assert_close(got[0].cpu(), expected)


# --- torch.func and forward mode ---


def test_vmap_over_the_index(device: str) -> None:
    x = integers((4,), torch.float64, device, 1)
    index = torch.tensor([[0, 3], [1, 1], [2, 0]], device=device)
    assert torch.equal(torch.func.vmap(lambda i: F.gather(x, 0, i))(index), x[index])
    assert torch.equal(torch.func.vmap(lambda i: F.index_select(x, 0, i))(index), x[index])
    got = torch.func.vmap(lambda i: F.index_put(x, (i,), x.new_ones(())))(index)
    assert torch.equal(got, torch.stack([x.index_put((i,), x.new_ones(())) for i in index]))


@pytest.mark.parametrize("name", FIXED)
def test_vmap_over_no_example(name: str, device: str) -> None:
    call = fixed(device)[name]
    function = torch.func.vmap(on_copies(call, call.ours))
    one = [v.unsqueeze(0) for v in call.copies()]
    assert function(*(v[:0] for v in one)).shape == (0, *function(*one).shape[1:])


def test_out_refuses_forward_mode() -> None:
    with dual_level(), pytest.raises(RuntimeError, match=r"out=\.\.\. is not supported"):
        F.gather(make_dual(torch.ones(2), torch.ones(2)), 0, torch.tensor([1]), out=torch.ones(1))
