"""One engine for rowwise ops: rows in registers, rows in a loop, rows split between programs.

A family writes a subclass of ``Entry`` with what its ops share (arguments, traffic, guarantees), and for each kernel a
subclass of its kind and of that, in this order, with a tile and the launches that do the rows' own work. The kinds:

* ``WholeRows``: a tile holds whole rows; each element is read once.
* ``LoopedRows``: a program loops along rows of any length, twice; the second time they are in the L2 cache.
* ``SplitRows``: each block of a row has its own program, for few and long rows. One launch reduces each block into the
  workspace; the next merges the partial results of a row and writes.

From these follow when the entry applies, its cost, workspace, numerics id and launches. A family must write
``guarantee``, and each kernel ``tile`` and ``main`` (a split ``tile``, ``kernels`` and ``partials``); all else has a
default. ``desc`` is always a descriptor of one of the ops that the entry was registered for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch
from triplan.backends.table import kernel
from triplan.backends.triton.common.card import L2_BYTES
from triplan.backends.triton.common.offsets import TL, ceil_power, padded_bytes, values
from triplan.backends.triton.common.rows import Rows, Tile, again_us, waves_us
from triplan.descriptors import Operand, Role
from triplan.sku import SUPPORTED, ElementKind, PrecisionGuarantee, Support, Target
from triplan.sku.facts import fact

#: Programs of one launch at most: the x extent of a CUDA grid.
MOST_PROGRAMS = 2**31 - 1
#: Blocks of one row at most, as each finishing program of a split merges them all at once. Untuned.
MOST_BLOCKS = 4096
#: Warps that a multiprocessor holds (compute capability 8.0 and 9.0).
RESIDENT_WARPS = 64


class Rowwise(Protocol):
    """What the engine reads of a descriptor. Operands of shape ``input_shape`` consist of rows."""

    @property
    def op(self) -> str: ...
    @property
    def element(self) -> ElementKind: ...
    @property
    def input_shape(self) -> tuple[int, ...]: ...
    def operands(self) -> tuple[Operand, ...]: ...


D = TypeVar("D", bound=Rowwise)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one row: those read ``first``, to reduce it; those moved ``second``, for the results alone; and those of
    the first that the results need ``again``."""

    first: int
    second: int
    again: int


def is_backward(desc: Rowwise) -> bool:
    return desc.op.endswith("_backward")


@fact
def rows_along(desc: Rowwise, axis: int, in_order: bool) -> Rows:
    return Rows([o for o in desc.operands() if o.shape == desc.input_shape], axis, in_order)


def placed(arrays: Mapping[str, int], element: ElementKind) -> dict[str, Arg]:
    """The addresses of arrays of so many bytes, one after another in the workspace."""
    found: dict[str, Arg] = {}
    start = 0
    for name, size in arrays.items():
        found[name] = Scratch(start, element)
        start += size
    return found


