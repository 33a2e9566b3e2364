"""``python -m bench gemm``: matrix products against torch's (cuBLAS), in one run."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

import triplan as tp
from bench import timing
from bench.report import Chart, Column, Report, Row, hardware_slug, slug
from bench.timing import Contestant, DeviceTime
from triplan.backends.launch import Launch
from triplan.backends.triton import gemm_launch, gemm_split, gemm_wgmma
from triplan.backends.triton.gemm_launch import Tile
from triplan.descriptors import MatrixProductDescriptor

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
#: Buffer sets enough that no call finds its operands in the L2 cache, and no more than this.
MOST_SETS = 16
#: Configurations of a row that a sweep leaves out: those that its own cost model takes for this many times as slow.
HOPELESS, HOPELESS_SPLIT = 2.5, 1.35
HOST_LOOPS = 3
#: Rows of tiles dealt together, beside the row's own choice.
GROUPS = (2, 4, 16)
#: Tiles that no row takes today. What keeps most loads on their way is for a sweep to find: by rows of A at most.
FEW_ROWS = {
    16: (
        Tile(16, 16, 256, 4, 4),
        Tile(16, 32, 64, 4, 6),
        Tile(16, 32, 128, 2, 4),
        Tile(16, 32, 256, 4, 3),
        Tile(16, 64, 64, 4, 6),
        Tile(16, 64, 256, 8, 3),
        Tile(16, 128, 64, 4, 4),
    ),
    64: (
        Tile(64, 32, 128, 4, 4),
        Tile(64, 64, 64, 4, 3),
        Tile(64, 64, 64, 4, 6),
        Tile(64, 64, 128, 4, 4),
        Tile(64, 128, 64, 4, 3),
        Tile(64, 128, 64, 8, 4),
        Tile(64, 128, 128, 8, 3),
    ),
}
#: And those that are written nearly as long as they are multiplied.
SHALLOW_K = 256
SHALLOW = (
    Tile(128, 256, 64, 8, 2),
    Tile(128, 128, 64, 8, 2),
    Tile(128, 128, 64, 4, 2),
    Tile(128, 128, 128, 8, 1),
    Tile(128, 64, 64, 4, 2),
    Tile(64, 256, 64, 8, 2),
    Tile(64, 128, 64, 4, 2),
    Tile(64, 64, 128, 4, 1),
)

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
CHARTS = (Chart("tflops", "TFLOP/s"), Chart("speed_vs_torch", "speed, torch = 1", 1.0))
Progress = Callable[[str, int, int], None]
T = TypeVar("T")


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
    """A contestant of one case; ``run(i)`` works on buffer set ``i``. ``plans`` is empty for torch."""

    name: str
    kernel: str
    run: Callable[[int], object]
    plans: tuple[tp.Plan[Any, Any], ...] = ()


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


Args = tp.GemmArgs | tp.BatchedGemmArgs
Product = MatrixProductDescriptor


def products(case: Case, x: Buffers) -> Sequence[Args]:
    """What plans are to do for one set of buffers."""
    if case.backward:
        return [tp.GemmArgs(a=x.c, b=x.b.t(), c=x.da), tp.GemmArgs(a=x.a.t(), b=x.c, c=x.db)]
    if case.batch:
        return [tp.BatchedGemmArgs(a=x.a, b=x.b, c=x.c)]
    return [tp.GemmArgs(a=x.a, b=x.b, c=x.c, bias=x.bias if case.bias else None)]


def described(args: Args) -> Product:
    found: type[Product] = tp.GemmDescriptor if isinstance(args, tp.GemmArgs) else tp.BatchedGemmDescriptor
    return found.from_args(args, epilogue="identity" if args.bias is None else "bias")


def entry(
    name: str, case: Case, buffers: Sequence[Buffers], plans: Sequence[tp.Plan[Any, Any]], device: torch.device
) -> Entry:
    if device.type == "cuda":
        for plan in plans:
            plan.prepare(device)
    args = [products(case, x) for x in buffers]
    workspaces = [tp.Workspace.allocate(plan, device) for plan in plans]

    def run(i: int) -> None:
        for plan, given, workspace in zip(plans, args[i], workspaces, strict=True):
            plan.run(given, workspace)
        if case.backward:  # the gradient of the bias is torch's own, for both
            torch.sum(buffers[i].c, 0, out=buffers[i].dbias)

    kernels = list(dict.fromkeys(plan.sku().kernel for plan in plans))
    return Entry(name, ", ".join(kernels), run, tuple(plans))


def pinned(desc: Product, row: str, target: tp.Target) -> tp.Plan[Any, Any] | None:
    try:
        return tp.plan(desc, preference=tp.PlanPreference(deterministic=False, kernel=row), target=target)
    except tp.Unsupported:
        return None


def entries(case: Case, buffers: Sequence[Buffers], device: torch.device, sweep: bool) -> Iterator[Entry]:
    """torch, what select picks, every other row, and in a sweep every configuration of a row that has some hope."""
    target = tp.Target.of(device)
    descs = [described(args) for args in products(case, buffers[0])]
    yield torch_entry(case, buffers)
    chosen = [tp.plan(d, preference=tp.PlanPreference(deterministic=False), target=target) for d in descs]
    yield entry("triplan", case, buffers, chosen, device)
    taken = [plan.sku().kernel for plan in chosen]
    for row in tp.TABLE.rows(descs[0].op):
        plans = [pinned(d, row.name, target) for d in descs]
        if row.backend is tp.BackendKind.TRITON and [row.name] * len(descs) != taken and all(plans):
            yield entry(f"row {row.name}", case, buffers, [p for p in plans if p is not None], device)
    # A few kinds of product stand for all: each takes as long to compile as to time.
    if sweep and not case.backward and target.is_gpu and (case.bias or case.batch or case.layout == "nt"):
        for c in configurations(descs[0], target):
            yield entry(f"{c.row} {c.name}", case, buffers, [configured(descs[0], c, target)], device)


@dataclass(frozen=True)
class Configuration:
    """Launches of a row that stands for all of its kind in a sweep, and the workspace they need."""

    row: str
    name: str
    launches: list[Launch]
    workspace: int = 0


def configurations(desc: Product, target: tp.Target) -> Iterator[Configuration]:
    """``desc`` by every tile and ring, but for those that are estimated to be far slower than the best."""
    few: tuple[Tile, ...] = next((tiles for rows, tiles in FEW_ROWS.items() if desc.m <= rows), ())
    tried = few or (SHALLOW if desc.k <= SHALLOW_K else ())
    fitting = [t for t in tried if t.shared_bytes(desc.element.itemsize) <= target.shared_memory]
    tiles = [*gemm_launch.tiles_of(desc, target), *fitting]
    for tile in promising(tiles, lambda tile: gemm_launch.tile_us(desc, tile, target)):
        yield Configuration("tiles", str(tile), gemm_launch.tiles_launch(desc, tile))
    if few:
        splits = [*gemm_split.splits_of(desc, target), *gemm_split.cuts(fitting, desc.k)]
        for split in promising(splits, lambda s: gemm_split.split_us(desc, s, target), HOPELESS_SPLIT):
            launches, workspace = gemm_split.split_launch(desc, split), gemm_split.partial_bytes(desc, split)
            yield Configuration("split_k", str(split), launches, workspace)
    if pinned(desc, "wgmma", target) is None:
        return
    rings = promising(
        [r for specialised in (True, False) for r in gemm_wgmma.rings_of(desc, target, specialised)],
        lambda ring: gemm_wgmma.ring_us(desc, ring, target),
    )
    for ring in rings:
        yield configuration(desc, ring, target)
    for group in GROUPS:  # the same binary
        yield configuration(desc, replace(rings[0], group=group), target)


def configuration(desc: Product, ring: gemm_wgmma.Ring, target: tp.Target) -> Configuration:
    row = "wgmma" if ring.specialised else "wgmma_tiles"
    return Configuration(row, str(ring), gemm_wgmma.wgmma_launch(desc, ring, target))


def promising(all_of: Sequence[T], estimate: Callable[[T], float], hopeless: float = HOPELESS) -> list[T]:
    """The cheapest first, by a row's own cost model, down to those that are hopeless."""
    costs = {x: estimate(x) for x in all_of}
    return sorted((x for x in costs if costs[x] <= hopeless * min(costs.values())), key=lambda x: costs[x])


