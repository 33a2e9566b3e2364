"""One engine for rowwise ops: rows in registers, rows in a loop, rows split between programs.

A family writes a subclass of ``Entry`` with what its ops share (arguments, traffic, guarantees), and for each kernel a
subclass of its kind and of that, in this order, with a tile and the launches that do the rows' own work. The kinds:

* ``WholeRows``: a tile holds whole rows; each element is read once.
* ``LoopedRows``: a program loops along rows of any length, twice; the second time they are in the L2 cache.
* ``SplitRows``: each block of a row has its own program, for few and long rows. One launch reduces each block into the
  workspace; the next merges the partial results of a row and writes.

From these follow when the entry applies, its cost, workspace, numerics id and launches. A family must write
``guarantee``, and each kernel ``find_tile`` and ``main`` (a split ``find_tile``, ``kernels`` and ``partials``); all
else has a default. An instance is the kernel applied to one problem, so that each fact of it is found once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch
from triplan.backends.table import kernel
from triplan.backends.triton.common import bounds
from triplan.backends.triton.common.card import L2_BYTES
from triplan.backends.triton.common.offsets import TL, ceil_power, padded_bytes, values
from triplan.backends.triton.common.rows import Rows, Tile, again_us, waves_us
from triplan.descriptors import RowsDescriptor
from triplan.sku import SUPPORTED, ElementKind, PrecisionGuarantee, Support, Target
from triplan.sku.facts import cached_property, fact

#: Programs of one launch at most: the x extent of a CUDA grid.
MOST_PROGRAMS = 2**31 - 1
#: Blocks of one row at most, as each finishing program of a split merges them all at once. Untuned.
MOST_BLOCKS = 4096
#: Warps that a multiprocessor holds (compute capability 8.0 and 9.0).
RESIDENT_WARPS = 64


D = TypeVar("D", bound=RowsDescriptor)


class Traffic(NamedTuple):
    """Bytes of one row: those read ``first``, to reduce it; those moved ``second``, for the results alone; and those of
    the first that the results need ``again``."""

    first: int
    second: int
    again: int


@fact
def rows_along(desc: RowsDescriptor, axis: int, in_order: bool) -> Rows:
    return Rows([o for o in desc.operands() if o.shape == desc.input_shape], axis, desc.element, in_order)


def placed(arrays: Mapping[str, int], element: ElementKind) -> dict[str, Arg]:
    """The addresses of arrays of so many bytes, one after another in the workspace."""
    found: dict[str, Arg] = {}
    start = 0
    for name, size in arrays.items():
        found[name] = Scratch(start, element)
        start += size
    return found


class Entry(ABC, Generic[D]):
    """One kernel in the kernel table, for one or several ops of a family; an instance is that kernel for ``desc``, a
    descriptor of one of these ops."""

    name: ClassVar[str]
    #: Where batch invariance is required, the entry of the smallest priority is taken (see the kernel table).
    priority: ClassVar[int] = 0
    #: Part of the numerics id: raised when bits change.
    version: ClassVar[int] = 1
    #: Whether each element is computed alone: then neither tile nor layout decides bits.
    elementwise: ClassVar[bool] = False
    index_elements: ClassVar[tuple[str, ...]] = ()
    #: Whether rows are numbered row-major, as operands with one element a row require.
    in_order: ClassVar[bool] = True
    #: Microseconds a program costs beside its traffic, while RESIDENT_WARPS warps run on its multiprocessor.
    program_us: ClassVar[float] = 0.0

    def __init__(self, desc: D) -> None:
        """A family that keeps facts of its own sets them before it calls this: ``axis`` and ``find_tile`` read them."""
        self.desc, self.element, self.compute = desc, desc.element, desc.element.compute
        self.backward = desc.op.endswith("_backward")
        #: Where the rows lie.
        self.rows = rows_along(desc, self.axis(), self.in_order)
        self.own_tile = self.find_tile()
        #: ``own_tile``; where the entry does not apply, one that a guarantee can be stated for.
        self.tile = self.own_tile or self.rows.block_tile()

    # --- what a family gives ---

    @abstractmethod
    def guarantee(self) -> Mapping[str, PrecisionGuarantee]: ...

    def axis(self) -> int:
        """The axis along which rows lie; by default the last."""
        return len(self.desc.input_shape) - 1

    def traffic(self) -> Traffic:
        """By default all that is read reduces the row, and all results need it again."""
        row = self.rows.n * self.element.itemsize
        read, written = self.rows.read * row, self.rows.written * row
        return Traffic(read, written, again=read if written else 0)

    def arguments(self) -> dict[str, Arg]:
        """Every argument that a kernel may have, beside the workspace's arrays and the tile's ``blocks``: sizes,
        operands and their strides."""
        strides = {f"{o.name}_strides": self.rows.strides(o) for o in self.rows.operands}
        return {**self.rows.sizes(), **{o.name: values(o) for o in self.desc.operands()}, **strides}

    def constants(self) -> dict[str, Any]:
        """Every constant that a kernel may have, beside COMPUTE and the tile's ROWS and BLOCK."""
        return {}

    def arrays(self) -> dict[str, int]:
        """Bytes of each array of the workspace, by the name of the kernels' argument. Elements are compute elements."""
        return {}

    def before(self) -> list[Launch]:
        return []

    def after(self) -> list[Launch]:
        return []

    def around_us(self) -> float:
        """Microseconds of ``before`` and ``after``."""
        return 0.0

    # --- what a kernel gives ---

    @abstractmethod
    def find_tile(self) -> Tile | None:
        """What a program reduces at a time; None where the entry does not apply. It decides bits, and so must not
        depend on the batch."""

    @abstractmethod
    def main(self) -> list[Launch]:
        """The launches that do the rows' own work. There is something to write."""

    @abstractmethod
    def us(self, target: Target) -> float:
        """Microseconds of ``main``."""

    def programs(self) -> int:
        """Programs of the largest launch."""
        return self.rows.outer * self.rows.groups(self.tile.rows)

    def idle(self) -> bool:
        """Whether ``main`` has nothing to write."""
        return self.rows.count == 0 or all(o.numel == 0 for o in self.desc.operands() if o.is_written)

    # --- what follows ---

    def supports(self, target: Target) -> Support:
        if self.own_tile is None:
            return Support.no(f"rows of {self.rows.n} elements do not fit in registers")
        if self.programs() > MOST_PROGRAMS:
            return Support.no(f"needs {self.programs()} programs; a grid holds at most {MOST_PROGRAMS}")
        for o in self.desc.operands():
            if not o.layout.packed and o.shape != self.desc.input_shape:
                return Support.no(f"{o.name} is not promised packed: only operands of whole rows may have gaps")
        return SUPPORTED

    def rank(self, target: Target) -> float:
        return self.us(target) + self.around_us()

    def programs_us(self, programs: int, target: Target) -> float:
        """What ``programs`` programs cost beside their traffic."""
        return programs * self.tile.warps * self.program_us / (RESIDENT_WARPS * max(target.sm_count, 1))

    def numerics(self) -> str | None:
        if self.elementwise:
            return f"{self.desc.op}.{self.element}.v{self.version}"
        name = f"{self.desc.op}.{self.name}.v{self.version}.{self.element}.{self.tile.text}"
        return self.rows.numerics(name, self.desc.operands())

    def layout(self) -> str:
        return "packed" if all(o.layout.packed for o in self.desc.operands()) else "strided"

    def rounded(
        self,
        relative: float,
        per_term: float = 0.0,
        *,
        out: ElementKind | None = None,
        flushes: float | None = None,
        lost: float = 0.0,
        batch: bool = False,
        order: bool = False,
    ) -> PrecisionGuarantee:
        """``bounds.rounded`` of a result in ``out``, by default the descriptor's element. By default any operation may
        flush: approximate exponentials and products do."""
        flushes = relative + per_term if flushes is None else flushes
        how = {"relative": relative, "per_term": per_term, "flushes": flushes, "lost": lost}
        return bounds.rounded(out or self.element, self.compute, **how, batch=batch, order=order)

    def launches(self, target: Target) -> Sequence[Launch]:
        return [*self.before(), *([] if self.idle() else self.main()), *self.after()]

    @cached_property
    def _given(self) -> tuple[dict[str, Arg], dict[str, Any]]:
        """The arguments and constants that all launches choose from."""
        args = {**self.arguments(), **placed(self.arrays(), self.compute)}
        return args, {"COMPUTE": TL[self.compute], **self.constants()}

    def launch(
        self,
        which: Any,
        grid: int | None = None,
        tile: Tile | None = None,
        args: Mapping[str, Arg] | None = None,
        registers: int = 0,
        **constants: Any,
    ) -> Launch:
        """The launch of one kernel, with what it asks for of all arguments and constants; an argument that there is not
        is None. By default of ``programs`` programs of ``tile``. ``registers``: a thread's at most."""
        tile, (given, known) = tile or self.tile, self._given
        groups = {"blocks": Int(self.rows.groups(tile.rows))} if "blocks" in which.arg_names else {}
        given = {**given, **groups, **(args or {})}
        known = {**known, "ROWS": tile.rows, "BLOCK": tile.block, **constants}
        taken = {name: given.get(name) for name in which.arg_names if not name.isupper()}
        constants = {name: known[name] for name in which.arg_names if name in known}
        grid = self.programs() if grid is None else grid
        return Launch(which, grid, taken, constants, tile.warps, max_registers=registers)

    @classmethod
    def register(cls, *ops: str) -> None:
        """Add the entry to the kernel table, for each of ``ops``."""
        of: Callable[[Any], Entry[D]] = fact(cls)
        for op in ops:
            kernel(
                op=op,
                name=cls.name,
                elements=("f16", "bf16", "f32", "f64"),
                index_elements=cls.index_elements,
                guarantee=lambda desc: of(desc).guarantee(),
                supports=lambda desc, target: of(desc).supports(target),
                rank=lambda desc, target: of(desc).rank(target),
                workspace=lambda desc, target: sum(of(desc).arrays().values()),
                numerics=lambda desc: of(desc).numerics(),
                priority=cls.priority,
                layout=lambda desc: of(desc).layout(),
            )(lambda desc, target: of(desc).launches(target))


