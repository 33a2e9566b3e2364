"""The rowwise bench: its cases, its check before any timing, its sweep, and a smoke run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from cases.bench import smoke, well_formed

import triplan as tp
from bench import loss_cases, rowwise, rowwise_cases
from bench.loss_cases import LossCase
from bench.report import Row
from bench.rowwise_cases import Case

CPU = torch.device("cpu")


def test_the_sizes_with_figures_to_beat_are_there() -> None:
    named = {(c.op, c.rows, c.n, c.dtype) for c in rowwise_cases.cases()}
    for op in ("softmax", "log_softmax", "rms_norm", "layer_norm"):
        for shape in ((4096, 4096), (8192, 8192), (8192, 32768), (65536, 256), (16, 262144)):
            for dtype in (torch.bfloat16, torch.float32):
                assert {(op, *shape, dtype), (f"{op}_backward", *shape, dtype)} <= named


def test_bytes() -> None:
    assert Case("softmax", 4, 8, torch.bfloat16).bytes == 2 * 4 * 8 * 2
    assert Case("layer_norm_backward", 4, 8, torch.float32).bytes == 3 * 4 * 8 * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("op", sorted({c.op for c in rowwise_cases.cases()}))
def test_mismatch_sees_a_wrong_element(op: str, dtype: torch.dtype) -> None:
    case = Case(op, 70, 48, dtype)
    b = rowwise_cases.make(case, CPU, torch.Generator().manual_seed(0))
    plan = tp.plan(rowwise_cases.descriptor(case), target=tp.Target.cpu())
    rowwise_cases.spoil(b)
    assert "wrong" in rowwise_cases.mismatch(case, b)
    plan.run(rowwise_cases.plan_args(case, b))
    assert rowwise_cases.mismatch(case, b) == ""
    for name in [n for n in ("dx", "dweight", "dbias", "out") if n in b.tensors and not (n == "out" and case.backward)]:
        kept = b.tensors[name].clone()
        b.tensors[name].view(-1)[3] += kept.abs().max() + 1
        assert name in rowwise_cases.mismatch(case, b)
        b.tensors[name].copy_(kept)


@pytest.mark.parametrize("op", sorted({c.op for c in rowwise_cases.cases()} - {"rms_norm_backward"}))
def test_compiled_formulas_are_torchs(op: str) -> None:
    """(That of rms_norm's adjoint, which torch has on a GPU alone, is layer_norm's less the means.)"""
    case = Case(op, 6, 40, torch.float32)
    b = rowwise_cases.make(case, CPU, torch.Generator().manual_seed(0))
    eager = rowwise_cases.torch_function(case, CPU)
    assert eager is not None
    got, wanted = rowwise_cases.formula(case)(*rowwise_cases.inputs(case, b)), eager(b)
    if not isinstance(got, tuple):
        got, wanted = (got,), (wanted,)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def timed(case: Case, device: torch.device) -> list[Row]:
    return [{"case": case.name, "device": str(device), "process": os.getpid()}]


def test_cases_are_spread_over_cards_in_order() -> None:
    listed = [Case("softmax", 4, n, torch.float32) for n in range(1, 9)]
    found = [row for rows in rowwise.spread(timed, listed, [CPU, CPU]) for row in rows]
    assert [row["case"] for row in found] == [case.name for case in listed]
    assert {row["device"] for row in found} == {"cpu"}
    assert os.getpid() not in {row["process"] for row in found}


@pytest.mark.parametrize("op", ["softmax", "softmax_backward", "rms_norm", "rms_norm_backward"])
def test_swept_tiles_are_kernels_for_as_long_as_they_are_timed(op: str) -> None:
    case = Case(op, 8192, 32768, torch.bfloat16)
    before = tp.TABLE.rows(op)
    with rowwise_cases.registered(case) as names:
        assert len(names) == len(set(names)) > 3
        plans = [
            tp.plan(
                rowwise_cases.descriptor(case),
                preference=tp.PlanPreference(kernel=name),
                target=tp.Target.preset("h200"),
            )
            for name in names
        ]
        assert len({tuple((launch.source(), launch.grid) for launch in p.launches) for p in plans}) == len(names)
        assert all(p.workspace_size() >= 0 for p in plans)
    assert tp.TABLE.rows(op) == before


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tp.SoftmaxPlan, "run", lambda self, args, workspace=None: args.out.fill_(0.5))
    found = rowwise.case_rows(Case("softmax", 4, 8, torch.float32), 2, 0, CPU, 1e12, True, False)
    by_name = {row["contestant"]: row for row in found}
    assert "device_us" in by_name["torch"]
    assert by_name["triplan"]["error"].startswith("wrong: ")


@pytest.mark.parametrize("sweep", [False, True])
def test_smoke(tmp_path: Path, sweep: bool) -> None:
    arguments = ["rowwise", "--device", "cpu", "--iterations", "2", "--warmup", "0", *(["--sweep"] if sweep else [])]
    code, path, content = smoke(tmp_path, arguments)
    assert code == 0
    rows = well_formed(path, content)
    assert path.name == f"rowwise-{'sweep-' if sweep else ''}cpu-smoke.json"
    names = {row["contestant"] for row in rows}
    assert names == ({"reference"} if sweep else {"torch", "torch.compile", "triplan"})
    assert not [row for row in rows if row.get("error")]


# --- cross-entropy ---


def test_the_losses_with_figures_to_beat_are_there() -> None:
    named = {(c.rows, c.n, c.dtype, c.gradient) for c in loss_cases.cases()}
    for dtype in (torch.bfloat16, torch.float32):
        for n in (32768, 131072):
            assert {(8192, n, dtype, False), (8192, n, dtype, True)} <= named
    assert LossCase(4, 8, torch.bfloat16, False).bytes == 4 * 8 * 2
    assert LossCase(4, 8, torch.float32, True).bytes == 2 * 4 * 8 * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_mismatch_sees_a_wrong_loss(dtype: torch.dtype) -> None:
    case = LossCase(70, 48, dtype, True)
    b = loss_cases.make(case, CPU, torch.Generator().manual_seed(0))
    _, run, _ = loss_cases.planned(case, [b], CPU)
    loss_cases.spoil(b)
    assert "wrong" in loss_cases.mismatch(case, b)
    run(0)
    assert loss_cases.mismatch(case, b) == ""
    for name in ("losses", "lse", "loss", "dx"):
        kept = b.tensors[name].clone()
        b.tensors[name].view(-1)[0] += kept.abs().max()
        assert name in loss_cases.mismatch(case, b)
        b.tensors[name].copy_(kept)


@pytest.mark.parametrize("gradient", [False, True])
def test_peers_compute_the_same_loss(gradient: bool) -> None:
    case = LossCase(6, 40, torch.float32, gradient)
    b = loss_cases.make(case, CPU, torch.Generator().manual_seed(0))
    loss_cases.planned(case, [b], CPU)[1](0)
    for name, run in loss_cases.peers(case, [b], CPU, tiny=True):
        torch.testing.assert_close(run(0), b.dx if gradient else b.loss[0], msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("gradient", [False, True])
def test_swept_tiles_of_losses_are_kernels(gradient: bool) -> None:
    case = LossCase(8192, 32768, torch.bfloat16, gradient)
    before, h200 = tp.TABLE.rows(case.op), tp.Target.preset("h200")
    with loss_cases.registered(case) as names:
        assert len(names) > 5
        preferences = [tp.PlanPreference(kernel=name) for name in names]
        plans = [tp.plan(loss_cases.descriptor(case), preference=p, target=h200) for p in preferences]
        assert all(p.launches and p.workspace_size() > 0 for p in plans)
    assert tp.TABLE.rows(case.op) == before
