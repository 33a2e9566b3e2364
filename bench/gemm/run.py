"""Contestants of each case: torch, the plan that select chooses, and other kernels; verified, then timed."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import triplan as tp
from bench import timing
from bench.gemm.cases import DTYPES, Buffers, Case, args_of, cases, descriptor_of, make, results, rotated
from bench.gemm.sweep import configurations, configured, pinned
from bench.report import Chart, Column, Report, Row, hardware_slug, slug, until_stopped
from bench.timing import Contestant, DeviceTime

HOST_LOOPS = 3
COLUMNS = (
    Column("case", "case"),
    Column("contestant", "by"),
    Column("kernel", "kernel"),
    Column("device_us", "device us", ".1f"),
    Column("host_us", "host us", ".1f"),
    Column("tflops", "TFLOP/s", ".0f"),
    Column("speed_vs_torch", "x torch", ".3f"),
    Column("max_error", "max error", ".2e"),
    Column("note", "note"),
)
#: TB/s that an H200 streams from memory, and TFLOP/s that it multiplies in f16 or bf16 under its power limit.
ROOFS = (4.28, 735.0)
CHARTS = (
    Chart("tflops", "TFLOP/s, by operations per byte of operands", roofs=ROOFS),
    Chart("speed_vs_torch", "speed, torch = 1", 1.0),
)
Progress = Callable[[str, int, int], None]


# --- candidates ---


@dataclass(frozen=True)
class Candidate:
    """One way to compute a case; ``run(i)`` works on set ``i`` of the buffers. ``plan`` is None for torch."""

    name: str
    kernel: str
    run: Callable[[int], object]
    plan: tp.Plan[Any, Any] | None = None


def torch_candidate(case: Case, buffers: Sequence[Buffers]) -> Candidate:
    """torch's own calls, with ``out=``."""

    def forward(i: int) -> object:
        x = buffers[i]
        if case.bias:
            return torch.addmm(x.bias, x.a, x.b, out=x.c)
        if case.batch:
            return torch.bmm(x.a, x.b, out=x.c)
        return torch.mm(x.a, x.b, out=x.c)

    def backward(i: int) -> object:
        x = buffers[i]
        torch.mm(x.c, x.b.t(), out=x.da)
        torch.mm(x.a.t(), x.c, out=x.db)
        return torch.sum(x.c, 0, out=x.dbias)

    return Candidate("torch", "", backward if case.backward else forward)


def plan_candidate(
    name: str, case: Case, buffers: Sequence[Buffers], plan: tp.Plan[Any, Any], device: torch.device
) -> Candidate:
    """``plan``, prepared, with a workspace of its own."""
    if device.type == "cuda":
        plan.prepare(device)
    args, workspace = [args_of(case, x) for x in buffers], tp.Workspace.allocate(plan, device)
    return Candidate(name, plan.sku().kernel, lambda i: plan.run(args[i], workspace), plan)


def candidates(case: Case, buffers: Sequence[Buffers], device: torch.device, sweep: bool) -> Iterator[Candidate]:
    """torch, the plan that select chooses, every other kernel, and in a sweep the promising configurations of each."""
    target = tp.Target.of(device)
    desc = descriptor_of(args_of(case, buffers[0]))
    yield torch_candidate(case, buffers)
    chosen = tp.plan(desc, preference=tp.PlanPreference(deterministic=False), target=target)
    yield plan_candidate("triplan", case, buffers, chosen, device)
    for entry in tp.TABLE.rows(desc.op):
        plan = pinned(desc, entry.name, target)
        if entry.backend is tp.BackendKind.TRITON and entry.name != chosen.sku().kernel and plan is not None:
            yield plan_candidate(f"kernel {entry.name}", case, buffers, plan, device)
    # Some cases stand for the others: each configuration takes as long to compile as to time.
    if sweep and target.is_gpu and (case.bias or case.batch or case.layout == "nt"):
        for c in configurations(desc, target):
            yield plan_candidate(c.contestant, case, buffers, configured(desc, c, target), device)


# --- verification ---


@dataclass(frozen=True)
class Truth:
    """Each result in float64, and its Σ|terms|, by operand."""

    values: dict[str, Tensor]
    terms: dict[str, Tensor]


def truth(case: Case, x: Buffers) -> Truth:
    """What a call on ``x`` should write."""

    def of(a: Tensor, b: Tensor, c: Tensor, bias: Tensor) -> dict[str, Tensor]:
        if case.backward:
            return {"da": c @ b.t(), "db": a.t() @ c, "dbias": c.sum(0)}
        return {"c": a @ b + (bias if case.bias else 0.0)}

    given = [t.double() for t in (x.a, x.b, x.c, x.bias)]
    return Truth(of(*given), of(*(t.abs() for t in given)))


