"""Replays of ``Plan.run``: after a warm-up, any change to any operand is met as a fresh plan would meet it."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from samples import SAMPLES, in_threads
from torch._subclasses import FakeTensorMode

import triplan as tp
from bench.stub import launch_stubbed
from triplan.backends.runtime import launcher
from triplan.facade import bound, replay as replay_module

CPU = tp.Target.cpu()
OPS = ("gather", "gather_backward", "index_select", "index_add", "scatter", "index_put", "embedding")


def problem(op: str, strided: bool) -> tuple[tp.Descriptor, Any]:
    desc = SAMPLES[op]
    if strided:
        desc = desc.replace(layouts={o.name: "strided" for o in desc.operands() if o.kind == "tensor"})
    plan_type = tp.plan_type(op)
    values: dict[str, Any] = {}
    for o in desc.operands():
        if o.kind == "host_scalar":
            values[o.name] = 0.5
        else:
            made = [torch.randint(0, 4, o.shape).to(o.element.torch) for _ in range(o.count)]
            values[o.name] = made if o.kind == "tensor_list" else made[0]
    return desc, plan_type.args_type(**values)


def tensors_of(args: Any, desc: tp.Descriptor) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for o in desc.operands():
        value = getattr(args, o.name)
        found += [t for t in (value if isinstance(value, list) else [value]) if isinstance(t, torch.Tensor)]
    return found


def shifted(t: torch.Tensor, elements: int) -> torch.Tensor:
    """The same values at an address that is ``elements`` off a 64-byte boundary."""
    buffer = torch.zeros(t.numel() + 64, dtype=t.dtype)
    buffer[elements : elements + t.numel()] = t.reshape(-1)
    return buffer[elements : elements + t.numel()].view(t.shape)


#: What a caller may do to a tensor of an accepted call. Each changes ``t`` in place.
CHANGES: dict[str, Callable[[torch.Tensor, list[torch.Tensor]], object]] = {
    "nothing": lambda t, others: None,
    "new values": lambda t, others: t.fill_(1),
    "another allocation": lambda t, others: t.set_(t.clone()),
    "resize": lambda t, others: t.resize_(*t.shape[:-1], t.shape[-1] + 1),
    "resize smaller": lambda t, others: t.resize_(*t.shape[:-1], t.shape[-1] - 1),
    "empty": lambda t, others: t.resize_(0),
    "misaligned": lambda t, others: t.set_(shifted(t, 1)),
    "misaligned by two": lambda t, others: t.set_(shifted(t, 2)),
    "transposed strides": lambda t, others: t.set_(t.clone().movedim(0, -1).contiguous().movedim(-1, 0)),
    "gaps": lambda t, others: t.set_(torch.zeros(*t.shape, 2, dtype=t.dtype)[..., 0]),
    "stride 0": lambda t, others: t.set_(torch.zeros((), dtype=t.dtype).expand(t.shape)),
    "another dtype": lambda t, others: setattr(
        t, "data", t.to(torch.float64 if t.dtype != torch.float64 else torch.float32)
    ),
    "shared with the first": lambda t, others: (
        t.set_(others[0].untyped_storage(), 0, t.shape, t.stride())
        if t.dtype == others[0].dtype and others[0].numel() >= t.numel()
        else None
    ),
    "requires grad": lambda t, others: t.requires_grad_() if t.is_floating_point() else None,
    "another rank": lambda t, others: t.unsqueeze_(0),
}


def bits(t: torch.Tensor) -> torch.Tensor:
    """A copy, to be compared as bytes: what ``resize_`` uncovers may be NaN."""
    return t.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("guard", ["dynamo", "plain"])
@pytest.mark.parametrize("op", OPS)
@given(data=st.data())
def test_a_changed_operand_is_met_as_by_a_fresh_plan(op: str, guard: str, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if guard == "plain":
            patch.setattr(replay_module, "_TENSOR_GUARDS", None)
        desc, args = problem(op, data.draw(st.booleans(), label="strided"))
        warm, fresh = tp.plan(desc, target=CPU), tp.plan(desc, target=CPU)
        for _ in range(2):
            warm.run(args)
        tensors = tensors_of(args, desc)
        which = data.draw(st.integers(0, len(tensors) - 1), label="operand")
        change = data.draw(st.sampled_from(sorted(CHANGES)), label="change")
        CHANGES[change](tensors[which], tensors)
        support = fresh.can_implement(args)
        on_cpu = [t for t in tensors if t.device.type == "cpu"]
        before = [t.detach().clone() for t in on_cpu]
        if support:
            warm.run(args)
            after = [bits(t) for t in on_cpu]
            with torch.no_grad():
                for t, b in zip(on_cpu, before, strict=True):
                    if not torch.equal(bits(t), bits(b)):
                        t.copy_(b)
            fresh.run(args)
            assert all(torch.equal(bits(t), a) for t, a in zip(on_cpu, after, strict=True))
        else:
            with pytest.raises(type(support.error)) as info:  # type: ignore[arg-type]
                warm.run(args)
            assert str(info.value) == support.reason
            assert all(torch.equal(bits(t), bits(b)) for t, b in zip(on_cpu, before, strict=True))


def test_the_fast_path_is_taken_and_forgets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    desc, args = problem("index_add", strided=False)
    plan = tp.plan(desc, target=CPU)
    full = []
    original = type(plan).can_implement

    def counting(self: Any, given: Any) -> tp.Support:
        full.append(given)
        return original(self, given)

    monkeypatch.setattr(type(plan), "can_implement", counting)
    plan.run(args)
    for _ in range(5):
        plan.run(args)
    assert len(full) == 1
    other = problem("index_add", strided=False)[1]
    plan.run(other)  # other tensors of the same signature
    assert len(full) == 1
    plan.run(tp.IndexAddArgs(args.index, args.src, args.out, alpha=2))
    assert len(full) == 1
    for bad in ("2", True, 1j):
        with pytest.raises(tp.InvalidProblem, match="alpha"):
            plan.run(tp.IndexAddArgs(args.index, args.src, args.out, alpha=bad))  # type: ignore[arg-type]
    with pytest.raises(tp.InvalidProblem, match="meta"):
        plan.run(tp.IndexAddArgs(args.index, args.src.to("meta"), args.out))
    with pytest.raises(tp.InvalidProblem, match="lazy"):
        plan.run(tp.IndexAddArgs(args.index, torch._neg_view(args.src), args.out))
    with pytest.raises(tp.InvalidProblem, match="IndexAddArgs"):
        plan.run(tp.ScatterAddArgs(args.index, args.src, args.out))
    with pytest.raises(tp.InvalidProblem, match="status"):
        plan.run(tp.IndexAddArgs(args.index, args.src, args.out, None, torch.zeros(1, dtype=torch.int64)))
    with pytest.raises(tp.InvalidProblem, match="out"):
        plan.run(tp.IndexAddArgs(args.index, args.src, None))  # type: ignore[arg-type]


@pytest.mark.parametrize("kinds", [2, 3])
def test_two_signatures_take_turns_and_a_third_is_checked(monkeypatch: pytest.MonkeyPatch, kinds: int) -> None:
    desc, args = problem("index_add", strided=True)
    plan = tp.plan(desc, target=CPU)
    full, original = [], type(plan).can_implement

    def counting(self: Any, given: Any) -> tp.Support:
        full.append(given)
        return original(self, given)

    monkeypatch.setattr(type(plan), "can_implement", counting)
    src = torch.ones_like(args.src)
    given = [(src, 0.5), (src, None), (src.t().contiguous().t(), 2.0)][:kinds]
    for turn in range(4):
        for x, alpha in given:
            out = torch.zeros_like(args.out)
            plan.run(tp.IndexAddArgs(args.index, x, out, alpha))
            expected = torch.zeros_like(out).index_add_(0, args.index, x, alpha=1.0 if alpha is None else alpha)
            assert torch.equal(out, expected), (turn, alpha)
    assert len(full) == (2 if kinds == 2 else 12)


def test_scalars_reach_the_kernel_every_time() -> None:
    desc, args = problem("index_add", strided=False)
    plan = tp.plan(desc, target=CPU)
    results = []
    for alpha in (1.0, 2.0, 2, None, 0.5, float("nan")):
        out = torch.zeros_like(args.out)
        plan.run(tp.IndexAddArgs(args.index, torch.ones_like(args.src), out, alpha))
        results.append(out[args.index[0]][0].item() / int((args.index == args.index[0]).sum()))
    assert results[:5] == [1.0, 2.0, 2.0, 1.0, 0.5]
    assert results[5] != results[5]


def test_operands_that_a_call_adds_are_seen() -> None:
    plan = tp.plan(tp.UnaryDescriptor(op="exp", element="f32", input_shape=(4,)), target=CPU)
    x, out = torch.zeros(4), torch.zeros(4)
    for _ in range(2):
        plan.run(tp.UnaryArgs(x=x, out=out))
    with pytest.raises(tp.InvalidProblem, match="other"):
        plan.run(tp.UnaryArgs(x=x, out=out, other=x))
    plan.run(tp.UnaryArgs(x=x, out=out))


def test_list_operands_are_looked_into() -> None:
    desc, args = problem("index_put", strided=False)
    plan = tp.plan(desc, target=CPU)
    plan.run(args)
    plan.run(args)
    good = args.indices[0]
    for bad in ([], [good, good], [good.int()], [None], good, [good[:-1]]):
        with pytest.raises(tp.InvalidProblem, match="indices"):
            plan.run(tp.IndexPutArgs(bad, args.values, args.out))
    args.indices[0] = good.int()  # the very list that was accepted
    with pytest.raises(tp.InvalidProblem, match="indices"):
        plan.run(args)


def test_many_threads_with_two_signatures() -> None:
    desc, _ = problem("gather", strided=True)
    plan = tp.plan(desc, target=CPU)

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(100):
            src = torch.randn(32, 9, generator=generator).t() if seed % 2 else torch.randn(9, 32, generator=generator)
            index = torch.randint(0, 9, (6, 32), generator=generator)
            out = torch.empty(6, 32)
            plan.run(tp.GatherArgs(src, index, out))
            assert torch.equal(out, src.gather(0, index))

    in_threads(8, work)


# --- tensors without memory, and those that dynamo's guard cannot look at ---


def freed(t: torch.Tensor) -> torch.Tensor:
    t.untyped_storage().resize_(0)
    return t


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("made", ["whole", "view", "view far from the start", "fake"])
@pytest.mark.parametrize("operand", ["index", "src", "out"])
@pytest.mark.parametrize("warm", [True, False])
def test_a_tensor_whose_storage_was_freed_is_refused(warm: bool, operand: str, made: str) -> None:
    desc = tp.IndexAddDescriptor(src_shape=(6, 32), add_dim=0, out_dim_size=9, element="f32")
    values = {"index": torch.arange(6), "src": torch.ones(6, 32), "out": torch.zeros(9, 32)}
    plan = tp.plan(desc, target=CPU)
    if warm:
        plan.run(tp.IndexAddArgs(**values))
    good = values[operand]
    if made == "fake":
        values[operand] = FakeTensorMode().from_tensor(good)
    elif made == "view":
        values[operand] = freed(torch.cat([good.flatten(), good.flatten()])[good.numel() :].view(good.shape))
    elif made == "view far from the start":  # 4 GiB, which are never touched
        values[operand] = freed(
            torch.empty(2**32 + good.nbytes, dtype=torch.uint8)[2**32 :].view(good.dtype).view_as(good)
        )
    else:
        values[operand] = freed(good.clone())
    args = tp.IndexAddArgs(**values)
    reason = plan.can_implement(args).reason or ""  # a failing assertion must not print the tensor
    assert "no memory" in reason
    with pytest.raises(tp.InvalidProblem, match=f"{operand} has no memory"):
        plan.run(args)


NESTED = """
import torch, triplan as tp
desc = tp.IndexAddDescriptor(src_shape=(6, 32), add_dim=0, out_dim_size=9, element="f32")
plan = tp.plan(desc, target=tp.Target.cpu())
index, src, out = torch.arange(6), torch.ones(6, 32), torch.zeros(9, 32)
plan.run(tp.IndexAddArgs(index, src, out))
nested = torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)])
for args in (tp.IndexAddArgs(index, nested, out), tp.IndexAddArgs(index, src, nested), tp.IndexAddArgs(index, 3, out)):
    try:
        plan.run(args)
    except tp.InvalidProblem as e:
        print("refused")
