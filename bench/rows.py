"""Benches of ops on rows: what a case of any family offers, and the run that times cases of all of them."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from types import new_class
from typing import Any

import torch
from torch import Tensor

import triplan as tp
from bench import timing
from bench.report import Chart, Column, Report, Row, hardware_slug, slug, until_stopped
from bench.timing import Contestant, copy_share, speed_ratio
from triplan.backends.runtime.compile import compile_source
from triplan.backends.triton.common import rows_entries
from triplan.backends.triton.common.offsets import ceil_power
from triplan.backends.triton.common.tiles import Tile

#: (rows, elements of a row) of softmax and norms.
SHAPES = ((4096, 4096), (8192, 8192), (8192, 32768), (65536, 256), (16, 262144))
#: Those that a sweep tries: the sizes that decide tiles.
SWEPT = ((8192, 8192), (8192, 32768), (65536, 256))
DTYPES = (torch.bfloat16, torch.float32)
#: Rows at either end that are compared with float64.
COMPARED = 32
#: Processes that compile for a sweep.
COMPILERS = 12
#: Seconds after which the process of a case without results is considered dead.
CASE_SECONDS = 300
COLUMNS = (
    Column("case", "case"),
    Column("contestant", "by"),
    Column("kernel", "kernel"),
    Column("device_us", "device us", ".1f"),
    Column("gb_per_s", "GB/s", ".0f"),
    Column("share_of_copy", "of copy", ".1%"),
    Column("speed_vs_peer", "x best peer", ".2f"),
    Column("sustained_us", "sustained us", ".1f"),
    Column("sustained_vs_peer", "x best peer", ".2f"),
    Column("peak_mib", "takes MiB", ".1f"),
    Column("note", "note"),
)
CHARTS = (
    Chart("share_of_copy", "share of the measured copy bandwidth", 1.0),
    Chart("speed_vs_peer", "speed, best peer = 1", 1.0),
)
Progress = Callable[[str, int, int], None]
#: Runs the work once, on buffer set ``i``.
Run = Callable[[int], Any]


# --- cases ---


@dataclass(frozen=True)
class Buffers:
    """One set of operands, by the names of the plan's."""

    tensors: dict[str, Tensor]

    def __getattr__(self, name: str) -> Tensor:
        return self.tensors[name]


