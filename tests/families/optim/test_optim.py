"""Optimizers against torch.optim in float64, over lists of tensors of any sizes; state dicts, refusals, repeats."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases.optim import Lion
from samples import SetConstant
from torch import Tensor
from torch.nn.parameter import UninitializedParameter

import triplan as tp
import triplan.optim as ours
from triplan.backends.triton.common import tables as table_facts
from triplan.backends.triton.common.tables import CHUNK, chunk_table, tables
from triplan.backends.triton.optim import update
from triplan.errors import InvalidProblem, MisalignedOperand
from triplan.facade.cache import PlanCache
from triplan.functional import optim as functional
from triplan.sku import interpreting

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
#: Empty, of one element, odd, and for the kernels a chunk or more.
SHAPES: tuple[tuple[int, ...], ...] = ((0,), (), (7, 11), (130,), (3, 5))
if interpreting():
    SHAPES = ((0,), (), (7, 11), (CHUNK + 5,))
elif torch.cuda.is_available():
    SHAPES = ((0,), (), (7, 11), (CHUNK,), (3, CHUNK // 2 + 1))
STEPS = 100 if not interpreting() else 3
U = 2.0**-24


ADAM = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "adamw": (ours.AdamW, torch.optim.AdamW, ADAM),
    "adam": (ours.Adam, torch.optim.Adam, ADAM | {"maximize": True}),
    "amsgrad": (ours.AdamW, torch.optim.AdamW, ADAM | {"amsgrad": True}),
    "sgd": (ours.SGD, torch.optim.SGD, {"lr": 1e-2, "weight_decay": 0.1}),
    "dampening": (ours.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    "nesterov": (ours.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "lion": (ours.Lion, Lion, {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}),
}


def drawn(seed: int, device: str) -> list[Tensor]:
    """Tensors of SHAPES; the last is a view that is not aligned, the matrix lies transposed in memory."""
    g = torch.Generator().manual_seed(seed)
    found = [torch.randn(shape, generator=g).to(device) for shape in SHAPES]
    found[2] = found[2].t().contiguous().t()
    found[-1] = torch.cat((torch.zeros(1, device=device), found[-1].flatten()))[1:].view(SHAPES[-1])
    return found


def trained(name: str, device: str, steps: int = STEPS) -> tuple[list[Tensor], list[Tensor], Any, Any]:
    """Parameters after ``steps`` of ours, and of torch's in float64, with a rate that changes every step.

    The second tensor has no gradient every third step; the second group, of half the rate, is frozen for some steps.
    """
    make, peer, options = CASES[name]
    params = [p.requires_grad_() for p in drawn(0, device)]
    wide = [p.detach().double().requires_grad_() for p in params]
    mine, other = (of([{"params": ps[:3]}, {"params": ps[3:]}], **options) for of, ps in ((make, params), (peer, wide)))
    for step in range(steps):
        without = ({1} if step % 3 == 2 else set()) | ({3, 4} if step % 10 in (1, 2, 3) else set())
        for i, (p, w, g) in enumerate(zip(params, wide, drawn(step + 1, device), strict=True)):
            p.grad, w.grad = (None, None) if i in without else (g, g.double())
        for optimizer in (mine, other):
            for group, share in zip(optimizer.param_groups, (1, 0.5), strict=True):
                group["lr"] = share * (1e-2 if step % 2 else 2e-3)
            optimizer.step()
    return params, wide, mine, other


def close(params: list[Tensor], wide: list[Tensor], steps: int) -> None:
    """A step rounds numbers below 8 twice, by half a unit in the last place at most: 4 U each."""
    for p, w in zip(params, wide, strict=True):
        torch.testing.assert_close(p.detach().double(), w.detach(), rtol=0, atol=steps * 8 * U)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_steps_are_torchs(name: str, device: str) -> None:
    params, wide, _, _ = trained(name, device)
    close(params, wide, STEPS)


@pytest.mark.interpret
@pytest.mark.parametrize("name", ["adamw", "nesterov", "lion"])
def test_interpreted_steps_are_torchs(name: str) -> None:
    params, wide, _, _ = trained(name, "cpu")
    close(params, wide, STEPS)


def steps_of_shared_chunks(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Of programs that share chunks, as those of large lists do, some have fewer elements or none."""
    monkeypatch.setattr(functional, "PLANS", PlanCache(4))
    monkeypatch.setattr(update, "parts_of", lambda sizes, part: 2)
    params, wide, _, _ = trained("adamw", device)
    close(params, wide, STEPS)