plan.run(tp.IndexAddArgs(index, src, out))
print(out.sum().item())
"""


def test_a_nested_tensor_is_refused_and_the_process_lives() -> None:
    """Dynamo's guard would end it with an uncaught C++ exception."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", NESTED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["refused"] * 3 + ["384.0"]), done.stderr


def test_a_guard_takes_no_interrupt_for_something_that_is_no_tensor() -> None:
    class Interrupted:
        @property
        def is_nested(self) -> bool:
            raise TimeoutError  # as a handler of a signal may raise anywhere

    guard = replay_module.guarded([replay_module.Slot("call", torch.zeros(2), 1, False)], ["return True"])
    assert (guard(torch.ones(2)), guard(3)) == (True, None)
    with pytest.raises(TimeoutError):
        guard(Interrupted())


# --- launches, with a launcher that records them ---

H200 = tp.Target.preset("h200")
compiled = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted here")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """The arguments of every launch, on tensors of the CPU."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(launcher, "_STATIC", lambda *args: calls.append(args[-2]))
    monkeypatch.setattr(bound, "current_device", lambda: -1)  # the index of a CPU tensor's device
    monkeypatch.setattr(bound, "current_stream", lambda index: 0)
    with launch_stubbed(H200):
        yield calls


ADD = tp.IndexAddDescriptor(src_shape=(6, 32), add_dim=0, out_dim_size=9, element="f32")
ATOMIC = tp.PlanPreference(kernel="atomic_rows", deterministic=False)