class Entry(ABC, Generic[D]):
    """One kernel in the kernel table, for one or several ops of a family."""

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

    # --- what a family gives ---

    @abstractmethod
    def guarantee(self, desc: D) -> Mapping[str, PrecisionGuarantee]: ...

    def axis(self, desc: D) -> int:
        """The axis along which rows lie; by default the last."""
        return len(desc.input_shape) - 1

    def traffic(self, desc: D) -> Traffic:
        """By default all that is read reduces the row, and all results need it again."""
        row, whole = self.rows(desc).n * desc.element.itemsize, self.whole(desc)
        read = sum(o.role is not Role.OUTPUT for o in whole) * row
        written = sum(o.is_written for o in whole) * row
        return Traffic(read, written, again=read if written else 0)

    def arguments(self, desc: D, rows: int) -> dict[str, Arg]:
        """Every argument that a kernel may have, for programs of ``rows`` rows: sizes, operands and their strides."""
        r = self.rows(desc)
        args: dict[str, Arg] = {**r.arguments(rows), **{o.name: values(o) for o in desc.operands()}}
        return args | {f"{o.name}_strides": r.strides(o) for o in self.whole(desc)}

    def constants(self, desc: D) -> dict[str, Any]:
        """Every constant that a kernel may have, beside COMPUTE and the tile's ROWS and BLOCK."""
        return {}

    def arrays(self, desc: D) -> dict[str, int]:
        """Bytes of each array of the workspace, by the name of the kernels' argument. Elements are compute elements."""
        return {}

    def before(self, desc: D) -> list[Launch]:
        return []

    def after(self, desc: D) -> list[Launch]:
        return []

    def around_us(self, desc: D) -> float:
        """Microseconds of ``before`` and ``after``."""
        return 0.0

    # --- what a kernel gives ---

    @abstractmethod
    def tile(self, desc: D) -> Tile | None:
        """What a program reduces at a time; None where the entry does not apply. It decides bits, and so must not
        depend on the batch."""

    @abstractmethod
    def main(self, desc: D, tile: Tile) -> list[Launch]:
        """The launches that do the rows' own work. There is something to write."""

    @abstractmethod
    def us(self, desc: D, tile: Tile, target: Target) -> float:
        """Microseconds of ``main``."""

    def programs(self, desc: D, tile: Tile) -> int:
        """Programs of the largest launch."""
        return self.rows(desc).programs(tile.rows)

    def idle(self, desc: D) -> bool:
        """Whether ``main`` has nothing to write."""
        return self.rows(desc).count == 0 or all(o.numel == 0 for o in desc.operands() if o.is_written)

    # --- what follows ---

    def whole(self, desc: D) -> list[Operand]:
        """The operands that consist of whole rows."""
        return [o for o in desc.operands() if o.shape == desc.input_shape]

    @fact
    def rows(self, desc: D) -> Rows:
        """Where the rows lie."""
        return rows_along(desc, self.axis(desc), self.in_order)

    @fact
    def some_tile(self, desc: D) -> Tile:
        """``tile``; where the entry does not apply, one that a guarantee can be stated for."""
        return self.tile(desc) or self.rows(desc).block_tile(desc.element)

    def supports(self, desc: D, target: Target) -> Support:
        tile = self.tile(desc)
        if tile is None:
            return Support.no(f"rows of {self.rows(desc).n} elements do not fit in registers")
        if self.programs(desc, tile) > MOST_PROGRAMS:
            return Support.no(f"needs {self.programs(desc, tile)} programs; a grid holds at most {MOST_PROGRAMS}")
        for o in desc.operands():
            if o.shape != desc.input_shape and not o.layout.packed:
                return Support.no(f"{o.name} is not promised packed: only operands of whole rows may have gaps")
        return SUPPORTED

    def rank(self, desc: D, target: Target) -> float:
        return self.us(desc, self.some_tile(desc), target) + self.around_us(desc)

    def programs_us(self, programs: int, tile: Tile, target: Target) -> float:
        """What ``programs`` programs cost beside their traffic."""
        return programs * tile.warps * self.program_us / (RESIDENT_WARPS * max(target.sm_count, 1))

    def workspace(self, desc: D, target: Target) -> int:
        return sum(self.arrays(desc).values())

    def numerics(self, desc: D) -> str | None:
        if self.elementwise:
            return f"{desc.op}.{desc.element}.v{self.version}"
        name = f"{desc.op}.{self.name}.v{self.version}.{desc.element}.{self.some_tile(desc).text}"
        return self.rows(desc).numerics(name, desc.operands())

    def layout(self, desc: D) -> str:
        return "packed" if all(o.layout.packed for o in desc.operands()) else "strided"

    def launches(self, desc: D, target: Target) -> Sequence[Launch]:
        main = [] if self.idle(desc) else self.main(desc, self.some_tile(desc))
        return [*self.before(desc), *main, *self.after(desc)]

    def launch(
        self,
        desc: D,
        which: Any,
        grid: int,
        tile: Tile,
        args: Mapping[str, Arg] | None = None,
        registers: int = 0,
        **constants: Any,
    ) -> Launch:
        """The launch of one kernel, with what it asks for of all arguments and constants; an argument that there is not
        is None. ``registers``: a thread's at most."""
        compute, names = desc.element.compute, which.arg_names
        given = {**self.arguments(desc, tile.rows), **placed(self.arrays(desc), compute), **(args or {})}
        known = {"COMPUTE": TL[compute], "ROWS": tile.rows, "BLOCK": tile.block, **self.constants(desc), **constants}
        taken = {name: given.get(name) for name in names if not name.isupper()}
        constants = {name: known[name] for name in names if name in known}
        return Launch(which, grid, taken, constants, tile.warps, max_registers=registers)

    def register(self, *ops: str) -> None:
        """Add the entry to the kernel table, for each of ``ops``."""
        for op in ops:
            kernel(
                op=op,
                name=self.name,
                elements=("f16", "bf16", "f32", "f64"),
                index_elements=self.index_elements,
                guarantee=self.guarantee,
                supports=self.supports,
                rank=self.rank,
                workspace=self.workspace,
                numerics=self.numerics,
                priority=self.priority,
                layout=self.layout,
            )(self.launches)


