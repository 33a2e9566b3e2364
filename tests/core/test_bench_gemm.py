"""The bench of matrix products: its arithmetic, its contestants, its files by a smoke run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases.bench import smoke

import triplan as tp
from bench import timing
from bench.gemm.cases import CASES, MAX_SETS, Case, args_of, cases, descriptor_of, make, rotated
from bench.gemm.run import candidates, case_rows, truth, verify
from bench.stub import launch_stubbed

CPU, H200 = torch.device("cpu"), tp.Target.preset("h200")


def test_flops_bytes_and_rotation() -> None:
    case = Case(4, 8, 16)
    assert (case.flops, case.bytes(2)) == (2 * 4 * 8 * 16, 2 * (64 + 128 + 32))
    assert Case(4, 8, 16, backward=True).flops == 2 * case.flops
    assert (Case(4, 8, 16, batch=3).flops, Case(4, 8, 16, batch=3).bytes(2)) == (3 * case.flops, 3 * case.bytes(2))
    # 2048 cubed in f16 is 24 MiB: five sets are more than twice an L2 cache of 50 MiB.
    assert rotated(Case(2048, 2048, 2048), 2, 50 << 20) == 5
    assert rotated(Case(8192, 8192, 8192), 2, 50 << 20) == 1
    assert rotated(case, 2, 50 << 20) == MAX_SETS


def test_the_sizes_that_are_promised_are_there() -> None:
    found = {(c.m, c.n, c.k, c.layout, c.bias, c.backward) for c in CASES}
    for n in (2048, 4096, 8192):
        assert (n, n, n, "nn", True, False) in found
        assert (n, n, n, "nn", True, True) in found
    assert {c.layout for c in CASES if (c.m, c.n, c.k) == (4096, 4096, 4096)} == {"nn", "nt", "tn"}
    for size in ((8192, 4096, 14336), (8192, 14336, 4096), (16, 4096, 4096), (64, 14336, 4096), (512, 4096, 4096)):
        assert size in {(c.m, c.n, c.k) for c in CASES}
    assert Case(1024, 1024, 128, batch=64) in CASES


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_operands_lie_as_the_case_says(layout: str) -> None:
    x = make(Case(16, 24, 32, layout), torch.float16, CPU, torch.Generator().manual_seed(0))
    assert (x.a.shape, x.b.shape, x.c.shape) == ((16, 32), (32, 24), (16, 24))
    sku = tp.plan(descriptor_of(args_of(Case(16, 24, 32, layout), x)), target=H200).sku()
    assert sku.layout == layout


def test_backward_multiplies_what_torch_does() -> None:
    case = Case(5, 6, 7, bias=True, backward=True)
    x = make(case, torch.float16, CPU, torch.Generator().manual_seed(0))
    want = truth(case, x)
    for e in candidates(case, [x], CPU, sweep=False):
        for t in (x.da, x.db, x.dbias):
            t.fill_(float("nan"))
        error, wrong = verify(case, e, x, want)
        assert error < 2**-10
        assert wrong == ""
        assert not x.dbias.isnan().any()
    assert torch.equal(want.values["da"], x.c.double() @ x.b.double().t())
    assert torch.equal(want.values["db"], x.a.double().t() @ x.c.double())
    assert torch.equal(want.values["dbias"], x.c.double().sum(0))


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(plan: Any, args: tp.GemmArgs, workspace: object = None) -> None:
        args.c.zero_()

    monkeypatch.setattr(tp.GemmPlan, "run", wrong)
    found = case_rows(Case(8, 8, 8), torch.float16, 2, 0, CPU, False)
    by_name = {row["contestant"]: row for row in found}
    assert "device_us" in by_name["torch"]
    assert by_name["triplan"]["error"].startswith("wrong: ")
    assert "device_us" not in by_name["triplan"]


@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        (Case(256, 256, 256, "nt", bias=True), ("tiles ", "wgmma ", "wgmma_tiles ")),
        (Case(16, 256, 1024, "nt"), ("tiles ", "split_k ", "wgmma_tiles ")),
    ],
)
def test_a_sweep_runs_every_configuration_of_every_row_and_leaves_the_table_as_it_was(
    case: Case, kinds: tuple[str, ...]
) -> None:
    x = make(case, torch.float16, CPU, torch.Generator().manual_seed(0))
    before = tp.TABLE.rows("gemm")
    with launch_stubbed(H200):
        found = list(candidates(case, [x], CPU, sweep=True))
    assert tp.TABLE.rows("gemm") == before
    names = [e.name for e in found]
    assert len(set(names)) == len(names)
    assert names[:2] == ["torch", "triplan"]
    assert {"kernel tiles_invariant"} < set(names)
    for prefix in kinds:
        swept = [e.plan for e in found if e.plan and e.name.startswith(prefix)]
        distinct = {
            str([(la.grid, la.constexprs, la.args, la.num_warps, la.num_stages) for la in p.launches]) for p in swept
        }
        assert len(distinct) == len(swept) > 1
        assert all((plan.workspace_size() > 0) == (prefix == "split_k ") for plan in swept)


def test_cases_can_be_picked_by_name() -> None:
    assert [c.name for c in cases(False, wanted="16x4096")] == ["16x4096x4096 NT"]
    assert {c.m for c in cases(False, sweep=True, wanted="x4096x4096 NT")} == {1, 16, 128, 512}
    assert cases(False) == list(CASES)


def test_a_sweep_of_the_backward_tries_rings_and_where_columns_are_summed() -> None:
    case = Case(2048, 2048, 2048, bias=True, backward=True)
    x = make(case, torch.float16, CPU, torch.Generator().manual_seed(0))
    with launch_stubbed(H200):
        found = {e.name: e.plan for e in candidates(case, [x], CPU, sweep=True) if e.plan is not None}
    assert len({str((p.launches[0].constexprs, p.launches[0].args)) for p in found.values()}) >= len(found) - 1 > 4
    assert (len(found["triplan"].launches), found["triplan"].workspace_size()) == (1, 0)
    apart = [plan for name, plan in found.items() if name.endswith("sums apart")]
    assert apart
    assert all(len(plan.launches) == 3 and plan.workspace_size() > 0 for plan in apart)


def test_gemm_smoke(tmp_path: Path) -> None:
    arguments = ["gemm", "--dtype", "bfloat16", "--device", "cpu", "--iterations", "1", "--warmup", "0"]
    rows, content = smoke(tmp_path, arguments, "gemm-bfloat16-cpu-smoke")
    assert "SMOKE TEST" in str(content["label"])
    assert {r["contestant"] for r in rows} == {"torch", "triplan"}
    assert len(rows) == 2 * len(CASES)
    assert all(float(str(r["tflops"])) > 0 for r in rows)


def test_the_speed_is_the_median_of_neighbouring_repeats() -> None:
    """A clock that drifts slows both: their medians, of 2 and 4, would call it even."""
    slowing, theirs = (1.0, 2.0, 4.0), (1.1, 2.2, 4.4)
    ours = timing.DeviceTime(2.0, 1.0, 4.0, 3, 1, samples=slowing)
    assert ours.speed_beside(timing.DeviceTime(2.0, 1.1, 4.4, 3, 1, samples=theirs)) == pytest.approx(1.1)
    assert ours.speed_beside(timing.DeviceTime(3.0, 3.0, 3.0, 1, 1, samples=(3.0,))) == 1.5