@compiled
def test_either_zero_reaches_the_kernel(launched: list[tuple[Any, ...]]) -> None:
    plan = tp.plan(ADD, preference=ATOMIC, target=H200)
    index, src, out = torch.arange(6), torch.ones(6, 32), torch.zeros(9, 32)
    for alpha in (0.0, -0.0, 0.0, -0.0, 2.5, 2.5):
        plan.run(tp.IndexAddArgs(index, src, out, alpha))
        (passed,) = (a for a in launched[-1] if isinstance(a, float))
        assert (passed, math.copysign(1, passed)) == (alpha, math.copysign(1, alpha))


@compiled
def test_a_scalar_that_a_call_adds_reaches_the_kernel(launched: list[tuple[Any, ...]]) -> None:
    state = torch.tensor([3, 5])
    operands = {"x": torch.ones(9), "out": torch.ones(9), "p": 0.5, "state": state}
    plan = tp.plan(tp.RandomDescriptor.from_args(tp.RandomArgs(**operands), op="dropout"), target=H200)
    for added in ({}, {"first": 7}, {}, {"first": 0}, {"first": None}, {"first": 6}):
        plan.run(tp.RandomArgs(**operands, **added))
    firsts = [call[call.index(state.data_ptr()) + 4] for call in launched]
    assert firsts == [0, 7, 0, 0, 0, 6]


@compiled
def test_repeated_runs_keep_their_launches(launched: list[tuple[Any, ...]]) -> None:
    plan = tp.plan(ADD, preference=ATOMIC, target=H200)
    index, src, out, other = torch.arange(6), torch.ones(6, 32), torch.zeros(9, 32), torch.zeros(9, 32)
    for target in (out, out, out, other, out):
        plan.run(tp.IndexAddArgs(index, src, target))
    addresses = [next(i for i, t in enumerate((out, other)) if t.data_ptr() in call) for call in launched]
    assert addresses == [0, 0, 0, 1, 0]
    assert launched[0] is launched[2]


@compiled
def test_a_run_keeps_no_tensor(launched: list[tuple[Any, ...]]) -> None:
    """Nor is one part of a cycle of references, which would keep it until Python collects those."""
    plan = tp.plan(ADD, preference=ATOMIC, target=H200)
    operands = [torch.arange(6), torch.ones(6, 32), torch.zeros(9, 32)]
    kept = list(map(weakref.ref, operands))
    gc.disable()
    try:
        plan.run(tp.IndexAddArgs(*operands))
        operands.clear()
        assert [t() for t in kept] == [None] * 3
    finally:
        gc.enable()
