"""Plan: what run refuses, what it touches, what explain and check say. On the CPU, by the reference backend."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from samples import SAMPLES

import triplan as tp
from bench.stub import launch_stubbed

CPU = tp.Target.cpu()
H200 = tp.Target.preset("h200")


def gather_problem(**options: object) -> tuple[tp.GatherPlan, tp.GatherArgs]:
    desc = tp.GatherDescriptor(out_shape=(3, 4), gather_dim=0, src_dim_size=5, element="f32", **options)  # type: ignore[arg-type]
    index = torch.randint(0, 5, (3, 4))
    status = torch.zeros(1, dtype=torch.int64) if desc.out_of_bounds == "error" else None
    args = tp.GatherArgs(torch.randn(5, 4), index, torch.full((3, 4), float("nan")), status)
    return tp.GatherPlan.select(desc, target=CPU), args


def test_the_life_cycle() -> None:
    plan, args = gather_problem()
    support = plan.can_implement(args)
    assert support
    assert support.reason == ""
    assert support.error is None
    assert plan.workspace_size() == 0
    plan.run(args)
    assert torch.equal(args.out, args.src.gather(0, args.index))
    assert plan.precision_guarantee() == plan.precision_guarantee("out") == plan.sku().precision_guarantee
    with pytest.raises(tp.InvalidProblem, match="out"):
        plan.precision_guarantee("nope")


def test_a_refusal_is_falsy_and_run_raises_the_same() -> None:
    plan, args = gather_problem()
    bad = tp.GatherArgs(args.src, args.index.to(torch.int32), args.out)
    support = plan.can_implement(bad)
    assert not support
    assert "index" in support.reason
    assert "int32" in support.reason
    assert "int64" in support.reason
    with pytest.raises(tp.InvalidProblem) as info:
        plan.run(bad)
    assert str(info.value) == support.reason
    assert args.out.isnan().all()  # nothing was written


def test_args_of_another_op_and_operands_nobody_asked_for() -> None:
    plan, args = gather_problem()
    assert "GatherArgs" in plan.can_implement(tp.IndexSelectArgs(args.src, args.index, args.out)).reason  # type: ignore[arg-type]
    status = torch.zeros(1, dtype=torch.int64)
    assert "status" in plan.can_implement(tp.GatherArgs(args.src, args.index, args.out, status)).reason
    error_plan, _ = gather_problem(out_of_bounds="error")
    assert "status is missing" in error_plan.can_implement(args).reason


def test_outputs_may_not_overlap_themselves_or_inputs() -> None:
    desc = tp.GatherDescriptor(
        out_shape=(3, 4), gather_dim=0, src_dim_size=3, element="f32", layouts={"out": "strided", "src": "strided"}
    )
    plan = tp.plan(desc, target=CPU)
    index = torch.zeros(3, 4, dtype=torch.int64)
    buffer = torch.randn(3, 9)
    left, right, crossing = buffer[:, :4], buffer[:, 4:8], buffer[:, 3:7]
    assert plan.can_implement(tp.GatherArgs(left, index, right))  # column slices of one tensor are apart
    assert "shares memory" in plan.can_implement(tp.GatherArgs(left, index, crossing)).reason
    assert "shares memory" in plan.can_implement(tp.GatherArgs(left, index, left)).reason
    folded = torch.randn(1, 4).expand(3, 4)
    assert "overlap" in plan.can_implement(tp.GatherArgs(left, index, folded)).reason
    sliding = torch.randn(6).as_strided((3, 4), (1, 1))
    assert "overlap" in plan.can_implement(tp.GatherArgs(left, index, sliding)).reason
    same_rows = torch.randn(6, 4)
    assert plan.can_implement(tp.GatherArgs(same_rows[0::2], index, same_rows[1::2]))


def test_broken_promises_name_the_promise() -> None:
    plan, args = gather_problem()
    transposed = tp.GatherArgs(torch.randn(4, 5).t(), args.index, args.out)
    assert "packed" in plan.can_implement(transposed).reason
    shifted = torch.randn(21)[1:].reshape(5, 4)
    support = plan.can_implement(tp.GatherArgs(shifted, args.index, args.out))
    assert isinstance(support.error, tp.MisalignedOperand)
    assert "16" in support.reason
    relaxed = plan.descriptor.replace(layouts={"src": tp.Layout(alignment=4)})
    assert tp.plan(relaxed, target=CPU).can_implement(tp.GatherArgs(shifted, args.index, args.out))


def test_plans_for_a_gpu_refuse_cpu_tensors_and_streams_need_a_gpu() -> None:
    plan, args = gather_problem()
    assert "sm90a" in tp.plan(plan.descriptor, target=H200).can_implement(args).reason
    with pytest.raises(tp.InvalidProblem, match="stream"):
        plan.run(args, stream=0)
    assert args.out.isnan().all()


def test_lazy_and_meta_tensors_are_refused() -> None:
    plan, args = gather_problem()
    assert "lazy" in plan.can_implement(tp.GatherArgs(torch._neg_view(args.src), args.index, args.out)).reason
    meta = tp.GatherArgs(*(t.to("meta") for t in (args.src, args.index, args.out)))
    assert "meta" in plan.can_implement(meta).reason
    assert "tensor" in plan.can_implement(tp.GatherArgs([1.0], args.index, args.out)).reason  # type: ignore[arg-type]


@pytest.mark.parametrize("alpha", [True, "1", 1j, torch.ones(())])
def test_alpha_is_a_python_number(alpha: object) -> None:
    desc = SAMPLES["index_add"]
    args = tp.IndexAddArgs(torch.zeros(6, dtype=torch.int64), torch.zeros(6, 32), torch.zeros(9, 32), alpha)  # type: ignore[arg-type]
    support = tp.plan(desc, target=CPU).can_implement(args)
    assert not support
    assert "alpha" in support.reason


def test_integer_alpha_must_fit() -> None:
    plan = tp.plan(SAMPLES["index_add"].replace(element="i32"), target=CPU)
    tensors = (
        torch.zeros(6, dtype=torch.int64),
        torch.ones(6, 32, dtype=torch.int32),
        torch.zeros(9, 32, dtype=torch.int32),
    )
    assert "i32" in plan.can_implement(tp.IndexAddArgs(*tensors, alpha=2**31)).reason
    assert "int" in plan.can_implement(tp.IndexAddArgs(*tensors, alpha=1.5)).reason
    plan.run(tp.IndexAddArgs(*tensors, alpha=-3))
    assert tensors[2][0, 0] == -18


@pytest.mark.parametrize(("element", "alpha"), [("f32", 1e39), ("f16", -1e39), ("f32", 10**400), ("f64", -(10**400))])
def test_alpha_must_be_within_its_element(element: str, alpha: float) -> None:
    desc = SAMPLES["index_add"].replace(element=element)
    plan = tp.plan(desc, target=CPU)
    dtype = tp.ElementKind.of(element).torch
    tensors = (torch.zeros(6, dtype=torch.int64), torch.ones(6, 32, dtype=dtype), torch.zeros(9, 32, dtype=dtype))
    for _ in range(2):  # before and after there is something to remember
        with pytest.raises(tp.InvalidProblem, match="alpha"):
            plan.run(tp.IndexAddArgs(*tensors, alpha=alpha))
        plan.run(tp.IndexAddArgs(*tensors, alpha=2.0))
    plan.run(tp.IndexAddArgs(*tensors, alpha=float("inf")))
    assert tensors[2][0].isinf().all()


def test_problems_beyond_a_grid_are_refused_when_planning() -> None:
    desc = tp.IndexPutDescriptor(
        out_shape=(4, 65536, 65536), index_shape=(3,), num_indices=3, element="f32", accumulate=True
    )
    with pytest.raises(tp.Unsupported, match=r"2\*\*31"):
        tp.plan(desc, target=H200, preference=tp.PlanPreference(kernel="ordered_sum"))
    assert (
        tp.plan(desc, target=H200, preference=tp.PlanPreference(deterministic=False)).sku().kernel == "atomic_elements"
    )


def test_check_names_position_and_value() -> None:
    plan, args = gather_problem(out_of_bounds="error")
    args.index[1, 2], args.index[2, 0] = -1, 99
    plan.run(args)
    with pytest.raises(IndexError, match=r"index\[1, 2\] = -1 is out of bounds for extent 5"):
        plan.check(args)
    assert args.out[1, 2] == args.out[2, 0] == 0  # skipped elements become zero, not stale
    args.index.clamp_(0, 4)
    plan.run(args)  # status is reset by the run itself
    plan.check(args)
    other, other_args = gather_problem()
    with pytest.raises(tp.InvalidProblem, match="error"):
        other.check(other_args)


def test_check_of_several_indices() -> None:
    desc = tp.IndexPutDescriptor(
        out_shape=(4, 5, 2), index_shape=(3,), num_indices=2, element="f32", out_of_bounds="error", wrap_negative=True
    )
    plan = tp.plan(desc, target=CPU)
    rows, columns = torch.tensor([0, -1, 2]), torch.tensor([0, 5, -6])
    args = tp.IndexPutArgs([rows, columns], torch.ones(3, 2), torch.zeros(4, 5, 2), torch.zeros(1, dtype=torch.int64))
    plan.run(args)
    with pytest.raises(IndexError, match=r"indices\[1\] = \(-1, 5\) is out of bounds for extent \(4, 5\)"):
        plan.check(args)


def test_run_bumps_version_counters() -> None:
    plan, args = gather_problem()
    x = torch.ones(3, 4, requires_grad=True)
    y = x * args.out  # saves args.out for backward
    before = args.out._version
    plan.run(args)
    assert args.out._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_run_works_on_inference_tensors() -> None:
    plan, args = gather_problem()
    with torch.inference_mode():
        out = torch.empty(3, 4)
        plan.run(tp.GatherArgs(args.src, args.index, out))
    assert torch.equal(out, args.src.gather(0, args.index))


def test_pickling_selects_again() -> None:
    plan, _ = gather_problem()
    again = pickle.loads(pickle.dumps(plan))
    assert again is not plan
    assert again.key == plan.key
    assert again.sku() == plan.sku()
    fp16 = tp.plan(
        SAMPLES["index_add"].replace(element="f16"), target=H200, preference=tp.PlanPreference(deterministic=True)
    )
    assert pickle.loads(pickle.dumps(fp16)).sku() == fp16.sku()


@pytest.mark.parametrize("op", ["gather_backward", "index_select_backward", "embedding_backward"])
def test_empty_problems_still_fill_what_must_be_filled(op: str) -> None:
    shape = {"embedding_backward": {"index_shape": (0, 3)}}.get(op, {"out_shape": (0, 32)})
    for accumulate in (True, False):
        desc = SAMPLES[op].replace(**shape, accumulate=accumulate, out_of_bounds="error")
        plan = tp.plan(desc, target=CPU)
        tensors = [torch.full(o.shape, 7).to(o.element.torch) for o in desc.operands()]
        args = plan.args_type(*tensors)
        plan.run(args)
        assert (tensors[2] == (7 if accumulate else 0)).all()
        plan.check(args)


# --- workspace ---


def test_workspace_is_exact_and_checked() -> None:
    desc = SAMPLES["index_add"].replace(element="f16")
    pinned = tp.PlanPreference(deterministic=False, kernel="atomic_f32")
    plan = tp.plan(desc, target=H200, preference=pinned)
    workspace = tp.Workspace.allocate(plan, device="cpu")
    assert workspace.nbytes == plan.workspace_size() == 9 * 32 * 4
    assert workspace.address % tp.Workspace.ALIGNMENT == 0
    bigger = tp.plan(desc.replace(out_dim_size=100), target=H200, preference=pinned)
    assert tp.Workspace.for_plans([plan, bigger], device="cpu").nbytes == bigger.workspace_size()
    mine = tp.Workspace.from_tensor(torch.empty(64, 2))
    assert mine.nbytes == 512
    for tensor in (torch.empty(4, 4).t()[1:], torch.empty(128, dtype=torch.uint8)[::2], torch.empty(1).expand(64)):
        with pytest.raises(tp.InvalidProblem, match="contiguous"):
            tp.Workspace(tensor)
    with pytest.raises(tp.MisalignedOperand, match="16"):
        tp.Workspace(torch.empty(64, dtype=torch.uint8)[1:])
    with pytest.raises(tp.InvalidProblem):
        tp.Workspace.for_plans([])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda workspace: pickle.loads(pickle.dumps(workspace))])
def test_a_copied_workspace_has_memory_of_its_own(copied: Callable[[tp.Workspace], tp.Workspace]) -> None:
    workspace = tp.Workspace(torch.empty(512, dtype=torch.uint8))
    again = copied(workspace)
    assert (again.nbytes, again.address) == (512, again.tensor.data_ptr())
    assert again.address != workspace.address


def test_a_workspace_follows_its_tensor() -> None:
    """Into memory that it was moved to; freed memory is refused, also by a plan that has run with it."""
    desc = tp.IndexAddDescriptor(src_shape=(6, 32), add_dim=0, out_dim_size=9, element="f32")
    plan = tp.plan(desc, target=H200, preference=tp.PlanPreference(kernel="sorted_sum"))
    args = tp.IndexAddArgs(index=torch.arange(6), src=torch.ones(6, 32), out=torch.zeros(9, 32), alpha=1.0)
    workspace = tp.Workspace.allocate(plan, "cpu")
    workspace.tensor.resize_(1 << 22)
    assert workspace.address == workspace.tensor.data_ptr()
    with launch_stubbed(H200):
        plan.run(args, workspace)
        workspace.tensor.untyped_storage().resize_(0)
        for _ in range(2):
            with pytest.raises(tp.InvalidProblem, match="freed"):
                plan.run(args, workspace)


def test_workspace_errors_carry_their_numbers() -> None:
    error = tp.WorkspaceTooSmall("short", needed=10, got=3)
    assert (error.needed, error.got) == (10, 3)
    assert isinstance(error, ValueError)
    again = pickle.loads(pickle.dumps(error))
    assert (again.needed, again.got, str(again)) == (10, 3, "short")


def test_a_profiler_shows_the_sku() -> None:
    plan, args = gather_problem()
    with torch.profiler.profile() as profile:
        plan.run(args)
    assert f"triplan {plan.sku().id}" in {event.key for event in profile.key_averages()}