def verify(case: Case, candidate: Candidate, x: Buffers, expected: Truth) -> tuple[float, str]:
    """Run once on ``x``: the largest error relative to Σ|terms|, and how the plan's guarantee is violated, if it is."""
    written = results(args_of(case, x))
    for result in written.values():
        result.fill_(float("nan"))  # elements that are not written show
    candidate.run(0)
    worst, wrong = 0.0, ""
    for name, got in written.items():
        want, terms = expected.values[name], expected.terms[name]
        error = (got.double() - want).abs()
        worst = max(worst, float((error / terms.clamp(min=1e-300)).nan_to_num(math.inf).max()))
        if candidate.plan is not None:
            t = candidate.plan.precision_guarantee(name).tolerance
            bad = ~(error <= t.rtol * want.abs() + t.ctol * terms + t.underflow)
            if bool(bad.any()):
                wrong = (
                    f"wrong: {int(bad.sum())} of {bad.numel()} elements of {name}; the largest error is "
                    f"{float(error.max())}"
                )
    return worst, wrong


# --- the run ---


def run(
    dtype: str,
    iterations: int,
    warmup: int,
    device: torch.device,
    tiny: bool,
    sweep: bool,
    wanted: str,
    progress: Progress,
) -> Report:
    """Time every case whose name contains ``wanted``. ``tiny`` shrinks them: a smoke test whose figures say nothing."""
    listed, rows = cases(tiny, sweep, wanted), list[Row]()
    started = time.perf_counter()
    with until_stopped() as labels:
        for i, case in enumerate(listed):
            progress(case.name, i, len(listed))
            rows += case_rows(case, DTYPES[dtype], iterations, warmup, device, sweep)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    progress("done", len(listed), len(listed))
    ratios = [r["speed_vs_torch"] for r in rows if r["contestant"] == "triplan" and r.get("speed_vs_torch")]
    mean = statistics.geometric_mean(ratios) if ratios else None
    if device.type != "cuda":
        labels.append("CPU SMOKE TEST: reference backend, tiny sizes, host clock; no measurement of any kernel")
    elif mean:
        labels.append(f"geometric mean of what select picks: {mean:.3f} x torch")
    settings = {
        "dtype": dtype,
        "iterations": iterations,
        "warmup": warmup,
        "device": device.type,
        "tiny": tiny,
        "sweep": sweep,
        "cases": wanted,
        "geometric_mean": mean,
        "seconds": time.perf_counter() - started,
    }
    stem = f"gemm-{dtype}-{hardware_slug(device)}" + ("-sweep" if sweep else "")
    stem += (f"-{slug(wanted)}" if wanted else "") + ("-smoke" if tiny else "")
    return Report(stem, f"matrix products, {dtype}", "; ".join(labels), COLUMNS, CHARTS, settings, rows)


def case_rows(
    case: Case, dtype: torch.dtype, iterations: int, warmup: int, device: torch.device, sweep: bool
) -> list[Row]:
    """torch first, then the plans; a candidate that is wrong or fails has an ``error`` and no figures."""
    g = torch.Generator(device).manual_seed(1)
    base: Row = {"case": case.name}
    failed: list[Row] = []
    try:
        sets = rotated(case, dtype.itemsize, timing.l2_bytes(device))
        buffers = [make(case, dtype, device, g) for _ in range(sets)]
        expected = truth(case, buffers[0])
        sound: list[tuple[Candidate, float]] = []
        for candidate in candidates(case, buffers, device, sweep):
            error, wrong = verify(case, candidate, buffers[0], expected)
            if wrong:
                named = {"contestant": candidate.name, "kernel": candidate.kernel}
                failed.append({**base, **named, "error": wrong, "note": wrong})
            else:
                sound.append((candidate, error))
        del expected
        contestants = [Contestant(c.name, c.run, sets) for c, _ in sound]
        times = timing.times(contestants, iterations, warmup, device)
        host = timing.host_times(
            [c.calls(timing.host_calls_for(t.median_us)) for c, t in zip(contestants[:2], times[:2], strict=True)],
            HOST_LOOPS,
        )
    except (tp.TriplanError, RuntimeError) as e:
        error_text = f"{type(e).__name__}: {str(e).splitlines()[0]}"
        return [{**base, "contestant": "all", "error": error_text, "note": error_text}]
    torch_time = next((t for (c, _), t in zip(sound, times, strict=True) if c.plan is None), None)
    found = [
        {
            **base,
            "contestant": c.name,
            "kernel": c.kernel,
            **figures(case, dtype.itemsize, t, torch_time),
            "max_error": error,
        }
        for (c, error), t in zip(sound, times, strict=True)
    ]
    for row, h in zip(found, host, strict=False):
        row["host_us"] = h.median_us
    return [*found, *failed]


def figures(case: Case, itemsize: int, t: DeviceTime, torch_time: DeviceTime | None) -> Row:
    """A row's measurements."""
    return {
        "device_us": t.median_us,
        "device_us_p10": t.low_us,
        "device_us_p90": t.high_us,
        "tflops": case.flops / t.median_us / 1e6,
        "intensity": case.flops / case.bytes(itemsize),
        "speed_vs_torch": None if torch_time is None else t.speed_beside(torch_time),
        "repeats": t.repeats,
        "launches": t.launches,
        "note": t.not_captured,
    }
