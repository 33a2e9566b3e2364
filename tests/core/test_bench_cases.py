"""What each bench times: the sizes, the check before any timing, sweeps, and smoke runs with their files."""

from __future__ import annotations

import csv
import gc
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import triplan as tp
from bench import determinism, gemm, host, norms, rotary, rows, softmax
from bench.__main__ import main
from bench.functions import WITHOUT_TENSORS
from bench.gemm.cases import make as make_product
from bench.gemm.run import candidates, case_rows, truth, verify
from bench.indexing import cases, run as indexing
from bench.indexing.cases import Case, bytes_moved
from bench.losses import CrossEntropyCase
from bench.norms import NormCase
from bench.report import Row
from bench.softmax import SoftmaxCase
from bench.stub import launch_stubbed
from triplan import functional
from triplan.functional.elementwise.table import TABLE

CPU, H200 = torch.device("cpu"), tp.Target.preset("h200")
Product = gemm.cases.Case
ROW_OPS = sorted({c.op for c in (*softmax.cases(), *norms.cases())})
ACCUMULATING = sorted({t.case.op for t in determinism.timed_cases()})


@pytest.fixture(autouse=True)
def _little_to_collect() -> None:
    """Each timing collects garbage first: what earlier tests keep is not searched again and again."""
    gc.freeze()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ignored(*args: object) -> None: ...


def build(op: str, rows: int, n: int, dtype: torch.dtype) -> SoftmaxCase | NormCase | CrossEntropyCase:
    if op == "cross_entropy":
        return CrossEntropyCase(op, rows, n, dtype, True)
    return (NormCase if "norm" in op else SoftmaxCase)(op, rows, n, dtype)


# --- sizes ---


def test_every_accumulating_op_and_pattern_of_indices_is_timed() -> None:
    timed = determinism.timed_cases()
    accumulating = {op for op in tp.TABLE.ops() if any(e.name == "atomic_elements" for e in tp.TABLE.rows(op))}
    assert {t.case.op for t in timed} == accumulating
    assert {t.case.pattern for t in timed} == set(get_args(cases.Pattern))
    assert any(t.case.flat for t in timed)


def test_cases_can_be_picked_by_name() -> None:
    assert [c.name for c in gemm.cases.cases(False, wanted="16x4096")] == ["16x4096x4096 NT"]
    swept = gemm.cases.cases(False, sweep=True, wanted="x4096x4096 NT")
    assert {c.m for c in swept} == {1, 16, 128, 512}
    assert gemm.cases.cases(False) == list(gemm.cases.CASES)


BYTES = {
    # 4 rows of 8 f16 values, a table of 16 rows; an i64 index.
    "index_select": (0, 2 * 32 * 2 + 4 * 8),
    "gather": (0, 2 * 32 * 2 + 32 * 8),
    "embedding": (0, 2 * 32 * 2 + 4 * 8),
    # src read, three rows of the table read and written
    "index_add": (24, 32 * 2 + 2 * 24 * 2 + 4 * 8),
    "scatter_add": (30, 32 * 2 + 2 * 30 * 2 + 32 * 8),
    "index_put": (24, 32 * 2 + 2 * 24 * 2 + 4 * 8),
    # dout read, the whole table written
    "embedding_backward": (24, 32 * 2 + 128 * 2 + 4 * 8),
    "index_select_backward": (24, 32 * 2 + 128 * 2 + 4 * 8),
    "gather_backward": (30, 32 * 2 + 128 * 2 + 32 * 8),
}


@pytest.mark.parametrize("op", BYTES)
def test_bytes_moved(op: str) -> None:
    touched, expected = BYTES[op]
    assert bytes_moved(Case("", op, rows=16, width=8, count=4), 2, touched) == expected


def test_bytes_and_operations_of_products_and_rows() -> None:
    product, batched = Product(4, 8, 16), Product(4, 8, 16, batch=3)
    assert (product.flops, product.bytes(2)) == (2 * 4 * 8 * 16, 2 * (64 + 128 + 32))
    assert replace(product, backward=True).flops == 2 * product.flops
    assert (batched.flops, batched.bytes(2)) == (3 * product.flops, 3 * product.bytes(2))
    # 2048 cubed in f16 is 24 MiB: five sets are more than twice an L2 cache of 50 MiB.
    rotated = [gemm.cases.rotated(case, 2, 50 << 20) for case in (Product(*[2048] * 3), Product(*[8192] * 3), product)]
    assert rotated == [5, 1, gemm.cases.MAX_SETS]
    assert SoftmaxCase("softmax", 4, 8, torch.bfloat16).bytes == 2 * 4 * 8 * 2
    assert NormCase("layer_norm_backward", 4, 8, torch.float32).bytes == 3 * 4 * 8 * 4
    assert CrossEntropyCase("cross_entropy", 4, 8, torch.bfloat16, False).bytes == 4 * 8 * 2
    assert CrossEntropyCase("cross_entropy", 4, 8, torch.float32, True).bytes == 2 * 4 * 8 * 4


