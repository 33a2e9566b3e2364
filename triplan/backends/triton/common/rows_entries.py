"""One engine for rowwise ops: rows in registers, rows in a loop, rows split between programs.

A family gives, once, what its ops share (``Family``), and for each kernel an ``Entry``: which tile a program holds, and
which launches do the rows' own work. The engine derives when the entry applies, its cost, its workspace, its numerics
id, its guarantee, and its registration in the kernel table.

* ``WholeRows``: a tile holds whole rows; each element is read once.
* ``LoopedRows``: a program loops along rows of any length, twice; the second time they are in the L2 cache.
* ``SplitRows``: a row is split into blocks, each with its own program, for few and long rows. One launch reduces each
  block into the workspace; the next merges the partial results of a row and writes.
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
from triplan.descriptors import Operand
from triplan.sku import SUPPORTED, ElementKind, PrecisionGuarantee, Support, Target
from triplan.sku.facts import fact

FLOATS = ("f16", "bf16", "f32", "f64")
#: Programs of one launch, at most: the x extent of a CUDA grid.
MOST_PROGRAMS = 2**31 - 1
#: Blocks of one row at most, as each finishing program of a split merges them all at once. Untuned.
MOST_BLOCKS = 4096
#: Warps that a multiprocessor holds (compute capability 8.0 and 9.0).
RESIDENT_WARPS = 64


class Rowwise(Protocol):
    """What the engine reads of a descriptor: the operands of shape ``input_shape`` consist of the rows."""

    @property
    def op(self) -> str: ...
    @property
    def element(self) -> ElementKind: ...
    @property
    def input_shape(self) -> tuple[int, ...]: ...
    def operands(self) -> tuple[Operand, ...]: ...


D = TypeVar("D", bound=Rowwise)
D_contra = TypeVar("D_contra", bound=Rowwise, contravariant=True)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one row.

    Attributes:
        first: read to reduce it.
        second: moved beside those: what only the results need is read, and they are written.
        again: those of ``first`` that the results need as well.
    """

    first: int
    second: int
    again: int


def is_backward(desc: Rowwise) -> bool:
    return desc.op.endswith("_backward")


def layout(desc: Rowwise) -> str:
    """The SKU's layout."""
    return "packed" if all(o.layout.packed for o in desc.operands()) else "strided"


def packed_beside_rows(desc: Rowwise) -> Support:
    """Whether all operands but the rows are promised packed."""
    for o in desc.operands():
        if o.shape != desc.input_shape and not o.layout.packed:
            return Support.no(
                f"{o.name} is not promised packed: only operands of shape {desc.input_shape} may have gaps"
            )
    return SUPPORTED


def launch_of(
    which: Any,
    grid: int,
    args: Mapping[str, Arg],
    constants: Mapping[str, Any],
    warps: int,
    stages: int = 3,
    max_registers: int = 0,
) -> Launch:
    """A launch with those of ``args`` and ``constants`` that the kernel has; arguments that are not given are None."""
    return Launch(
        which,
        grid,
        {name: args.get(name) for name in which.arg_names if not name.isupper()},
        {name: constants[name] for name in which.arg_names if name in constants},
        warps,
        stages,
        max_registers=max_registers,
    )


def placed(arrays: Mapping[str, int], element: ElementKind) -> dict[str, Arg]:
    """Arrays of so many bytes, one after another in the workspace."""
    found: dict[str, Arg] = {}
    start = 0
    for name, size in arrays.items():
        found[name] = Scratch(start, element)
        start += size
    return found


class Family(ABC, Generic[D_contra]):
    """What the entries of one family share. ``desc`` is a descriptor of any of its ops.

    ``shared`` is the tile with which the kernels reduce over rows, such as for gradients of weights: see
    ``Entry.shared_tile``.
    """

    #: Part of every numerics id: raised when bits change.
    version: ClassVar[int] = 1
    index_elements: ClassVar[tuple[str, ...]] = ()
    #: Whether rows are numbered row-major, as operands with one element a row require.
    in_order: ClassVar[bool] = True

    @abstractmethod
    def axis(self, desc: D_contra) -> int:
        """The axis along which rows lie."""

    @abstractmethod
    def traffic(self, desc: D_contra) -> Traffic:
        """What must be moved of one row."""

    @abstractmethod
    def guarantee(self, desc: D_contra, tile: Tile, shared: Tile) -> Mapping[str, PrecisionGuarantee]:
        """The guarantee of each output of an entry that reduces rows by ``tile``, and over rows by ``shared``."""

    @fact
    def rows(self, desc: D_contra) -> Rows:
        whole = [o for o in desc.operands() if o.shape == desc.input_shape]
        return Rows(whole, self.axis(desc), self.in_order)

    def supports(self, desc: D_contra) -> Support:
        """Conditions of every entry."""
        return SUPPORTED

    def arguments(self, desc: D_contra, rows: int) -> dict[str, Arg]:
        """Every argument that a kernel may have, for programs of ``rows`` rows: sizes, operands and their strides."""
        r = self.rows(desc)
        args: dict[str, Arg] = dict(r.arguments(rows))
        for o in desc.operands():
            args[o.name] = values(o)
            if o.shape == desc.input_shape:
                args[f"{o.name}_strides"] = r.strides(o)
        return args

    def constants(self, desc: D_contra) -> dict[str, Any]:
        """Every constant that a kernel may have, beside COMPUTE and the tile's ROWS and BLOCK."""
        return {}

    def arrays(self, desc: D_contra, shared: Tile) -> dict[str, int]:
        """Bytes of each array of the workspace that every entry needs, by the name of the kernels' argument."""
        return {}

    def before(self, desc: D_contra) -> list[Launch]:
        """Launches before those of an entry."""
        return []

    def after(self, desc: D_contra, shared: Tile) -> list[Launch]:
        """Launches after those of an entry."""
        return []

    def around_us(self, desc: D_contra, shared: Tile) -> float:
        """Cost of ``before`` and ``after``."""
        return 0.0


