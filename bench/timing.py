"""Device time and host time of contestants, for every bench.

Repeats of the contestants of one comparison are interleaved, because clocks drift; results are medians. Device time is
measured over CUDA graphs of several launches, so that it includes neither Python nor gaps between launches. Host time
is measured over loops that never synchronize and issue fewer launches than the driver's queue holds.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from triplan.errors import TriplanError

#: Runs the work once on buffer set ``i``. What it returns is dropped.
Call = Callable[[int], object]

#: Microseconds of device work to aim for in one graph: starting a graph takes a few microseconds between the events,
#: so short graphs would look slow.
GRAPH_US = 1000.0
#: Launches in one graph, at most.
MAX_LAUNCHES = 64
#: Seconds of timed device work per contestant: slow ones have fewer repeats.
BUDGET_S = 0.5
#: Repeats at least, whatever they take.
MIN_REPEATS = 3
#: Seconds that a contestant works without rest before its sustained time is taken, and then while it is. In runs of an
#: H200 that are not published, times rose for about 0.075 s, and once more after 0.7 s.
SETTLING_S, SUSTAINED_S = 0.1, 0.1
#: Sustained times of a contestant, of which the median is taken.
SUSTAINED_ROUNDS = 3
#: Microseconds of a call from which on a graph has one launch: it streams far more than any cache holds.
LONG_US = 5000.0
#: Calls per host loop, at most: the driver queues about 1,024 launches before one blocks, and a call may be several.
HOST_CALLS = 100
#: Host loops, of which the median is taken: as many in each order of neighbours.
HOST_LOOPS = 16
#: Loops of one round, where few contestants are compared at a time.
HOST_ROUND = 8


@dataclass(frozen=True)
class Contestant:
    """One implementation. ``sets`` buffer sets are rotated; ``call(i)`` works on set ``i``."""

    name: str
    call: Call
    sets: int

    def calls(self, n: int) -> list[Callable[[], object]]:
        """``n`` calls, set after set."""
        each = [partial(self.call, i) for i in range(self.sets)]
        return [each[i % self.sets] for i in range(n)]

    def take_turns(self, n: int) -> None:
        """Call ``n`` times, set after set.

        What a call returns is kept until its set's next turn, so that allocated outputs rotate as given ones do. If
        freed at once, they would get the same memory each time, which may stay in the cache.
        """
        kept: list[object] = [None] * self.sets
        for i, call in enumerate(self.calls(n)):
            kept[i % self.sets] = None
            kept[i % self.sets] = call()


@dataclass(frozen=True)
class DeviceTime:
    """Microseconds per call.

    Attributes:
        median_us, low_us, high_us: the median, the 10% and the 90% quantile of the samples.
        repeats: timed runs.
        launches: calls in each run.
        not_captured: why the work could not be captured in a CUDA graph; then a plain loop, with its gaps between
            launches, was timed.
        samples: all samples, in order.
        sustained_us: the median while the contestant works without rest, at the clocks that it leads to itself; None
            if it was not asked for.
    """

    median_us: float
    low_us: float
    high_us: float
    repeats: int
    launches: int
    not_captured: str = ""
    samples: tuple[float, ...] = ()
    sustained_us: float | None = None

    def speed_beside(self, other: DeviceTime) -> float:
        """How many times as fast as ``other``.

        It is the median ratio of repeats that followed each other, as clocks drift under load; if one has more
        repeats, the ratio of the medians.
        """
        if self.samples and len(self.samples) == len(other.samples):
            return median([theirs / own for own, theirs in zip(self.samples, other.samples, strict=True)])
        return other.median_us / self.median_us


@dataclass(frozen=True)
class HostTime:
    """Microseconds per call in the median loop, and in the best one, which an undisturbed machine would give."""

    median_us: float
    best_us: float


def median(samples: Sequence[float]) -> float:
    """The middle sample, or the mean of the two middle ones. Raises ``ValueError`` if there are no samples."""
    if not samples:
        raise ValueError("median of no samples")
    return statistics.median(samples)


def quantile(samples: Sequence[float], q: float) -> float:
    """The sample at rank ``round(q * (n - 1))``, without interpolation, so that it is a measured one."""
    if not samples:
        raise ValueError("quantile of no samples")
    return sorted(samples)[round(q * (len(samples) - 1))]


def launches_for(once_us: float, sets: int) -> int:
    """Calls per graph: enough to fill GRAPH_US, at most MAX_LAUNCHES, and every buffer set equally often."""
    if once_us >= LONG_US:
        return 1
    wanted = min(max(int(GRAPH_US / max(once_us, 0.1)), 1), MAX_LAUNCHES)
    return -(-wanted // sets) * sets


def repeats_for(once_us: float, launches: int, iterations: int) -> int:
    """Timed repeats that fit in BUDGET_S: ``iterations``, or fewer for slow work."""
    fitting = int(BUDGET_S * 1e6 / max(once_us * launches, 0.1))
    return max(min(iterations, fitting), min(iterations, MIN_REPEATS))


def host_calls_for(once_us: float) -> int:
    """Calls per host loop: at most about 20 ms of device work, so that slow kernels do not take minutes."""
    return max(4, min(HOST_CALLS, int(20_000 / max(once_us, 0.1))))


# --- device time ---


class _Replay:
    """One contestant on the device: a captured graph, or a plain loop if it cannot be captured."""

    def __init__(self, contestant: Contestant, warmup: int, capture: bool) -> None:
        self.contestant = contestant
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # Capture forbids lazy initialization (of modules, handles, scratch memory), so run everything once before.
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for i in range(min(contestant.sets, 3)):
                contestant.call(i)
            start, end = event(), event()
            start.record(side)
            for i in range(2):
                contestant.call(i % contestant.sets)
            end.record(side)
            end.synchronize()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        # It includes Python's gaps: an upper bound for short kernels, which a graph's own time refines below.
        self.once_us = start.elapsed_time(end) * 1e3 / 2
        self.launches = launches_for(self.once_us, contestant.sets)
        self.refusal = "" if capture else "not asked for"
        self.graph = self._capture() if capture else None
        if self.graph is not None and self.once_us < LONG_US:
            self.once_us = self._time_once()
            if launches_for(self.once_us, contestant.sets) > self.launches:
                self.launches = launches_for(self.once_us, contestant.sets)
                self.graph = self._capture()
        for _ in range(min(warmup, repeats_for(self.once_us, self.launches, max(warmup, 1)))):
            self.run()
        torch.cuda.synchronize()
        self.samples: list[float] = []
        self.sustained: list[float] = []

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            # What waits for the device cannot be captured, and a capture that fails keeps its memory.
            torch.cuda.set_sync_debug_mode("error")
            try:
                self.contestant.call(0)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            with torch.cuda.graph(graph):
                self._calls()
        except TriplanError:
            raise  # our own plans must be capturable
        except RuntimeError as e:
            self.refusal = f"no graph: {str(e).splitlines()[0]}"
            return None
        graph.replay()
        torch.cuda.synchronize()
        return graph

    def _time_once(self) -> float:
        start, end = event(), event()
        start.record()
        self.run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / self.launches

    def _calls(self) -> None:
        self.contestant.take_turns(self.launches)

    def run(self) -> None:
        if self.graph is None:
            self._calls()
        else:
            self.graph.replay()

    def sustain(self) -> None:
        """Work without rest, and add the microseconds of a call towards the end to ``sustained``."""
        start, end = event(), event()
        each = self.once_us * self.launches / 1e6
        for seconds, mark in ((SETTLING_S, start), (SUSTAINED_S, end)):
            repeats = max(int(seconds / each), 1)
            for _ in range(repeats):
                self.run()
            mark.record()
        end.synchronize()
        self.sustained.append(start.elapsed_time(end) * 1e3 / repeats / self.launches)

    def result(self) -> DeviceTime:
        return DeviceTime(
            median(self.samples),
            quantile(self.samples, 0.1),
            quantile(self.samples, 0.9),
            len(self.samples),
            self.launches,
            self.refusal,
            tuple(self.samples),
            median(self.sustained) if self.sustained else None,
        )


def event() -> torch.cuda.Event:
    """One that takes the time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def device_times(
    contestants: Sequence[Contestant], iterations: int, warmup: int, capture: bool = True, sustained: bool = False
) -> list[DeviceTime]:
    """Device time of each contestant, repeats interleaved. Needs a GPU; plans must be prepared.

    Each round has another order: a card at its limit of power is faster right after a contestant that draws little.
    ``sustained`` adds the times of each alone, in turns of SETTLING_S + SUSTAINED_S: as in a training step, what draws
    more power then runs at lower clocks.

    ``capture=False`` times plain loops, for calls so long that the host runs ahead of the device anyway.
    """
    if not contestants:
        return []
    replays = [_Replay(c, warmup, capture) for c in contestants]
    wanted = [repeats_for(r.once_us, r.launches, iterations) for r in replays]
    pending: list[tuple[_Replay, torch.cuda.Event, torch.cuda.Event]] = []
    shuffled = random.Random(0)
    for i in range(max(wanted)):
        rounds = list(zip(replays, wanted, strict=True))
        for replay, repeats in shuffled.sample(rounds, len(rounds)):
            # Spread a slow contestant's few repeats evenly over the others' many.
            if i * repeats // max(wanted) == (i - 1) * repeats // max(wanted) and i > 0:
                continue
            start, end = event(), event()
            start.record()
            replay.run()
            end.record()
            pending.append((replay, start, end))
    torch.cuda.synchronize()
    for replay, start, end in pending:
        replay.samples.append(start.elapsed_time(end) * 1e3 / replay.launches)
    for _ in range(SUSTAINED_ROUNDS if sustained else 0):
        for replay in shuffled.sample(replays, len(replays)):
            replay.sustain()
    return [r.result() for r in replays]