@dataclass(frozen=True)
class Case(ABC):
    """One op on ``rows`` rows of ``n`` elements of ``dtype``: its operands, who computes it, and what is right."""

    op: str
    rows: int
    n: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.op} {self.rows}x{self.n} {tp.ElementKind.of(self.dtype)}"

    @property
    def backward(self) -> bool:
        return self.op.endswith("_backward")

    @property
    def bytes(self) -> int:
        """The fewest bytes to move: each element of the operands of whole rows is read or written once."""
        return (3 if self.backward else 2) * self.rows * self.n * self.dtype.itemsize

    @property
    def sustained(self) -> bool:
        """Whether times without rests are taken too: of work whose clocks the card's limit of power decides."""
        return False

    @property
    def in_sweep(self) -> bool:
        return self.dtype is torch.bfloat16 and (self.rows, self.n) in SWEPT

    @abstractmethod
    def make(self, device: torch.device, generator: torch.Generator) -> Buffers:
        """Inputs with values, outputs with memory."""

    @abstractmethod
    def descriptor(self) -> tp.Descriptor: ...

    @abstractmethod
    def peers(self, buffers: list[Buffers], device: torch.device, tiny: bool) -> list[tuple[str, Run]]:
        """Other libraries' ways to compute the same, by name. ``tiny``: a smoke test."""

    @abstractmethod
    def mismatch(self, b: Buffers) -> str:
        """Which output in ``b`` is wrong by more than a few roundings; empty if none is.

        The first and the last rows are compared with float64.
        """

    @abstractmethod
    def swept(self) -> Iterator[type[rows_entries.Entry]]:
        """Entries with other tiles."""

    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs, as ``make`` gives them."""
        return tuple(o.name for o in self.descriptor().operands() if o.is_written)

    def spoil(self, b: Buffers) -> None:
        """NaN into all outputs: an element that is not written shows."""
        for name in self.outputs():
            b.tensors[name].fill_(float("nan"))

    def compared(self, device: torch.device) -> Tensor:
        """The rows that are compared with float64."""
        first, last = range(min(COMPARED, self.rows)), range(max(self.rows - COMPARED, 0), self.rows)
        return torch.tensor(sorted({*first, *last}), device=device)

    def args(self, b: Buffers) -> Any:
        # (torch's way may need more tensors than ours.)
        ours = {o.name for o in self.descriptor().operands()}
        return tp.plan_type(self.op).args_type(**{name: t for name, t in b.tensors.items() if name in ours})

    def planned(self, buffers: list[Buffers], device: torch.device, kernel: str | None = None) -> tuple[str, Run, int]:
        """(the kernel's name, its run, bytes of results and scratch, which it is given rather than allocates)."""
        preference = tp.PlanPreference(deterministic=False, kernel=kernel)
        plan = tp.plan(self.descriptor(), preference=preference, target=tp.Target.of(device)).prepare(device)
        workspace = tp.Workspace.allocate(plan, device)
        args = [self.args(b) for b in buffers]
        results = sum(o.nbytes for o in plan.descriptor.operands() if o.is_written)
        return plan.sku().kernel, lambda i: plan.run(args[i], workspace), results + plan.workspace_size()


class OneOpCase(Case):
    """A case whose peers are functions of its operands."""

    @abstractmethod
    def functions(self, device: torch.device) -> dict[str, Callable[[Buffers], Any]]:
        """Peers with kernels of their own, by name."""

    @abstractmethod
    def formula(self) -> Callable[..., Any]:
        """What torch.compile compiles, a function of ``inputs``."""

    @abstractmethod
    def inputs(self, b: Buffers) -> list[Tensor]:
        """The arguments of ``formula``."""

    def peers(self, buffers: list[Buffers], device: torch.device, tiny: bool) -> list[tuple[str, Run]]:
        functions = self.functions(device)
        found: list[tuple[str, Run]] = [(name, partial(on_set, f, buffers)) for name, f in functions.items()]
        if not tiny or not functions:  # a smoke test needs one peer
            compiled = compiled_by_torch(self.formula(), tiny)
            given = [self.inputs(b) for b in buffers]
            found.append(("torch.compile", lambda i: compiled(*given[i])))
        return found


def on_set(function: Callable[[Buffers], Any], buffers: list[Buffers], i: int) -> Any:
    return function(buffers[i])


def compiled_by_torch(function: Callable[..., Any], tiny: bool) -> Callable[..., Any]:
    torch._dynamo.reset()
    how: dict[str, Any] = {"backend": "eager"} if tiny else {"mode": "max-autotune-no-cudagraphs"}
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False, **how)
    return compiled


def shrunken(shape: tuple[int, int], tiny: bool) -> tuple[int, int]:
    """``shape``, or if ``tiny`` one that a smoke test computes at once."""
    rows, n = shape
    return (max(rows >> 12, 2), max(n >> 7, 2)) if tiny else shape


def wrong_elements(name: str, got: Tensor, wanted: Tensor, eps: float, size: Tensor) -> str:
    """How many elements of ``got`` are wrong by more than four roundings of ``eps``, of elements and of ``size``."""
    allowed = 4 * (eps + 1e-6) * (wanted.abs() + size)
    bad = ~((got - wanted).abs() <= allowed)  # NaN is bad
    return f"wrong: {int(bad.sum())} of {bad.numel()} compared elements of {name}" if bool(bad.any()) else ""


# --- a sweep of tiles ---


def whole_tiles(case: Case, most: int) -> Iterator[Tile]:
    """Tiles to try for kernels that hold whole rows, of at most ``most`` elements."""
    block = ceil_power(case.n)
    least, short = (4096, 8192) if case.backward else (1024, 4096)  # elements of several short rows
    for rows in (1, 2, 4, 8, 16, 32):
        if not least <= rows * block <= max(short, block) or block > most:
            continue
        for warps in (1, 2, 4, 8, 16, 32):
            each = rows * block // (32 * warps)
            if 8 <= each <= (16 if case.backward else 128 if block >= 32768 else 32):
                yield Tile(rows, block, warps)


def looped_tiles(case: Case) -> Iterator[tuple[Tile, int]]:
    """(tile, blocks in flight) to try for kernels that loop along rows."""
    for block in (2048, 4096, 8192):
        for warps in (8, 16, 32):
            if case.n >= 16384 and 4 <= block // (32 * warps) <= 16:
                yield from ((Tile(1, block, warps), unroll) for unroll in (1, 2, 4, 8) if block * unroll <= case.n)


