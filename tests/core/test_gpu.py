"""What only a GPU can show: streams, capture, sizes past 2**31, refusals that never fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import SAMPLES, in_threads, known, make_args, outputs, refill

import triplan as tp

pytestmark = pytest.mark.gpu
DETERMINISTIC = tp.PlanPreference(deterministic=True)
LOOSE = tp.PlanPreference(deterministic=False)


@pytest.mark.parametrize("op", SAMPLES)
def test_run_is_captured_replayed_and_allocates_nothing(op: str) -> None:
    for preference in (LOOSE, DETERMINISTIC):
        desc = SAMPLES[op].replace(**known(SAMPLES[op], out_of_bounds="error"))
        plan = tp.plan(desc, preference=preference).prepare()
        if plan.precision_guarantee().duplicates is tp.Duplicates.ANY:
            continue  # two runs may differ; the deterministic entry of the op is compared instead
        workspace = tp.Workspace.allocate(plan)
        args, fresh = make_args(plan), make_args(plan, seed=1)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):  # entering allocates for torch's generators
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            plan.run(args, workspace)
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            plan.run(args, workspace)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        refill(plan, args, fresh)
        graph.replay()
        plan.run(fresh, workspace)
        for t, f in zip(outputs(plan, args), outputs(plan, fresh), strict=True):
            torch.testing.assert_close(t, f, rtol=0, atol=0, equal_nan=True)  # a mean over weights of no sum is NaN


def test_an_unprepared_plan_refuses_to_compile_under_capture() -> None:
    desc = SAMPLES["gather"].replace(element="f64", index_element="i32", out_of_bounds="clamp", wrap_negative=True)
    plan = tp.plan(desc)
    args = make_args(plan)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(tp.Unsupported, match="prepare"), torch.cuda.graph(graph):
        plan.run(args)
    torch.cuda.synchronize()
    plan.prepare().run(args)
    torch.cuda.synchronize()


def test_streams() -> None:
    plan = tp.plan(SAMPLES["index_add"], preference=LOOSE).prepare()
    args, stream = make_args(plan), torch.cuda.Stream()
    plan.run(args)
    torch.cuda.synchronize()
    for chosen in (stream, stream.cuda_stream):
        mine = make_args(plan)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # were the launch on another stream, it would be done long before
        marker = torch.cuda.Event()
        plan.run(mine, stream=chosen)
        marker.record(stream)
        assert not marker.query()
        marker.synchronize()
        assert torch.equal(mine.out, args.out)  # type: ignore[attr-defined]


def test_eight_threads_on_eight_streams() -> None:
    plan = tp.plan(SAMPLES["gather"].replace(out_shape=(999, 64)), preference=LOOSE).prepare()

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for k in range(20):
                args = make_args(plan, seed * 100 + k)
                plan.run(args)
                assert torch.equal(args.out, args.src.gather(0, args.index))  # type: ignore[attr-defined]

    in_threads(8, work)


def test_cpu_tensors_and_foreign_targets_are_refused() -> None:
    plan = tp.plan(SAMPLES["gather"])
    args = make_args(plan)
    on_cpu = tp.GatherArgs(*(t.cpu() for t in (args.src, args.index, args.out)))  # type: ignore[attr-defined]
    assert "cpu" in plan.can_implement(on_cpu).reason
    mixed = tp.GatherArgs(args.src, args.index.cpu(), args.out)  # type: ignore[attr-defined]
    assert "one device" in plan.can_implement(mixed).reason
    other = "a100" if plan.target.arch is tp.ArchSku.SM90A else "h200"
    foreign = tp.plan(SAMPLES["gather"], target=tp.Target.preset(other))
    assert isinstance(foreign.can_implement(args).error, tp.Unsupported)


def test_check_leaves_the_context_usable() -> None:
    plan = tp.plan(SAMPLES["gather"].replace(out_of_bounds="error"))
    args = make_args(plan)
    args.index[3, 7] = 2**62  # type: ignore[attr-defined]
    plan.run(args)
    with pytest.raises(IndexError, match=r"index\[3, 7\] = 4611686018427387904"):
        plan.check(args)
    args.index[3, 7] = 0  # type: ignore[attr-defined]
    plan.run(args)
    plan.check(args)
    assert torch.equal(args.out, args.src.gather(0, args.index))  # type: ignore[attr-defined]


@pytest.fixture
def large_memory() -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 60 * 2**30:
        pytest.skip("needs 60 GiB of free GPU memory")


@pytest.mark.usefixtures("large_memory")
@pytest.mark.parametrize("layout", ["packed", "strided"])
def test_operands_past_two_to_the_31st(layout: str) -> None:
    """Rows beyond element 2**31, read and added to, at every boundary where 32-bit offsets would wrap."""
    rows, width = 2**21 + 5, 1031  # about 2.16e9 elements, in no block's multiple
    promised: dict[str, Any] = {"element": "f16", "layouts": {"out": layout, "src": layout}}
    read: dict[str, Any] = {"select_dim": 0, "src_dim_size": rows, **promised}
    table = torch.zeros(rows, width, dtype=torch.float16, device="cuda")
    ends = [0, 1, rows - 1, rows - 2, 2**31 // width, 2**31 // width + 1, 2**30 // width]
    interesting = torch.tensor(ends, device="cuda")
    values = torch.randn(len(interesting), width, device="cuda").half()
    add = tp.IndexAddDescriptor(src_shape=values.shape, add_dim=0, out_dim_size=rows, **promised)
    tp.plan(add, preference=LOOSE).run(tp.IndexAddArgs(interesting, values, table))
    assert torch.equal(table[interesting], values)
    assert int(torch.count_nonzero(table)) == int(torch.count_nonzero(values))
    out = torch.full_like(values, float("nan"))
    select = tp.IndexSelectDescriptor(out_shape=values.shape, **read)
    tp.plan(select).run(tp.IndexSelectArgs(table, interesting, out))
    assert torch.equal(out, values)
    big_out = torch.full((rows, width), float("nan"), dtype=torch.float16, device="cuda")
    index = torch.arange(rows, device="cuda", dtype=torch.int32).flip(0)
    copy = tp.IndexSelectDescriptor(out_shape=(rows, width), index_element="i32", **read)
    tp.plan(copy).run(tp.IndexSelectArgs(table, index, big_out))
    assert torch.equal(big_out[rows - 1 - interesting], values)
    assert int(torch.count_nonzero(big_out)) == int(torch.count_nonzero(values))


@pytest.mark.skipif("torch.cuda.device_count() < 2")
def test_a_second_device_loads_its_own_kernels() -> None:
    plan = tp.plan(SAMPLES["gather"])
    first = make_args(plan)
    plan.run(first)
    with torch.cuda.device(1):
        second = make_args(plan)
    assert second.out.device.index == 1  # type: ignore[attr-defined]
    plan.run(second)  # with device 0 current
    assert torch.equal(second.out, second.src.gather(0, second.index))  # type: ignore[attr-defined]
    assert torch.cuda.current_device() == 0
