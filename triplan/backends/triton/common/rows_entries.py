"""One engine for rowwise ops: rows in registers, rows in a loop, rows split between programs.

A family writes a subclass of ``Entry`` with what its ops share, and for each kernel a subclass of its kind
(``WholeRows``, ``LoopedRows``, ``SplitRows``) and of that, in this order. From these follow when the entry applies, its
cost, workspace, numerics id and launches. A family must write ``guaranteed``, and each kernel ``find_tile``, and
``main`` or ``which`` (a split ``which`` and ``partials``); all else has a default. A class that is given ``ops`` is
registered for them. An instance is the kernel applied to one problem, so that each fact of it is found once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch
from triplan.backends.table import kernel
from triplan.backends.triton.common import bounds
from triplan.backends.triton.common.card import L2_BYTES, LAUNCH_US, OVERLAPPED_LAUNCH_US, SM_PROGRAMS, SM_WARPS
from triplan.backends.triton.common.offsets import TL, ceil_power, layout, padded_bytes, values
from triplan.backends.triton.common.rows import Rows
from triplan.backends.triton.common.tiles import Tile, again_us, registers_for, tile_of, waves_us
from triplan.descriptors import Operand, Role
from triplan.descriptors.base import RowsDescriptor
from triplan.sku import SUPPORTED, ElementKind, PrecisionGuarantee, Support, Target, interpreting
from triplan.sku.facts import cached_property, fact

#: Blocks of one row at most, as each finishing program of a split merges them all at once. Untuned.
MOST_BLOCKS = 4096
#: Partial results of several rows at most that a program of a split merges at once. Untuned.
MOST_MERGED = 4096
#: Rows of a tile that is written, relative to one that is read: the first of these with which a program merges few
#: enough. The longer the pieces that are written, the better.
WRITTEN = (4, 2)
#: Elements of a row at most where threads hold them as they are read; elements of each thread, two to a register, and
#: its registers at most.
MOST_NARROW = 32768
NARROW_EACH = 128
#: How much longer f64 takes than f32 where instructions are the limit.
F64_SLOWDOWN = 2.5
#: Fewest programs that an estimate counts on a multiprocessor, in a loop of 16 bits and in a split: one that is alone
#: takes that share of the time of a full one. (From drawn problems on an H200, as are the next ones.)
ALONE, SPLIT_ALONE = 1.1, 0.5
#: How much faster splits are of which only one launch has tiles of several rows, and forward ones of 16 bits
#: where rows are crossed.
TURNED_ONCE = 1.1
#: Elements a microsecond that tiles of several rows access one by one, each in a sector of its own (see ``apart_us``).
#: From drawn problems on an H200, of norms.
APART_PER_US = 6.5e4
rows_of = fact(Rows)


class Entry(ABC):
    """One kernel in the kernel table, for one or several ops; an instance is that kernel for ``desc``."""

    desc: RowsDescriptor
    name: ClassVar[str]
    #: Where batch invariance is required, the entry of the smallest priority is taken (see the kernel table).
    priority: ClassVar[int] = 0
    #: Part of the numerics id: raised when bits change. And that of the kernel, which is part of its SKU.
    version: int = 1
    sku_version: ClassVar[int] = 1
    #: Whether each element is computed alone: then neither tile nor layout decides bits.
    elementwise: ClassVar[bool] = False
    elements: ClassVar[tuple[str, ...]] = ("f16", "bf16", "f32", "f64")
    index_elements: ClassVar[tuple[str, ...]] = ()
    #: Operands that are read for the results alone; the others that are read also reduce their rows.
    late: ClassVar[tuple[str, ...]] = ()
    #: Whether kernels access gapped operands by ``load_rows``.
    along: ClassVar[bool] = False
    #: Whether launches begin while the one ahead of them ends, as all are short.
    overlaps: ClassVar[bool] = False
    #: Microseconds a program costs beside its traffic, while SM_WARPS warps run on its multiprocessor, or its programs.
    program_us: ClassVar[float] = 0.0
    #: The kernel of the op, and that of its backward, of which ``main`` is one launch.
    which: Sequence[Any]

    def __init_subclass__(cls, ops: Sequence[str] = ()) -> None:
        """Add the entry to the kernel table, for each of ``ops``; none for what entries have in common."""
        of: Callable[[Any], Entry] = fact(cls)
        for op in ops:
            kernel(
                op=op,
                name=cls.name,
                elements=cls.elements,
                index_elements=cls.index_elements,
                guarantee=lambda desc: bounds.of_outputs(desc, of(desc).guaranteed),
                supports=lambda desc, target: of(desc).supports(target),
                rank=lambda desc, target: of(desc).rank(target),
                workspace=lambda desc, target: of(desc).nbytes(*of(desc).arrays().values()),
                numerics=lambda desc: of(desc).numerics(),
                priority=cls.priority,
                version=cls.sku_version,
                layout=layout,
            )(lambda desc, target: of(desc).launches(target))

    def __init__(self, desc: RowsDescriptor) -> None:
        """A family sets facts of its own before it calls this: ``find_tile`` reads them."""
        self.desc, self.element, self.compute = desc, desc.element, desc.element.compute
        self.backward = desc.op.endswith("_backward")
        #: Where the rows lie.
        self.rows = self.find_rows(desc)
        read = [o for o in self.rows.operands if o.role is not Role.OUTPUT]
        #: The operands whose rows are read or written, those with both twice; those that are read to reduce rows.
        self.moved = [*read, *(o for o in self.rows.operands if o.is_written)]
        self.read_first = [o for o in read if o.name not in self.late]
        self.own_tile = self.find_tile()
        #: ``own_tile``; where the entry does not apply, one that a guarantee can be stated for.
        self.tile = self.own_tile or self.rows.block_tile()

    # --- what a family gives ---

    @abstractmethod
    def guaranteed(self, o: Operand) -> PrecisionGuarantee:
        """The guarantee of one output that is not ``status``."""

    def arguments(self) -> dict[str, Arg]:
        """Every argument that a kernel may have, beside the workspace's arrays and the tile's ``blocks``."""
        strides = {f"{o.name}_strides": self.rows.strides(o, self.turns()) for o in self.rows.operands}
        sizes = self.rows.sizes(self.is_turned())
        return {**sizes, **{o.name: values(o) for o in self.desc.operands()}, **strides}

    def is_turned(self) -> bool:
        """Whether kernels are told which powers of two divide the sizes along rows and across. Then masks of whole
        vectors hold in either direction, and operands that lie across rows have vectors, too."""
        return self.rows.crossed

    def constants(self) -> dict[str, Any]:
        """Every constant that a kernel may have, beside COMPUTE and the tile's ROWS and BLOCK."""
        return {}

    def arrays(self) -> dict[str, int]:
        """Compute elements of each array of the workspace, by the name of the kernels' argument."""
        return {}

    # --- what a kernel gives ---

    def find_rows(self, desc: RowsDescriptor) -> Rows:
        """Where the rows lie, and how they are numbered."""
        return rows_of(desc)

    @abstractmethod
    def find_tile(self) -> Tile | None:
        """What a program reduces at a time; None where the entry does not apply. It decides bits, and so must not
        depend on the batch."""

    def main(self) -> list[Launch]:
        """The launches that do the rows' own work. There is something to write."""
        return [self.launch(self.which[self.backward], registers=self.most_registers())]

    def most_registers(self) -> int:
        """Registers of a thread at most; left alone (0), ptxas may spill a few to fit one more program."""
        return 0

    def us(self, target: Target) -> float:
        """Microseconds of ``main`` beside its first launch; by default of its traffic."""
        return waves_us(self.rows.count, sum(self.traffic()), target)

    def programs(self) -> int:
        """Programs of the largest launch; by default one a tile."""
        return self.rows.programs(self.tile)

    def idle(self) -> bool:
        """Whether ``main`` has nothing to write."""
        return self.rows.count == 0 or all(o.numel == 0 for o in self.desc.operands() if o.is_written)

    # --- what follows, to which a family may add ---

    def supports(self, target: Target) -> Support:
        if self.own_tile is None:
            return Support.no(f"rows of {self.rows.n} elements do not fit in registers")
        for o in self.desc.operands():
            if not o.layout.packed and o.shape != self.desc.input_shape:
                return Support.no(f"{o.name} is not promised packed: only operands of whole rows may have gaps")
        return SUPPORTED

    def rank(self, target: Target) -> float:
        return LAUNCH_US + self.us(target)

    def numerics(self) -> str | None:
        if self.elementwise:
            return f"{self.desc.op}.{self.element}.v{self.version}"
        along = ".along" if self.turns() else ""
        name = f"{self.desc.op}.{self.name}.v{self.version}.{self.element}.{self.tile.text}{along}"
        return self.rows.numerics(name, self.desc.operands())

    def launches(self, target: Target) -> list[Launch]:
        return [] if self.idle() else self.main()

    # --- what kinds and families use ---

    def several(self) -> bool:
        """Whether programs of any launch hold several rows."""
        return self.tile.rows > 1

    def turns(self) -> bool:
        """Whether the kernel is told to give consecutive threads consecutive elements of a row, in operands that are
        ``gapped``. With one row a program they have these anyway."""
        return self.along and self.rows.gapped and self.several()

    def traffic(self) -> tuple[int, int]:
        """Bytes of one row: those read first, to reduce it, and those moved second, for the results alone. If there
        are any of these, the first are read again."""
        first, every = (self.rows.n * sum(o.element.itemsize for o in some) for some in (self.read_first, self.moved))
        return first, every - first

    def later_us(self) -> float:
        """Microseconds of a launch after the first."""
        return OVERLAPPED_LAUNCH_US if self.overlaps else LAUNCH_US

    def reducing_us(self, programs: int, nbytes: float, target: Target) -> float:
        """Microseconds of programs that reduce ``nbytes`` each: their traffic or their number is the limit."""
        return max(waves_us(programs, nbytes, target), self.busy_us(programs, target))

    def tiles_us(self, tile: Tile, programs: int, per_us: float, target: Target, alone: float = 1.0) -> float:
        """Microseconds of ``programs`` of a ``tile`` of several rows, bound by instructions: ``per_us`` elements of a
        multiprocessor in one, and ``alone``, the fewest programs that are counted on one. Rows that a tile lacks cost
        nothing."""
        slowdown = F64_SLOWDOWN if self.element is ElementKind.F64 else 1.0
        held = self.rows.numbered / max(self.rows.groups(tile.rows), 1)  # rows of a tile that exist
        return slowdown * held * tile.block * max(programs / target.sm_count, alone) / per_us

    def apart_us(self, operands: Sequence[Operand] = ()) -> float:
        """Microseconds of elements (of ``operands``, by default all) that tiles of several rows access one by one, as
        neither elements of a row nor its neighbours are adjacent. (If the kernel ``turns``, consecutive threads share
        sectors.)"""
        r = self.rows
        if self.turns() or not r.crossed:
            return 0.0
        apart = (o.numel for o in operands or r.operands if not (r.is_along(o) or r.is_adjacent(o)))
        return sum(apart) / APART_PER_US

    def busy_us(self, programs: int, target: Target) -> float:
        """Microseconds that ``programs`` programs cost beside their traffic."""
        held = max(self.tile.warps, SM_WARPS // SM_PROGRAMS)
        return programs * held * self.program_us / (SM_WARPS * target.sm_count)

    @cached_property
    def given(self) -> dict[str, Arg]:
        """The arguments that all launches choose from."""
        args, start = self.arguments(), 0
        for name, length in self.arrays().items():  # one after another in the workspace
            args[name], start = Scratch(start, self.compute), start + self.nbytes(length)
        return args

    def nbytes(self, *lengths: int) -> int:
        """Bytes of the workspace that arrays of so many elements take."""
        return sum(padded_bytes(length * self.compute.itemsize) for length in lengths)

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
        tile = tile or self.tile
        groups = None if self.rows.flat else Int(self.rows.groups(tile.rows))
        given = {"blocks": groups, "groups": groups, **self.given, **(args or {})}
        own = {"COMPUTE": TL[self.compute], "ROWS": tile.rows, "BLOCK": tile.block}
        known = {**own, **self.constants(), **constants}
        taken = {name: given.get(name) for name in which.arg_names if not name.isupper()}
        constants = {name: known[name] for name in which.arg_names if name in known}
        grid = self.programs() if grid is None else grid
        return Launch(which, grid, taken, constants, tile.warps, overlaps=self.overlaps, max_registers=registers)


class WholeRows(Entry):
    """A tile holds whole rows; each element is read once."""

    name = "rows"
    #: Elements of a row at most, forward and backward, that registers hold as compute elements; of f64 a quarter.
    longest: ClassVar[Sequence[int]]
    #: Bytes of a tile of several short rows, forward and backward.
    held: ClassVar[Sequence[int]] = (4096, 4096)
    #: Whether few warps share a row, forward and backward (see ``Rows.whole_tile``).
    few_warps: ClassVar[Sequence[bool]] = (True, True)
    #: Elements of a row above which ``narrow`` pays, forward and backward.
    narrow_above: ClassVar[Sequence[int]] = (MOST_NARROW, MOST_NARROW)

    def find_tile(self) -> Tile | None:
        if self.narrow():
            block = ceil_power(self.rows.n)
            return Tile(1, block, block // (32 * NARROW_EACH))
        most = self.longest[self.backward] // (4 if self.element is ElementKind.F64 else 1)
        return self.rows.whole_tile(most, self.held[self.backward], self.few_warps[self.backward])

    def narrow(self) -> bool:
        """Whether threads hold 16-bit elements as they are read: as compute elements they would fill a multiprocessor's
        registers. (With an address for each, narrow ones would not fit either.)"""
        fits = self.narrow_above[self.backward] < ceil_power(self.rows.n) <= MOST_NARROW
        return fits and self.element.itemsize == 2 and self.rows.vectors

    def most_registers(self) -> int:
        return min(registers_for(self.tile, 2), NARROW_EACH) if self.narrow() and not interpreting() else 0

    def constants(self) -> dict[str, Any]:
        return {**super().constants(), "NARROW": self.narrow() and not interpreting()}

    def us(self, target: Target) -> float:
        held = min(self.tile.rows, self.rows.numbered)
        nbytes = held * self.rows.sectors(self.tile.rows) * sum(self.traffic())
        return self.reducing_us(self.programs(), nbytes, target)


class LoopedRows(Entry):
    """A program loops along rows of any length, twice; the second time they are in the L2 cache."""

    name = "looped"
    priority = 1
    #: What the second loop's reads cost, as a share of reads from memory: while the rows of all resident programs fit
    #: in the L2 cache, and otherwise. Untuned.
    cached_share: float = 0.35
    missed_share: float = 0.8
    #: Programs that run on a multiprocessor at a time.
    resident: int = 2
    #: Elements of tiles of several rows that a multiprocessor has in a microsecond: forward of 16 bits and of more,
    #: backward of 16 bits and of more. (From drawn problems on an H200.)
    several_per_us: Sequence[float] = (2500.0, 1800.0, 1500.0, 1500.0)

    def programs(self) -> int:
        return self.rows.programs(self.tile, blocks=1)

    def unroll(self) -> int:
        """Blocks of one row that are loaded at a time."""
        return 1

    def shiftable(self) -> bool:
        """Whether programs may read longer rows than a tile's by vectors, from the one on that a row begins in."""
        return False

    def shifted(self) -> bool:
        return self.shiftable() and self.tile.block < self.rows.n

    def constants(self) -> dict[str, Any]:
        vector = 16 // self.element.itemsize if self.shifted() else self.rows.vector(self.tile)
        return {**super().constants(), "UNROLL": self.unroll(), "VECTOR": vector}

    def us(self, target: Target) -> float:
        first, second = self.traffic()
        again = first if second else 0
        running = min(self.rows.count, self.resident * target.sm_count)
        nbytes = first + second + self.again_share(running * again) * again
        nbytes *= self.tile.rows * self.rows.sectors(self.tile.rows)
        return self.reducing_us(self.programs(), nbytes, target)

    def again_share(self, nbytes: float) -> float:
        """What the second loop's reads cost, of the ``nbytes`` of all programs that run at a time."""
        return self.cached_share if nbytes <= L2_BYTES else self.missed_share

    def several_us(self, target: Target) -> float:
        """Microseconds of tiles of several rows, bound by instructions; 0 for tiles of one."""
        tile, narrow = self.tile, self.element.itemsize == 2
        if tile.rows == 1:
            return 0.0
        per_us = self.several_per_us[2 * self.backward + (not narrow)]
        # With more programs than multiprocessors and up to twice as many, the busiest have two. (Of wider elements two
        # take hardly longer than one.)
        busiest = 2.0 if 1 < self.programs() / target.sm_count <= 2 else ALONE
        us = self.rows.blocks(tile) * self.tiles_us(tile, self.programs(), per_us, target, busiest if narrow else 1.0)
        return max(us, self.apart_us())


class SplitRows(Entry):
    """Each block of a row has its own program, for few and long rows. One launch reduces each block into the workspace.
    In the last, every program merges the partial results of its row in the same order, and writes.

    Where neighbouring rows are adjacent in memory in some operands, programs have blocks of several rows: they move
    whole sectors, and turn the block between their threads. Where programs of several rows would merge too much, a
    launch between the two merges the partial results of each row.
    """

    name = "split"
    priority = 2
    #: The kernels of the launches before ``which``, which writes: of the op, and of its backward.
    reduced: ClassVar[Sequence[Any]]
    merged: ClassVar[Sequence[Any]]
    #: Elements of tiles of several rows that a multiprocessor has in a microsecond in both launches: forward, backward,
    #: and backward of more than 16 bits.
    turned_per_us: Sequence[float]
    #: Operands that a program holds at a time, forward and backward.
    held: ClassVar[Sequence[int]] = (1, 1)

    @abstractmethod
    def partials(self) -> tuple[str, ...]:
        """The arrays of partial results, one element a block; ``row_`` and their names are those of merged ones."""

    @cached_property
    def tiles(self) -> tuple[Tile, Tile]:
        """What a program of the first and of the last launch holds: of one row where those of several would merge too
        much, or where the last writes no rows."""
        r, read, held = self.rows, self.read_first, self.held[self.backward]
        first = r.turned_tile(read, 1, held) or r.lone_tile(read, len(read))
        if not self.writes_rows():
            return first, Tile(1, first.block, 4)
        merged, alone = ceil_power(r.blocks(first)), r.lone_tile(r.operands, len(read))
        found = [r.turned_tile(r.operands, times, held) or alone for times in WRITTEN]
        return first, next((tile for tile in found if tile.rows * merged <= MOST_MERGED), found[0])

    def writes_rows(self) -> bool:
        return any(o.is_written for o in self.rows.operands)

    def find_tile(self) -> Tile:
        return self.tiles[0]

    def several(self) -> bool:
        return any(tile.rows > 1 for tile in self.tiles)

    def is_turned(self) -> bool:
        return self.several()

    def blocks(self) -> int:
        """Blocks of a row that are reduced."""
        return self.rows.blocks(self.tile)

    def finish(self) -> tuple[Tile, int]:
        """What a program of the last launch writes, and its programs for each row."""
        return self.tiles[1], self.rows.blocks(self.tiles[1]) if self.writes_rows() else 1

    def merges_apart(self) -> bool:
        return self.tiles[1].rows > 1 and self.tiles[1].rows * ceil_power(self.blocks()) > MOST_MERGED

    def arrays(self) -> dict[str, int]:
        """Those of the blocks, and if they are merged apart those of the rows."""
        size, names = 0 if self.idle() else self.rows.count, self.partials()
        rows = {f"row_{name}": size for name in names} if self.merges_apart() else {}
        return super().arrays() | dict.fromkeys(names, size * self.blocks()) | rows

    def programs(self) -> int:
        return max(self.rows.programs(self.tile), self.rows.programs(*self.finish()))

    def supports(self, target: Target) -> Support:
        if self.blocks() > MOST_BLOCKS:
            return Support.no(f"rows have {self.blocks()} blocks; at most {MOST_BLOCKS} are merged at once")
        return super().supports(target)

    def reduce_us(self, target: Target) -> float:
        """Microseconds of the first launch."""
        tile = self.tile
        nbytes = tile.rows * self.rows.sectors(tile.rows, self.read_first) * self.traffic()[0] / self.blocks()
        return self.reducing_us(self.rows.programs(tile), nbytes, target)

    def us(self, target: Target) -> float:
        r, (first, second), (tile, pieces) = self.rows, self.traffic(), self.finish()
        nbytes = tile.rows * r.sectors(tile.rows) * second / pieces
        again = r.count * r.sectors(tile.rows, self.read_first) * first if second else 0
        us = self.reduce_us(target) + again_us(again) + self.later_us()
        us += self.reducing_us(r.programs(tile, pieces), nbytes, target)
        wide, once = self.element.itemsize > 2, 1 in (self.tile.rows, tile.rows)
        if tile.rows == 1:  # where the second launch does not read again, the first may have several rows all the same
            tile, pieces = self.tiles[0], self.blocks()
        if tile.rows == 1:
            return us
        once |= r.crossed and not self.backward and not wide
        per_us = self.turned_per_us[self.backward * (1 + wide)] * (TURNED_ONCE if once else 1.0)
        busy = max(self.tiles_us(tile, r.programs(tile, pieces), per_us, target, SPLIT_ALONE), self.apart_us())
        return self.merges_apart() * self.later_us() + max(us, self.later_us() + busy)

    def arguments(self) -> dict[str, Arg]:
        return super().arguments() | {"blocks": Int(self.blocks()), "pieces": Int(self.finish()[1])}

    def reduce(self) -> Launch:
        """The first launch."""
        return self.launch(self.reduced[self.backward], self.rows.programs(self.tile))

    def main(self) -> list[Launch]:
        blocks, (tile, pieces) = ceil_power(self.blocks()), self.finish()
        found, args, constants = [self.reduce()], dict[str, Arg](), {"BLOCKS": blocks}
        if self.merges_apart():
            merging = tile_of(1, blocks, self.compute.itemsize)
            found.append(self.launch(self.merged[self.backward], self.rows.count, merging))
            args = {name: self.given[f"row_{name}"] for name in self.partials()} | {"blocks": Int(1)}
            constants = {"BLOCKS": 1, "PART": ceil_power(self.rows.n)}
        most = registers_for(tile, 1) if tile.rows > 1 else 0  # see ``most_registers``
        which, programs = self.which[self.backward], self.rows.programs(tile, pieces)
        return [*found, self.launch(which, programs, tile, args, most, **constants)]
