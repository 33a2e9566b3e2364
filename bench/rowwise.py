"""``python -m bench rowwise``: softmax, norms and cross-entropy against torch and torch.compile, in one run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

import triplan as tp
from bench import loss_cases, rowwise_cases, timing
from bench.liger import liger_function
from bench.loss_cases import LossCase
from bench.report import Chart, Column, Report, Row, hardware_slug
from bench.rowwise_cases import (
    Buffers,
    Case,
    cases,
    compile_share,
    descriptor,
    formula,
    inputs,
    plan_args,
    torch_function,
)
from bench.timing import Contestant, copy_share, speed_ratio

COLUMNS = (
    Column("case", "case"),
    Column("contestant", "by"),
    Column("kernel", "kernel"),
    Column("device_us", "device us", ".1f"),
    Column("gb_per_s", "GB/s", ".0f"),
    Column("share_of_copy", "of copy", ".1%"),
    Column("speed_vs_peer", "x best peer", ".2f"),
    Column("peak_mib", "takes MiB", ".1f"),
    Column("note", "note"),
)
CHARTS = (
    Chart("share_of_copy", "share of the measured copy bandwidth", 1.0),
    Chart("speed_vs_peer", "speed, best peer = 1", 1.0),
)
Progress = Callable[[str, int, int], None]
#: What a sweep tries: the sizes that decide tiles. (A logarithm changes nothing about tiles.)
SWEPT = ((8192, 8192), (8192, 32768), (65536, 256))
COMPILERS = 12
#: After so long without a case's figures its process is taken for dead.
CASE_SECONDS = 300


@dataclass(frozen=True)
class Entry:
    """A contestant of one case. ``run(i)`` works on buffer set ``i``; ``own_bytes`` are of results and scratch that it
    is given, rather than allocates."""

    name: str
    kernel: str
    run: Callable[[int], Any]
    ours: bool
    own_bytes: int = 0


def run(
    iterations: int,
    warmup: int,
    device: torch.device,
    tiny: bool,
    sweep: bool,
    wanted: Sequence[str],
    progress: Progress,
) -> Report:
    """Time every case whose name has one of ``wanted`` in it (all, if there are none).

    ``tiny`` runs shrunken cases, a smoke test; ``sweep`` tries tiles instead of peers.
    """
    on_gpu = device.type == "cuda"
    copy = timing.copy_bandwidth(device, iterations, warmup, 2 << 30 if on_gpu else 1 << 20)
    listed: list[Case | LossCase] = [*cases(tiny), *loss_cases.cases(tiny)]
    if sweep and not tiny:
        shapes = (*SWEPT, *loss_cases.SHAPES[1:])
        listed = [c for c in listed if (c.rows, c.n) in shapes and c.dtype is torch.bfloat16 and "log_" not in c.op]
    listed = [c for c in listed if not wanted or any(text in c.name for text in wanted)]
    if sweep and on_gpu:
        progress("compiling", 0, len(listed))
        compile_all([c for c in listed if isinstance(c, Case)], tp.Target.of(device))
    rows: list[Row] = []
    started = time.perf_counter()
    cards = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if on_gpu else []
    timed = partial(case_rows, iterations=iterations, warmup=warmup, copy=copy, tiny=tiny, sweep=sweep)
    for i, found in enumerate(spread(timed, listed, cards) if cards else (timed(c, device=device) for c in listed)):
        progress(listed[i].name, i + 1, len(listed))
        rows += found
    label = "" if on_gpu else "CPU SMOKE TEST: reference backend, tiny sizes, host clock; no measurement of any kernel"
    settings = {
        "iterations": iterations,
        "warmup": warmup,
        "device": device.type,
        "tiny": tiny,
        "sweep": sweep,
        "cards": max(len(cards), 1),
        "copy_gb_per_s": copy / 1e9,
        "l2_bytes": timing.l2_bytes(device),
        "seconds": time.perf_counter() - started,
    }
    stem = ("rowwise-sweep-" if sweep else "rowwise-") + hardware_slug(device) + ("-smoke" if tiny else "")
    title = f"rowwise; copy {copy / 1e12:.2f} TB/s" if on_gpu else "rowwise"
    return Report(stem, title, label, COLUMNS, CHARTS, settings, rows)


def spread(
    timed: Callable[..., list[Row]], listed: Sequence[Case | LossCase], cards: Sequence[torch.device]
) -> Iterator[list[Row]]:
    """``timed`` of each case, in order, on whichever of ``cards`` is free: contestants of one case share a card.

    A process a card, as most of the time goes into torch.compile, whose helpers besides outlive it if nobody ends them.
    """
    context = get_context("spawn")
    free = context.SimpleQueue()
    for card in cards:
        free.put(card)
    with context.Pool(len(cards), _take_card, (free, max((os.cpu_count() or 1) // len(cards), 1))) as pool:
        found = pool.imap(partial(_timed_here, timed), listed)
        for _ in listed:
            yield found.next(CASE_SECONDS)


_card = torch.device("cpu")


def _take_card(free: Any, compilers: int) -> None:
    global _card
    _card = free.get()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(compilers)
    if _card.type == "cuda":
        torch.cuda.set_device(_card)


def _timed_here(timed: Callable[..., list[Row]], case: Case | LossCase) -> list[Row]:
    rows = timed(case, device=_card)
    if _card.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def family(case: Case | LossCase) -> Any:
    """The module that knows the case."""
    return loss_cases if isinstance(case, LossCase) else rowwise_cases


def compile_all(listed: Sequence[Case], target: tp.Target) -> None:
    """Fill Triton's cache on disk from several processes. What does not compile is reported where it is to be timed."""
    workers = min(COMPILERS, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        shares = [pool.submit(compile_share, case, target, i, 4) for case in listed for i in range(4)]
        for share in shares:
            if isinstance(failure := share.exception(), Exception) and not isinstance(failure, tp.TriplanError):
                raise failure


def case_rows(
    case: Case | LossCase, iterations: int, warmup: int, device: torch.device, copy: float, tiny: bool, sweep: bool
) -> list[Row]:
    """Peers first, then ours; a contestant that is wrong or fails has an ``error`` and no figures."""
    generator = torch.Generator(device).manual_seed(1)
    base: Row = {"case": case.name}
    failed: list[Row] = []
    try:
        sets, resident = timing.rotation(case.bytes, timing.l2_bytes(device))
        buffers = [family(case).make(case, device, generator) for _ in range(sets)]
        with ExitStack() as stack:
            if sweep:
                entries = swept_entries(case, buffers, device, stack, failed)
            else:
                entries = [*peers(case, buffers, device, tiny), planned("triplan", case, buffers, device)]
            sound = []
            for entry in entries:
                error = verify(case, entry, buffers[0])
                if not error:
                    sound.append(entry)
                    continue
                row: Row = {"contestant": entry.name, "kernel": entry.kernel, "note": error}
                failed.append({**row, "error": error} if entry.ours else row)  # a peer that fails is no fault of ours
            peaks = [peak_bytes(e) if device.type == "cuda" else None for e in sound]
            contestants = [Contestant(e.name, e.run, sets) for e in sound]
            found = timing.times(contestants, iterations, warmup, device)
    except (tp.TriplanError, RuntimeError) as failure:
        error = _first_line(failure)
        return [{**base, "contestant": "all", "error": error, "note": error}]
    best = min((d.median_us for e, d in zip(sound, found, strict=True) if not e.ours), default=None)
    rows = []
    for e, d, peak in zip(sound, found, peaks, strict=True):
        notes = ["in L2"] if resident else []
        rows.append(
            {
                **base,
                "contestant": e.name,
                "kernel": e.kernel,
                "device_us": d.median_us,
                "device_us_p10": d.low_us,
                "device_us_p90": d.high_us,
                "bytes": case.bytes,
                "gb_per_s": case.bytes / d.median_us / 1e3,
                "share_of_copy": copy_share(case.bytes, d.median_us, copy),
                "speed_vs_peer": None if best is None else speed_ratio(best, d.median_us),
                "peak_mib": None if peak is None else peak / 2**20,
                "resident_in_l2": resident,
                "repeats": d.repeats,
                "note": " ".join([*notes, *([d.not_captured] if d.not_captured else [])]),
            }
        )
    return [*rows, *({**base, **r} for r in failed)]


def planned(
    name: str, case: Case | LossCase, buffers: list[Buffers], device: torch.device, kernel: str | None = None
) -> Entry:
    if isinstance(case, LossCase):
        found, run, extra = loss_cases.planned(case, buffers, device, kernel)
        return Entry(name, found, run, True, extra)
    preference = tp.PlanPreference(deterministic=False, kernel=kernel)
    plan = tp.plan(descriptor(case), preference=preference, target=tp.Target.of(device)).prepare(device)
    workspace = tp.Workspace.allocate(plan, device)
    args = [plan_args(case, b) for b in buffers]
    results = sum(o.nbytes for o in plan.descriptor.operands() if o.is_written)
    own = results + plan.workspace_size()
    return Entry(name, plan.sku().kernel, lambda i: plan.run(args[i], workspace), True, own)


def peak_bytes(entry: Entry) -> int:
    """Bytes of device memory that a call takes at most, beyond its inputs: results, and whatever else."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    entry.run(0)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before + entry.own_bytes


def swept_entries(
    case: Case | LossCase, buffers: list[Buffers], device: torch.device, stack: ExitStack, failed: list[Row]
) -> list[Entry]:
    """Every row of the table, and every tile; tiles that do not compile are reported."""
    entries = []
    tiles = stack.enter_context(family(case).registered(case)) if device.type == "cuda" else []
    rows = [r.name for r in tp.TABLE.rows(case.op) if r.name not in tiles]
    for name in [*rows, *tiles]:
        try:
            entries.append(planned(name, case, buffers, device, kernel=name))
        except tp.Unsupported:
            continue  # no row for this size or this machine
        except tp.KernelInternal as e:
            error = str(e).splitlines()[0]
            failed.append({"contestant": name, "kernel": name, "error": error, "note": error})
    return entries


def peers(case: Case | LossCase, buffers: list[Buffers], device: torch.device, tiny: bool) -> list[Entry]:
    if isinstance(case, LossCase):
        return [Entry(name, "", run, False) for name, run in loss_cases.peers(case, buffers, device, tiny)]
    found = []
    if (eager := torch_function(case, device)) is not None:
        found.append(Entry("torch", "", lambda i: eager(buffers[i]), False))
    if device.type == "cuda" and (liger := liger_function(case)) is not None:
        found.append(Entry("liger", "", lambda i: liger(buffers[i]), False))
    if not tiny or case.op == "rms_norm_backward":
        torch._dynamo.reset()
        how: dict[str, Any] = {"backend": "eager"} if tiny else {"mode": "max-autotune-no-cudagraphs"}
        compiled = torch.compile(formula(case), dynamic=False, **how)
        given = [inputs(case, b) for b in buffers]
        found.append(Entry("torch.compile", "", lambda i: compiled(*given[i]), False))
    return found


def _first_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"


def verify(case: Case | LossCase, entry: Entry, b: Buffers) -> str:
    """Run once on ``b``. Ours is compared with float64; a peer's results are its own memory, and must be finite."""
    if entry.ours:
        family(case).spoil(b)
        try:
            entry.run(0)
        except tp.KernelInternal as failure:  # a tile that needs more than there is
            return _first_line(failure)
        found: str = family(case).mismatch(case, b)
        return found
    try:
        result = entry.run(0)
    except RuntimeError as failure:
        return _first_line(failure)
    first = result[0] if isinstance(result, tuple) else result
    return "" if bool(first.isfinite().all()) else "not finite"
