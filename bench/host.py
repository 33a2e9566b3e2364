"""``python -m bench host``: host time of planning, of launching, and of every function beside torch's, per call."""

from __future__ import annotations

import importlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

import triplan as tp
from bench import functions, timing
from bench.indexing.cases import Case, descriptor, make, plan_args, torch_call
from bench.jit_kernel import jit_index_select
from bench.report import Chart, Column, Report, Row, hardware_slug
from bench.stub import launch_stubbed
from bench.timing import Contestant
from triplan.backends.runtime import launcher

#: (rows of the table, width, rows moved): so small that the device is rarely slower than the host.
SIZES = ((1024, 256, 128), (4096, 1024, 512), (16384, 1024, 2048))
SIZE = SIZES[0]
OPS = ("index_select", "gather", "index_add", "scatter_add", "embedding", "embedding_backward")
#: Ops that torch writes into a given tensor, with the limit of our ``run``'s time divided by torch's.
LAUNCHED = {"index_select": 1.0, "index_add": 1.1}
#: Ops whose functional call allocates its result.
ALLOCATING = ("index_select", "gather")
#: Limit of a bound run's time divided by torch's.
BOUND_RATIO = 0.8
#: Limits in microseconds: of a bound run; of ``select`` and of a PlanCache hit, on a machine without a GPU.
BOUND_LIMIT = 4.0
SELECT_LIMIT = 50.0
HIT_LIMIT = 3.0
#: Limits of our host time divided by torch's, by what is timed: of each function, and of their geometric mean.
LIMITS = {
    "forward": (1.0, 1.0),
    "forward, recorded": (1.4, 1.2),
    "autograd.grad": (1.1, 1.0),
    "backward()": (1.1, 1.0),
}
#: Calls of a function per timed loop. A call with its backward is up to 20 launches: more calls would fill the queue.
FUNCTION_CALLS = 25

COLUMNS = (
    Column("case", "what"),
    Column("contestant", "op"),
    Column("host_us", "host us", ".2f"),
    Column("host_us_best", "best", ".2f"),
    Column("torch_us", "torch us", ".2f"),
    Column("device_us", "device us", ".2f"),
    Column("limit_us", "limit us", ".0f"),
    Column("of_torch", "of torch", ".2f"),
    Column("limit_of_torch", "limit", ".2f"),
    Column("holds", "holds"),
    Column("note", "note"),
)
#: Timed runs per step of device time.
DEVICE_REPEATS = 20
#: The note of a row whose device time exceeds its host time.
DEVICE_BOUND = "device-bound"
CHARTS = (
    Chart("host_us", "host microseconds per call", log=True),
    Chart("of_torch", "host time divided by torch's", mark=1.0),
)
#: The note of a row that is measured without a GPU.
ON_CPU = "computed on the cpu: no comparison"
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Step:
    """One thing that is timed.

    Attributes:
        name: the case; steps of one case are compared.
        op: the contestant.
        calls: calls per timed loop.
        limit_us: what a call may take, in microseconds.
        limit_of_torch: what a call may take, divided by torch's time.
        launches: whether a call launches a kernel, so that it has a device time too.
    """

    name: str
    op: str
    call: Callable[[], object]
    calls: int
    note: str = ""
    limit_us: float | None = None
    limit_of_torch: float | None = None
    launches: bool = False


