"""Times drawn problems: what select chooses, every other entry, and torch; the distribution of ratios and of regret."""

from __future__ import annotations

import math
import os
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.pool import AsyncResult
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from triton.runtime import driver
from triton.runtime.cache import triton_key

import triplan as tp
from bench import timing
from bench.anywhere.drawing import MOST, Case, Peer, Tensors, case, entries_of, family_of, ops_of, tensors
from bench.indexing.cases import SAME_WORK
from bench.report import Chart, Column, Report, Row, hardware_slug, until_stopped
from bench.rows import compiled_by_torch
from bench.timing import Contestant
from triplan.backends.runtime.compile import compile_source
from triplan.descriptors import Role
from triplan.facade.tables import TablePlan

#: What a family must hold at a seed that nobody tuned for.
LIMITS = {"ratio_worst": 0.85, "ratio_q05": 0.95, "regret_q95": 1.08}
#: Bytes of the operands in a smoke test, at most.
TINY = 1 << 14
#: Problems whose kernels are compiled ahead of the one that is timed.
AHEAD = 32
#: An entry is left out if it is estimated to take longer than this, and so many times as long as select's choice.
LEFT_OUT_US, LEFT_OUT = 20_000.0, 5.0
#: Microseconds of a call from which on it is timed again only if it may be the fastest: within SLOWER times of it.
LONG_US, SLOWER = 1000.0, 3.0
#: Microseconds of timed calls of one contestant, about; and timed calls at least.
CALLS_US, FEWEST = 40_000.0, 3
#: Seconds of a problem after which no further call of it begins. Untuned.
PROBLEM_S = 30.0
#: Bytes of operands up to which results are compared with torch's.
COMPARED = 1 << 28
#: Terms of a sum up to which it is comparable though torch rounds each step to 16 bits. Untuned: the errors of n steps
#: are about sqrt(n) * eps / 8 of the sums.
MOST_SUMMED = 4096
#: Rows of the lists of the worst problems.
SHOWN = 10
COLUMNS = (
    Column("case", "case"),
    Column("kernel", "kernel"),
    Column("device_us", "us", ".1f"),
    Column("floor_us", "floor us", ".1f"),
    Column("best_kernel", "fastest"),
    Column("best_us", "us", ".1f"),
    Column("regret", "regret", ".2f"),
    Column("peer", "best peer"),
    Column("peer_us", "us", ".1f"),
    Column("ratio", "x peer", ".2f"),
    Column("note", "note"),
)
CHARTS = (
    Chart("ratio", "speed over bytes of operands, best peer = 1", 1.0, over="bytes"),
    Chart("regret", "time of select's choice, fastest entry = 1", 1.0, over="bytes"),
)
Progress = Callable[[str, int, int], None]
#: Runs the work once, on buffer set ``i``.
Run = Callable[[int], Any]


# --- compiling ahead ---


class Compilers:
    """Processes that fill Triton's cache on disk, each binary once. To be made before CUDA starts: they fork."""

    def __init__(self) -> None:
        triton_key()  # each process would read all of Triton's files
        self.pool = get_context("fork").Pool(max((os.cpu_count() or 1) - 1, 1), _stand_apart)
        self.started: dict[Any, AsyncResult[str]] = {}

    def start(self, plans: Iterable[tp.Plan[Any, Any]]) -> list[AsyncResult[str]]:
        found = []
        for plan in plans:
            for i, launch in enumerate(plan.launches):
                source = launch.source()
                if source not in self.started:
                    request = (plan.descriptor, plan.sku().kernel, plan.target, i)
                    self.started[source] = self.pool.apply_async(_compile, request)
                found.append(self.started[source])
        return found


def _stand_apart() -> None:
    """Signals of the run reach the parent alone, which reports what was timed. The pool ends its processes, also within
    a compilation; one that ended by itself might hold a lock that the pool waits for."""
    os.setpgrp()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _compile(desc: tp.Descriptor, kernel: str, target: tp.Target, i: int) -> str:
    """Compile launch ``i`` of a plan and Triton's launcher for it; what went wrong, or empty."""
    try:
        binary = compile_source(pinned(desc, kernel, target).launches[i].source(), target.arch)
        driver.active.launcher_cls(binary.src, binary.metadata)  # its C code, which a load would compile
    except tp.KernelInternal as e:
        return str(e)
    return ""


