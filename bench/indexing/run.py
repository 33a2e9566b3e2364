"""``python -m bench indexing``: gather, scatter and embedding against torch's own ops, in one run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import triplan as tp
from bench import timing
from bench.indexing.cases import (
    DTYPES,
    SAME_WORK,
    Buffers,
    Case,
    Truth,
    bytes_moved,
    cases,
    descriptor,
    make,
    mismatch,
    plan_args,
    relative_error,
    torch_call,
    touched_elements,
    truth,
)
from bench.report import Chart, Column, Report, Row, hardware_slug, until_stopped
from bench.timing import Contestant, DeviceTime, HostTime, copy_share, speed_ratio

#: A kernel that is estimated to take longer is not timed.
LIMIT_US = 100_000.0

COLUMNS = (
    Column("case", "case"),
    Column("contestant", "by"),
    Column("kernel", "kernel"),
    Column("device_us", "device us", ".1f"),
    Column("host_us", "host us", ".1f"),
    Column("gb_per_s", "GB/s", ".0f"),
    Column("share_of_copy", "of copy", ".1%"),
    Column("speed_vs_torch", "x torch", ".2f"),
    Column("note", "note"),
)
CHARTS = (
    Chart("share_of_copy", "share of the measured copy bandwidth", 1.0),
    Chart("speed_vs_torch", "speed, torch = 1", 1.0),
)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Implementation:
    """An implementation of one case; ``plan`` is None for torch. ``run(i)`` works on buffer set ``i``.

    ``extra_bytes`` is what a plan takes besides its operands.
    """

    name: str
    kernel: str
    run: Callable[[int], Any]
    plan: tp.Plan[Any, Any] | None = None
    extra_bytes: int = 0


def run(dtype: str, iterations: int, warmup: int, device: torch.device, tiny: bool, progress: Progress) -> Report:
    """Time every case. ``tiny``: a smoke test, whose figures mean nothing."""
    on_gpu = device.type == "cuda"
    copy = timing.copy_bandwidth(device, iterations, warmup, 2 << 30 if on_gpu else 1 << 20)
    listed = cases(tiny)
    rows: list[Row] = []
    started = time.perf_counter()
    with until_stopped() as labels:
        for i, case in enumerate(listed):
            progress(case.name, i, len(listed))
            rows += _case_rows(case, DTYPES[dtype], iterations, warmup, device, copy)
            if on_gpu:
                torch.cuda.empty_cache()
    progress("done", len(listed), len(listed))
    labels.append(
        "* the device takes longer than the host: a loop of such calls is bound by the device"
        if on_gpu
        else "CPU SMOKE TEST: reference backend, tiny sizes, host clock; no measurement of any kernel"
    )
    settings = {
        "dtype": dtype,
        "iterations": iterations,
        "warmup": warmup,
        "device": device.type,
        "tiny": tiny,
        "copy_gb_per_s": copy / 1e9,
        "copy_gb_per_s_at_end": timing.copy_bandwidth(device, iterations, warmup, 2 << 30 if on_gpu else 1 << 20) / 1e9,
        "l2_bytes": timing.l2_bytes(device),
        "seconds": time.perf_counter() - started,
    }
    stem = f"indexing-{dtype}-{hardware_slug(device)}" + ("-smoke" if tiny else "")
    title = f"indexing, {dtype}; copy {copy / 1e12:.2f} TB/s" if on_gpu else f"indexing, {dtype}"
    return Report(stem, title, "; ".join(labels), COLUMNS, CHARTS, settings, rows)


def _case_rows(
    case: Case, dtype: torch.dtype, iterations: int, warmup: int, device: torch.device, copy: float
) -> list[Row]:
    """torch first, then ours; one that is wrong or fails has an ``error`` and no figures."""
    generator = torch.Generator(device).manual_seed(1)
    base: Row = {"case": case.name, "group": case.group}
    try:
        first = make(case, dtype, device, generator)
        nbytes = bytes_moved(case, dtype.itemsize, touched_elements(case, first.index) if case.adds else 0)
        sets, resident = timing.rotation(nbytes, timing.l2_bytes(device))
        buffers = [first, *(make(case, dtype, device, generator) for _ in range(sets - 1))]
        implementations, rows = _implementations(case, dtype, device, buffers)
        rows = [{**base, **r} for r in rows]
        sound: list[Implementation] = []
        expected = truth(case, first)
        for implementation in implementations:
            if error := verify(case, implementation, first, expected):
                failed = {
                    "contestant": implementation.name,
                    "kernel": implementation.kernel,
                    "error": error,
                    "note": error,
                }
                rows.append({**base, **failed})
            else:
                sound.append(implementation)
        del expected
        timed = time_all(sound, sets, iterations, warmup, device)
    except (tp.TriplanError, RuntimeError) as e:
        error = f"{type(e).__name__}: {str(e).splitlines()[0]}"
        return [{**base, "contestant": "all", "error": error, "note": error}]
    torch_us = next((d.median_us for e, (d, _) in zip(sound, timed, strict=True) if e.plan is None), None)
    figures = [
        {**base, "contestant": e.name, "kernel": e.kernel, **_figures(d, host, nbytes, resident, copy, torch_us)}
        for e, (d, host) in zip(sound, timed, strict=True)
    ]
    return [*figures, *rows]


def _figures(
    device: DeviceTime, host: HostTime, nbytes: int, resident: bool, copy: float, torch_us: float | None
) -> Row:
    notes = ["in L2"] if resident else []
    if device.not_captured:
        notes.append(device.not_captured)
    slower = device.median_us > host.median_us
    if slower:
        notes.append("*")
    return {
        "device_us": device.median_us,
        "device_us_p10": device.low_us,
        "device_us_p90": device.high_us,
        "host_us": host.median_us,
        "host_us_best": host.best_us,
        "bytes": nbytes,
        "gb_per_s": nbytes / device.median_us / 1e3,
        "share_of_copy": copy_share(nbytes, device.median_us, copy),
        "speed_vs_torch": None if torch_us is None else speed_ratio(torch_us, device.median_us),
        "resident_in_l2": resident,
        "device_bound": slower,
        "repeats": device.repeats,
        "launches": device.launches,
        "note": " ".join(notes),
    }


def _implementations(
    case: Case, dtype: torch.dtype, device: torch.device, buffers: list[Buffers]
) -> tuple[list[Implementation], list[Row]]:
    """The implementations, and a row with the reason for each that is left out."""
    calls = [torch_call(case, b) for b in buffers]
    implementations = [Implementation("torch", "", lambda i: calls[i]())]
    desc, target = descriptor(case, dtype), tp.Target.of(device)
    args = [plan_args(case, b) for b in buffers]
    default = tp.plan(desc, preference=tp.PlanPreference(deterministic=False), target=target)
    implementations.append(planned("triplan", default, args, device))
    strict = tp.plan(desc, preference=tp.PlanPreference(deterministic=True), target=target)
    if strict.sku().kernel == default.sku().kernel:
        return implementations, []
    name = "triplan deterministic"
    if left_out := too_long(name, strict):
        return implementations, [left_out]
    return [*implementations, planned(name, strict, args, device)], []


def estimated_us(plan: tp.Plan[Any, Any]) -> float:
    """The cost that select estimated for the chosen kernel."""
    return next(c.cost_us for c in plan.candidates if c.chosen) or 0.0


def too_long(name: str, plan: tp.Plan[Any, Any]) -> Row | None:
    """The row of a plan that is left out, as its estimate is beyond LIMIT_US; None for one that is timed."""
    cost = estimated_us(plan)
    if cost <= LIMIT_US:
        return None
    return {"contestant": name, "kernel": plan.sku().kernel, "note": f"skipped: estimated at {cost / 1e3:.0f} ms"}


def planned(name: str, plan: tp.Plan[Any, Any], args: list[Any], device: torch.device) -> Implementation:
    plan.prepare(device)
    workspace = tp.Workspace.allocate(plan, device)
    return Implementation(name, plan.sku().kernel, lambda i: plan.run(args[i], workspace), plan, plan.workspace_size())


def verify(case: Case, implementation: Implementation, b: Buffers, expected: Truth) -> str:
    """Run once on ``b``, which is then restored. Returns what is wrong with the result; empty if nothing is."""
    result = b.table if case.adds else b.dense
    kept = result.clone()
    if not case.adds or case.fills:
        result.fill_(float("nan"))  # an element that is not written shows
    returned = implementation.run(0)
    got = result
    if implementation.plan is None:
        got = returned
        error = relative_error(expected, got)
        wrong = "" if error <= SAME_WORK else f"torch's result is off by {error:.3g}: the bench compares unlike things"
    else:
        wrong = mismatch(expected, got, implementation.plan.precision_guarantee())
    result.copy_(kept)
    return wrong


def time_all(
    implementations: list[Implementation], sets: int, iterations: int, warmup: int, device: torch.device
) -> list[tuple[DeviceTime, HostTime]]:
    contestants = [Contestant(e.name, e.run, sets) for e in implementations]
    if not contestants:
        return []
    found = timing.times(contestants, iterations, warmup, device)
    calls = [c.calls(timing.host_calls_for(d.median_us)) for c, d in zip(contestants, found, strict=True)]
    loops = timing.HOST_LOOPS if device.type == "cuda" else 2
    return list(zip(found, timing.host_times(calls, loops), strict=True))