def steps_by_table(monkeypatch: pytest.MonkeyPatch, constant: SetConstant, device: str, copied: int) -> None:
    """Also of few tensors."""
    monkeypatch.setattr(functional, "PLANS", PlanCache(4))
    constant(table_facts, "FEW", 0)
    constant(table_facts, "COPIED", copied)
    params, wide, _, _ = trained("adamw", device)
    close(params, wide, STEPS)


@pytest.mark.interpret
@pytest.mark.parametrize("copied", [0, 100])
def test_interpreted_programs_find_tensors_by_table(
    monkeypatch: pytest.MonkeyPatch, constant: SetConstant, copied: int
) -> None:
    steps_by_table(monkeypatch, constant, "cpu", copied)


@pytest.mark.gpu
@pytest.mark.parametrize("copied", [0, 100])
def test_programs_find_tensors_by_table(monkeypatch: pytest.MonkeyPatch, constant: SetConstant, copied: int) -> None:
    steps_by_table(monkeypatch, constant, "cuda", copied)


@pytest.mark.interpret
def test_interpreted_programs_may_share_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    steps_of_shared_chunks(monkeypatch, "cpu")


@pytest.mark.gpu
def test_programs_may_share_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    steps_of_shared_chunks(monkeypatch, "cuda")


def test_chunks_are_shared_where_few_programs_are_idle() -> None:
    assert update.parts_of((4096 * 4096,) * 2, 1024) == 16
    assert update.parts_of((1000,) * 5000, 1024) == 1
    assert update.parts_of((5, 1 << 24, 3), 1024) == 4
    assert update.parts_of((), 1024) == update.parts_of((0,), 1024) == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["adamw", "amsgrad", "nesterov"])
def test_state_dicts_go_both_ways(name: str, device: str) -> None:
    """Three steps of one, and from its state dict three more of the other: as six of torch's in float64."""
    make, peer, options = CASES[name]
    for first, second in ((make, peer), (peer, make), (make, make)):
        params = [p.requires_grad_() for p in drawn(0, device)]
        wide = [p.detach().double().requires_grad_() for p in params]
        begun, oracle = first(params, **options), peer(wide, **options)
        for step in range(6):
            if step == 3:
                kept = copy.deepcopy(begun.state_dict())
                begun = second(params, **options)
                begun.load_state_dict(kept)
            for p, w, g in zip(params, wide, drawn(step + 1, device), strict=True):
                p.grad, w.grad = g, g.double()
            begun.step()
            oracle.step()
        close(params, wide, 6)


