"""The rowwise bench: its cases, its check before any timing, its sweep, and a smoke run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from cases.bench import smoke

import triplan as tp
from bench import losses, norms, rows, softmax
from bench.losses import CrossEntropyCase
from bench.norms import NormCase
from bench.report import Row
from bench.softmax import SoftmaxCase

CPU = torch.device("cpu")
CASES = [*softmax.cases(), *norms.cases()]
OPS = sorted({c.op for c in CASES})


def build(op: str, rows: int, n: int, dtype: torch.dtype) -> SoftmaxCase | NormCase | CrossEntropyCase:
    if op == "cross_entropy":
        return CrossEntropyCase(op, rows, n, dtype, True)
    return (NormCase if "norm" in op else SoftmaxCase)(op, rows, n, dtype)


def test_the_sizes_with_figures_to_beat_are_there() -> None:
    named = {(c.op, c.rows, c.n, c.dtype) for c in CASES}
    for op in ("softmax", "log_softmax", "rms_norm", "layer_norm"):
        for shape in ((4096, 4096), (8192, 8192), (8192, 32768), (65536, 256), (16, 262144)):
            for dtype in (torch.bfloat16, torch.float32):
                assert {(op, *shape, dtype), (f"{op}_backward", *shape, dtype)} <= named


def test_bytes() -> None:
    assert SoftmaxCase("softmax", 4, 8, torch.bfloat16).bytes == 2 * 4 * 8 * 2
    assert NormCase("layer_norm_backward", 4, 8, torch.float32).bytes == 3 * 4 * 8 * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("op", [*OPS, "cross_entropy"])
def test_mismatch_sees_a_wrong_element(op: str, dtype: torch.dtype) -> None:
    case = build(op, 70, 48, dtype)
    b = case.make(CPU, torch.Generator().manual_seed(0))
    _, run, _ = case.planned([b], CPU)
    case.spoil(b)
    assert "wrong" in case.mismatch(b)
    run(0)
    assert case.mismatch(b) == ""
    written = {"losses", "lse", "loss", "dx", "dweight", "dbias", *(() if case.backward else ("out",))}
    for name in written & set(b.tensors):
        kept = b.tensors[name].clone()
        b.tensors[name].view(-1)[0] += kept.abs().max() + (op != "cross_entropy")
        assert name in case.mismatch(b)
        b.tensors[name].copy_(kept)


@pytest.mark.parametrize("op", sorted({*OPS} - {"rms_norm_backward"}))
def test_compiled_formulas_are_torchs(op: str) -> None:
    """rms_norm's backward, which torch has on a GPU alone, is layer_norm's less the means."""
    case = build(op, 6, 40, torch.float32)
    b = case.make(CPU, torch.Generator().manual_seed(0))
    eager = case.functions(CPU)["torch"]
    got, wanted = case.formula()(*case.inputs(b)), eager(b)
    if not isinstance(got, tuple):
        got, wanted = (got,), (wanted,)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def timed(case: rows.Case, device: torch.device) -> list[Row]:
    return [{"case": case.name, "device": str(device), "process": os.getpid()}]


def test_cases_are_spread_over_cards_in_order() -> None:
    listed = [SoftmaxCase("softmax", 4, n, torch.float32) for n in range(1, 9)]
    found = [row for one in rows.spread(timed, listed, [CPU, CPU]) for row in one]
    assert [row["case"] for row in found] == [case.name for case in listed]
    assert {row["device"] for row in found} == {"cpu"}
    assert os.getpid() not in {row["process"] for row in found}


@pytest.mark.parametrize(
    "case",
    [
        *(build(op, 8192, 32768, torch.bfloat16) for op in OPS if not op.startswith(("log", "layer"))),
        *(CrossEntropyCase("cross_entropy", 8192, 32768, torch.bfloat16, gradient) for gradient in (False, True)),
    ],
    ids=lambda case: case.name,
)
def test_swept_tiles_are_kernels_for_as_long_as_they_are_timed(case: rows.Case) -> None:
    before, h200 = tp.TABLE.rows(case.op), tp.Target.preset("h200")
    is_loss = isinstance(case, CrossEntropyCase)
    with rows.registered(case) as names:
        assert len(names) == len(set(names)) > (5 if is_loss else 3)
        preferences = [tp.PlanPreference(kernel=name) for name in names]
        plans = [tp.plan(case.descriptor(), preference=p, target=h200) for p in preferences]
        distinct = {tuple((launch.source(), launch.grid) for launch in p.launches) for p in plans}
        assert is_loss or len(distinct) == len(names)
        assert all(p.launches and p.workspace_size() >= is_loss for p in plans)
    assert tp.TABLE.rows(case.op) == before


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tp.SoftmaxPlan, "run", lambda self, args, workspace=None: args.out.fill_(0.5))
    found = rows.case_rows(SoftmaxCase("softmax", 4, 8, torch.float32), 2, 0, CPU, 1e12, True, False)
    by_name = {row["contestant"]: row for row in found}
    assert "device_us" in by_name["torch"]
    assert by_name["triplan"]["error"].startswith("wrong: ")


@pytest.mark.parametrize("sweep", [False, True])
def test_smoke(tmp_path: Path, sweep: bool) -> None:
    arguments = ["rowwise", "--device", "cpu", "--iterations", "2", "--warmup", "0", *(["--sweep"] if sweep else [])]
    written, _ = smoke(tmp_path, arguments, f"rowwise-{'sweep-' if sweep else ''}cpu-smoke")
    names = {row["contestant"] for row in written}
    assert names == ({"reference"} if sweep else {"torch", "torch.compile", "triplan"})
    assert not [row for row in written if row.get("error")]


# --- cross-entropy ---


def test_the_losses_with_figures_to_beat_are_there() -> None:
    named = {(c.rows, c.n, c.dtype, c.gradient) for c in losses.cases()}
    for dtype in (torch.bfloat16, torch.float32):
        for n in (32768, 131072):
            assert {(8192, n, dtype, False), (8192, n, dtype, True)} <= named
    assert CrossEntropyCase("cross_entropy", 4, 8, torch.bfloat16, False).bytes == 4 * 8 * 2
    assert CrossEntropyCase("cross_entropy", 4, 8, torch.float32, True).bytes == 2 * 4 * 8 * 4


@pytest.mark.parametrize("gradient", [False, True])
def test_peers_compute_the_same_loss(gradient: bool) -> None:
    case = CrossEntropyCase("cross_entropy", 6, 40, torch.float32, gradient)
    b = case.make(CPU, torch.Generator().manual_seed(0))
    case.planned([b], CPU)[1](0)
    for name, run in case.peers([b], CPU, tiny=True):
        torch.testing.assert_close(run(0), b.dx if gradient else b.loss[0], msg=lambda m, name=name: f"{name}: {m}")