class Entry(ABC, Generic[D]):
    """One kernel in the kernel table, for one or several ops of a family."""

    name: ClassVar[str]
    #: As of ``KernelRow``: which entry is taken where batch invariance is required, the smallest first.
    priority: ClassVar[int] = 0

    #: Microseconds a program costs beside its traffic, while RESIDENT_WARPS warps run on its multiprocessor.
    program_us: ClassVar[float] = 0.0
    family: Family[D]

    # --- given by the family ---

    @abstractmethod
    def tile(self, desc: D) -> Tile | None:
        """What a program reduces at a time; None where the entry does not apply. It decides bits, and so must not
        depend on the batch."""

    @abstractmethod
    def main(self, desc: D, tile: Tile) -> list[Launch]:
        """The launches that do the rows' own work. There is at least one row."""

    @abstractmethod
    def us(self, desc: D, tile: Tile, target: Target) -> float:
        """Microseconds of ``main``."""

    def shared_tile(self, desc: D, tile: Tile) -> Tile:
        """The tile with which kernels reduce over rows."""
        return tile

    def arrays(self, desc: D, tile: Tile) -> dict[str, int]:
        """Bytes of each array of the workspace."""
        return self.family.arrays(desc, self.shared_tile(desc, tile))

    def programs(self, desc: D, tile: Tile) -> int:
        """Programs of the largest launch."""
        return self.family.rows(desc).programs(tile.rows)

    def programs_us(self, programs: int, tile: Tile, target: Target) -> float:
        """What ``programs`` programs cost beside their traffic."""
        return programs * tile.warps * self.program_us / (RESIDENT_WARPS * max(target.sm_count, 1))

    def idle(self, desc: D) -> bool:
        """Whether ``main`` has nothing to write."""
        return self.family.rows(desc).count == 0 or all(o.numel == 0 for o in desc.operands() if o.is_written)

    # --- derived ---

    def tile_or_any(self, desc: D) -> Tile:
        """``tile``, or where the entry does not apply a tile that a guarantee can be stated with."""
        return self.tile(desc) or self.family.rows(desc).block_tile(desc.element)

    def _known_tile(self, desc: D) -> Tile:
        tile = self.tile(desc)
        assert tile is not None, f"{self.name} does not apply to {desc}"
        return tile

    def supports(self, desc: D, target: Target) -> Support:
        tile = self.tile(desc)
        if tile is None:
            return Support.no(f"rows of {self.family.rows(desc).n} elements do not fit in registers")
        programs = self.programs(desc, tile)
        if programs > MOST_PROGRAMS:
            return Support.no(f"needs {programs} programs; a grid holds at most {MOST_PROGRAMS}")
        return self.family.supports(desc)

    def rank(self, desc: D, target: Target) -> float:
        tile = self._known_tile(desc)
        return self.us(desc, tile, target) + self.family.around_us(desc, self.shared_tile(desc, tile))

    def workspace(self, desc: D, target: Target) -> int:
        return sum(self.arrays(desc, self._known_tile(desc)).values())

    def numerics(self, desc: D) -> str | None:
        tile = self._known_tile(desc)
        name = f"{desc.op}.{self.name}.v{self.family.version}.{desc.element}.{tile.text}"
        return self.family.rows(desc).numerics(name, desc.operands())

    def guarantee(self, desc: D) -> Mapping[str, PrecisionGuarantee]:
        tile = self.tile_or_any(desc)
        return self.family.guarantee(desc, tile, self.shared_tile(desc, tile))

    def launches(self, desc: D, target: Target) -> Sequence[Launch]:
        tile = self._known_tile(desc)
        main = [] if self.idle(desc) else self.main(desc, tile)
        return [*self.family.before(desc), *main, *self.family.after(desc, self.shared_tile(desc, tile))]

    def launch(
        self,
        desc: D,
        which: Any,
        grid: int,
        tile: Tile,
        args: Mapping[str, Arg] | None = None,
        max_registers: int = 0,
        stages: int = 3,
        **constants: Any,
    ) -> Launch:
        """The launch of one kernel with ``tile``: what it asks for of the family's arguments and constants, of the
        workspace's arrays, of ``args`` and of ``constants``."""
        compute = desc.element.compute
        arrays = placed(self.arrays(desc, self._known_tile(desc)), compute)
        given = {**self.family.arguments(desc, tile.rows), **arrays, **(args or {})}
        known = {"COMPUTE": TL[compute], "ROWS": tile.rows, "BLOCK": tile.block, **self.family.constants(desc)}
        return launch_of(which, grid, given, {**known, **constants}, tile.warps, stages, max_registers)

    def register(self, *ops: str) -> None:
        """Add the entry to the kernel table, for each of ``ops``."""
        for op in ops:
            kernel(
                op=op,
                name=self.name,
                elements=FLOATS,
                index_elements=self.family.index_elements,
                guarantee=self.guarantee,
                supports=self.supports,
                rank=self.rank,
                workspace=self.workspace,
                numerics=self.numerics,
                priority=self.priority,
                layout=layout,
            )(self.launches)


