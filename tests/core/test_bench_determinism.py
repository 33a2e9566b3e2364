"""The determinism bench: its cases, its contestants, its files by a smoke run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases.bench import smoke

import triplan as tp
from bench import determinism
from bench.indexing import cases
from bench.indexing.cases import Case


def test_determinism_smoke(tmp_path: Path) -> None:
    arguments = ["determinism", "--device", "cpu", "--iterations", "1", "--warmup", "0", "--rows"]
    rows, content = smoke(tmp_path, arguments, "determinism-cpu-smoke")
    by_case: dict[str, dict[str, dict[str, object]]] = {}
    for r in rows:
        by_case.setdefault(str(r["case"]), {})[str(r["contestant"])] = r
    assert list(by_case) == [t.name for t in determinism.timed_cases(tiny=True)]
    ours = ("triplan atomic", "triplan deterministic", "triplan prepared", "triplan order-invariant")
    for found in by_case.values():
        assert set(found) - {"torch.compile"} == {"torch", "torch deterministic", *ours}
        assert found["torch"]["speed_vs_torch"] == found["torch deterministic"]["speed_vs_deterministic"] == 1
        ratio = found["torch deterministic"]["device_us"] / found["triplan deterministic"]["device_us"]  # type: ignore[operator]
        assert found["triplan deterministic"]["speed_vs_deterministic"] == pytest.approx(ratio)
        assert found["triplan order-invariant"]["note"] == "-"
    kernels = content["kernels"]
    assert len(kernels) == len(determinism.timed_cases(True)) + len(determinism.row_cases(True))
    for record in kernels:
        assert record["kernel"] == "reference"
        assert record["device_us"] > 0
        assert {"op", "element", "rows", "width", "count", "pattern", "estimated_us"} <= set(record)


def test_every_accumulating_op_is_timed() -> None:
    timed = determinism.timed_cases()
    accumulating = {op for op in tp.TABLE.ops() if any(r.name.startswith("atomic") for r in tp.TABLE.rows(op))}
    assert {t.case.op for t in timed} == accumulating
    assert {t.case.pattern for t in timed} == {"uniform", "zipf", "one", "distinct", "sorted", "rowwise"}
    assert any(t.case.flat for t in timed)


@pytest.mark.parametrize("op", ["index_add", "scatter_add"])
def test_patterns_of_indices(op: str) -> None:
    def index(pattern: cases.Pattern) -> torch.Tensor:
        case = Case("", op, rows=50, width=3, count=40, pattern=pattern)
        return cases.make(case, torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0)).index

    shape = (40, 3) if op == "scatter_add" else (40,)
    assert index("zipf").shape == index("one").shape == index("uniform").shape == shape
    assert index("one").unique().tolist() == [0]
    assert index("distinct").shape == shape
    assert all(len(column.unique()) == 40 for column in index("distinct").reshape(40, -1).T)
    assert index("distinct").max() < 50
    assert torch.equal(index("sorted"), index("sorted").sort(0).values)
    assert all(len(row.unique()) == 1 for row in index("rowwise").reshape(40, -1))
    assert len(index("rowwise").unique()) > 10
    assert len(index("sorted").unique()) > 10


@pytest.mark.parametrize("op", sorted({t.case.op for t in determinism.timed_cases()}))
def test_torch_compile_takes_the_whole_function(op: str) -> None:
    case = Case("", op, rows=12, width=1 if op == "index_add" else 4, count=9)
    one, two = (
        cases.make(case, torch.float32, torch.device("cpu"), torch.Generator().manual_seed(3)) for _ in range(2)
    )
    traced = torch.compile(determinism.torch_function(case), backend="eager", fullgraph=True)
    assert torch.equal(traced(one.dense, one.table, one.index), cases.torch_call(case, two)())


def test_deterministic_mode_is_on_within_and_as_before_after() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    assert determinism.deterministically(lambda i: torch.are_deterministic_algorithms_enabled())(0)
    with pytest.raises(ZeroDivisionError):
        determinism.deterministically(lambda i: 1 // i)(0)
    assert not torch.are_deterministic_algorithms_enabled()


def test_prepared_indices_take_part_where_a_plan_offers_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run(self: tp.IndexAddPlan, args: tp.IndexAddArgs, workspace: object = None, prepared: object = None) -> None:
        seen.append(prepared)
        args.out.index_add_(0, args.index, args.src)

    def prepare(self: tp.IndexAddPlan, index: torch.Tensor, storage: tp.Workspace, workspace: tp.Workspace) -> str:
        assert storage.nbytes == 48
        return f"prepared {index.numel()}"

    monkeypatch.setattr(tp.IndexAddPlan, "prepared_size", lambda self: 48, raising=False)
    monkeypatch.setattr(tp.IndexAddPlan, "prepare_indices", prepare, raising=False)
    monkeypatch.setattr(tp.IndexAddPlan, "run", run)
    timed = determinism.Timed(Case("", "index_add", 16, 4, 9), "fp32")
    monkeypatch.setattr(determinism, "timed_cases", lambda tiny: [timed])
    found = determinism.run(1, 0, torch.device("cpu"), True, False, lambda *a: None)
    by_name = {row["contestant"]: row for row in found.rows}
    assert by_name["triplan prepared"]["device_us"] > 0
    assert by_name["triplan prepared"]["kernel"] == "reference"
    assert "prepared 9" in seen
    assert "error" not in by_name["triplan prepared"]


def test_a_wrong_accumulation_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tp.IndexAddPlan, "run", lambda plan, args, workspace=None: args.out.add_(1e4))
    monkeypatch.setattr(
        determinism, "timed_cases", lambda tiny: [determinism.Timed(Case("", "index_add", 16, 4, 9), "fp32")]
    )
    found = determinism.run(1, 0, torch.device("cpu"), True, False, lambda *a: None)
    by_name = {row["contestant"]: row for row in found.rows}
    assert "device_us" in by_name["torch deterministic"]
    assert by_name["triplan deterministic"]["error"].startswith("wrong: ")
    assert "device_us" not in by_name["triplan deterministic"]


@pytest.mark.gpu
def test_on_the_gpu_all_contestants_find_the_same_operands() -> None:
    """Each is held against one truth: who changes the operands and does not restore them, spoils the rest."""
    device = torch.device("cuda", torch.cuda.current_device())
    report = determinism.run(2, 1, device, True, True, lambda what, done, total: None)
    assert [r for r in report.rows if "error" in r] == []
    assert all(r["device_us"] > 0 for r in report.sections["kernels"])