def pinned(desc: tp.Descriptor, kernel: str, target: tp.Target) -> tp.Plan[Any, Any]:
    """The plan of ``kernel``. Raises ``Unsupported``."""
    return tp.plan(desc, preference=tp.PlanPreference(deterministic=False, kernel=kernel), target=target)


# --- one problem ---


def plans_of(c: Case, target: tp.Target) -> list[tp.Plan[Any, Any]]:
    """What select chooses, then the plan of every other entry that meets the request and is not far too slow."""
    found: list[tp.Plan[Any, Any]] = [tp.plan(c.desc, preference=c.preference, target=target)]
    costs = {candidate.kernel: candidate.cost_us or 0.0 for candidate in found[0].candidates}
    chosen = found[0].sku().kernel
    for entry in entries_of(c.desc.op) if target.is_gpu else ():
        if entry.name != chosen and costs[entry.name] <= max(LEFT_OUT_US, LEFT_OUT * costs[chosen]):
            preference = tp.PlanPreference(deterministic=c.deterministic, kernel=entry.name)
            try:
                found.append(tp.plan(c.desc, preference=preference, target=target))
            except tp.Unsupported:
                continue
    return found


@contextmanager
def torchs_modes(c: Case) -> Iterator[None]:
    """torch as the problem asks: deterministic or not, products of f32 in tf32 or not.

    cuDNN times its algorithms where that ends soon, else takes what its heuristics say.
    """
    products, debugging = torch.backends.cuda.matmul, cast(Any, torch.utils.deterministic)
    before = debugging.fill_uninitialized_memory, products.allow_tf32
    # Filling results before they are written is a debugging aid, not determinism.
    debugging.fill_uninitialized_memory = False
    products.allow_tf32 = tf32 = str(getattr(c.desc, "math", None)) == "tf32"
    flags: Any = torch.backends.cudnn.flags  # untyped in torch
    # use_deterministic_algorithms would also set the compiler's mode, and so import the compiler: seconds of each run.
    if c.deterministic:
        torch.set_deterministic_debug_mode("error")
    try:
        with flags(enabled=True, benchmark=searched(c), deterministic=c.deterministic, allow_tf32=tf32):
            yield
    finally:
        if c.deterministic:
            torch.set_deterministic_debug_mode("default")
        debugging.fill_uninitialized_memory, products.allow_tf32 = before


def searched(c: Case) -> bool:
    """Whether cuDNN times its algorithms. Nothing ends such a search, which calls each several times."""
    return c.floor_us <= float(getattr(family_of(c.desc.op), "SEARCHED_US", math.inf))


def peers_of(c: Case, compiled: bool, tiny: bool) -> dict[str, Peer]:
    """torch's ways to compute the problem; if asked, the first also by torch.compile."""
    found: dict[str, Peer] = family_of(c.desc.op).peers(c.desc)
    if compiled and found:
        found["torch.compile"] = compiled_by_torch(next(iter(found.values())), tiny)
    return found


def comparable(c: Case) -> bool:
    """Whether torch's result says that ours is right.

    It does not where an index may repeat and any contribution may win, or where torch adds up in 16 bits the thousands
    of terms of the first word or of a scan. Nor where nothing but rounding is left: the gradient of the norm of one
    element is 0.
    """
    g = tp.plan(c.desc, preference=c.preference, target="cpu").precision_guarantee()
    narrow = any(o.element.itemsize == 2 for o in c.desc.operands() if o.is_written)
    desc: Any = c.desc
    scans = desc.op == "cumprod_backward"
    scans = scans or (desc.op == "cumsum" and desc.input_shape[desc.scan_axis] > MOST_SUMMED)
    sums = scans or (g.duplicates == "sum" and c.pattern == "zipf")
    cancels = desc.op == "l2_norm_backward" and desc.input_shape[-1] == 1
    return g.duplicates not in ("any", "last") and not (sums and narrow) and not cancels


