"""What both entries of reductions pass to their kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import triton.language as tl

from triplan.backends.runtime.launch import Arg, Float, Int, Ptr, Scalar, power_of_two_in
from triplan.backends.triton.common import expressions
from triplan.backends.triton.common.offsets import divisor, ranked
from triplan.backends.triton.common.strides import stride_arg
from triplan.backends.triton.common.tiles import Tile
from triplan.backends.triton.reductions.dims import Dim, in_order
from triplan.backends.triton.reductions.expression_kernels import reduce_expression_kernel
from triplan.backends.triton.reductions.kinds import OTHER_NORM, POSITIONS, TYPES
from triplan.backends.triton.reductions.limits import BESIDE, FEW, SECTOR_LANES
from triplan.backends.triton.reductions.tiles_kernels import reduce_kernel
from triplan.backends.triton.reductions.tiling import Tiling
from triplan.descriptors import Operand
from triplan.descriptors.reductions import DEVIATIONS
from triplan.sku import ElementKind
from triplan.sku.facts import fact


class Plan(Tiling):
    """How one problem is reduced, and what its kernels are given."""

    def _dims(self, dims: list[Dim], reads: int | None = None) -> tuple[Arg, ...]:
        """Kernel arguments of dimensions: innermost first, see ``ranked``."""
        found = ranked(dims, Dim(1, (0,) * len(self.reads)))
        return tuple((divisor(d.size, self.wide), *self._strides(d, reads)) for d in found)

    def _visited(self) -> list[Dim]:
        """The dimensions along which a program reads elements."""
        if self.turns == 1:
            return self.reduced
        size, strides = self.reduced[0][:2]
        return [Dim(size, tuple(s * self.turns for s in strides if isinstance(s, int)))]

    def _strides(self, d: Dim, reads: int | None = None) -> tuple[Arg, ...]:
        """Strides of a dimension in the tensors that are read (or only so many of them), and in both results."""
        results = zip((self.results * 2)[:2], (d.out, d.second), strict=True)
        strides = (*[*zip(self.reads, d.reads, strict=True)][:reads], *results)
        return tuple(stride_arg(o, s) for o, s in strides)

    def _pointer(self, o: Operand, most: int = 1024) -> Ptr:
        """The address of ``o``; ``most``: the largest alignment that the compiler is told."""
        element = ElementKind.I8 if o.element is ElementKind.BOOL else o.element
        return Ptr(o.name, element, min(o.alignment, most))

    def _lead_address(self) -> Ptr:
        """The address of x. Its alignment limits how many neighbouring lines a thread loads at once."""
        item, positions = self.x.element.itemsize, self.kind.accumulates in POSITIONS
        narrow = self.across is not None and self.n > FEW and (item == 1 or positions)
        return self._pointer(self.x, BESIDE * item if narrow else 1024)

    @property
    def kernel(self) -> Any:
        """The kernel that reads the operands."""
        return reduce_kernel if self.tree is None else reduce_expression_kernel

    def taken(self, kernel: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """Those of ``given`` that ``kernel`` takes."""
        return {name: given[name] for name in kernel.arg_names if name in given}

    def _scalars(self) -> tuple[Arg, ...]:
        inputs = () if self.tree is None else self.tree.inputs_read()
        return tuple(Scalar(i.name, i.element, 0) for i in inputs if i.shape is None)

    def arguments(self) -> dict[str, Arg]:
        """Arguments of both kernels; for the second, ``kept`` has all kept dimensions. What a kernel does not use is
        None: each argument that a launch passes takes the host time."""
        across = [] if self.across is None else [self.across]
        along = None
        if self.across is not None:
            n = self.across.size
            size = divisor(n, self.wide) if self.flat else Int(n, self.wide, power_of_two_in(n))
            # (Of an expression's operands, ROW_STEPS says which have unit stride.)
            of_first, *others = self._strides(self.across)
            if self.flat and in_order([*self.kept, self.across], len(self.results)):
                others[-2:] = None, None
            elif not self.flat:
                others[-2:] = (None if s == 1 else arg for s, arg in zip(self.across[2:], others[-2:], strict=True))
            along = (size, None if self.across.reads == (1,) else of_first, *others)
        divisible = power_of_two_in(self.n) if self.unit else 1
        # A wider load of one operand would divide a short column among several threads.
        most = self._aligned() if self.across is not None and self.n <= FEW else 1024
        number = self.compute if self.compute is ElementKind.F64 else ElementKind.F32
        return {
            "x": self._lead_address(),
            "inputs": tuple(self._pointer(o, most) for o in self.reads),
            "scalars": self._scalars() or None,
            "out": self._pointer(self.results[0]),
            "second": self._pointer(self.results[1]) if len(self.results) > 1 else None,
            "kept": self._dims(self.kept) if self.kept or self.across is None else None,
            "all_kept": self._dims([*self.kept, *across], 1),
            "along": along,
            "reduced": None if (self.unit or self.rowed) and self.tree is None else self._dims(self._visited()),
            "rows": self._dims(self.reduced[:-1]) if self.rowed else None,
            "size": Int(self.reduced[-1].size, self.wide) if self.rowed else None,
            "lanes": Int(self.lanes, self.wide, max(self.flat, 1)),
            "outer": Int(self.lanes // max(self.across.size, 1) if self.across else self.lanes, self.wide),
            "n": Int(self.n, self.wide, divisible),
            "chunk": Int(self.chunk, self.wide, power_of_two_in(self.chunk)),
            # (Many accumulators of a line are loaded by vectors; of few, the binary does not depend on their number.)
            "chunks": Int(self.chunks, divisibility=power_of_two_in(self.chunks) if self.merging().rows == 1 else 1),
            "correction": Float(self.desc.correction, number) if self.desc.op in DEVIATIONS else None,
            "order": Float(self.desc.order, number) if self.kind is OTHER_NORM else None,
        }

    def constants(self, tile: Tile) -> dict[str, Any]:
        group = max(min(self._group(tile), self.chunk // tile.block), 1)
        return {
            "KIND": self.kind.accumulates.value,
            "MAP": self.kind.maps.value,
            "FINISH": self.kind.finish.value,
            "IDENTITY": self.kind.identity(self.compute),
            "COMPUTE": TYPES[self.compute],
            "RESULT": TYPES[self.desc.result],
            "ACROSS": self.across is not None,
            "UNIT": self.unit,
            "BESIDE": self._read_beside(),
            "FLAT": self.flat,
            "VECTOR": self._vectors(tile.block)[self._lead],
            "SHIFT": self._shift(tile),
            "ONCE": self.once > 0,
            "ALIGNED": self.x.alignment >= 16,
            "SINGLE": self.single,
            "FULL": self.n == tile.block,
            "AHEAD": self._ahead(tile),
            "GROUP": group,
            "ALL": 1 < group == self.n // tile.block and self.n % tile.block == 0 and self.chunks == 1,
            "PIECES": self._pieces(tile),
            "TURNS": self.turns,
            "LANES_BESIDE": self.across is not None and self.merging().rows >= SECTOR_LANES,
            "FUNCTION": None if self.tree is None else expressions.fused(self.tree, False),
            "ROW_STEPS": tuple(map(self._row_step, range(len(self.reads)))),
            "COLUMN_STEPS": tuple(map(self._column_step, range(len(self.reads)))),
            "VECTORS": self._vectors(tile.block),
            "POINT_TYPE": tl.int64 if self.wide else tl.int32,
            "ROWS": tile.rows,
            "BLOCK": tile.block,
        }


plan_of: Callable[[Any], Plan] = fact(Plan)