def run(progress: Progress, seconds: float, calls: int = 300, loops: int = timing.HOST_LOOPS) -> Report:
    """Time all steps, those of one comparison interleaved, in fewer loops if ``seconds`` are over.

    Without a GPU, plans are for the h200 preset and launches are stubbed.
    """
    started, on_gpu = time.perf_counter(), torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    target = tp.Target.current() if on_gpu else tp.Target.preset("h200")
    # At most as many calls per loop as the driver queues launches: a full queue would make the host wait.
    launches = min(calls, timing.HOST_CALLS)
    progress("host", 0, 1)
    alternatives = list(_alternatives(device, launches, "" if on_gpu else ON_CPU))
    with nullcontext() if on_gpu else launch_stubbed(target):
        note = "" if on_gpu else "launch stubbed"
        steps = [*_planning(target, device, calls), *_launching(target, device, launches, note)]
        rows = _rows([*steps, *alternatives] if on_gpu else steps, loops)
    rows = _beside_torch(rows) if on_gpu else rows + _rows(alternatives, loops)
    rows += _functions(device, min(calls, FUNCTION_CALLS), loops, started + seconds)
    order = list(dict.fromkeys(row["case"] for row in rows))
    # Device-bound rows come last.
    rows.sort(key=lambda row: (row["note"] == DEVICE_BOUND, order.index(row["case"])))
    progress("host", 1, 1)
    settings = {"calls": calls, "loops": loops, "target": target.name, "launch_stubbed": not on_gpu, "size": SIZE}
    settings["seconds"] = time.perf_counter() - started
    label = "" if on_gpu else "LAUNCH STUBBED: no GPU here; plans are for the h200 preset and nothing is launched"
    stem = f"host-{hardware_slug(device)}"
    return Report(stem, "host time per call", label, COLUMNS, CHARTS, settings, rows)


def _rows(steps: list[Step], loops: int, together: int | None = None, until: float = math.inf) -> list[Row]:
    rows: list[Row] = [{"case": s.name, "contestant": s.op, "note": s.note} for s in steps]
    entries = list(zip(rows, steps, strict=True))
    sound: list[tuple[Row, Step]] = []
    for i in range(0, len(entries), together or 1):
        compared = entries[i : i + (together or 1)]
        for row, step in compared:
            try:
                step.call()
            except Exception as e:  # the other rows are still valid
                row["error"] = row["note"] = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
        if not any("error" in row for row, _ in compared):
            sound += compared
    times = timing.host_times([[step.call] * step.calls for _, step in sound], loops, together, until)
    on_device = [i for i, (_, step) in enumerate(sound) if step.launches and torch.cuda.is_available()]
    contestants = [Contestant(sound[i][1].name, _ignoring_set(sound[i][1].call), 1) for i in on_device]
    device_times = timing.device_times(contestants, DEVICE_REPEATS, warmup=2)
    for i, on_gpu in zip(on_device, device_times, strict=True):
        sound[i][0]["device_us"] = on_gpu.median_us
    for (row, step), found in zip(sound, times, strict=True):
        row |= {"host_us": found.median_us, "host_us_best": found.best_us}
        if step.limit_us is not None:
            row |= {"limit_us": step.limit_us, "holds": "yes" if found.median_us <= step.limit_us else "NO"}
        if step.limit_of_torch is not None:
            row["limit_of_torch"] = step.limit_of_torch
    return rows


def _beside_torch(rows: list[Row]) -> list[Row]:
    """Add to each row its time divided by torch's for the same case, and whether it is within its limits."""
    torch_us = {row["case"]: row["host_us"] for row in rows if row["contestant"] == "torch" and "host_us" in row}
    for row in rows:
        if "host_us" in row and row["case"] in torch_us:
            row["of_torch"] = row["host_us"] / torch_us[row["case"]]
            if row.get("device_us", 0.0) > row["host_us"]:
                # The loop waited for the device, so this is not host time, and limits do not apply.
                row["note"] = DEVICE_BOUND
                row.pop("limit_of_torch", None)
                row.pop("limit_us", None)
                row.pop("holds", None)
            elif "limit_of_torch" in row:
                within = row["of_torch"] <= row["limit_of_torch"] and row.get("holds") != "NO"
                row["holds"] = "yes" if within else "NO"
    return rows


def timed(call: functions.Call, function: Callable[..., Any]) -> dict[str, Callable[[], object]]:
    """What is timed of ``function``, which is one of ``call``'s, by the names of LIMITS.

    The last two include the forward that autograd records.
    """
    args, leaves = call.given(False), call.given(True)
    parameters = list(function.parameters()) if isinstance(function, torch.nn.Module) else []
    wanted = [*(leaves[i] for i in call.grads), *parameters]

    def without_grad() -> object:
        with torch.no_grad():
            return function(*args)

    forward = without_grad if parameters else partial(function, *args)
    if not call.grads:
        return {"forward": forward}
    grad = torch.ones_like(call.theirs(*args))

    def by_grad() -> object:
        return torch.autograd.grad(function(*leaves), wanted, grad)

    def by_backward() -> None:
        for t in wanted:
            t.grad = None
        function(*leaves).backward(grad)

    return dict(zip(LIMITS, (forward, partial(function, *leaves), by_grad, by_backward), strict=True))