def mismatch(c: Case, run: Run, peer: Peer, t: Tensors, apart: float = SAME_WORK) -> str:
    """Which result of ``run`` on ``t`` is further from that of ``peer`` than ``apart``, in norm; empty if none is.

    The default is no tolerance, only proof that both did the same work. Of an in-out, what was added is compared.
    """
    outputs = {o.name: o for o in c.desc.operands() if o.is_written}
    before = {name: _whole(t[name]).clone() for name, o in outputs.items() if o.role is Role.IN_OUT}
    wanted = {name: _whole(value).clone() for name, value in peer(t).items()}
    for name, o in outputs.items():
        if isinstance(t[name], list):
            sizes = [x.numel() for x in t[name]]
            for x, part in zip(t[name], before[name].split(sizes), strict=True):
                x.copy_(part)
        elif name in before:
            t[name].copy_(before[name])
        else:
            t[name].fill_(float("nan") if o.element.is_floating_point else 0)
    run(0)
    for name, want in wanted.items():
        found = _whole(t[name])
        got, want = found.double(), want.double().reshape(found.shape)
        # Steps of torch's in 16 bits overflow where ours in f32 do not.
        other = math.inf if outputs[name].element.itemsize > 2 else 0.0
        error = torch.where(want.isfinite(), got - want, torch.where(got.isfinite(), other, 0.0))
        change = want - before[name].double() if name in before else want
        eps = torch.finfo(found.dtype).eps if found.is_floating_point() else 0.0
        change, whole = (float(x.nan_to_num(0.0, 0.0, 0.0).norm()) for x in (change, want))
        if not float(error.norm()) <= apart * change + eps * whole:  # NaN is bad
            return f"wrong: {name} differs from torch's"
    return ""


def _whole(value: Any) -> Any:
    """A tensor, or those of a list behind each other."""
    return torch.cat(value) if isinstance(value, list) else value


@dataclass
class Timed:
    """A contestant and its time, in microseconds."""

    name: str
    run: Run
    us: float = math.inf
    note: str = ""


def time_all(
    listed: list[Timed], sets: int, device: torch.device, iterations: int, warmup: int, until: float = math.inf
) -> None:
    """Set the times of ``listed``. Of long calls only those that may be the fastest are timed more than twice.

    No call begins once ``time.perf_counter()`` has reached ``until``; what is not timed for that reason has a note.
    """
    if device.type != "cuda":
        found = timing.wall_times([Contestant(e.name, e.run, sets) for e in listed], iterations, warmup)
        for e, t in zip(listed, found, strict=True):
            e.us = t.median_us
        return
    for e in listed:
        try:
            for first in (True, False, False):  # the host may be held up between two launches
                if time.perf_counter() >= until:
                    e.note = "not timed: the problem took too long" if e.us == math.inf else e.note
                    break
                start, end = timing.event(), timing.event()
                start.record()
                e.run(0 if first else sets - 1)
                end.record()
                end.synchronize()
                e.us = e.us if first else min(e.us, start.elapsed_time(end) * 1e3)
        except RuntimeError as failure:
            e.note = _first_line(failure)
    if time.perf_counter() >= until:
        return
    limit = max(LONG_US, SLOWER * min(e.us for e in listed))
    again = [e for e in listed if e.us <= limit]
    slowest = max(max(e.us for e in again), 1.0)
    repeats = max(min(iterations, round(CALLS_US / slowest)), min(iterations, FEWEST))
    found = timing.device_times([Contestant(e.name, e.run, sets) for e in again], repeats, warmup)
    for e, t in zip(again, found, strict=True):
        e.us, e.note = t.median_us, t.not_captured