def configured(desc: Product, c: Configuration, target: tp.Target) -> tp.Plan[Any, Any]:
    """A plan that runs ``c``: of a row that is in the table for as long as it takes to select it."""
    base = next(row for row in tp.TABLE.rows(desc.op) if row.name == c.row)
    name = f"{c.row} {c.name}"
    tp.kernel(
        op=desc.op,
        name=name,
        elements=base.elements,
        guarantee=base.guarantee,
        rank=lambda desc, target: 0.0,
        workspace=lambda desc, target: c.workspace,
    )(lambda desc, target: c.launches)
    try:
        found = pinned(desc, name, target)
        assert found is not None
        _ = found.launches, found.workspace_size()  # asked of the row while it is there
        return found
    finally:
        tp.TABLE.unregister(desc.op, name)


# --- what is right ---


@dataclass(frozen=True)
class Truth:
    """Each result in float64, and Σ|terms|."""

    values: tuple[Tensor, ...]
    terms: tuple[Tensor, ...]


def truth(case: Case, x: Buffers) -> Truth:
    found = []
    for args in products(case, x):
        a, b = args.a.double(), args.b.double()
        bias = 0.0 if args.bias is None else args.bias.double()
        found.append((a @ b + bias, a.abs() @ b.abs() + (0.0 if args.bias is None else args.bias.double().abs())))
    return Truth(tuple(v for v, _ in found), tuple(t for _, t in found))