def wall_times(contestants: Sequence[Contestant], iterations: int, warmup: int) -> list[DeviceTime]:
    """The same by the host's clock, on a machine without a GPU: a smoke test of the bench, not a measurement."""
    samples: list[list[float]] = [[] for _ in contestants]
    for i in range(-warmup, iterations):
        for contestant, kept in zip(contestants, samples, strict=True):
            start = time.perf_counter_ns()
            contestant.call(i % contestant.sets)
            if i >= 0:
                kept.append((time.perf_counter_ns() - start) / 1e3)
    return [
        DeviceTime(median(s), quantile(s, 0.1), quantile(s, 0.9), len(s), 1, "host clock", tuple(s)) for s in samples
    ]


def times(
    contestants: Sequence[Contestant], iterations: int, warmup: int, device: torch.device, sustained: bool = False
) -> list[DeviceTime]:
    """What a bench reports of each contestant: device time on a GPU, otherwise time by the host's clock."""
    if device.type == "cuda":
        return device_times(contestants, iterations, warmup, sustained=sustained)
    return wall_times(contestants, iterations, warmup)


# --- host time ---


def host_times(
    calls: Sequence[Sequence[Callable[[], object]]],
    loops: int = HOST_LOOPS,
    together: int | None = None,
    until: float = math.inf,
) -> list[HostTime]:
    """Host time per call, from ``loops`` loops over each contestant's ``calls``; contestants' loops are interleaved.

    With ``together``, so many neighbours are compared at a time, in rounds of ``HOST_ROUND`` loops over all groups:
    other work on the machine comes and goes in seconds, and neighbours then meet the same of it. After the first, no
    further round begins once ``time.perf_counter()`` has reached ``until``; without ``together`` there is one round.

    Each loop begins with an idle device, so with an empty launch queue. The first of two neighbours finds caches cold
    and autograd's thread asleep, which takes 0.2 ms (H200): every other time the second of them comes first.
    """
    samples: list[list[float]] = [[] for _ in calls]
    entries = list(zip(calls, samples, strict=True))
    size, each = (together, HOST_ROUND) if together else (max(1, len(entries)), loops)
    groups = [entries[i : i + size] for i in range(0, len(entries), size)]
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for done in range(0, loops, each):
            if done and time.perf_counter() > until:
                break
            for group in groups:
                _time_in_turns(group, min(each, loops - done))
    finally:
        if collecting:
            gc.enable()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return [HostTime(median(s), min(s)) for s in samples]