def _functions(device: torch.device, calls: int, loops: int, until: float) -> list[Row]:
    """Every function and module beside torch's; without a GPU, ours alone, of the smallest size."""
    on_gpu = device.type == "cuda"
    ours: list[Step] = []
    theirs: list[Step] = []
    for m, n, dtype in functions.SIZES if on_gpu else functions.SIZES[-1:]:
        for name, call in functions.calls(functions.Draw(m, n, dtype, device)).items():
            case = f"{name}, ({m}, {n}) {tp.ElementKind.of(dtype)}"
            ours += [Step(case, *kind, calls) for kind in timed(call, call.ours).items()]
            theirs += [Step(case, *kind, calls) for kind in timed(call, call.theirs).items()]
    if not on_gpu:
        return [{**row, "note": ON_CPU} for row in _rows(ours, loops, 1, until)]
    rows = _rows([step for pair in zip(ours, theirs, strict=True) for step in pair], loops, 2, until)
    return _compared(rows[::2], rows[1::2])


def _compared(ours: list[Row], theirs: list[Row]) -> list[Row]:
    """``ours`` with torch's times, and the geometric means of the ratios for each size."""
    ratios: dict[tuple[str, str], list[float]] = {}
    rows: list[Row] = []
    for row, its in zip(ours, theirs, strict=True):
        if "host_us" in row and "host_us" in its:
            ratio = row["host_us"] / its["host_us"]
            ratios.setdefault((row["case"].partition(", ")[2], row["contestant"]), []).append(ratio)
            row = row | {"torch_us": its["host_us"]} | _judged(ratio, LIMITS[row["contestant"]][0])
        rows.append({**its, "contestant": "torch"} if "error" in its else row)
    for (size, kind), found in ratios.items():
        mean = _judged(statistics.geometric_mean(found), LIMITS[kind][1])
        rows.append({"case": f"geometric mean, {size}", "contestant": kind, **mean, "note": f"of {len(found)}"})
    return rows


def _judged(ratio: float, limit: float) -> Row:
    return {"of_torch": ratio, "limit_of_torch": limit, "holds": "yes" if ratio <= limit else "NO"}


def _ignoring_set(call: Callable[[], object]) -> timing.Call:
    """``call`` for ``device_times``, which passes the number of the set of buffers."""
    return lambda i: call()


def _planning(target: tp.Target, device: torch.device, calls: int) -> Iterator[Step]:
    """What happens before a launch. ``select`` and the cache get a descriptor that they have had before (warm)."""
    described = {op: descriptor(Case("host", op, *SIZE), torch.float16) for op in OPS}
    fields = {op: {name: getattr(d, name) for name in type(d).model_fields} for op, d in described.items()}
    cache = tp.PlanCache()
    for op, desc in described.items():
        yield Step("descriptor construction", op, partial(type(desc), **fields[op]), calls)
    for op, desc in described.items():
        yield Step("descriptor construction and key", op, partial(_key, type(desc), fields[op]), calls)
    for op, desc in described.items():
        yield Step("select, warm", op, partial(tp.plan, desc, target=target), calls, limit_us=SELECT_LIMIT)
    for op, desc in described.items():
        preference = tp.PlanPreference(deterministic=True)
        call = partial(tp.plan, desc, preference=preference, target=target)
        yield Step("select, warm, deterministic", op, call, calls, limit_us=SELECT_LIMIT)
    for op, desc in described.items():
        yield Step("PlanCache hit", op, partial(cache.get, desc, target=target), calls, limit_us=HIT_LIMIT)
    for op in OPS:
        case = Case("host", op, *SIZE)
        plan = tp.plan(described[op], target=target)
        args = plan_args(case, make(case, torch.float16, device, torch.Generator(device)))
        yield Step("can_implement", op, partial(plan.can_implement, args), calls)