def verify(case: Case, e: Entry, x: Buffers, expected: Truth) -> tuple[float, str]:
    """Run once on ``x``: (largest error relative to Σ|terms|, what breaks the plan's guarantee)."""
    results = [args.c for args in products(case, x)]
    for result in results:
        result.fill_(float("nan"))  # what is not written shows
    e.run(0)
    worst, wrong = 0.0, ""
    for n, (got, want, terms) in enumerate(zip(results, expected.values, expected.terms, strict=True)):
        error = (got.double() - want).abs()
        worst = max(worst, float((error / terms.clamp(min=1e-300)).nan_to_num(math.inf).max()))
        if e.plans:
            t = e.plans[n].precision_guarantee("c").tolerance
            bad = ~(error <= t.rtol * want.abs() + t.ctol * terms + t.underflow)
            if bool(bad.any()):
                wrong = f"wrong: {int(bad.sum())} of {bad.numel()} elements; the largest error is {float(error.max())}"
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
        if device.type == "cuda":
            times = timing.device_times(contestants, iterations, warmup)
        else:
            times = timing.wall_times(contestants, iterations, warmup)
        host = timing.host_times(
            [c.calls(timing.host_calls_for(t.median_us)) for c, t in zip(contestants[:2], times[:2], strict=True)],
            HOST_LOOPS,
        )
    except (tp.TriplanError, RuntimeError) as e:
        error_text = f"{type(e).__name__}: {str(e).splitlines()[0]}"
        return [{**base, "contestant": "all", "error": error_text, "note": error_text}]
    torch_us = next((t.median_us for (e, _), t in zip(sound, times, strict=True) if not e.plans), None)
    found = [
        {**base, "contestant": e.name, "kernel": e.kernel, **figures(case, t, torch_us), "max_error": error}
        for (e, error), t in zip(sound, times, strict=True)
    ]
    for row, h in zip(found, host, strict=False):
        row["host_us"] = h.median_us
    return [*found, *failed]


def figures(case: Case, t: DeviceTime, torch_us: float | None) -> Row:
    return {
        "device_us": t.median_us,
        "device_us_p10": t.low_us,
        "device_us_p90": t.high_us,
        "tflops": case.flops / t.median_us / 1e6,
        "speed_vs_torch": None if torch_us is None else torch_us / t.median_us,
        "repeats": t.repeats,
        "launches": t.launches,
        "note": t.not_captured,
    }
