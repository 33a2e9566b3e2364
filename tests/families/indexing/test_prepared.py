"""Prepared indices: the same bits as without, for any number of runs; and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from proofs import MARKS, target
from samples import ACCUMULATING, SAMPLES

import triplan as tp
from triplan.sku import ElementKind
from triplan.testing import args_for

PINNED = tp.PlanPreference(kernel="sorted_sum", deterministic=False)
#: Slots that are filled with zeros, not written by programs of their own.
SPARSE = {"num_embeddings": 500, "accumulate": False}
WHERE = [pytest.param(w, marks=m) for w, m in MARKS.items() if w != "cpu"]


def plan_of(op: str, where: str, **options: Any) -> tp.Plan[Any, Any]:
    desc = SAMPLES[op].replace(**options)
    desc = desc.replace(accumulate=True) if op == "index_put" else desc
    return tp.plan(desc, preference=PINNED, target=target(where))


def storage_of(plan: tp.Plan[Any, Any], device: Any) -> tp.Workspace:
    return tp.Workspace.from_tensor(torch.full((plan.prepared_size(),), 0xA5, dtype=torch.uint8, device=device))


def index_of(plan: tp.Plan[Any, Any], args: Any) -> tuple[str, Any]:
    (name,) = (o.name for o in plan.descriptor.operands() if o.index_extents)
    return name, getattr(args, name)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("out_of_bounds", ["skip", "error"])
@pytest.mark.parametrize(("op", "options"), [*((op, {}) for op in ACCUMULATING), ("embedding_backward", SPARSE)])
def test_runs_with_prepared_indices_have_the_same_bits(
    op: str, options: dict[str, Any], out_of_bounds: str, where: str
) -> None:
    plan = plan_of(op, where, out_of_bounds=out_of_bounds, **options)
    device = plan.target.device_type
    written = [o.name for o in plan.descriptor.operands() if o.is_written]
    workspace = tp.Workspace.allocate(plan)
    placed = args_for(plan.descriptor, device, 1)
    prepared = plan.prepare_indices(index_of(plan, placed.args)[1], storage_of(plan, device), workspace)
    for _ in range(2):
        outs = []
        for p in (None, prepared):
            workspace.tensor.fill_(0x5A)  # nothing that was prepared lies in the workspace
            placed.reset(0)
            plan.run(placed.args, workspace, prepared=p)
            outs.append([getattr(placed.args, n).clone() for n in written])
        for a, b in zip(*outs, strict=True):
            assert torch.equal(a.view(ElementKind.of(a.dtype).bits.torch), b.view(ElementKind.of(b.dtype).bits.torch))
    if out_of_bounds == "error":
        assert placed.args.status.item() != 2**63 - 1  # else the status shows nothing
    prepared.verify(index_of(plan, placed.args)[1])


@pytest.mark.interpret
def test_what_is_refused() -> None:
    plan, other = plan_of("index_add", "interpret"), plan_of("index_add", "interpret", index_element="i32")
    args = args_for(plan.descriptor, "cpu", 1, indices="valid").args
    workspace, storage = tp.Workspace.allocate(plan), storage_of(plan, "cpu")
    prepared = plan.prepare_indices(args.index, storage, workspace)
    changed = args_for(other.descriptor, "cpu", 1).args
    with pytest.raises(tp.InvalidProblem, match="prepared by another plan"):
        other.run(changed, tp.Workspace.allocate(other), prepared=prepared)
    with pytest.raises(tp.InvalidProblem, match="dtype"):
        plan.prepare_indices(args.index.int(), storage, workspace)
    with pytest.raises(tp.WorkspaceTooSmall, match="storage"):
        plan.prepare_indices(args.index, tp.Workspace.from_tensor(storage.tensor[:-16]), workspace)
    both = tp.Workspace.from_tensor(torch.zeros(4096, dtype=torch.uint8))
    with pytest.raises(tp.InvalidProblem, match="the workspace shares memory with the storage"):
        plan.prepare_indices(args.index, both, both)
    prepared.verify(args.index)
    args.index[0] = (args.index[0] + 1) % plan.descriptor.out_dim_size
    with pytest.raises(tp.InvalidProblem, match="changed since"):
        prepared.verify(args.index)


def test_rows_that_prepare_nothing_say_so() -> None:
    desc, h200 = SAMPLES["index_add"], tp.Target.preset("h200")
    plan = tp.plan(desc, preference=PINNED.replace(kernel="ordered_sum"), target=h200)
    with pytest.raises(tp.Unsupported, match="ordered_sum has no work on the indices alone"):
        plan.prepared_size()


@pytest.mark.parametrize("copied", [False, True], ids=["", "copied"])
def test_preparing_compiles_next_to_nothing_new(copied: bool) -> None:
    """Storage and workspace are addresses alike: only the status is handled by other kernels. Contributions across the
    contiguous axis are copied with prepared indices, too."""
    desc = SAMPLES["index_add"]
    if copied:
        across = {"src": tp.Layout.strided(unit_axis=0)}
        desc = desc.replace(src_shape=(20000, 64), add_dim=0, out_dim_size=1000, layouts=across)
    plan = tp.plan(desc, preference=PINNED, target=tp.Target.preset("h200"))
    assert any("matrix_copy" in launch.kernel.__name__ for launch in plan.launches) == copied
    known = {launch.source() for launch in plan.launches}
    assert {launch.source() for launch in (*plan.preparing_launches, *plan.prepared_launches)} == known