def case_row(
    c: Case, plans: Sequence[tp.Plan[Any, Any]], device: torch.device, iterations: int, warmup: int, compiled: bool
) -> Row:
    """Time one problem. What fails or is wrong has an ``error``."""
    base: Row = {"case": c.name, "contestant": "select", "op": c.desc.op, "number": c.number, "bytes": c.bytes}
    base |= {"kernel": plans[0].sku().kernel, "floor_us": c.floor_us}
    generator, until = torch.Generator(device).manual_seed(1), time.perf_counter() + PROBLEM_S
    try:
        sets, _ = timing.rotation(c.bytes, timing.l2_bytes(device))
        buffers = [tensors(c, device, generator) for _ in range(sets)]
        names = [o.name for o in c.desc.operands()]
        args = [tp.plan_type(c.desc.op).args_type(**{n: t[n] for n in names}) for t in buffers]
        plans, notes = _prepared(plans, device) if device.type == "cuda" else (plans, [])
        workspace = tp.Workspace.for_plans(plans, device)
        ours = [Timed(plan.sku().kernel, _runner(plan, args, workspace)) for plan in plans]
        with torchs_modes(c):
            peers = [
                Timed(name, partial(_run_peer, peer, buffers))
                for name, peer in peers_of(c, compiled, device.type == "cpu").items()
            ]
            wrong = ""
            if peers and c.bytes <= COMPARED and comparable(c):
                try:
                    wrong = mismatch(c, ours[0].run, family_of(c.desc.op).peers(c.desc)[peers[0].name], buffers[0])
                except RuntimeError as failure:
                    if isinstance(failure, tp.TriplanError):
                        raise
                    notes, peers = [*notes, f"torch: {_first_line(failure)}"], []
            notes = [*notes, *([] if searched(c) or not peers else ["cuDNN did not search"])]
            time_all([*ours, *peers], sets, device, iterations, warmup, until)
    except (tp.TriplanError, RuntimeError) as failure:
        return {**base, "error": _first_line(failure), "note": _first_line(failure)}
    best, peer = min(ours, key=lambda e: e.us), min(peers, key=lambda e: e.us, default=None)
    failed = [f"{e.name}: {e.note}" for e in (*ours, *peers) if e.note]
    row = {**base, "device_us": ours[0].us, "times": {e.name: e.us for e in (*ours, *peers) if e.us < math.inf}}
    row |= {"note": "; ".join([*([wrong] if wrong else []), *notes, *failed])}
    if wrong or ours[0].us == math.inf:
        return {**row, "error": wrong or failed[0]}
    if device.type != "cuda":
        return row  # the reference beside torch: no comparison of kernels
    row |= {"best_kernel": best.name, "best_us": best.us, "regret": ours[0].us / best.us}
    if peer is not None and peer.us < math.inf:
        row |= {"peer": peer.name, "peer_us": peer.us, "ratio": timing.speed_ratio(peer.us, ours[0].us)}
    return row


def _prepared(plans: Sequence[tp.Plan[Any, Any]], device: torch.device) -> tuple[list[tp.Plan[Any, Any]], list[str]]:
    """``plans``, loaded, and what failed of those that select did not choose."""
    found, notes = [plans[0].prepare(device)], []
    for plan in plans[1:]:
        try:
            found.append(plan.prepare(device))
        except tp.KernelInternal as failure:
            notes.append(f"{plan.sku().kernel}: {_first_line(failure)}")
    return found, notes


def _runner(plan: tp.Plan[Any, Any], args: list[Any], workspace: tp.Workspace) -> Run:
    if isinstance(plan, TablePlan) and plan.target.is_gpu:  # each set has its tables: a graph need not write them
        bound = [plan.bind(a, tp.Workspace.allocate(plan, workspace.device)) for a in args]
        return lambda i: bound[i]()
    return partial(_run_plan, plan, args, workspace)


def _run_plan(plan: tp.Plan[Any, Any], args: list[Any], workspace: tp.Workspace, i: int) -> None:
    plan.run(args[i], workspace)


def _run_peer(peer: Peer, buffers: list[Tensors], i: int) -> dict[str, Tensor]:
    return peer(buffers[i])


def _first_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"[:200]


# --- the figures ---


def summary(rows: Sequence[Row]) -> list[Row]:
    """The distribution of ratios and of regret, of all problems and of each op, and which limits they do not hold."""
    found = []
    for name in ("all", *sorted({r["op"] for r in rows})):
        own = [r for r in rows if name in ("all", r["op"])]
        row: Row = {"case": name, "cases": len(own)}
        if ratios := [r["ratio"] for r in own if r.get("ratio")]:
            row |= {
                "compared": len(ratios),
                "ratio_worst": min(ratios),
                "ratio_q05": timing.quantile(ratios, 0.05),
                "ratio_median": timing.median(ratios),
                "ratio_mean": statistics.geometric_mean(ratios),
            }
        if regrets := [r["regret"] for r in own if r.get("regret")]:
            row |= {"regret_median": timing.median(regrets), "regret_q95": timing.quantile(regrets, 0.95)}
        broken = [k for k, v in LIMITS.items() if k in row and (row[k] > v if k.startswith("regret") else row[k] < v)]
        found.append({**row, "holds": f"NO: {', '.join(broken)}" if broken else "yes" if len(row) > 2 else ""})
    return found


