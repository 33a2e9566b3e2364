"""Clipping of gradients beside torch's in float64: orders, elements, layouts, what is not finite, what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from proofs import target
from samples import SetConstant
from torch import Tensor

import triplan as tp
import triplan.optim as ours
from triplan.backends.triton.common import tables
from triplan.backends.triton.common.tables import CHUNK
from triplan.backends.triton.optim import clip as entry
from triplan.errors import InvalidProblem
from triplan.functional.optim import TensorList
from triplan.sku import interpreting
from triplan.testing import check_plan

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ORDERS = [2.0, 1.0, math.inf, -math.inf, 3.0, 0.5, -1.0]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
#: Of one element, odd, a chunk, more than one.
SHAPES = ((), (7, 11), (CHUNK,), (3, CHUNK // 2 + 1)) if not interpreting() else ((), (7, 11), (CHUNK + 5,))


def with_gradients(device: str, *dtypes: torch.dtype, scale: float = 1.0) -> list[Tensor]:
    """Parameters of SHAPES, in turn of ``dtypes``: the matrix lies transposed, the last gradient is not aligned."""
    g, found = torch.Generator().manual_seed(0), []
    for i, shape in enumerate(SHAPES):
        grad = (torch.randn(shape, generator=g).abs() + 0.01).mul(scale).to(device, dtypes[i % len(dtypes)])
        if i == 1:
            grad = grad.t().contiguous().t()
        if i == len(SHAPES) - 1:
            grad = torch.cat((grad.new_zeros(1), grad.flatten()))[1:].view(shape)
        p = torch.zeros_like(grad, requires_grad=True)
        p.grad = -grad if i == 1 else grad
        found.append(p)
    return found


def gradients(params: list[Tensor]) -> list[Tensor]:
    return [p.grad.clone() for p in params if p.grad is not None]


def in_f64(params: list[Tensor]) -> list[Tensor]:
    found = [p.detach().double().requires_grad_() for p in params]
    for p, w in zip(params, found, strict=True):
        w.grad = None if p.grad is None else p.grad.double()
    return found


def close(params: list[Tensor], wide: list[Tensor]) -> None:
    """Gradients are rounded to f32, and to their element."""
    for p, w in zip(params, wide, strict=True):
        assert p.grad is not None
        unit = tp.ElementKind.of(p.dtype).unit_roundoff + 2.0**-24
        torch.testing.assert_close(p.grad.double(), w.grad, rtol=unit * 1.01, atol=2.0**-25 if p.dtype is F16 else 0)


def clips_as_torch(order: float, device: str, *dtypes: torch.dtype) -> None:
    params = with_gradients(device, *dtypes)
    wide = in_f64(params)
    expected = torch.nn.utils.clip_grad_norm_(wide, 1e-2, order)
    found = ours.clip_grad_norm_(params, 1e-2, order)
    assert (found.dtype, found.shape, found.device) == (F32, (), params[0].device)
    torch.testing.assert_close(found.double(), expected, rtol=2.0**-23, atol=0)
    close(params, wide)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtypes", [(F32,), (BF16,), (F16,), (F32, BF16, F16)], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_norms_and_gradients_are_torchs(order: float, dtypes: tuple[torch.dtype, ...], device: str) -> None:
    clips_as_torch(order, device, *dtypes)


@pytest.mark.interpret
@pytest.mark.parametrize("order", ORDERS)
def test_interpreted_norms_and_gradients_are_torchs(order: float) -> None:
    clips_as_torch(order, "cpu", F32, BF16)


@pytest.mark.interpret
def test_interpreted_programs_may_share_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some have fewer elements or none; the first element behind a tensor's end is no tensor's."""
    monkeypatch.setattr(entry, "parts_of", lambda sizes, part: 4)
    whole = torch.linspace(-3, 3, 2 * CHUNK)
    parts = [whole[1:8], whole[11 : 11 + CHUNK // 4], whole[CHUNK + 13 : -5]]
    wanted = whole.clone()
    for own in (wanted[1:8], wanted[11 : 11 + CHUNK // 4], wanted[CHUNK + 13 : -5]):
        own.clamp_(-1.5, 1.5)
    desc = tp.ClipDescriptor(op="clip_value", element="f32", sizes=tuple(p.numel() for p in parts))
    plan = tp.plan(desc, target=tp.Target.cpu(interpret=True))
    plan.run(plan.args_type(x=parts, limit=1.5), tp.Workspace.allocate(plan, "cpu"))
    assert torch.equal(whole, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_the_order_may_be_a_word_and_parameters_a_generator_or_one_tensor(device: str) -> None:
    params = with_gradients(device, F32)
    largest = max(float(g.abs().max()) for g in gradients(params))
    assert float(ours.clip_grad_norm_((p for p in params), math.inf, "inf")) == largest  # type: ignore[arg-type]
    before = gradients(params)[1]
    assert float(ours.clip_grad_norm_(params[1], 1e9)) == pytest.approx(float(before.norm()), rel=1e-6)
    assert float(ours.get_total_norm(before)) == float(ours.get_total_norm([before]))


def test_what_has_no_gradient_is_left_out() -> None:
    params = with_gradients("cpu", F32)
    expected = ours.clip_grad_norm_(params, 1e9)
    more = [torch.zeros(3, requires_grad=True), *params, torch.zeros(0, requires_grad=True)]
    more[-1].grad = torch.zeros(0)
    assert torch.equal(ours.clip_grad_norm_(more, 1e9), expected)
    assert more[0].grad is None
    for none in ([], [more[0]], more[-1]):
        assert torch.equal(ours.clip_grad_norm_(none, 1.0), torch.tensor(0.0))
        ours.clip_grad_value_(none, 1.0)
    with pytest.warns(UserWarning, match="empty generator"):
        ours.clip_grad_norm_((p for p in []), 1.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("limit", [0.1, 0.0, math.inf])
def test_values_are_clamped_as_by_torch(limit: float, dtype: torch.dtype, device: str) -> None:
    pairs = [with_gradients(device, dtype) for _ in range(2)]
    for params in pairs:
        assert params[1].grad is not None
        params[1].grad[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    ours.clip_grad_value_(pairs[0], limit)
    torch.nn.utils.clip_grad_value_(pairs[1], limit)
    torch.testing.assert_close(*map(gradients, pairs), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_norms_that_are_not_finite_do_what_torchs_do(bad: float, device: str) -> None:
    pairs = [with_gradients(device, F32) for _ in range(2)]
    for params in pairs:
        assert params[2].grad is not None
        params[2].grad[5] = bad
    before = gradients(pairs[0])
    for order in (2.0, math.inf):
        with pytest.raises(RuntimeError, match=f"order {order} for gradients from `parameters` is non-finite"):
            ours.clip_grad_norm_(pairs[0], 1.0, order, error_if_nonfinite=True)
    torch.testing.assert_close(gradients(pairs[0]), before, rtol=0, atol=0, equal_nan=True)
    norms = [ours.clip_grad_norm_(pairs[0], 1.0), torch.nn.utils.clip_grad_norm_(pairs[1], 1.0)]
    torch.testing.assert_close(*norms, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(*map(gradients, pairs), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_below_the_limit_keep_their_bits(device: str) -> None:
    params = with_gradients(device, F32, BF16)
    assert params[2].grad is not None
    params[2].grad[:2] = torch.tensor([-0.0, 1e-45])
    before = [g.reshape(-1).view(torch.uint8) for g in gradients(params)]
    norm = ours.clip_grad_norm_(params, 1e9)
    ours.clip_grads_with_norm_(params, float(norm) * 2, norm)
    after = [g.reshape(-1).view(torch.uint8) for g in gradients(params)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_no_square_overflows_or_vanishes(scale: float, device: str) -> None:
    """(torch's squares do: its norm of 1e30 is inf, and that of 1e-30 is 0 where squares are flushed.)"""
    params = with_gradients(device, F32, scale=scale)
    expected = torch.nn.utils.get_total_norm([g.double() for g in gradients(params)])
    torch.testing.assert_close(ours.clip_grad_norm_(params, 1.0).double(), expected, rtol=2.0**-23, atol=0)
    after = torch.nn.utils.get_total_norm([g.double() for g in gradients(params)])
    torch.testing.assert_close(float(after), min(1.0, float(expected)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_bits_are_those_of_every_run_and_depend_on_no_address(device: str) -> None:
    found = []
    for shift in (0, 1, 3, 0):
        params = with_gradients(device, F32, BF16)
        for p in params:
            assert p.grad is not None
            moved = torch.cat((p.grad.new_zeros(shift), p.grad.flatten()))[shift:].view(p.shape)
            p.grad = moved
        found.append([ours.clip_grad_norm_(params, 0.5), *gradients(params)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_in_any_layout(device: str) -> None:
    """Gaps between elements and an axis of stride 0 in what a norm is taken of; autograd is told of every write."""
    wide = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).to(device)
    p = torch.zeros(6, 4, device=device, requires_grad=True)
    p.grad = wide[:, ::2]
    kept, version = wide.clone(), p.grad._version
    norm = ours.clip_grad_norm_([p], 0.1)
    torch.testing.assert_close(norm, kept[:, ::2].norm())
    torch.testing.assert_close(p.grad, kept[:, ::2] * (0.1 / norm))
    assert torch.equal(wide[:, 1::2], kept[:, 1::2])
    assert p.grad._version > version
    one = torch.ones(1, device=device).expand(9)
    assert float(ours.get_total_norm([one])) == 3.0
    plain = torch.ones(5, device=device)
    version, p.grad = plain._version, None
    p = torch.zeros(5, device=device, requires_grad=True)
    p.grad = plain
    ours.clip_grad_value_([p], 0.5)
    assert plain._version > version


def test_refusals() -> None:
    p = torch.zeros(3, requires_grad=True)
    p.grad = torch.ones(3)
    for order in (0, math.nan):
        with pytest.raises(InvalidProblem, match="must be a number other than 0"):
            ours.clip_grad_norm_([p], 1.0, order)
    p.grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        ours.clip_grad_norm_([p], 1.0)
    q = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    q.grad = torch.ones(3, dtype=torch.float64)
    for clip in (ours.clip_grad_norm_, ours.clip_grad_value_):
        with pytest.raises(InvalidProblem, match="take f32, bf16 and f16"):
            clip([q], 1.0)
    whole = torch.ones(4)
    pair = [torch.zeros(3, requires_grad=True) for _ in range(2)]
    pair[0].grad, pair[1].grad = whole[:3], whole[1:]
    with pytest.raises(InvalidProblem, match="shares memory"):
        ours.clip_grad_norm_(pair, 1.0)

    class Sharded(Tensor):
        pass

    with pytest.raises(InvalidProblem, match="clipping of Sharded: plain tensors and DTensors are expected"):
        ours.get_total_norm([torch.ones(3).as_subclass(Sharded)])


def test_args_of_lists_are_checked() -> None:
    plan = tp.plan(tp.ClipDescriptor(op="clip_norm", element="f32", sizes=(3, 0)), target="cpu")
    x, norm = [torch.ones(3), torch.ones(0)], torch.ones(1, dtype=torch.float64)
    assert plan.can_implement(tp.ClipArgs(x, 1.0, norm))
    for args, said in (
        (tp.ClipArgs(x, "1", norm), "a Python number is expected"),  # type: ignore[arg-type]
        (tp.ClipArgs(x, 1.0), "norm is missing"),
        (tp.ClipArgs(x, 1.0, norm.float()), "norm has dtype"),
        (tp.ClipArgs(x[:1], 1.0, norm), "a sequence of 2"),
    ):
        with pytest.raises(InvalidProblem, match=said):
            plan.run(args)


# --- GradScaler ---

SCALED: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "adamw": (ours.AdamW, torch.optim.AdamW),
    "sgd": (ours.SGD, torch.optim.SGD),
    "muon": (ours.Muon, torch.optim.Muon),
}


def scaled(make: Callable[..., Any], clip: Any, device: str, unscales: bool) -> tuple[list[Tensor], list[float]]:
    """Five steps under a GradScaler; the third overflows. The parameters, and the scale after each step."""
    g = torch.Generator().manual_seed(0)
    w = torch.randn(6, 4, generator=g).to(device).requires_grad_()
    x = torch.randn(16, 6, generator=g).to(device)
    optimizer, scaler = make([w], lr=0.05), torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(5):
        optimizer.zero_grad()
        loss = ((x @ w).square() * (math.inf if step == 2 else 1.0)).mean()
        scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
            clip([w], 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [w.detach()], scales


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("name", SCALED)
def test_steps_under_a_grad_scaler_are_torchs(name: str, unscales: bool, device: str) -> None:
    """With and without ``unscale_`` and clipping; a step with an infinity is skipped, and the scale halved."""
    make, peer = SCALED[name]
    (own, scales), (others, expected) = (
        scaled(kind, clip, device, unscales)
        for kind, clip in ((make, ours.clip_grad_norm_), (peer, torch.nn.utils.clip_grad_norm_))
    )
    assert scales == expected == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]
    torch.testing.assert_close(own, others, rtol=0, atol=2e-2 if name == "muon" else 1e-5)  # Muon's products are bf16


# --- on the device ---


@pytest.mark.gpu
def test_thousands_of_gradients_are_a_handful_of_launches_and_nothing_waits() -> None:
    params = [torch.ones(17, device="cuda", requires_grad=True) for _ in range(5000)]
    for p in params:
        p.grad = torch.ones_like(p)
    ours.clip_grad_norm_(params, 1.0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            ours.clip_grad_norm_(params, 0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum(event.count for event in found.key_averages() if "kernel" in event.key) <= 4
    assert float(ours.get_total_norm([p.grad for p in params if p.grad is not None])) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("known", [False, True])
def test_a_captured_call_gives_the_same_bits(known: bool) -> None:
    """Where the addresses are known the tables are kept; otherwise they are written during the capture."""
    params, plain = with_gradients("cuda", F32, BF16), with_gradients("cuda", F32, BF16)
    drawn = [gradients(with_gradients("cuda", F32, BF16, scale=s)) for s in (1.0, 3.0)]
    if known:
        ours.clip_grad_norm_(params, 0.5)
    else:
        for order in (2.0,):  # kernels are loaded before a capture
            ours.clip_grad_norm_(with_gradients("cuda", F32, BF16), 0.5, order)
        TensorList._bound.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = ours.clip_grad_norm_(params, 0.5)
    TensorList._bound.clear()  # what a graph reads stays
    for grads in drawn:
        for p, q, g in zip(params, plain, grads, strict=True):
            assert p.grad is not None
            p.grad.copy_(g)
            assert q.grad is not None
            q.grad.copy_(g)
        graph.replay()
        assert torch.equal(norm, ours.clip_grad_norm_(plain, 0.5))
        assert all(torch.equal(a, b) for a, b in zip(gradients(params), gradients(plain), strict=True))


@pytest.mark.gpu
def test_no_gradient_is_held() -> None:
    p = torch.zeros(1 << 20, device="cuda", requires_grad=True)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        ours.clip_grad_norm_([p], 1.0)
    p.grad = None
    before = torch.cuda.memory_allocated()
    p.grad = torch.ones(1 << 20, device="cuda")
    ours.clip_grad_norm_([p], 1.0)
    p.grad = None
    assert torch.cuda.memory_allocated() - before < 1 << 20


@pytest.mark.parametrize(
    "where", [pytest.param(where, marks=getattr(pytest.mark, where)) for where in ("interpret", "gpu")]
)
@pytest.mark.parametrize(("few", "copied"), [(0, 0), (0, 100), (7, 100)])
def test_chunks_are_found_with_a_table_and_without(few: int, copied: int, where: str, constant: SetConstant) -> None:
    """Of one tensor, and of several: empty, of one chunk, of several; starts that a power of two fills and not."""
    constant(tables, "FEW", few)
    constant(tables, "COPIED", copied)
    for sizes in ((2500,), (0, 1, 1024, 2500, 0), (1024, 0, 0, 1025), (5, 0)):
        for desc in (
            tp.ClipDescriptor(op="clip_value", element="f32", sizes=sizes),
            tp.TotalNormDescriptor(element="f32", sizes=sizes, order=math.inf),
        ):
            assert tables.tables(sizes, 1).is_few == (few > 0)
            assert check_plan(tp.plan(desc, target=target(where)), runs=1).compared


@pytest.mark.parametrize("op", ["clip_value", "clip_norm", "total_norm", "list_expression", "adam"])
def test_no_tensors_are_checked_as_vectors(op: str) -> None:
    """Lists of none would tell no device, and no version counter of theirs would grow."""
    desc = tp.descriptor_types()[op].example(tp.ElementKind.F32).replace(op=op, sizes=())
    plan: Any = tp.plan(desc, target="cpu")
    assert check_plan(plan).runs
    if op == "clip_value":
        refused = plan.can_implement(tp.ClipArgs([], 1.0))
        assert isinstance(refused.error, InvalidProblem)
        assert "no device" in refused.reason


@pytest.mark.parametrize(
    "where", [pytest.param(where, marks=getattr(pytest.mark, where)) for where in ("interpret", "gpu")]
)
@pytest.mark.parametrize("op", ["clip_value", "total_norm"])
def test_whole_vectors_need_no_tables_where_borders_do_not_matter(op: str, where: str) -> None:
    """What is written to the workspace shows which launches ran."""
    sizes = (5, 0, 1100, 3, 2, 1)
    plan: Any = tp.plan(tp.descriptor_types()[op](op=op, element="f32", sizes=sizes), target=target(where))  # type: ignore[call-arg]
    device, found, writes = plan.target.device_type, [], []
    for is_whole in (True, False):
        x, norm = torch.linspace(-3, 3, sum(sizes), device=device), torch.zeros(1, dtype=torch.float64, device=device)
        workspace = tp.Workspace.allocate(plan)
        workspace.tensor.fill_(0xA5)
        given = x if is_whole else list(x.split(sizes))
        plan.run(tp.ClipArgs(given, 1.0) if op == "clip_value" else tp.TotalNormArgs(given, norm), workspace)
        found += [(x, norm)]
        writes += [bool((workspace.tensor != 0xA5).any())]
    assert writes == [op == "total_norm", True]
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    "where", [pytest.param(where, marks=getattr(pytest.mark, where)) for where in ("interpret", "gpu")]
)
@pytest.mark.parametrize("sizes", [(), (0,), (0, 0), (0,) * 5])
@pytest.mark.parametrize("each", [False, True])
def test_norms_of_no_elements(each: bool, sizes: tuple[int, ...], where: str) -> None:
    """No launch has a grid of 0 programs."""
    desc = tp.TotalNormDescriptor(element="f32", sizes=sizes, each=each)
    plan = tp.plan(desc, target=target(where))
    assert len(plan.launches) == (0 if each and not sizes else 1)
    check_plan(plan, runs=1)


def test_references_write_no_tables() -> None:
    """They are given a workspace that has no bytes; lists of more than ``FEW`` tensors would have tables."""
    sizes = (3, 1, 0, 2, 1)
    plan = tp.plan(tp.ClipDescriptor(op="clip_value", element="f32", sizes=sizes), target="cpu")
    x = torch.linspace(-3, 3, sum(sizes))
    expected = x.clamp(-1, 1)
    plan.run(tp.ClipArgs(x, 1.0), tp.Workspace.allocate(plan))
    assert torch.equal(x, expected)
