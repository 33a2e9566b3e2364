"""tune: time the kernels that support a problem, once, on the GPU, so that select can choose by measured times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from triplan.backends.storing import software
from triplan.backends.table import TABLE
from triplan.backends.tuning import TuningTable
from triplan.descriptors import Descriptor, Operand, OperandKind, packed_strides
from triplan.descriptors.layout import ordered_strides
from triplan.errors import Unsupported
from triplan.facade.plan import Plan, plan_type
from triplan.facade.workspace import Workspace
from triplan.sku import BackendKind, PlanPreference, Target, TargetName

__all__ = ["tune"]

#: A configuration is not timed if its modelled cost exceeds that of the kernel's best by this factor. Untuned.
MAX_COST_RATIO = 2.0
#: Microseconds: the device time that one graph of launches should take. Untuned.
GRAPH_US = 500.0
#: Launches in one graph. Untuned.
MAX_LAUNCHES = 64
#: Timed replays of each graph. Untuned.
REPEATS = 11
#: Copies of the operands. They should fill twice the L2 cache, so that no call finds them there. Untuned.
MAX_COPIES = 16

Runs = Sequence[Callable[[], object]]


def tune(
    problems: Descriptor | Sequence[Descriptor],
    target: Target | TargetName | None = None,
    *,
    table: TuningTable | None = None,
) -> TuningTable:
    """Time every kernel that supports each of ``problems`` on ``target``, in every promising configuration.

    Give the resulting table to ``tp.plan(desc, tuning=table)``, or save it with ``table.save(path)``. It includes the
    entries of ``table``, unless these are stale. Operands are random: normal floats, uniform indices, packed strides
    unless the layout promises others. Times are medians of launches on operands that are not in the L2 cache; the
    kernels take turns. Plans that require ``batch_invariant`` do not use them.

    Args:
        problems: one descriptor, or several.
        target: by default the current GPU, which it must be. A preset's name is taken too.
        table: earlier measurements.

    Raises:
        Unsupported: without a GPU, if ``target`` is not the current one, or if no kernel can answer a problem.
    """
    target = Target.given(target)
    device = _device(target)
    times: dict[str, dict[str, float]] = {}
    kernels: dict[str, int] = {}
    for desc in [problems] if isinstance(problems, Descriptor) else problems:
        plans = candidates(desc, target)
        if not plans:
            raise Unsupported(f"no kernel can answer {desc.key} on {target.key}: there is nothing to tune")
        found = device_times(_bound(desc, list(plans.values()), device), device)
        times[TuningTable.problem(desc.key, target)] = dict(zip(plans, found, strict=True))
        kernels |= {f"{desc.op}/{entry.name}": entry.version for entry in TABLE.rows(desc.op)}
    measured = TuningTable.of(times, software(), kernels, torch.cuda.get_device_name(device))
    return measured if table is None else table.joined(measured)


def _device(target: Target) -> torch.device:
    here = Target.current()
    if not here.is_gpu:
        raise Unsupported("tune times kernels on a GPU, and there is none")
    if here != target:
        raise Unsupported(f"tune times kernels on the current GPU, {here.key}; the target is {target.key}")
    return torch.device("cuda", torch.cuda.current_device())


def candidates(desc: Descriptor, target: Target) -> dict[str, Plan[Any, Any]]:
    """The plans to time, by the kernel's name, followed by the configuration's."""
    found: dict[str, Plan[Any, Any]] = {}
    problem = TuningTable.problem(desc.key, target)
    for entry in TABLE.rows(desc.op):
        if entry.backend is not BackendKind.TRITON:
            continue
        preference = PlanPreference(deterministic=False, kernel=entry.name)
        try:
            found[entry.name] = plan_type(desc.op).select(desc, preference=preference, target=target)
        except Unsupported:
            continue  # this kernel cannot run the problem
        configurations = entry.configurations(desc, target)
        least = min((c.cost for c in configurations.values()), default=0.0)
        for way, configuration in configurations.items():
            if configuration.cost <= MAX_COST_RATIO * least:
                name = f"{entry.name} {way}"
                only = TuningTable.of({problem: {name: 0.0}})
                found[name] = plan_type(desc.op).select(desc, preference=preference, target=target, tuning=only)
    return found


# --- operands ---


def _bound(desc: Descriptor, plans: Sequence[Plan[Any, Any]], device: torch.device) -> list[Runs]:
    """A run of each plan on each copy of the operands."""
    generator = torch.Generator(device).manual_seed(0)
    nbytes = sum(o.nbytes * o.count for o in desc.operands() if o.is_tensor)
    copies = max(1, min(MAX_COPIES, -(-2 * _l2_bytes(device) // max(nbytes, 1))))
    args = [sample_args(desc, device, generator) for _ in range(copies)]
    workspace = Workspace.for_plans(plans, device)
    return [[plan.bind(a, workspace) for a in args] for plan in plans]


def _l2_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def sample_args(desc: Descriptor, device: torch.device, generator: torch.Generator) -> Any:
    """Args that ``desc`` describes: optional scalars are None."""
    fields: dict[str, Any] = {}
    for o in desc.operands():
        if o.kind is OperandKind.HOST_SCALAR:
            fields[o.name] = None if o.optional else 1
        elif o.kind is OperandKind.TENSOR_LIST:
            extents = o.index_extents or (0,) * o.count
            fields[o.name] = [_tensor(o, extent, device, generator) for extent in extents]
        else:
            fields[o.name] = _tensor(o, math.prod(o.index_extents), device, generator)
    return plan_type(desc.op).args_type(**fields)


def _tensor(o: Operand, extent: int, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Random values; ``extent``: indices are below this."""
    strides = _strides(o)
    room = 1 + sum((n - 1) * s for n, s in zip(o.shape, strides, strict=True)) if o.numel else 0
    memory: torch.Tensor
    if o.index_extents:
        memory = torch.randint(max(extent, 1), (room,), generator=generator, device=device)
    elif o.element.is_floating_point:
        memory = torch.randn(room, generator=generator, device=device)
    else:
        memory = torch.randint(2, (room,), generator=generator, device=device)
    return memory.to(o.element.torch).as_strided(o.shape, strides)


