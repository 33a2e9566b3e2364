"""``python -m bench determinism``: what deterministic and order-invariant accumulation costs, against torch.

Each case is run by torch in both of its modes, by torch.compile, and by our plans: the cheapest atomic kernel, the
kernels selected where determinism or order invariance is required, and the deterministic one with prepared indices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import triplan as tp
from bench import timing
from bench.indexing.cases import (
    DTYPES,
    Buffers,
    Case,
    bytes_moved,
    descriptor,
    make,
    plan_args,
    torch_call,
    touched_elements,
    truth,
)
from bench.indexing.run import LIMIT_US, Implementation, Progress, estimated_us, planned, too_long, verify
from bench.report import Chart, Column, Report, Row, hardware_slug, until_stopped
from bench.timing import Contestant, DeviceTime, speed_ratio

#: Seconds after which torch.compile is left out: its warm-up is longer than everything that is timed.
COMPILE_UNTIL_S = 45.0
#: Seconds after which the remaining cases of ``--rows`` are left out; the report says how many.
ROWS_UNTIL_S = 240.0

COLUMNS = (
    Column("case", "case"),
    Column("contestant", "by"),
    Column("kernel", "kernel"),
    Column("device_us", "device us", ".1f"),
    Column("speed_vs_deterministic", "x torch det.", ".2f"),
    Column("speed_vs_torch", "x torch", ".2f"),
    Column("gb_per_s", "GB/s", ".0f"),
    Column("extra_mb", "extra MB", ".1f"),
    Column("note", "note"),
)
CHARTS = (
    Chart("speed_vs_deterministic", "speed, torch's deterministic mode = 1", 1.0, log=True),
    Chart("speed_vs_torch", "speed, torch = 1", 1.0, log=True),
)
LOOSE = tp.PlanPreference(deterministic=False)
#: Names of torch's own implementations, to which speeds are compared.
TORCH, TORCH_DETERMINISTIC = "torch", "torch deterministic"


@dataclass(frozen=True)
class Timed:
    """A case in one dtype. ``compiled``: torch.compile takes part."""

    case: Case
    dtype: str
    compiled: bool = False

    @property
    def name(self) -> str:
        c = self.case
        pattern = "" if c.pattern == "uniform" else f" {c.pattern}"
        return f"{c.op} ({c.rows}, {c.width})/{c.count} {self.dtype}{pattern}"


def timed_cases(tiny: bool = False) -> list[Timed]:
    """The bench's cases, those of torch.compile first."""
    large, middle = (131072, 1024, 262144), (16384, 1024, 65536)
    found = [
        Timed(Case("large", "index_add", *large), "fp16", True),
        Timed(Case("large", "embedding_backward", 50304, 1024, 65536, "zipf"), "bf16", True),
        Timed(Case("large", "scatter_add", *large, "rowwise"), "fp32", True),
        Timed(Case("large", "index_add", *large), "fp32"),
        Timed(Case("large", "scatter_add", *large, "rowwise"), "fp16"),
        Timed(Case("large", "scatter_add", *large), "fp16"),
        Timed(Case("large", "scatter_add", *large), "fp32"),
        Timed(Case("seed", "index_add", 16384, 1024, 2048), "fp16"),
        Timed(Case("pattern", "index_add", *middle, "one"), "fp16"),
        Timed(Case("pattern", "index_add", 131072, 1024, 65536, "distinct"), "fp16"),
        Timed(Case("pattern", "index_add", *middle, "sorted"), "fp16"),
        Timed(Case("op", "index_put", *middle), "fp32"),
        Timed(Case("op", "index_select_backward", *middle), "fp32"),
        Timed(Case("op", "gather_backward", *middle), "fp32"),
        Timed(Case("flat", "index_add", 1 << 20, 1, 1 << 22), "fp32"),
    ]
    return [replace(t, case=t.case.tiny()) for t in found] if tiny else found