@pytest.mark.parametrize("device", DEVICES)
def test_a_restored_state_gives_the_same_bits(device: str) -> None:
    make, _, options = CASES["adamw"]
    ends = []
    for restored in (False, True):
        params = [p.requires_grad_() for p in drawn(0, device)]
        optimizer = make(params, **options)
        for step in range(4):
            if restored and step == 2:
                kept = copy.deepcopy(optimizer.state_dict())
                optimizer = make(params, **options)
                optimizer.load_state_dict(kept)
            for p, g in zip(params, drawn(step + 1, device), strict=True):
                p.grad = g
            optimizer.step()
        ends.append([p.detach().clone() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_grad_scaler_sets(device: str) -> None:
    """Scaled gradients give the unscaled step; an infinity leaves parameters, states and steps as they are."""
    make, _, options = CASES["adamw"]
    ends = []
    for scaled in (False, True):
        params = [p.requires_grad_() for p in drawn(0, device)]
        optimizer = make(params, **options)
        for step in range(3):
            if scaled:
                optimizer.grad_scale = torch.tensor(1024.0, device=device)
                optimizer.found_inf = torch.tensor(float(step == 1), device=device)
            for p, g in zip(params, drawn(step + 1, device), strict=True):
                p.grad = g * 1024 if scaled else g
            if scaled or step != 1:
                optimizer.step()
        ends.append([*(p.detach() for p in params), *(optimizer.state[p]["step"] for p in params)])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_lr_as_a_tensor_closures_and_schedulers(device: str) -> None:
    ends = []
    for lr in (1e-2, torch.tensor(1e-2, dtype=torch.float64, device=device)):
        p = torch.ones(5, device=device, requires_grad=True)
        optimizer = ours.AdamW([{"params": [p], "weight_decay": 0.0}], lr=lr)

        def closure(p: Tensor = p, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = (p**2).sum()
            loss.backward()
            return loss

        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for _ in range(3):
            loss: Any = optimizer.step(closure)
            schedule.step()
        ends.append((p.detach().clone(), loss.item()))
    torch.testing.assert_close(*ends, rtol=0, atol=0)


@pytest.mark.parametrize("make", [ours.AdamW, ours.Adam, ours.SGD, ours.Lion, ours.Muon])
def test_hooks_are_called_as_torch_calls_them(make: Callable[..., Any]) -> None:
    called: list[str] = []
    p = torch.ones(2, 2, requires_grad=True)
    optimizer = make([p], lr=1e-2)
    optimizer.register_step_pre_hook(lambda *_: called.append(f"before {p[0, 0] == 1}"))
    optimizer.register_step_post_hook(lambda *_: called.append(f"after {p[0, 0] < 1}"))
    optimizer.register_state_dict_post_hook(lambda *_: called.append("state"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: called.append("load"))
    p.grad = torch.ones(2, 2)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["before True", "after True", "state", "load"]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="learning rate: -1"):
        ours.AdamW([torch.ones(1)], lr=-1.0)
    with pytest.raises(ValueError, match="Nesterov"):
        ours.SGD([torch.ones(1)], nesterov=True)
    p = torch.ones(3, requires_grad=True)
    p.grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        ours.AdamW([p]).step()
    p = torch.ones(6)[::2].requires_grad_()
    p.grad = torch.ones(3)
    with pytest.raises(InvalidProblem, match="gaps between the elements of a param"):
        ours.AdamW([p]).step()
    with pytest.raises(InvalidProblem, match="updates take f32, bf16 and f16"):
        tp.AdamDescriptor(element="f64", sizes=(1,))


def listed(sizes: tuple[int, ...] = (3, 0, 5)) -> tuple[tp.AdamPlan, dict[str, Any]]:
    plan = tp.plan(tp.AdamDescriptor(element="f32", sizes=sizes), target="cpu")
    streams: dict[str, Any] = {
        name: [torch.ones(n) for n in sizes] for name in ("param", "grad", "exp_avg", "exp_avg_sq")
    }
    return plan, {**streams, "steps": torch.zeros(len(sizes)), "hyper": torch.full((5,), 0.5, dtype=torch.float64)}


def freed(n: int) -> torch.Tensor:
    t = torch.ones(n)
    t.untyped_storage().resize_(0)
    return t


def misaligned(n: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(4 * n + 1), dtype=torch.float32, count=n, offset=1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"grad": [torch.ones(3), torch.ones(0)]}, "grad is 2 tensors; a sequence of 3"),
        ({"grad": torch.ones(8)}, "but grad is Tensor; all are lists, or none"),
        ({"grad": [torch.ones(3), torch.ones(0), torch.ones(4)]}, r"grad\[2\] has 4 elements; 5"),
        ({"grad": [torch.ones(3), torch.ones(0), torch.ones(5).half()]}, r"grad\[2\] has dtype"),
        ({"grad": [torch.ones(3), torch.ones(0), torch.ones(10)[::2]]}, r"grad\[2\] has strides \(2,\)"),
        ({"grad": [torch.ones(3), torch.ones(0), torch._neg_view(torch.ones(5))]}, r"grad\[2\] is a .* lazy view"),
        ({"grad": [torch.ones(3), torch.ones(0), UninitializedParameter()]}, r"grad\[2\] is an uninitialized"),
        ({"grad": [torch.ones(3), torch.ones(0), freed(5)]}, r"grad\[2\] has no memory"),
        ({"grad": [torch.ones(3), torch.ones(0), torch.ones(5, device="meta")]}, r"grad\[2\] is on meta"),
        ({"grad": [torch.ones(3), torch.ones(0, device="meta"), torch.ones(5)]}, r"grad\[1\] is on meta"),
        ({"param": [torch.ones(3), torch.ones(0), torch.ones(5, requires_grad=True)]}, r"param\[2\] is a leaf"),
        ({"steps": None}, "steps is missing"),
        ({"found_inf": torch.zeros(1)}, "found_inf was passed"),
    ],
)
def test_lists_that_are_refused(change: dict[str, Any], said: str) -> None:
    plan, given = listed()
    assert plan.can_implement(tp.AdamArgs(**given))
    with pytest.raises(InvalidProblem, match=said):
        plan.run(tp.AdamArgs(**given | change))


def test_lists_of_misaligned_tensors_are_refused() -> None:
    plan, given = listed()
    with pytest.raises(MisalignedOperand, match=r"grad\[2\] is at 0x.*, which is not a multiple"):
        plan.run(tp.AdamArgs(**given | {"grad": [torch.ones(3), torch.ones(0), misaligned(5)]}))