def _strides(o: Operand) -> tuple[int, ...]:
    """The smallest strides that keep the layout's promises."""
    layout = o.layout
    if layout.packed:
        return packed_strides(o.shape)
    if layout.order:
        return ordered_strides(o.shape, layout.order)
    found, step = [0] * len(o.shape), 1
    unit = layout.unit_axis
    order = [axis for axis in reversed(range(len(o.shape))) if axis != unit and axis not in layout.zero_axes]
    for axis in order if unit is None else [unit, *order]:
        if axis != unit:
            step = -(-step // layout.stride_multiple) * layout.stride_multiple
        found[axis] = step
        step *= max(o.shape[axis], 1)
    return tuple(found)


# --- timing ---


def device_times(contestants: Sequence[Runs], device: torch.device) -> list[float]:
    """Median microseconds of one run of each.

    The runs are in CUDA graphs, so that host time does not count, and take turns, because clocks drift.
    """
    graphs = [_captured(runs, device) for runs in contestants]
    samples: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in graphs]
    for _ in range(REPEATS):
        for (graph, _launches), taken in zip(graphs, samples, strict=True):
            taken.append(_timed(graph.replay))
    torch.cuda.synchronize(device)
    return [
        statistics.median(start.elapsed_time(end) for start, end in taken) * 1e3 / launches
        for (_, launches), taken in zip(graphs, samples, strict=True)
    ]


def _captured(runs: Runs, device: torch.device) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of runs, each copy of the operands equally often, and the number of runs."""
    for run in runs:
        run()
    once = _timed(lambda: [run() for run in runs])
    torch.cuda.synchronize(device)
    each = once[0].elapsed_time(once[1]) * 1e3 / len(runs)
    rounds = -(-max(1, min(MAX_LAUNCHES, int(GRAPH_US / max(each, 1.0)))) // len(runs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for run in runs:
                run()
    graph.replay()
    return graph, rounds * len(runs)


def _timed(work: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    return start, end