def row_cases(tiny: bool = False) -> list[Timed]:
    """What ``--rows`` times in addition: sizes that differ by factors of four and eight, to fit costs to."""
    sizes = [
        (rows, width, count)
        for count in (512, 4096, 32768)
        for rows, width in ((count // 4, 1024), (8 * count, 64), (8 * count, 1024))
    ]
    found = [
        Timed(Case("rows", op, *size), dtype)
        for op, dtype in (("index_add", "fp16"), ("index_add", "fp32"), ("scatter_add", "fp32"))
        for size in sizes
    ]
    found += [Timed(Case("rows", "index_add", 64 * n, 1, 64 * n), "fp32") for n in (64, 1024, 16384)]
    found += [Timed(Case("rows", "index_add", 32768, 256, 32768, p), "fp32") for p in ("one", "zipf", "distinct")]
    return [replace(t, case=t.case.tiny()) for t in found[:: len(found) // 3]] if tiny else found


def run(iterations: int, warmup: int, device: torch.device, tiny: bool, rows: bool, progress: Progress) -> Report:
    """Time every case; with ``rows`` also each kernel alone. ``tiny``: a smoke test, whose figures mean nothing."""
    on_gpu = device.type == "cuda"
    bench = _Bench(iterations, warmup, device, rows, time.perf_counter())
    listed = [(t, True) for t in timed_cases(tiny)] + [(t, False) for t in (row_cases(tiny) if rows else [])]
    found: list[Row] = []
    left_out = 0
    with until_stopped() as labels:
        for i, (timed, compared) in enumerate(listed):
            progress(timed.name, i, len(listed))
            if not compared and bench.seconds() > ROWS_UNTIL_S:
                left_out += 1
                continue
            found += bench.case(timed, compared)
            if on_gpu:
                torch.cuda.empty_cache()
    progress("done", len(listed), len(listed))
    labels.append(
        "extra MB: torch's allocator at its peak; for triplan the workspace, and prepared indices"
        if on_gpu
        else "CPU SMOKE TEST: reference backend, tiny sizes, host clock; no measurement of any kernel"
    )
    settings = {
        "iterations": iterations,
        "warmup": warmup,
        "device": device.type,
        "tiny": tiny,
        "row_cases_left_out": left_out,
        "seconds": bench.seconds(),
    }
    stem = f"determinism-{hardware_slug(device)}" + ("-smoke" if tiny else "")
    title = "deterministic accumulation"
    sections = {"kernels": bench.kernels} if rows else {}
    return Report(stem, title, "; ".join(labels), COLUMNS, CHARTS, settings, found, sections)


@dataclass
class _Bench:
    iterations: int
    warmup: int
    device: torch.device
    rows: bool
    started: float

    def __post_init__(self) -> None:
        #: What ``--rows`` measures: one record per case and kernel.
        self.kernels: list[Row] = []

    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def case(self, timed: Timed, compared: bool) -> list[Row]:
        """The rows of the table (none unless ``compared``). Records each kernel if ``rows`` asks for it."""
        base: Row = {"case": timed.name, "group": timed.case.group}
        try:
            return self._case(timed, compared, base)
        except (tp.TriplanError, RuntimeError) as e:
            return [{**base, "contestant": "all", **_failure(e)}]

    def _case(self, timed: Timed, compared: bool, base: Row) -> list[Row]:
        case, dtype = timed.case, DTYPES[timed.dtype]
        generator = torch.Generator(self.device).manual_seed(1)
        first = make(case, dtype, self.device, generator)
        nbytes = bytes_moved(case, dtype.itemsize, touched_elements(case, first.index))
        sets, _ = timing.rotation(nbytes, timing.l2_bytes(self.device))
        buffers = [first, *(make(case, dtype, self.device, generator) for _ in range(sets - 1))]
        implementations, rows = self._contestants(timed, buffers) if compared else ([], [])
        if self.rows:
            implementations += self._kernels(timed, buffers)
        expected = truth(case, first)
        extra: dict[str, float | None] = {}
        sound: list[Implementation] = []
        for implementation in implementations:
            try:
                extra[implementation.name], wrong = self._first_run(case, implementation, first, expected)
            except (tp.TriplanError, RuntimeError) as e:
                # torch refuses some ops in its deterministic mode, and torch.compile may lack what it needs.
                wrong = _failure(e)["error"]
                if implementation.plan is None:
                    rows.append({"contestant": implementation.name, "note": f"refused: {wrong}"})
                    continue
            if wrong:
                rows.append(
                    {"contestant": implementation.name, "kernel": implementation.kernel, "error": wrong, "note": wrong}
                )
            else:
                sound.append(implementation)
        del expected
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # graphs have memory pools of their own: that of the first runs would count twice
        times = dict(zip((e.name for e in sound), self._times(sound, sets), strict=True))
        self._record(timed, [e for e in sound if e.name.startswith(ALONE)], times)
        shown = [e for e in sound if not e.name.startswith(ALONE)]
        return [
            *({**base, **_figures(e, times, nbytes, extra[e.name])} for e in shown),
            *({**base, **r} for r in rows),
        ]

    def _contestants(self, timed: Timed, buffers: list[Buffers]) -> tuple[list[Implementation], list[Row]]:
        """torch's implementations and ours, and a row with the reason for each that is left out."""
        calls = [torch_call(timed.case, b) for b in buffers]
        implementations = [
            Implementation(TORCH, "", lambda i: calls[i]()),
            Implementation(TORCH_DETERMINISTIC, "", deterministically(lambda i: calls[i]())),
        ]
        rows: list[Row] = []
        if timed.compiled and self.device.type == "cuda" and self.seconds() < COMPILE_UNTIL_S:
            implementations.append(Implementation("torch.compile", "", _compiled(timed.case, buffers)))
        elif timed.compiled:
            rows.append({"contestant": "torch.compile", "note": "-"})
        desc, target = descriptor(timed.case, DTYPES[timed.dtype]), tp.Target.of(self.device)
        args = [plan_args(timed.case, b) for b in buffers]
        atomic = next((c.kernel for c in considered(desc, target) if not _deterministic(desc, target, c.kernel)), None)
        wanted = {
            "triplan atomic": LOOSE.replace(kernel=atomic or "none is atomic"),
            "triplan deterministic": LOOSE.replace(deterministic=True),
            "triplan order-invariant": LOOSE.replace(order_invariant=True),
        }
        for name, preference in wanted.items():
            try:
                plan = tp.plan(desc, preference=preference, target=target)
            except tp.Unsupported:
                rows.append({"contestant": name, "note": "-"})
                continue
            if left_out := too_long(name, plan):
                rows.append(left_out)
                continue
            implementations.append(planned(name, plan, args, self.device))
            if name == "triplan deterministic":
                prepared = _prepared("triplan prepared", plan, args, buffers, self.device)
                if prepared is not None:
                    implementations.append(prepared)
                else:
                    rows.append({"contestant": "triplan prepared", "kernel": plan.sku().kernel, "note": "-"})
        return implementations, rows

    def _kernels(self, timed: Timed, buffers: list[Buffers]) -> list[Implementation]:
        """A plan of each kernel that applies."""
        desc, target = descriptor(timed.case, DTYPES[timed.dtype]), tp.Target.of(self.device)
        args = [plan_args(timed.case, b) for b in buffers]
        return [
            planned(
                f"{ALONE}{c.kernel}",
                tp.plan(desc, preference=LOOSE.replace(kernel=c.kernel), target=target),
                args,
                self.device,
            )
            for c in considered(desc, target)
        ]

    def _first_run(
        self, case: Case, implementation: Implementation, b: Buffers, expected: Any
    ) -> tuple[float | None, str]:
        """(extra MB, what is wrong with the result). Memory is measured in a second run: the first allocates caches."""
        wrong = verify(case, implementation, b, expected)
        if self.device.type != "cuda":
            return None, wrong
        if implementation.plan is not None:
            return implementation.extra_bytes / 1e6, wrong
        kept = b.table.clone()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        implementation.run(0)
        torch.cuda.synchronize()
        taken = torch.cuda.max_memory_allocated() - before
        b.table.copy_(kept)  # the next implementation is compared with the same truth
        return taken / 1e6, wrong

    def _times(self, implementations: list[Implementation], sets: int) -> list[DeviceTime]:
        contestants = [Contestant(e.name, e.run, sets) for e in implementations]
        if not contestants:
            return []
        return timing.times(contestants, self.iterations, self.warmup, self.device)

    def _record(self, timed: Timed, implementations: list[Implementation], times: dict[str, DeviceTime]) -> None:
        for implementation in implementations:
            assert implementation.plan is not None
            sku, found = implementation.plan.sku(), times[implementation.name]
            self.kernels.append(
                {
                    "op": sku.op,
                    "kernel": sku.kernel,
                    "version": sku.version,
                    "element": str(sku.element),
                    "index_element": str(sku.index_element),
                    "rows": timed.case.rows,
                    "width": timed.case.width,
                    "count": timed.case.count,
                    "pattern": timed.case.pattern,
                    "estimated_us": estimated_us(implementation.plan),
                    "device_us": found.median_us,
                    "device_us_p10": found.low_us,
                    "device_us_p90": found.high_us,
                    "captured": not found.not_captured,
                    "workspace_bytes": implementation.plan.workspace_size(),
                }
            )


def problems(rows: Sequence[Row]) -> Iterator[tuple[tp.Descriptor, str, dict[str, float]]]:
    """What the rows of ``kernels`` say of each problem: descriptor, pattern of the indices, microseconds by kernel."""
    found: dict[tuple[Case, str], dict[str, float]] = {}
    for r in rows:
        case = Case("rows", r["op"], r["rows"], r["width"], r["count"], r["pattern"])
        found.setdefault((case, r["element"]), {})[r["kernel"]] = r["device_us"]
    for (case, element), times in found.items():
        yield descriptor(case, tp.ElementKind(element).torch), case.pattern, times


#: Prefix of the names of the implementations of ``--rows``.
ALONE = "kernel "


def considered(desc: tp.Descriptor, target: tp.Target) -> list[tp.Candidate]:
    """The kernels that apply and whose estimates are within LIMIT_US, cheapest first."""
    plan = tp.plan(desc, preference=LOOSE, target=target)
    return [c for c in plan.candidates if c.cost_us is not None and c.cost_us <= LIMIT_US]


def _deterministic(desc: tp.Descriptor, target: tp.Target, kernel: str) -> bool:
    plan = tp.plan(desc, preference=LOOSE.replace(kernel=kernel), target=target)
    return plan.precision_guarantee().deterministic


def deterministically(call: Callable[[int], Any]) -> Callable[[int], Any]:
    """``call`` in torch's deterministic mode; the mode is restored."""

    def run(i: int) -> Any:
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            return call(i)
        finally:
            torch.use_deterministic_algorithms(before)

    return run


def torch_function(case: Case) -> Callable[..., torch.Tensor]:
    """torch's op of (dense, table, index): what torch.compile is given."""
    return lambda dense, table, index: torch_call(case, Buffers(dense, table, index))()


def _compiled(case: Case, buffers: list[Buffers]) -> Callable[[int], Any]:
    function = torch.compile(torch_function(case), dynamic=False)
    return lambda i: function(buffers[i].dense, buffers[i].table, buffers[i].index)


def _prepared(
    name: str, plan: tp.Plan[Any, Any], args: list[Any], buffers: list[Buffers], device: torch.device
) -> Implementation | None:
    """The plan with prepared indices, one for each buffer set; None where the plan cannot prepare any."""
    try:
        size = plan.prepared_size()
    except tp.Unsupported:
        return None
    workspace = tp.Workspace.allocate(plan, device)
    prepared = []
    for a, b in zip(args, buffers, strict=True):
        storage = tp.Workspace(torch.empty(size, dtype=torch.uint8, device=device))
        index = a.indices if hasattr(a, "indices") else b.index
        prepared.append(plan.prepare_indices(index, storage, workspace))
    extra = plan.workspace_size() + size
    return Implementation(
        name, plan.sku().kernel, lambda i: plan.run(args[i], workspace, prepared=prepared[i]), plan, extra_bytes=extra
    )


def _figures(implementation: Implementation, times: dict[str, DeviceTime], nbytes: int, extra_mb: float | None) -> Row:
    found = times[implementation.name]

    def ratio(name: str) -> float | None:
        return speed_ratio(times[name].median_us, found.median_us) if name in times else None

    return {
        "contestant": implementation.name,
        "kernel": implementation.kernel,
        "device_us": found.median_us,
        "device_us_p10": found.low_us,
        "device_us_p90": found.high_us,
        "speed_vs_deterministic": ratio(TORCH_DETERMINISTIC),
        "speed_vs_torch": ratio(TORCH),
        "bytes": nbytes,
        "gb_per_s": nbytes / found.median_us / 1e3,
        "extra_mb": extra_mb,
        "repeats": found.repeats,
        "launches": found.launches,
        "note": found.not_captured,
    }


def _failure(e: Exception) -> Row:
    error = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
    return {"error": error, "note": error}