class WholeRows(Entry[D]):
    name = "rows"

    def us(self, desc: D, tile: Tile, target: Target) -> float:
        t = self.traffic(desc)
        return waves_us(self.programs(desc, tile), tile.rows * (t.first + t.second), target)


class LoopedRows(Entry[D]):
    name = "looped"
    priority = 1
    #: What the second loop's reads cost, as a share of reads from memory: while the rows of all resident programs fit
    #: in the L2 cache, and otherwise. Untuned.
    cached_share: ClassVar[float] = 0.35
    missed_share: ClassVar[float] = 0.8

    def resident(self, tile: Tile) -> int:
        """Programs that run on a multiprocessor at a time."""
        return 2

    def us(self, desc: D, tile: Tile, target: Target) -> float:
        t, programs = self.traffic(desc), self.programs(desc, tile)
        running = min(self.rows(desc).count, self.resident(tile) * max(target.sm_count, 1))
        share = self.cached_share if running * t.again <= L2_BYTES else self.missed_share
        moved = waves_us(programs, tile.rows * (t.first + t.second + share * t.again), target)
        return moved + self.programs_us(programs, tile, target)


class SplitRows(Entry[D]):
    """Every finishing program merges the partial results of its row in the same order."""

    name = "split"
    priority = 2

    @abstractmethod
    def kernels(self, desc: D) -> tuple[Any, Any]:
        """The kernel that reduces a block, and the one that merges partial results and writes a block."""

    @abstractmethod
    def partials(self, desc: D) -> Sequence[str]:
        """The arrays of partial results, one element a block."""

    def blocks(self, desc: D) -> int:
        """Blocks of a row that are reduced. (One even of an empty row: its statistics are written.)"""
        return max(-(-self.rows(desc).n // self.some_tile(desc).block), 1)

    def finish_tile(self, desc: D) -> Tile:
        """What a program of the second launch writes."""
        return self.some_tile(desc)

    def finish_blocks(self, desc: D) -> int:
        """Programs of the second launch, for each row."""
        return self.blocks(desc)

    def arrays(self, desc: D) -> dict[str, int]:
        size = padded_bytes(self.rows(desc).count * self.blocks(desc) * desc.element.compute.itemsize)
        return super().arrays(desc) | dict.fromkeys(self.partials(desc), size)

    def programs(self, desc: D, tile: Tile) -> int:
        return self.rows(desc).count * max(self.blocks(desc), self.finish_blocks(desc))

    def supports(self, desc: D, target: Target) -> Support:
        if self.blocks(desc) > MOST_BLOCKS:
            return Support.no(f"rows have {self.blocks(desc)} blocks; at most {MOST_BLOCKS} are merged at once")
        return super().supports(desc, target)

    def reduce_us(self, desc: D, tile: Tile, target: Target) -> float:
        """Microseconds of the first launch."""
        r, blocks = self.rows(desc), self.blocks(desc)
        moved = waves_us(r.count * blocks, r.sectors(desc.element) * self.traffic(desc).first / blocks, target)
        return moved + self.programs_us(r.count * blocks, tile, target)

    def us(self, desc: D, tile: Tile, target: Target) -> float:
        r, t, blocks = self.rows(desc), self.traffic(desc), self.finish_blocks(desc)
        sectors = r.sectors(desc.element)
        written = waves_us(r.count * blocks, sectors * t.second / blocks, target)
        return self.reduce_us(desc, tile, target) + written + again_us(r.count * sectors * t.again)

    def main(self, desc: D, tile: Tile) -> list[Launch]:
        count, blocks, (reduce, finish) = self.rows(desc).count, self.blocks(desc), self.kernels(desc)
        args, grid = {"blocks": Int(blocks)}, count * self.finish_blocks(desc)
        return [
            self.launch(desc, reduce, count * blocks, tile, args),
            self.launch(desc, finish, grid, self.finish_tile(desc), args, BLOCKS=ceil_power(blocks)),
        ]