def _time_in_turns(group: Sequence[tuple[Sequence[Callable[[], object]], list[float]]], loops: int) -> None:
    """Append the microseconds per call of ``loops`` loops over the calls of each entry, after one that warms up."""
    exchanged = [entry for i in range(0, len(group), 2) for entry in group[i : i + 2][::-1]]
    drain = torch.cuda.is_available()
    for loop in range(-1, loops):  # the first warms up
        for own, kept in exchanged if loop % 2 else group:
            if drain:
                torch.cuda.synchronize()
            start = time.perf_counter_ns()
            for call in own:
                call()
            elapsed = time.perf_counter_ns() - start
            if loop >= 0:
                kept.append(elapsed / 1e3 / len(own))


# --- caches and ceilings ---


def l2_bytes(device: torch.device) -> int:
    """Bytes of the last-level cache, which the rotated buffers must exceed."""
    if device.type != "cuda":
        return 32 << 20
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def rotation(bytes_per_call: float, l2: int) -> tuple[int, bool]:
    """(buffer sets, whether all of them fit in L2).

    Work on more than half of L2 is bound by memory: it gets at least two sets, of four times L2 together, so that every
    call finds the cache cold. Smaller work is timed as callers mostly meet it: up to four sets, all of them in L2.
    """
    if bytes_per_call > l2 / 2:
        return max(2, -(-4 * l2 // int(bytes_per_call))), False
    return max(1, min(4, int(l2 / 2 / max(bytes_per_call, 1)))), True


def copy_bandwidth(device: torch.device, iterations: int, warmup: int, nbytes: int = 2 << 30) -> float:
    """Bytes per second, read plus written, of a large copy on the device."""
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = Contestant("copy", lambda i: target.copy_(source), 1)
    if device.type == "cuda":
        (found,) = device_times([copy], iterations, warmup, capture=False)
    else:
        (found,) = wall_times([copy], iterations, warmup)
    return 2 * nbytes / (found.median_us * 1e-6)


# --- ratios ---


def copy_share(nbytes: int, us: float, copy_bytes_per_s: float) -> float:
    """Bytes per second, as a share of those of a plain copy."""
    return nbytes / (us * 1e-6) / copy_bytes_per_s


def speed_ratio(peer_us: float, us: float) -> float:
    """How many times as fast as the peer: above 1 is faster."""
    return peer_us / us