SUMMARY = (
    Column("case", "op"),
    Column("cases", "cases", "d"),
    Column("ratio_worst", "x peer: worst", ".2f"),
    Column("ratio_q05", "5%", ".2f"),
    Column("ratio_median", "median", ".2f"),
    Column("ratio_mean", "geo. mean", ".2f"),
    Column("regret_median", "regret: median", ".2f"),
    Column("regret_q95", "95%", ".2f"),
    Column("holds", "within the limits"),
)


class Distribution(Report):
    """A report that prints the summary and the worst problems, and writes all of them."""

    def show(self, console: Console) -> None:
        lists = {
            "slowest beside torch": sorted((r for r in self.rows if r.get("ratio")), key=lambda r: float(r["ratio"])),
            "largest regret": sorted((r for r in self.rows if r.get("regret")), key=lambda r: -float(r["regret"])),
            "errors": [r for r in self.rows if r.get("error")],
        }
        console.print(f"{self.title}\n{self.label}".strip())
        for title, rows in lists.items():
            _print(console, title, COLUMNS, rows[:SHOWN])
        _print(console, "summary", SUMMARY, self.sections["summary"])


def _print(console: Console, title: str, columns: Sequence[Column], rows: Sequence[Row]) -> None:
    if rows:
        table = Table(title=title)
        for c in columns:
            table.add_column(c.heading, justify="right" if c.spec else "left", no_wrap=bool(c.spec))
        for row in rows:
            table.add_row(*(c.show(row.get(c.field)) for c in columns))
        console.print(table)


# --- the run ---


def run(
    family: str,
    seed: int,
    cases: int,
    seconds: float,
    compiled: bool,
    iterations: int,
    warmup: int,
    tiny: bool,
    progress: Progress,
) -> Report:
    """Time ``cases`` problems, or as many as fit into ``seconds``; ``tiny``: a smoke test on the CPU."""
    started = time.perf_counter()
    compilers = None if tiny else Compilers()
    device = torch.device("cpu") if tiny else torch.device("cuda", torch.cuda.current_device())
    target, most = tp.Target.of(device), TINY if tiny else MOST
    numbers = iter(range(cases))
    waiting: deque[tuple[Case, list[tp.Plan[Any, Any]], list[AsyncResult[str]]]] = deque()
    rows: list[Row] = []
    with until_stopped() as labels, compilers.pool if compilers else nullcontext():  # leaving a pool ends its processes
        while time.perf_counter() - started < seconds:
            while len(waiting) < AHEAD and (number := next(numbers, None)) is not None:
                drawn = case(family, seed, number, target, most)
                plans = plans_of(drawn, target)
                waiting.append((drawn, plans, compilers.start(plans) if compilers else []))
            if not waiting:
                break
            drawn, plans, compiling = waiting.popleft()
            progress(drawn.name, len(rows), cases)
            asked = time.perf_counter()
            for binary in compiling:
                binary.wait(max(started + seconds - time.perf_counter(), 0.0))
            if not all(binary.ready() for binary in compiling):
                break  # the time is over
            waited, begun = time.perf_counter() - asked, time.perf_counter()
            row = case_row(drawn, plans, device, iterations, warmup, compiled)
            rows.append({**row, "waited_s": round(waited, 3), "seconds": round(time.perf_counter() - begun, 3)})
            if device.type == "cuda" and torch.cuda.memory_reserved() > torch.cuda.mem_get_info()[1] // 3:
                torch.cuda.empty_cache()
    done = f"{len(rows)} of {cases} problems in {time.perf_counter() - started:.0f} s, seed {seed}"
    label = "; ".join([done, *labels])
    if tiny:
        label = f"CPU SMOKE TEST: reference backend, tiny sizes, no comparison; {label}"
    settings = {
        "family": family,
        "ops": ops_of(family),
        "seed": seed,
        "cases": cases,
        "seconds": seconds,
        "compile": compiled,
        "iterations": iterations,
        "warmup": warmup,
        "device": device.type,
        "limits": LIMITS,
    }
    stem = f"anywhere-{family}-seed{seed}-{hardware_slug(device)}" + ("-smoke" if tiny else "")
    title = f"{family}: drawn problems beside torch"
    return Distribution(stem, title, label, COLUMNS, CHARTS, settings, rows, sections={"summary": summary(rows)})