def test_touched_elements_counts_each_once() -> None:
    whole = Case("", "index_add", rows=16, width=8, count=4)
    assert cases.touched_elements(whole, torch.tensor([3, 5, 3, 0])) == 3 * 8
    full = Case("", "scatter_add", rows=16, width=2, count=3)
    assert cases.touched_elements(full, torch.tensor([[0, 1], [0, 2], [7, 1]])) == 4


# --- operands ---


def test_zipf_tokens_are_skewed_and_in_range() -> None:
    tokens = cases.zipf_tokens(20_000, 1000, CPU, seeded())
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 1000
    counts = torch.bincount(tokens, minlength=1000).sort(descending=True).values
    # Token 1 has 1 / H(1000) = 13.4% of the mass, token 10 a tenth of that.
    assert 0.12 < counts[0] / 20_000 < 0.15
    assert 6 < counts[0] / counts[9] < 15


@pytest.mark.parametrize("op", ["index_add", "scatter_add"])
def test_patterns_of_indices(op: str) -> None:
    drawn = {p: Case("", op, rows=50, width=3, count=40, pattern=p) for p in get_args(cases.Pattern)}
    index = {p: cases.make(case, torch.float32, CPU, seeded()).index for p, case in drawn.items()}
    assert {t.shape for t in index.values()} == {(40, 3) if op == "scatter_add" else (40,)}
    assert index["one"].unique().tolist() == [0]
    assert all(len(column.unique()) == 40 for column in index["distinct"].reshape(40, -1).T)
    assert index["distinct"].max() < 50
    assert torch.equal(index["sorted"], index["sorted"].sort(0).values)
    assert all(len(row.unique()) == 1 for row in index["rowwise"].reshape(40, -1))
    assert min(len(index[p].unique()) for p in ("rowwise", "sorted")) > 10


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_operands_lie_as_the_case_says(layout: str) -> None:
    case = Product(16, 24, 32, layout)
    x = make_product(case, torch.float16, CPU, seeded())
    assert (x.a.shape, x.b.shape, x.c.shape) == ((16, 32), (32, 24), (16, 24))
    sku = tp.plan(gemm.cases.descriptor_of(gemm.cases.args_of(case, x)), target=H200).sku()
    assert sku.layout == layout


# --- contestants compute the same, and the check before any timing sees when they do not ---


@pytest.mark.parametrize("op", ACCUMULATING)
def test_torch_compile_takes_the_whole_function(op: str) -> None:
    case = Case("", op, rows=12, width=1 if op == "index_add" else 4, count=9)
    one, two = (cases.make(case, torch.float32, CPU, seeded(3)) for _ in range(2))
    traced = torch.compile(determinism.torch_function(case), backend="eager", fullgraph=True)
    assert torch.equal(traced(one.dense, one.table, one.index), cases.torch_call(case, two)())