def test_lists_on_two_devices_are_refused() -> None:
    plan, given = listed((0, 0))
    with pytest.raises(InvalidProblem, match=r"grad\[0\] is on meta, but param\[0\] on cpu"):
        plan.run(tp.AdamArgs(**given | {"grad": [torch.ones(0, device="meta")] * 2}))


def test_memory_that_is_written_is_shared_with_nothing() -> None:
    plan, given = listed()
    whole = torch.ones(12)
    for name, at in (("exp_avg", 0), ("grad", 4), ("param", 2)):
        pieces = [whole[:3], torch.ones(0), whole[at : at + 5]] if name == "exp_avg" else given[name]
        if name != "exp_avg":
            pieces = [whole[:3] if name == "grad" else torch.ones(3), torch.ones(0), whole[at : at + 5]]
        other = {"exp_avg": [whole[6:9], torch.ones(0), torch.ones(5)]} if name != "exp_avg" else {}
        with pytest.raises(InvalidProblem, match="shares memory"):
            plan.run(tp.AdamArgs(**given | other | {name: pieces}))
    twice = [whole[:3], torch.ones(0), whole[:5]]  # gradients are only read
    assert plan.can_implement(tp.AdamArgs(**given | {"grad": twice}))


def test_chunks_cover_each_element_once() -> None:
    sizes = (0, 1, 77, 256, 517)
    seen = [torch.zeros(n) for n in sizes]
    for tensor, number in chunk_table(sizes, 256).t().tolist():
        part = seen[tensor][number * 256 : (number + 1) * 256]
        assert part.numel()
        part += 1
    assert all(bool((s == 1).all()) for s in seen)


def _turned(params: list[Tensor]) -> None:
    params[0].grad = params[0].grad.t().contiguous().t()  # type: ignore[union-attr]


def _cut(opt: Any, params: list[Tensor]) -> None:
    """The second parameter is a part of its memory from now on, as of a pruned layer."""
    p, state = params[1], opt.state[params[1]]
    p.grad, p.data = None, p.data[:2]
    state.update({name: t[:2] for name, t in state.items() if t.dim()})
    p.grad = torch.full_like(p, 5.0)


#: What may change between two steps of the same optimizer, given it and its parameters.
CHANGES: dict[str, Callable[[Any, list[Tensor]], None]] = {
    "nothing": lambda opt, params: None,
    "a number": lambda opt, params: opt.param_groups[0].update(lr=0.3),
    "an option": lambda opt, params: opt.param_groups[0].update(maximize=True),
    "no gradient": lambda opt, params: setattr(params[1], "grad", None),
    "another gradient": lambda opt, params: setattr(params[1], "grad", torch.full_like(params[1], 7.0)),
    "a gradient's layout": lambda opt, params: _turned(params),
    "a parameter's memory": lambda opt, params: setattr(params[1], "data", params[1].data.clone()),
    "a parameter": lambda opt, params: opt.param_groups[0]["params"].pop(),
    "a state": lambda opt, params: opt.state[params[0]].update(exp_avg=torch.ones(5, 3)),
    "a state's memory": lambda opt, params: setattr(opt.state[params[0]]["exp_avg"], "data", torch.ones(5, 3)),
    "all states of one": lambda opt, params: opt.state.pop(params[1]),
    "a group": lambda opt, params: opt.add_param_group({"params": [torch.ones(3, requires_grad=True)], "lr": 0.1}),
    "a parameter's size": _cut,
    "a momentum": lambda opt, params: opt.param_groups[0].update(momentum=0.5, dampening=0.25),
    "no momentum": lambda opt, params: opt.param_groups[0].update(momentum=0.0),
}
#: Those of AdamW, and of SGD without momentum or with Nesterov's.
CHANGED = [("AdamW", {}, change) for change in CHANGES if "momentum" not in change]
CHANGED += [("SGD", {}, "a momentum"), ("SGD", {"momentum": 0.9, "nesterov": True}, "no momentum")]


@pytest.mark.parametrize(("name", "options", "change"), CHANGED)
def test_steps_see_what_changed_since_the_last(name: str, options: dict[str, Any], change: str) -> None:
    made = []
    for kind in (getattr(ours, name), getattr(torch.optim, name)):
        params = [torch.linspace(-1, 1, 15).reshape(5, 3).requires_grad_(), torch.ones(4, requires_grad=True)]
        opt = kind(params, lr=0.1, **options)
        for turn in range(5):
            for p in params:
                p.grad = torch.full_like(p, turn + 0.5)
            params[0].grad[0, 0] = 3.0 * turn  # type: ignore[index]
            if turn == 3:
                CHANGES[change](opt, params)
            opt.step()
        made.append(params)
    torch.testing.assert_close(made[0], made[1])


