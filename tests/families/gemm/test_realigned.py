"""Products on copies of what TMA cannot map: what is copied, and the results on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import H200, INTERPRETER, pinned, required
from cases.gemm import COLUMN, LOOSE_COLUMN, backward, backward_grid, batched_grid, check, grid, plan_with

import triplan as tp
from triplan.backends.runtime.launch import Scratch
from triplan.backends.triton.gemm import wgmma_cut
from triplan.backends.triton.gemm.copies import MatrixCopy

ODD = tp.GemmDescriptor(m=2049, n=2047, k=2046, element="bf16", epilogue="bias_silu")


@pytest.mark.parametrize(
    ("change", "copies", "padded"),
    [
        ({}, "abc", 2049 * 2048 + 2046 * 2048 + 2049 * 2048),
        ({"n": 2048}, "a", 2049 * 2048),
        ({"n": 2048, "layouts": {"a": COLUMN, "c": COLUMN}}, "c", 2049 * 2048),
        ({"k": 2048, "n": 2048, "layouts": {"b": LOOSE_COLUMN}}, "b", 2048 * 2048),
        ({"k": 2048}, "bc", 2048 * 2048 + 2049 * 2048),
        ({"k": 2048, "layouts": {"b": COLUMN}}, "c", 2049 * 2048),
        ({"m": 2048, "k": 2048, "epilogue": "silu", "layouts": {"b": COLUMN, "c": COLUMN}}, "", 0),
        ({"m": 2048, "epilogue": "silu", "layouts": {"a": COLUMN, "c": COLUMN}}, "b", 2046 * 2048),
        (
            {"m": 2049, "n": 2048, "epilogue": "identity", "layouts": {"b": COLUMN, "c": COLUMN}},
            "ac",
            2049 * 2048 + 2048 * 2112,
        ),
    ],
)
def test_what_is_copied(change: dict[str, Any], copies: str, padded: int) -> None:
    """What TMA cannot map as it lies, and C where TMA would write beyond a row of it."""
    plan = required(ODD.replace(**change), "realigned", H200)
    names = [x.kernel.__name__ for x in plan.launches if x.kernel.__name__ != "parts_kernel"]
    factors = sum(x in copies for x in "ab")
    assert names[:factors] == ["matrix_copy_kernel"] * factors
    assert names[factors].startswith("wgmma")
    assert names[factors + 1 :] == ["matrix_copy_kernel"] * ("c" in copies)
    partial = [x for launch in plan.launches if isinstance(x := launch.args.get("partial"), Scratch)]
    assert ({x.offset for x in partial} or {plan.workspace_size()}) == {2 * padded}


def test_parts_of_tiles_lie_behind_the_copies() -> None:
    """They are added into the copy of C, of whose rows nothing is written beyond the end."""
    desc = ODD.replace(m=261, n=2047, k=6019)
    plan = required(desc, "realigned", H200)
    assert [x.kernel.__name__ for x in plan.launches[2:]] == ["wgmma_kernel", "parts_kernel", "matrix_copy_kernel"]
    copied, c = 2 * (261 * 6080 + 6019 * 2048 + 261 * 2048), 2 * (261 * 6080 + 6019 * 2048)
    first, second = plan.launches[2:4]
    copied_desc = desc.replace(layouts={x: MatrixCopy(desc.operand(x), 1).layout for x in "abc"})
    cut = wgmma_cut.cheapest_cut(copied_desc, H200)
    for launch in (first, second):
        assert launch.args["partial"] == Scratch(copied, tp.ElementKind.F32)
    assert second.args["c"] == Scratch(c, tp.ElementKind.BF16)
    assert plan.workspace_size() == copied + cut.nbytes


def test_with_workspace_for_copies_alone_no_tile_is_cut() -> None:
    """Kernels without copies take several times as long."""
    desc = ODD.replace(m=261, n=2047, k=6019)
    copied = 2 * (261 * 6080 + 6019 * 2048 + 261 * 2048)
    assert tp.plan(desc, target=H200).workspace_size() > copied
    for most in (copied, tp.plan(desc, target=H200).workspace_size() - 1):
        plan = tp.plan(desc, target=H200, max_workspace_bytes=most)
        assert (plan.sku().kernel, plan.workspace_size()) == ("realigned", copied)
        assert [x.kernel.__name__ for x in plan.launches].count("parts_kernel") == 0
        assert "whole tiles, for its workspace" in plan.explain()
    assert tp.plan(desc, target=H200, max_workspace_bytes=copied - 1).sku().kernel != "realigned"


def test_where_it_is_chosen() -> None:
    assert tp.plan(ODD, target=H200).sku().kernel == "realigned"
    assert tp.plan(ODD.replace(n=2048, k=2048), target=H200).sku().kernel.startswith("wgmma")
    with pytest.raises(tp.Unsupported, match="TMA can map every matrix"):
        required(ODD.replace(n=2048, k=2048), "realigned", H200)
    none = tp.PlanPreference(max_workspace_bytes=0)
    assert tp.plan(ODD, preference=none, target=H200).sku().kernel == "tiles"
    empty = required(ODD.replace(m=0), "realigned", H200)
    assert (empty.launches, empty.workspace_size()) == ((), 0)


def test_gradients_take_what_suits_each() -> None:
    odd = backward(2049, 2047, 2046, "bf16", (1, 1, 1))
    assert tp.plan(odd, target=H200).sku().kernel == "separate_wgmma"
    names = [x.kernel.__name__ for x in required(odd, "separate_wgmma", H200).launches]
    assert sum(name.startswith("wgmma") for name in names) == 2
    with pytest.raises(tp.Unsupported, match="without TMA"):
        required(backward(64, 31, 1, "bf16", (1, 1, 0)), "separate_wgmma", H200)


def test_gradients_with_workspace_for_copies_alone_cut_no_tile() -> None:
    odd = backward(6019, 2047, 261, "bf16", (1, 1, 0))
    cut = tp.plan(odd, target=H200)
    assert "parts_kernel" in [x.kernel.__name__ for x in cut.launches]
    plan = tp.plan(odd, target=H200, max_workspace_bytes=cut.workspace_size() - 1)
    names = [x.kernel.__name__ for x in plan.launches]
    assert plan.sku().kernel == "separate_wgmma"
    assert sum(name.startswith("wgmma") for name in names) == 2
    assert "parts_kernel" not in names
    assert "whole tiles, for its workspace" in plan.explain()
    assert plan.workspace_size() < cut.workspace_size()


def problems(element: str) -> Iterator[tp.Descriptor]:
    for m, n, k in ((136, 264, 200), (129, 257, 203), (130, 258, 1)):
        yield from grid(element, m, n, k)
        yield from batched_grid(element, 3, m, n, k)
    yield from grid(element, 1025, 515, 2047)
    yield from grid(element, 129, 257, 8191)  # whose tiles are cut along k


@pytest.mark.gpu
@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_every_layout_on_the_gpu(element: str) -> None:
    target = tp.Target.current()
    found = [plan for desc in problems(element) if (plan := pinned(desc, "realigned", target)) is not None]
    assert sum(check(plan, turn) for turn, plan in enumerate(found)) > 0
    found = [
        plan
        for desc in backward_grid(element, 1025, 515, 771)
        if (plan := pinned(desc, "separate_wgmma", target)) is not None
    ]
    assert sum(check(plan, turn) for turn, plan in enumerate(found)) > 0


@pytest.mark.interpret
@pytest.mark.parametrize("batch", [0, 3])
@pytest.mark.parametrize("lies", [0, 1, None])
@pytest.mark.parametrize("unit", [0, 1])
def test_copies_interpreted(batch: int, lies: int | None, unit: int) -> None:
    """A matrix into the workspace, in rows or columns of padded length with zeros behind, and C out of it, at any
    strides."""
    lead = (batch,) if batch else ()
    layout = "strided" if lies is None else tp.Layout.strided(unit_axis=len(lead) + lies)
    made: dict[str, Any] = {"m": 35, "n": 131, "k": 131, "element": "f16", "layouts": {"a": layout, "c": "strided"}}
    desc = tp.BatchedGemmDescriptor(batch=batch, **made) if batch else tp.GemmDescriptor(**made)
    a, c = MatrixCopy(desc.operand("a"), unit), MatrixCopy(desc.operand("c"), unit)
    assert a.strides[-2:] == ((1, 40) if unit == 0 else (136, 1))
    guarantee = next(e for e in tp.TABLE.rows(desc.op) if e.name == "realigned").guarantee
    plan = plan_with(desc, "copies", [a.launch(0), c.launch(0)], a.nbytes, guarantee, INTERPRETER)
    x = torch.randn(*lead, 35, 200).half()[..., :131]
    x = x.mT.contiguous().mT if lies == 0 else x
    b, y = torch.zeros(*lead, 131, 131).half(), torch.zeros(*lead, 131, 35).half().mT
    workspace = tp.Workspace.allocate(plan)
    workspace.tensor.fill_(255)
    plan.run(tp.plan_type(desc.op).args_type(a=x, b=b, c=y), workspace)
    assert torch.equal(y, x)
    rows = workspace.tensor.view(torch.float16).view(*lead, a.rows, a.leading)
    assert torch.equal(rows[..., : a.columns], x.mT if unit == 0 else x)
    assert not rows[..., a.columns :].any()


@pytest.mark.parametrize(
    ("columns", "element", "leading"),
    [(1000, "bf16", 1024), (385, "f16", 392), (511, "f16", 512), (12287, "f32", 12288)],
)
def test_rows_of_copies_begin_at_lines_unless_that_adds_much(columns: int, element: str, leading: int) -> None:
    desc = tp.GemmDescriptor(m=8, n=columns, k=8, element=element)
    assert MatrixCopy(desc.operand("b"), 1).leading == leading