@pytest.mark.parametrize("op", sorted({*ROW_OPS} - {"rms_norm_backward"}))
def test_compiled_formulas_are_torchs(op: str) -> None:
    """rms_norm's backward, which torch has on a GPU alone, is layer_norm's less the means."""
    case = build(op, 6, 40, torch.float32)
    b = case.make(CPU, seeded())
    torch.testing.assert_close(case.formula()(*case.inputs(b)), case.functions(CPU)["torch"](b), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gradient", [False, True])
def test_peers_compute_the_same_loss(gradient: bool) -> None:
    case = CrossEntropyCase("cross_entropy", 6, 40, torch.float32, gradient)
    b = case.make(CPU, seeded())
    case.planned([b], CPU)[1](0)
    for name, run in case.peers([b], CPU, tiny=True):
        torch.testing.assert_close(run(0), b.dx if gradient else b.loss[0], msg=lambda m, name=name: f"{name}: {m}")


def test_backward_multiplies_what_torch_does() -> None:
    case = Product(5, 6, 7, bias=True, backward=True)
    x = make_product(case, torch.float16, CPU, seeded())
    want = truth(case, x)
    for e in candidates(case, [x], CPU, sweep=False):
        for t in (x.da, x.db, x.dbias):
            t.fill_(float("nan"))
        error, wrong = verify(case, e, x, want)
        assert error < 2**-10
        assert wrong == ""
        assert not x.dbias.isnan().any()
    a, b, dc = x.a.double(), x.b.double(), x.c.double()
    for name, wanted in {"da": dc @ b.t(), "db": a.t() @ dc, "dbias": dc.sum(0)}.items():
        assert torch.equal(want.values[name], wanted)


@pytest.mark.parametrize("dtype", list(cases.DTYPES.values()), ids=list(cases.DTYPES))
@pytest.mark.parametrize("op", sorted({c.op for c in cases.cases()} | {*ACCUMULATING}))
def test_mismatch_sees_a_wrong_element(op: str, dtype: torch.dtype) -> None:
    case = Case("", op, rows=12, width=16, count=40)
    buffers = cases.make(case, dtype, CPU, seeded(3))
    right = cases.truth(case, buffers)
    plan = tp.plan(cases.descriptor(case, dtype), target=tp.Target.cpu())
    plan.run(cases.plan_args(case, buffers))
    got = buffers.table if case.adds else buffers.dense
    guarantee = plan.precision_guarantee()
    assert cases.mismatch(right, got, guarantee) == ""
    for wrong in (got[3, 4] + right.magnitude[3, 4] + 1, float("nan")):
        spoiled = got.clone()
        spoiled[3, 4] = wrong
        assert "1 of" in cases.mismatch(right, spoiled, guarantee)


def test_mismatch_sees_a_lost_contribution_in_narrow_atomics() -> None:
    """The f16 atomics' own tolerance allows for every row in one place; the count of each element is far stricter."""
    case = Case("", "index_add", rows=8, width=4, count=4096)
    index = torch.zeros(4096, dtype=torch.int64)
    index[:3] = 5
    buffers = replace(cases.make(case, torch.float16, CPU, seeded(3)), index=index)
    guarantee = tp.plan(cases.descriptor(case, torch.float16), target=tp.Target.sm90a()).precision_guarantee()
    right = cases.truth(case, buffers)
    lost = right.value.clone()
    lost[5] -= buffers.dense[1].double()
    assert guarantee.accumulator == "f16"
    assert guarantee.tolerance.ctol > 1, "the plan's bound alone would let this pass"
    assert "wrong: 4 of" in cases.mismatch(right, lost, guarantee)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("op", [*ROW_OPS, "cross_entropy"])
def test_mismatch_sees_a_wrong_element_of_a_row(op: str, dtype: torch.dtype) -> None:
    case = build(op, 70, 48, dtype)
    b = case.make(CPU, seeded())
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


ADD = determinism.Timed(Case("", "index_add", 16, 4, 9), "fp32")
#: Of each bench: a plan, its output, the rows of a run that has this plan alone, and the end of the contestants' names.
ONE_PLAN: dict[str, tuple[type[Any], str, Callable[[], list[Row]], str]] = {
    "indexing": (tp.IndexSelectPlan, "out", lambda: indexing.run("fp32", 2, 0, CPU, True, ignored).rows, ""),
    "determinism": (
        tp.IndexAddPlan, "out", lambda: determinism.run(1, 0, CPU, True, False, ignored).rows, " deterministic",
    ),
    "gemm": (tp.GemmPlan, "c", lambda: case_rows(Product(8, 8, 8), torch.float16, 2, 0, CPU, False), ""),
    "rowwise": (
        tp.SoftmaxPlan,
        "out",
        lambda: rows.case_rows(build("softmax", 4, 8, torch.float32), 2, 0, CPU, 1e12, True, False),
        "",
    ),
    "rotary": (
        tp.RotaryPlan, "q_out", lambda: rows.case_rows(rotary.cases(True)[2], 2, 0, CPU, 1e12, True, False), "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bench", ONE_PLAN)
def test_a_wrong_kernel_is_not_timed(bench: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, output, run, end = ONE_PLAN[bench]
    monkeypatch.setattr(indexing, "cases", lambda tiny: [Case("seed", "index_select", 8, 4, 4)])
    monkeypatch.setattr(determinism, "timed_cases", lambda tiny: [ADD])
    monkeypatch.setattr(plan, "run", lambda self, args, workspace=None: getattr(args, output).fill_(1e4))
    by_name = {row["contestant"]: row for row in run()}
    assert "device_us" in by_name[f"torch{end}"]
    assert by_name[f"triplan{end}"]["error"].startswith("wrong: ")
    assert "device_us" not in by_name[f"triplan{end}"]


def test_prepared_indices_take_part_where_a_plan_offers_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run(self: tp.IndexAddPlan, args: tp.IndexAddArgs, workspace: object = None, prepared: object = None) -> None:
        seen.append(prepared)
        args.out.index_add_(0, args.index, args.src)

    def prepare(self: tp.IndexAddPlan, index: torch.Tensor, storage: tp.Workspace, workspace: tp.Workspace) -> str:
        return f"prepared {index.numel()} in {storage.nbytes} bytes"

    monkeypatch.setattr(tp.IndexAddPlan, "prepared_size", lambda self: 48, raising=False)
    monkeypatch.setattr(tp.IndexAddPlan, "prepare_indices", prepare, raising=False)
    monkeypatch.setattr(tp.IndexAddPlan, "run", run)
    monkeypatch.setattr(determinism, "timed_cases", lambda tiny: [ADD])
    by_name = {row["contestant"]: row for row in determinism.run(1, 0, CPU, True, False, ignored).rows}
    prepared = by_name["triplan prepared"]
    assert (prepared["kernel"], prepared["device_us"] > 0, "error" in prepared) == ("reference", True, False)
    assert "prepared 9 in 48 bytes" in seen


def test_deterministic_mode_is_on_within_and_as_before_after() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    assert determinism.deterministically(lambda i: torch.are_deterministic_algorithms_enabled())(0)
    with pytest.raises(ZeroDivisionError):
        determinism.deterministically(lambda i: 1 // i)(0)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.gpu
def test_on_the_gpu_all_contestants_find_the_same_operands() -> None:
    """Each is held against one truth: who changes the operands and does not restore them, spoils the rest."""
    device = torch.device("cuda", torch.cuda.current_device())
    report = determinism.run(2, 1, device, True, True, ignored)
    assert [r for r in report.rows if "error" in r] == []
    assert all(r["device_us"] > 0 for r in report.sections["kernels"])


# --- sweeps ---


def planned(case: gemm.cases.Case) -> dict[str, Any]:
    """The plans of a sweep by contestant."""
    x = make_product(case, torch.float16, CPU, seeded())
    with launch_stubbed(H200):
        found = [(e.name, e.plan) for e in candidates(case, [x], CPU, sweep=True)]
    assert len(dict(found)) == len(found)
    return dict(found)


@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        (Product(256, 256, 256, "nt", bias=True), ("tiles ", "wgmma ", "wgmma_tiles ")),
        (Product(16, 256, 1024, "nt"), ("tiles ", "split_k ", "wgmma_tiles ")),
    ],
)
def test_a_sweep_runs_every_configuration_of_every_kernel_and_leaves_the_table_as_it_was(
    case: gemm.cases.Case, kinds: tuple[str, ...]
) -> None:
    before = tp.TABLE.rows("gemm")
    found = planned(case)
    assert tp.TABLE.rows("gemm") == before
    assert list(found)[:2] == ["torch", "triplan"]
    assert "kernel tiles_invariant" in found
    for prefix in kinds:
        swept = [plan for name, plan in found.items() if plan and name.startswith(prefix)]
        launched = {
            str([(x.grid, x.args, x.constexprs, x.num_warps, x.num_stages, x.max_registers) for x in plan.launches])
            for plan in swept
        }
        assert len(launched) == len(swept) > 1
        assert all((plan.workspace_size() > 0) == (prefix == "split_k ") for plan in swept)


def test_a_sweep_of_the_backward_tries_rings_and_where_columns_are_summed() -> None:
    found = {n: p for n, p in planned(Product(2048, 2048, 2048, bias=True, backward=True)).items() if p is not None}
    assert len({str((p.launches[0].constexprs, p.launches[0].args)) for p in found.values()}) >= len(found) - 1 > 4
    assert (len(found["triplan"].launches), found["triplan"].workspace_size()) == (1, 0)
    separate = [plan for name, plan in found.items() if name.endswith("sums apart")]
    assert separate
    assert all(len(plan.launches) == 3 and plan.workspace_size() > 0 for plan in separate)


@pytest.mark.parametrize(
    "case",
    [
        *(build(op, 8192, 32768, torch.bfloat16) for op in ROW_OPS if not op.startswith(("log", "layer"))),
        *(CrossEntropyCase("cross_entropy", 8192, 32768, torch.bfloat16, gradient) for gradient in (False, True)),
    ],
    ids=lambda case: case.name,
)
def test_swept_tiles_are_kernels_for_as_long_as_they_are_timed(case: rows.Case) -> None:
    before, is_loss = tp.TABLE.rows(case.op), isinstance(case, CrossEntropyCase)
    with rows.registered(case) as names:
        assert len(names) == len(set(names)) > (5 if is_loss else 3)
        preferences = [tp.PlanPreference(kernel=name) for name in names]
        plans = [tp.plan(case.descriptor(), preference=p, target=H200) for p in preferences]
        distinct = {tuple((launch.source(), launch.grid) for launch in p.launches) for p in plans}
        assert is_loss or len(distinct) == len(names)
        assert all(p.launches and p.workspace_size() >= getattr(case, "gradient", False) for p in plans)
    assert tp.TABLE.rows(case.op) == before


def timed(case: rows.Case, device: torch.device) -> list[Row]:
    return [{"case": case.name, "device": str(device), "process": os.getpid()}]


def test_cases_are_spread_over_cards_in_order() -> None:
    listed = [SoftmaxCase("softmax", 4, n, torch.float32) for n in range(1, 9)]
    found = [row for one in rows.spread(timed, listed, [CPU, CPU]) for row in one]
    assert [(row["case"], row["device"]) for row in found] == [(case.name, "cpu") for case in listed]
    assert os.getpid() not in {row["process"] for row in found}


# --- smoke runs ---

ON_CPU = ["--device", "cpu", "--iterations", "1", "--warmup", "0"]
INDEXING = ["indexing", "--dtype", "bf16", *ON_CPU]


def smoke(folder: Path, arguments: list[str], name: str, code: int = 0) -> tuple[list[Row], dict[str, Any]]:
    """The rows and all else of ``name``.json, which a run that exits with ``code`` writes beside a table and a plot."""
    assert main([*arguments, "--out", str(folder)]) == code
    (path,) = folder.glob("*.json")
    content = json.loads(path.read_text())
    found = content["rows"]
    assert code or not [r["error"] for r in found if r.get("error")]
    assert path.name == f"{name}.json"
    assert set(content) >= {"date", "machine", "versions", "settings"}
    assert content["command"] == " ".join(["python -m bench", *arguments])
    assert ("LAUNCH STUBBED" if arguments == ["host"] else "SMOKE TEST") in content["label"]
    with path.with_suffix(".csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [(r["case"], r["contestant"]) for r in table] == [(r["case"], r["contestant"]) for r in found]
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    return found, content


def test_indexing_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = smoke(tmp_path, INDEXING, "indexing-bf16-cpu-smoke")
    assert "SMOKE TEST" in capsys.readouterr().out
    measured = [r for r in found if "device_us" in r]
    assert {r["contestant"] for r in measured} == {"torch", "triplan"}
    assert len(measured) == 2 * len(cases.cases())
    assert all(r["speed_vs_torch"] == 1 for r in measured if r["contestant"] == "torch")
    assert all(str(r["note"]).startswith("skipped: ") for r in found if "device_us" not in r)


def test_errors_show_in_the_exit_code_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("first line\nsecond")

    monkeypatch.setattr(indexing, "truth", broken)
    found, _ = smoke(tmp_path, INDEXING, "indexing-bf16-cpu-smoke", code=1)
    assert {r["error"] for r in found} == {"RuntimeError: first line"}


def test_gemm_smoke(tmp_path: Path) -> None:
    found, _ = smoke(tmp_path, ["gemm", "--dtype", "bfloat16", *ON_CPU], "gemm-bfloat16-cpu-smoke")
    assert sorted(r["contestant"] for r in found) == sorted(["torch", "triplan"] * len(gemm.cases.CASES))
    assert all(float(str(r["tflops"])) > 0 for r in found)


@pytest.fixture
def roughly_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots whose parts may overlap: placing takes longer than drawing. Other smoke runs place them."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("matplotlib.figure.Figure.set_layout_engine", lambda *_, **__: None)


@pytest.mark.usefixtures("roughly_placed")
@pytest.mark.parametrize("sweep", [False, True])
def test_rowwise_smoke(tmp_path: Path, sweep: bool) -> None:
    arguments = ["rowwise", *ON_CPU, *(["--sweep"] if sweep else [])]
    found, _ = smoke(tmp_path, arguments, f"rowwise-{'sweep-' if sweep else ''}cpu-smoke")
    contestants = {"reference"} if sweep else {"torch", "torch.compile", "triplan", "triplan by logits"}
    assert {row["contestant"] for row in found} == contestants


def test_optim_smoke(tmp_path: Path) -> None:
    found, _ = smoke(tmp_path, ["optim", *ON_CPU], "optim-cpu-smoke")
    assert {row["contestant"] for row in found} == {"torch", "torch foreach", "torch fused", "triplan"}


def test_models_smoke(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found, _ = smoke(tmp_path, ["models", *ON_CPU], "models-cpu-smoke")
    assert {"torch", "triplan"} == {row["contestant"] for row in found}


@pytest.mark.usefixtures("roughly_placed")
@pytest.mark.parametrize(
    "bench",
    [
        "batch_norm",
        "conv",
        "copies",
        "elementwise",
        "lm",
        "pooling",
        "random",
        "reductions",
        "rotary",
        "sampling",
        "sorting",
    ],
)
def test_smoke_against_torch(tmp_path: Path, bench: str) -> None:
    found, _ = smoke(tmp_path, [bench, *ON_CPU], f"{bench}-cpu-smoke")
    ours = {"triplan", "triplan apart", "triplan by logits"} if bench == "lm" else {"triplan"}
    peers = {"torch", "torch deterministic"} if bench == "conv" else {"torch"}
    assert {row["contestant"] for row in found if "seconds" not in row} == peers | ours


def test_some_cases_do_not_overwrite_the_full_run(tmp_path: Path) -> None:
    arguments = ["rowwise", *ON_CPU, "--sweep", "--cases", "relu"]
    found, _ = smoke(tmp_path, arguments, "rowwise-sweep-cpu-relu-smoke")
    assert all("relu" in row["case"] for row in found)


@pytest.mark.usefixtures("roughly_placed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="stubs the launch that a GPU machine really makes")
def test_host_smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.run, "__defaults__", (2, 1))
    found, _ = smoke(tmp_path, ["host"], "host-cpu")
    by_name = {(r["case"], r["contestant"]): r for r in found}
    for key in (("select, warm", "index_add"), ("PlanCache hit", "gather"), ("can_implement", "embedding")):
        assert by_name[key]["host_us"] > 0
    for contestant in ("plan.run", "BoundRun", "bare launch", "triton jit"):
        row = by_name["index_select into a given tensor, (1024, 256, 128)", contestant]
        assert row["note"] == "launch stubbed"
        assert "of_torch" not in row  # what was not launched is not compared
    functions = [r for r in found if str(r["case"]).endswith(", (8, 64) f32")]
    assert {r["contestant"] for r in functions} == set(host.LIMITS)
    timed = {str(r["case"]).partition(",")[0] for r in functions}
    assert timed >= set(functional.__all__) - set(TABLE) - {
        "expression",
        *WITHOUT_TENSORS,
    }  # some of that table stand for all
    assert all(r["host_us"] > 0 and r["note"] == host.ON_CPU and "of_torch" not in r for r in functions)


def test_determinism_smoke(tmp_path: Path) -> None:
    found, content = smoke(tmp_path, ["determinism", *ON_CPU, "--rows"], "determinism-cpu-smoke")
    by_case: dict[str, dict[str, Row]] = {}
    for r in found:
        by_case.setdefault(r["case"], {})[r["contestant"]] = r
    assert list(by_case) == [t.name for t in determinism.timed_cases(tiny=True)]
    ours = ("triplan atomic", "triplan deterministic", "triplan prepared", "triplan order-invariant")
    for by_name in by_case.values():
        assert set(by_name) - {"torch.compile"} == {"torch", "torch deterministic", *ours}
        torchs, mine = by_name["torch deterministic"], by_name["triplan deterministic"]
        assert by_name["torch"]["speed_vs_torch"] == torchs["speed_vs_deterministic"] == 1
        assert mine["speed_vs_deterministic"] == pytest.approx(torchs["device_us"] / mine["device_us"])
        assert by_name["triplan order-invariant"]["note"] == "-"
    kernels = content["kernels"]
    assert len(kernels) == len(determinism.timed_cases(True)) + len(determinism.row_cases(True))
    assert all(record["kernel"] == "reference" and record["device_us"] > 0 for record in kernels)
    assert all({"op", "element", "rows", "width", "count", "pattern", "estimated_us"} <= set(r) for r in kernels)
