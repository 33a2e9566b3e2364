"""``python -m bench gemm``: matrix products against torch's (cuBLAS), in one run."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import triplan as tp
from bench import timing
from bench.gemm_sweep import configurations, configured, pinned
from bench.report import Chart, Column, Report, Row, hardware_slug, slug
from bench.timing import Contestant, DeviceTime
from triplan.descriptors import MultiplyingDescriptor

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
#: Buffer sets enough that no call finds its operands in the L2 cache, and no more than this.
MOST_SETS = 16
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
#: What an H200 streams from memory, in TB/s, and multiplies in f16 or bf16 under its power limit, in TFLOP/s.
ROOFS = (4.28, 735.0)
CHARTS = (
    Chart("tflops", "TFLOP/s, by operations per byte of operands", roofs=ROOFS),
    Chart("speed_vs_torch", "speed, torch = 1", 1.0),
)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Case:
    """One product. ``layout`` names A and B as BLAS does: n for row-major, t for column-major.

    ``backward``: both factors' gradients and the bias's, of the product of the same extents. ``batch``: so many
    products of these extents; 0 for one of plain matrices.
    """

    m: int
    n: int
    k: int
    layout: str = "nn"
    bias: bool = False
    backward: bool = False
    batch: int = 0

    @property
    def name(self) -> str:
        size = f"{self.m}" if self.m == self.n == self.k else f"{self.m}x{self.n}x{self.k}"
        size = f"{self.batch} x {size}" if self.batch else size
        what = "backward" if self.backward else f"{self.layout.upper()}{' + bias' if self.bias else ''}"
        return f"{size} {what}"

    @property
    def flops(self) -> int:
        """Multiplications and additions of the products."""
        return 2 * self.m * self.n * self.k * (2 if self.backward else 1) * max(self.batch, 1)

    def bytes(self, itemsize: int) -> int:
        """Of the operands, each once."""
        once = itemsize * (self.m * self.k + self.k * self.n + self.m * self.n)
        return once * (2 if self.backward else 1) * max(self.batch, 1)


SQUARES = (2048, 4096, 8192)
CASES = (
    *(Case(n, n, n, bias=True) for n in SQUARES),
    *(Case(n, n, n, bias=True, backward=True) for n in SQUARES),
    Case(8192, 4096, 14336, "nt"),
    Case(8192, 14336, 4096, "nt"),
    *(Case(4096, 4096, 4096, layout) for layout in ("nn", "nt", "tn")),
    Case(16, 4096, 4096, "nt"),
    Case(64, 14336, 4096, "nt"),
    Case(512, 4096, 4096, "nt"),
    Case(1024, 1024, 128, batch=64),
)
#: More of few rows, for what a sweep is to teach the cost model.
SWEPT = (
    Case(1, 4096, 4096, "nt"),
    Case(32, 4096, 14336, "nt"),
    Case(64, 1024, 8192, "nt"),
    Case(128, 4096, 4096, "nt"),
)


def cases(tiny: bool, sweep: bool = False, wanted: str = "") -> list[Case]:
    """Every row of the bench whose name contains ``wanted``; ``tiny`` shrinks them for a smoke test."""
    found = [c for c in (*CASES, *(SWEPT if sweep else ())) if wanted in c.name]
    return [replace(c, m=max(c.m >> 7, 2), n=c.n >> 7, k=max(c.k >> 7, 8)) for c in found] if tiny else found


# --- operands ---


@dataclass(frozen=True)
class Buffers:
    """``a`` (m, k) and ``b`` (k, n) as the case lays them out; the rest is packed. Backward uses all."""

    a: Tensor
    b: Tensor
    c: Tensor
    bias: Tensor
    da: Tensor
    db: Tensor
    dbias: Tensor


def make(case: Case, dtype: torch.dtype, device: torch.device, g: torch.Generator) -> Buffers:
    def values(rows: int, columns: int, layout: str = "n") -> Tensor:
        shape = (columns, rows) if layout == "t" else (rows, columns)
        lead = (case.batch,) if case.batch else ()
        found = torch.randn((*lead, *shape), dtype=dtype, device=device, generator=g)
        return found.transpose(-1, -2) if layout == "t" else found

    a, b = values(case.m, case.k, case.layout[0]), values(case.k, case.n, case.layout[1])
    c, bias = values(case.m, case.n), torch.randn(case.n, dtype=dtype, device=device, generator=g)
    empty = torch.empty(0, dtype=dtype, device=device)
    da, db, dbias = (torch.empty_like(t) if case.backward else empty for t in (a, b, bias))
    return Buffers(a, b, c, bias, da, db, dbias)


def rotated(case: Case, itemsize: int, l2: int) -> int:
    """Buffer sets: together twice the L2 cache, so that none is found there again."""
    return max(1, min(MOST_SETS, -(-2 * l2 // case.bytes(itemsize))))


# --- contestants ---


@dataclass(frozen=True)
class Entry:
    """A contestant of one case; ``run(i)`` works on buffer set ``i``. ``plan`` is None for torch."""

    name: str
    kernel: str
    run: Callable[[int], object]
    plan: tp.Plan[Any, Any] | None = None


def torch_entry(case: Case, buffers: Sequence[Buffers]) -> Entry:
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

    return Entry("torch", "", backward if case.backward else forward)


Args = tp.GemmArgs | tp.BatchedGemmArgs | tp.GemmBackwardArgs


def work(case: Case, x: Buffers) -> Args:
    """What a plan is to do for one set of buffers."""
    if case.backward:
        return tp.GemmBackwardArgs(dc=x.c, a=x.a, b=x.b, da=x.da, db=x.db, dbias=x.dbias)
    if case.batch:
        return tp.BatchedGemmArgs(a=x.a, b=x.b, c=x.c)
    return tp.GemmArgs(a=x.a, b=x.b, c=x.c, bias=x.bias if case.bias else None)


def described(args: Args) -> MultiplyingDescriptor:
    if isinstance(args, tp.GemmBackwardArgs):
        return tp.GemmBackwardDescriptor.from_args(args)
    epilogue = "identity" if args.bias is None else "bias"
    if isinstance(args, tp.GemmArgs):
        return tp.GemmDescriptor.from_args(args, epilogue=epilogue)
    return tp.BatchedGemmDescriptor.from_args(args, epilogue=epilogue)


def results(args: Args) -> dict[str, Tensor]:
    """What is written, by operand."""
    names = ("da", "db", "dbias") if isinstance(args, tp.GemmBackwardArgs) else ("c",)
    return {name: getattr(args, name) for name in names}


def entry(name: str, case: Case, buffers: Sequence[Buffers], plan: tp.Plan[Any, Any], device: torch.device) -> Entry:
    if device.type == "cuda":
        plan.prepare(device)
    args, workspace = [work(case, x) for x in buffers], tp.Workspace.allocate(plan, device)
    return Entry(name, plan.sku().kernel, lambda i: plan.run(args[i], workspace), plan)


def entries(case: Case, buffers: Sequence[Buffers], device: torch.device, sweep: bool) -> Iterator[Entry]:
    """torch, what select picks, every other row, and in a sweep every configuration of a row that has some hope."""
    target = tp.Target.of(device)
    desc = described(work(case, buffers[0]))
    yield torch_entry(case, buffers)
    chosen = tp.plan(desc, preference=tp.PlanPreference(deterministic=False), target=target)
    yield entry("triplan", case, buffers, chosen, device)
    for row in tp.TABLE.rows(desc.op):
        plan = pinned(desc, row.name, target)
        if row.backend is tp.BackendKind.TRITON and row.name != chosen.sku().kernel and plan is not None:
            yield entry(f"row {row.name}", case, buffers, plan, device)
    # A few kinds of product stand for all: each takes as long to compile as to time.
    if sweep and target.is_gpu and (case.bias or case.batch or case.layout == "nt"):
        for c in configurations(desc, target):
            yield entry(c.contestant, case, buffers, configured(desc, c, target), device)


# --- what is right ---


@dataclass(frozen=True)
class Truth:
    """Each result in float64, and Σ|terms|, by operand."""

    values: dict[str, Tensor]
    terms: dict[str, Tensor]


def truth(case: Case, x: Buffers) -> Truth:
    def of(a: Tensor, b: Tensor, c: Tensor, bias: Tensor) -> dict[str, Tensor]:
        if case.backward:
            return {"da": c @ b.t(), "db": a.t() @ c, "dbias": c.sum(0)}
        return {"c": a @ b + (bias if case.bias else 0.0)}

    given = [t.double() for t in (x.a, x.b, x.c, x.bias)]
    return Truth(of(*given), of(*(t.abs() for t in given)))


def verify(case: Case, e: Entry, x: Buffers, expected: Truth) -> tuple[float, str]:
    """Run once on ``x``: (largest error relative to Σ|terms|, what breaks the plan's guarantee)."""
    written = results(work(case, x))
    for result in written.values():
        result.fill_(float("nan"))  # what is not written shows
    e.run(0)
    worst, wrong = 0.0, ""
    for name, got in written.items():
        want, terms = expected.values[name], expected.terms[name]
        error = (got.double() - want).abs()
        worst = max(worst, float((error / terms.clamp(min=1e-300)).nan_to_num(math.inf).max()))
        if e.plan is not None:
            t = e.plan.precision_guarantee(name).tolerance
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
    """Time every case that is ``wanted``. ``tiny`` runs shrunken ones: a smoke test whose figures say nothing."""
    listed, rows = cases(tiny, sweep, wanted), list[Row]()
    started = time.perf_counter()
    for i, case in enumerate(listed):
        progress(case.name, i, len(listed))
        rows += case_rows(case, DTYPES[dtype], iterations, warmup, device, sweep)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    progress("done", len(listed), len(listed))
    ratios = [r["speed_vs_torch"] for r in rows if r["contestant"] == "triplan" and r.get("speed_vs_torch")]
    mean = statistics.geometric_mean(ratios) if ratios else None
    label = "CPU SMOKE TEST: reference backend, tiny sizes, host clock; no measurement of any kernel"
    if device.type == "cuda":
        label = f"geometric mean of what select picks: {mean:.3f} x torch" if mean else ""
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
    return Report(stem, f"matrix products, {dtype}", label, COLUMNS, CHARTS, settings, rows)


def case_rows(
    case: Case, dtype: torch.dtype, iterations: int, warmup: int, device: torch.device, sweep: bool
) -> list[Row]:
    """torch first, then ours; a contestant that is wrong or fails has an ``error`` and no figures."""
    g = torch.Generator(device).manual_seed(1)
    base: Row = {"case": case.name}
    failed: list[Row] = []
    try:
        sets = rotated(case, dtype.itemsize, timing.l2_bytes(device))
        buffers = [make(case, dtype, device, g) for _ in range(sets)]
        # Gradients keep what they are of; a forward product's C is no input, and may hold anything.
        expected = truth(case, buffers[0])
        sound: list[tuple[Entry, float]] = []
        for e in entries(case, buffers, device, sweep):
            error, wrong = verify(case, e, buffers[0], expected)
            if wrong:
                failed.append({**base, "contestant": e.name, "kernel": e.kernel, "error": wrong, "note": wrong})
            else:
                sound.append((e, error))
        del expected
        contestants = [Contestant(e.name, e.run, sets) for e, _ in sound]
        times = timing.times(contestants, iterations, warmup, device)
        host = timing.host_times(
            [c.calls(timing.host_calls_for(t.median_us)) for c, t in zip(contestants[:2], times[:2], strict=True)],
            HOST_LOOPS,
        )
    except (tp.TriplanError, RuntimeError) as e:
        error_text = f"{type(e).__name__}: {str(e).splitlines()[0]}"
        return [{**base, "contestant": "all", "error": error_text, "note": error_text}]
    torch_time = next((t for (e, _), t in zip(sound, times, strict=True) if e.plan is None), None)
    found = [
        {
            **base,
            "contestant": e.name,
            "kernel": e.kernel,
            **figures(case, dtype.itemsize, t, torch_time),
            "max_error": error,
        }
        for (e, error), t in zip(sound, times, strict=True)
    ]
    for row, h in zip(found, host, strict=False):
        row["host_us"] = h.median_us
    return [*found, *failed]


def figures(case: Case, itemsize: int, t: DeviceTime, torch_time: DeviceTime | None) -> Row:
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