class WholeRows(Entry[D]):
    """``rows``: a tile holds whole rows, and each element is read once."""

    name = "rows"

    def us(self, desc: D, tile: Tile, target: Target) -> float:
        t = self.family.traffic(desc)
        return waves_us(self.programs(desc, tile), tile.rows * (t.first + t.second), target)


class LoopedRows(Entry[D]):
    """``looped``: programs loop along rows of any length, once to reduce them and once to write the results."""

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
        t, programs = self.family.traffic(desc), self.programs(desc, tile)
        running = min(self.family.rows(desc).count, self.resident(tile) * max(target.sm_count, 1))
        share = self.cached_share if running * t.again <= L2_BYTES else self.missed_share
        moved = waves_us(programs, tile.rows * (t.first + t.second + share * t.again), target)
        return moved + self.programs_us(programs, tile, target)


class SplitRows(Entry[D]):
    """``split``: one launch reduces each block of each row into the workspace; the next merges the partial results of
    its row, in the same order in every program, and writes one block of the results."""

    name = "split"
    priority = 2

    @abstractmethod
    def kernels(self, desc: D) -> tuple[Any, Any]:
        """The kernel that reduces a block, and the one that merges partial results and writes."""

    @abstractmethod
    def partials(self, desc: D) -> Sequence[str]:
        """The arrays of partial results, one compute element a block."""

    def blocks(self, desc: D) -> int:
        """Blocks of a row that are reduced separately. (One even of an empty row: its statistics are written.)"""
        return max(-(-self.family.rows(desc).n // self.tile_or_any(desc).block), 1)

    def finish_tile(self, desc: D, tile: Tile) -> Tile:
        """What a program of the second launch writes."""
        return tile

    def finish_blocks(self, desc: D) -> int:
        """Programs of the second launch, for each row."""
        return self.blocks(desc)

    def arrays(self, desc: D, tile: Tile) -> dict[str, int]:
        size = padded_bytes(self.family.rows(desc).count * self.blocks(desc) * desc.element.compute.itemsize)
        return {**super().arrays(desc, tile), **dict.fromkeys(self.partials(desc), size)}

    def programs(self, desc: D, tile: Tile) -> int:
        return self.family.rows(desc).count * max(self.blocks(desc), self.finish_blocks(desc))

    def supports(self, desc: D, target: Target) -> Support:
        if self.blocks(desc) > MOST_BLOCKS:
            return Support.no(f"rows have {self.blocks(desc)} blocks; at most {MOST_BLOCKS} are merged at once")
        return super().supports(desc, target)

    def us(self, desc: D, tile: Tile, target: Target) -> float:
        r, t = self.family.rows(desc), self.family.traffic(desc)
        sectors, blocks = r.sectors(desc.element), self.finish_blocks(desc)
        written = waves_us(r.count * blocks, sectors * t.second / blocks, target)
        return self.reduce_us(desc, tile, target) + written + again_us(r.count * sectors * t.again)

    def reduce_us(self, desc: D, tile: Tile, target: Target) -> float:
        """Microseconds of the first launch."""
        r, t, blocks = self.family.rows(desc), self.family.traffic(desc), self.blocks(desc)
        moved = waves_us(r.count * blocks, r.sectors(desc.element) * t.first / blocks, target)
        return moved + self.programs_us(r.count * blocks, tile, target)

    def main(self, desc: D, tile: Tile) -> list[Launch]:
        count, blocks, (reduce, finish) = self.family.rows(desc).count, self.blocks(desc), self.kernels(desc)
        args: dict[str, Arg] = {"blocks": Int(blocks)}
        last, grid = self.finish_tile(desc, tile), count * self.finish_blocks(desc)
        return [
            self.launch(desc, reduce, count * blocks, tile, args),
            self.launch(desc, finish, grid, last, args, BLOCKS=ceil_power(blocks)),
        ]