def _key(cls: type[tp.Descriptor], fields: dict[str, Any]) -> str:
    return cls(**fields).key


def _into(op: str, size: tuple[int, int, int]) -> str:
    return f"{op} into a given tensor, {size}"


def _new(op: str, size: tuple[int, int, int]) -> str:
    return f"{op} into a new tensor, {size}"


def _launching(target: tp.Target, device: torch.device, calls: int, note: str) -> Iterator[Step]:
    """One call of the op by a plan, and by Triton's own jit."""
    for op, limit in LAUNCHED.items():
        for size in SIZES:
            case = Case("host", op, *size)
            buffers = make(case, torch.float16, device, torch.Generator(device))
            plan = tp.plan(descriptor(case, torch.float16), target=target)
            args, workspace = plan_args(case, buffers), tp.Workspace.allocate(plan, device)
            if device.type == "cuda":
                plan.prepare(device)
            bind = partial(plan.bind, args, workspace)
            if op == "index_select" and size == SIZE:
                yield Step("bind", op, bind, calls, note or f"{_bytes_each(bind) >> 10} KiB of the GPU's memory each")
            run, bound = partial(plan.run, args, workspace), bind()
            yield Step(_into(op, size), "plan.run", run, calls, note, limit_of_torch=limit, launches=True)
            yield Step(_into(op, size), "BoundRun", bound, calls, note, BOUND_LIMIT, BOUND_RATIO, launches=True)
            yield Step(_into(op, size), "bare launch", _bare(plan, args, device), calls, note, launches=True)
            if op == "index_select":
                jit = partial(jit_index_select, buffers.table, buffers.index, buffers.dense)
                yield Step(_into(op, size), "triton jit", jit, calls, note, launches=True)


def _bytes_each(make: Callable[[], object], count: int = 256) -> int:
    """GPU memory per object that ``make`` returns. The driver allocates 2 MiB at a time, hence many objects."""
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    made = [make() for _ in range(count)]
    after, _ = torch.cuda.mem_get_info()
    return (before - after) // len(made)


def _bare(plan: tp.Plan[Any, Any], args: Any, device: torch.device) -> Callable[[], object]:
    """The plan's single launch, without checks: the least host time that a kernel takes."""
    names = [f.name for f in fields(args) if isinstance(getattr(args, f.name), torch.Tensor)]
    assert plan.target.arch is not None
    (kernel,) = launcher.load(plan.launches, plan.target.arch, device.index or 0)
    template = kernel.template(args, {(name, None): i for i, name in enumerate(names)})
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return partial(template.fill(tuple(getattr(args, name).data_ptr() for name in names)).start, stream)


def _alternatives(device: torch.device, calls: int, note: str) -> Iterator[Step]:
    """The same ops by functional calls and by torch, which run on any device."""
    functional: Any = importlib.import_module("triplan.functional")
    for op in LAUNCHED:
        for size in SIZES if device.type == "cuda" else SIZES[:1]:
            case = Case("host", op, *size)
            buffers = make(case, torch.float16, device, torch.Generator(device))
            table, index, dense = buffers.table, buffers.index, buffers.dense
            if op == "index_select":
                ours = partial(functional.index_select, table, 0, index, out=dense)
            else:
                ours = partial(functional.index_add_, table, 0, index, dense)
            yield Step(_into(op, size), "triplan.functional", ours, calls, note, launches=True)
            yield Step(_into(op, size), "torch", torch_call(case, buffers), calls, note, launches=True)
    for op in ALLOCATING:
        for size in SIZES if device.type == "cuda" else SIZES[:1]:
            buffers = make(Case("host", op, *size), torch.float16, device, torch.Generator(device))
            args = (buffers.table, 0, buffers.index)
            ours = partial(getattr(functional, op), *args)
            yield Step(_new(op, size), "triplan.functional", ours, calls, note, limit_of_torch=1.0, launches=True)
            yield Step(_new(op, size), "torch", partial(getattr(torch, op), *args), calls, note, launches=True)