def with_tile(entry: type[rows_entries.Entry], name: str, tile: Tile, **facts: Any) -> type[rows_entries.Entry]:
    """``entry`` under another name, with another tile and other ``facts``: what its methods of these names return."""
    found = {"find_tile": tile, **facts}
    return type(name, (entry,), {"name": name, **{of: lambda self, fact=fact: fact for of, fact in found.items()}})


@contextmanager
def registered(case: Case) -> Iterator[list[str]]:
    """The names of the swept entries of ``case``, which are in the kernel table within this context."""
    names: list[str] = []
    try:
        for entry in case.swept():
            new_class(entry.__name__, (entry,), {"ops": (case.op,)})  # which registers it
            names.append(entry.name)
        yield names
    finally:
        for name in names:
            tp.TABLE.unregister(case.op, name)


def compile_all(listed: Sequence[Case], target: tp.Target) -> None:
    """Fill Triton's cache on disk from several processes. What does not compile is reported when it is to be timed."""
    workers = min(COMPILERS, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        shares = [pool.submit(compile_share, case, target, i, 4) for case in listed for i in range(4)]
        for share in shares:
            if isinstance(failure := share.exception(), Exception) and not isinstance(failure, tp.TriplanError):
                raise failure


def compile_share(case: Case, target: tp.Target, first: int, step: int) -> None:
    """Compile each ``step``-th swept kernel of ``case`` into Triton's cache on disk."""
    with registered(case) as names:
        for name in names[first::step]:
            plan = tp.plan(case.descriptor(), preference=tp.PlanPreference(kernel=name), target=target)
            for launch in plan.launches:
                compile_source(launch.source(), target.arch)


# --- the run ---


@dataclass(frozen=True)
class Entry:
    """A contestant of one case. ``own_bytes``: of results and scratch that it is given rather than allocates."""

    name: str
    kernel: str
    run: Run
    ours: bool
    own_bytes: int = 0


def run(
    cases: Sequence[Case],
    iterations: int,
    warmup: int,
    device: torch.device,
    tiny: bool,
    sweep: bool,
    wanted: Sequence[str],
    progress: Progress,
    bench: str = "rowwise",
) -> Report:
    """Time each of ``cases`` whose name contains one of ``wanted`` (all, if there are none).

    ``tiny``: a smoke test of shrunken cases; ``sweep``: times tiles instead of peers, for the cases of a sweep.
    """
    on_gpu = device.type == "cuda"
    bandwidth = timing.copy_bandwidth(device, iterations, warmup, 2 << 30 if on_gpu else 1 << 20)
    listed = [c for c in cases if not sweep or tiny or c.in_sweep]
    listed = [c for c in listed if not wanted or any(text in c.name for text in wanted)]
    if sweep and on_gpu:
        progress("compiling", 0, len(listed))
        compile_all(listed, tp.Target.of(device))
    rows: list[Row] = []
    started = time.perf_counter()
    cards = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if on_gpu else []
    timed = partial(case_rows, iterations=iterations, warmup=warmup, copy=bandwidth, tiny=tiny, sweep=sweep)
    with until_stopped() as labels:
        for i, found in enumerate(spread(timed, listed, cards) if cards else (timed(c, device=device) for c in listed)):
            progress(listed[i].name, i + 1, len(listed))
            rows += found
    if not on_gpu:
        labels.append("CPU SMOKE TEST: reference backend, tiny sizes, host clock; no measurement of any kernel")
    settings = {
        "iterations": iterations,
        "warmup": warmup,
        "device": device.type,
        "tiny": tiny,
        "sweep": sweep,
        "cards": max(len(cards), 1),
        "copy_gb_per_s": bandwidth / 1e9,
        "l2_bytes": timing.l2_bytes(device),
        "seconds": time.perf_counter() - started,
    }
    stem = (f"{bench}-sweep-" if sweep else f"{bench}-") + hardware_slug(device)
    stem += (f"-{slug(' '.join(wanted))}" if wanted else "") + ("-smoke" if tiny else "")
    title = f"{bench}; copy {bandwidth / 1e12:.2f} TB/s" if on_gpu else bench
    return Report(stem, title, "; ".join(labels), COLUMNS, CHARTS, settings, rows)


def spread(
    timed: Callable[..., list[Row]], listed: Sequence[Case], cards: Sequence[torch.device]
) -> Iterator[list[Row]]:
    """``timed`` of each case, in order, on whichever of ``cards`` is free. All contestants of a case run on one card.

    Each card has a process: most of the time goes into torch.compile, whose worker processes would otherwise outlive
    the run.
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
    """Initialize a process of the pool: it takes one card for itself."""
    global _card
    _card = free.get()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(compilers)
    if _card.type == "cuda":
        torch.cuda.set_device(_card)


def _timed_here(timed: Callable[..., list[Row]], case: Case) -> list[Row]:
    rows = timed(case, device=_card)
    if _card.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def case_rows(
    case: Case, iterations: int, warmup: int, device: torch.device, copy: float, tiny: bool, sweep: bool
) -> list[Row]:
    """The table's rows of one case: peers first, then ours. A contestant that is wrong or fails has an ``error``
    instead of times."""
    generator = torch.Generator(device).manual_seed(1)
    base: Row = {"case": case.name}
    failed: list[Row] = []
    try:
        sets, resident = timing.rotation(case.bytes, timing.l2_bytes(device))
        buffers = [case.make(device, generator) for _ in range(sets)]
        with ExitStack() as stack:
            if sweep:
                entries = swept_entries(case, buffers, device, stack, failed)
            else:
                peers = [Entry(name, "", run, False) for name, run in case.peers(buffers, device, tiny)]
                entries = [*peers, planned("triplan", case, buffers, device)]
            sound = []
            for entry in entries:
                error = verify(case, entry, buffers[0])
                if not error:
                    sound.append(entry)
                    continue
                row: Row = {"contestant": entry.name, "kernel": entry.kernel, "note": error}
                failed.append({**row, "error": error} if entry.ours else row)  # a peer's failure is not our error
            peaks = [peak_bytes(e) if device.type == "cuda" else None for e in sound]
            contestants = [Contestant(e.name, e.run, sets) for e in sound]
            found = timing.times(contestants, iterations, warmup, device, case.sustained)
    except (tp.TriplanError, RuntimeError) as failure:
        error = _first_line(failure)
        return [{**base, "contestant": "all", "error": error, "note": error}]
    best = min((d.median_us for e, d in zip(sound, found, strict=True) if not e.ours), default=None)
    alone = min(
        (d.sustained_us for e, d in zip(sound, found, strict=True) if d.sustained_us and not e.ours), default=None
    )
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
                **({} if alone is None or d.sustained_us is None else sustained(alone, d.sustained_us)),
                "peak_mib": None if peak is None else peak / 2**20,
                "resident_in_l2": resident,
                "repeats": d.repeats,
                "note": " ".join([*notes, *([d.not_captured] if d.not_captured else [])]),
            }
        )
    return [*rows, *({**base, **r} for r in failed)]


def sustained(peer_us: float, us: float) -> Row:
    return {"sustained_us": us, "sustained_vs_peer": speed_ratio(peer_us, us)}


def planned(name: str, case: Case, buffers: list[Buffers], device: torch.device, kernel: str | None = None) -> Entry:
    chosen, run, own_bytes = case.planned(buffers, device, kernel)
    return Entry(name, chosen, run, True, own_bytes)


def peak_bytes(entry: Entry) -> int:
    """The most bytes of device memory that a call uses beside its inputs: results and temporaries."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    entry.run(0)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before + entry.own_bytes


def swept_entries(
    case: Case, buffers: list[Buffers], device: torch.device, stack: ExitStack, failed: list[Row]
) -> list[Entry]:
    """Every entry of the kernel table, and every tile; tiles that do not compile are added to ``failed``."""
    entries = []
    tiles = stack.enter_context(registered(case)) if device.type == "cuda" else []
    others = [r.name for r in tp.TABLE.rows(case.op) if r.name not in tiles]
    for name in [*others, *tiles]:
        try:
            entries.append(planned(name, case, buffers, device, kernel=name))
        except tp.Unsupported:
            continue  # not for this size or this machine
        except tp.KernelInternal as e:
            error = str(e).splitlines()[0]
            failed.append({"contestant": name, "kernel": name, "error": error, "note": error})
    return entries


def _first_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"


def verify(case: Case, entry: Entry, b: Buffers) -> str:
    """Run once on ``b``; what is wrong, or empty. Our results are compared with float64, a peer's must be finite."""
    if entry.ours:
        case.spoil(b)
        try:
            entry.run(0)
        except tp.KernelInternal as failure:  # a tile that needs more shared memory or registers than there are
            return _first_line(failure)
        return case.mismatch(b)
    try:
        result = entry.run(0)
    except RuntimeError as failure:
        return _first_line(failure)
    first = result[0] if isinstance(result, tuple) else result
    return "" if bool(first.isfinite().all()) else "not finite"