class WholeRows(Entry[D]):
    name = "rows"

    def us(self, target: Target) -> float:
        return waves_us(self.programs(), self.tile.rows * (self.traffic().first + self.traffic().second), target)


class LoopedRows(Entry[D]):
    name = "looped"
    priority = 1
    #: What the second loop's reads cost, as a share of reads from memory: while the rows of all resident programs fit
    #: in the L2 cache, and otherwise. Untuned.
    cached_share: ClassVar[float] = 0.35
    missed_share: ClassVar[float] = 0.8

    def resident(self) -> int:
        """Programs that run on a multiprocessor at a time."""
        return 2

    def us(self, target: Target) -> float:
        t, programs = self.traffic(), self.programs()
        running = min(self.rows.count, self.resident() * max(target.sm_count, 1))
        share = self.cached_share if running * t.again <= L2_BYTES else self.missed_share
        moved = waves_us(programs, self.tile.rows * (t.first + t.second + share * t.again), target)
        return moved + self.programs_us(programs, target)


class SplitRows(Entry[D]):
    """Every finishing program merges the partial results of its row in the same order."""

    name = "split"
    priority = 2

    @abstractmethod
    def kernels(self) -> tuple[Any, Any]:
        """The kernel that reduces a block, and the one that merges partial results and writes a block."""

    @abstractmethod
    def partials(self) -> Sequence[str]:
        """The arrays of partial results, one element a block."""

    def blocks(self) -> int:
        """Blocks of a row that are reduced. (One even of an empty row: its statistics are written.)"""
        return max(-(-self.rows.n // self.tile.block), 1)

    def finish(self) -> tuple[Tile, int]:
        """What a program of the second launch writes, and its programs for each row."""
        return self.tile, self.blocks()

    def arrays(self) -> dict[str, int]:
        size = padded_bytes(self.rows.count * self.blocks() * self.compute.itemsize)
        return super().arrays() | dict.fromkeys(self.partials(), size)

    def programs(self) -> int:
        return self.rows.count * max(self.blocks(), self.finish()[1])

    def supports(self, target: Target) -> Support:
        if self.blocks() > MOST_BLOCKS:
            return Support.no(f"rows have {self.blocks()} blocks; at most {MOST_BLOCKS} are merged at once")
        return super().supports(target)

    def reduce_us(self, target: Target) -> float:
        """Microseconds of the first launch."""
        programs = self.rows.count * self.blocks()
        moved = waves_us(programs, self.rows.sectors() * self.traffic().first / self.blocks(), target)
        return moved + self.programs_us(programs, target)

    def us(self, target: Target) -> float:
        count, sectors, t, blocks = self.rows.count, self.rows.sectors(), self.traffic(), self.finish()[1]
        written = waves_us(count * blocks, sectors * t.second / blocks, target)
        return self.reduce_us(target) + written + again_us(count * sectors * t.again)

    def main(self) -> list[Launch]:
        count, blocks, (reduce, finish), (tile, each) = self.rows.count, self.blocks(), self.kernels(), self.finish()
        args = {"blocks": Int(blocks)}
        written = self.launch(finish, count * each, tile, args, BLOCKS=ceil_power(blocks))
        return [self.launch(reduce, count * blocks, args=args), written]