@pytest.mark.gpu
@pytest.mark.parametrize("known", [False, True])
def test_a_captured_step_takes_the_lr_of_its_tensor(known: bool) -> None:
    """Replays are steps, and write no tables: with the addresses of the step before the capture or with others (not
    ``known``), and the numbers on the device."""
    lr = torch.tensor(1e-2, dtype=torch.float64, device="cuda")
    ends = []
    for captured in (False, True):
        params = [p.requires_grad_() for p in drawn(0, "cuda")]
        optimizer = ours.AdamW(params, lr=lr.fill_(1e-2))
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        graph = torch.cuda.CUDAGraph()
        if captured:
            first = [p.grad for p in params]  # held: others get other addresses
            if not known:
                for p in params:
                    p.grad = torch.ones_like(p)
            with torch.cuda.graph(graph):
                optimizer.step()
            assert known or any(p.grad.data_ptr() != g.data_ptr() for p, g in zip(params, first, strict=True))
        for step in range(3):
            lr.fill_(1e-2 / (step + 1))
            if captured:
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
                    graph.replay()
                names = [e.key for e in found.key_averages()]
                assert "update_kernel" in names
                assert not any("Fill" in name for name in names), "launches that write tables"
            else:
                optimizer.step()
        ends.append([*(p.detach().clone() for p in params), optimizer.state[params[0]]["step"].clone()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.gpu
def test_thousands_of_tensors_are_two_launches() -> None:
    params = [torch.ones(17, device="cuda", requires_grad=True) for _ in range(5000)]
    optimizer = ours.SGD(params, lr=1e-2, momentum=0.9)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        optimizer.step()
    assert sum(event.count for event in found.key_averages() if "kernel" in event.key) <= 2


@pytest.mark.parametrize("sizes", [(3, 0, 5), (0,), (2 * CHUNK + 1, 1, CHUNK), (5, 0, 3000, 1, 0, 1025)])
def test_tables_by_launches_are_those_that_are_copied(sizes: tuple[int, ...], constant: SetConstant) -> None:
    constant(table_facts, "FEW", 0)
    table, addresses = tables(sizes, 2), [[16 * i for i in range(len(sizes))], [2**40 + i for i in range(len(sizes))]]
    copied, filled = (torch.zeros(table.nbytes, dtype=torch.uint8) for _ in range(2))
    table.write(copied, sizes, addresses)
    table.fill(filled, sizes, addresses)
    assert torch.equal(copied, filled)


@pytest.mark.parametrize("device", DEVICES)
def test_parameters_and_states_may_be_replaced(device: str) -> None:
    """``p.data = ...`` moves a parameter, and a state may be put in its place by hand: the step sees both."""
    ends = []
    for replaced in (False, True):
        p = torch.ones(5, device=device, requires_grad=True)
        optimizer = ours.SGD([p], lr=0.1, momentum=0.9)
        for step in range(3):
            p.grad = torch.ones_like(p)
            if replaced and step == 1:
                kept = p.detach().clone(), optimizer.state[p]["momentum_buffer"].clone()
                p.data.fill_(7.0)
                p.data, optimizer.state[p]["momentum_buffer"] = kept
            optimizer.step()
        ends.append(p.detach().clone())
    assert torch.equal(*ends)


@pytest.mark.gpu
def test_other_calls_may_use_the_workspace_of_a_bound_run() -> None:
    """The contents of a workspace mean nothing between calls: a BoundRun's tables lie elsewhere."""
    plan = tp.plan(tp.SGDDescriptor(element="f32", sizes=(3, 1, 2, 1, 1), momentum=False)).prepare()
    hyper = torch.tensor([0.5, 0.0, 0.0, 0.0], dtype=torch.float64, device="cuda")
    args = [
        tp.SGDArgs(torch.ones(8, device="cuda"), torch.ones(8, device="cuda"), torch.zeros(5, device="cuda"), hyper)
        for _ in range(2)
    ]
    workspace = tp.Workspace.allocate(plan)
    bound = plan.bind(args[0], workspace)
    plan.run(args[1], workspace)
    workspace.tensor.fill_(255)
    bound()
    assert all(torch.equal(a.param, torch.full((8,), 0.5, device="cuda")) for a in args)  # type: ignore[arg-type]
