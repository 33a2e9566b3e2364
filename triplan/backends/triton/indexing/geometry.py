"""One shape for every indexing op: points, a dense side, a table, and the indices between them.

For a point ``c`` of the iteration space, the dense side is at ``sum c[d] * dense_stride[d]`` and the table at
``sum c[d] * table_stride[d] + sum_k index_k(c) * axis_stride[k]``. An op of the family is the few lines below that say
which axes those are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from triplan.descriptors import (
    EmbeddingBackwardDescriptor,
    EmbeddingDescriptor,
    GatherBackwardDescriptor,
    GatherDescriptor,
    IndexAddDescriptor,
    IndexingDescriptor,
    IndexPutDescriptor,
    IndexSelectBackwardDescriptor,
    IndexSelectDescriptor,
    Operand,
    OperandKind,
    ScatterAddDescriptor,
    ScatterDescriptor,
    packed_strides,
)

Axes = tuple[int | None, ...]


@dataclass(frozen=True)
class Geometry:
    """Which axis of each operand every iteration dimension walks (None: it stays put), outermost first.

    ``loop`` are the iteration dimensions that the table does not walk: along them contributions meet. They are
    adjacent in every op. ``table_axes`` of the others, and the k-th index selects along table axis ``indexed[k]``.
    """

    sizes: tuple[int, ...]
    dense: Operand
    dense_axes: Axes
    table: Operand
    table_axes: Axes
    index: Operand
    index_axes: Axes
    indexed: tuple[int, ...]
    padding: int | None = None

    @cached_property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @cached_property
    def idle(self) -> bool:
        """Whether there is nothing to move or add: no points, or a written table without elements."""
        return self.numel == 0 or (self.table.is_written and self.table.numel == 0)

    @cached_property
    def loop(self) -> tuple[int, ...]:
        return tuple(d for d, axis in enumerate(self.table_axes) if axis is None)

    @cached_property
    def fold(self) -> tuple[int, int, int]:
        """(outer, count, inner): the iteration space with the loop in the middle."""
        first, last = self.loop[0], self.loop[-1] + 1
        return math.prod(self.sizes[:first]), math.prod(self.sizes[first:last]), math.prod(self.sizes[last:])

    @cached_property
    def full(self) -> bool:
        """Whether the index differs between the lanes of a slice (one an element, as in torch.gather)."""
        return any(axis is not None for d, axis in enumerate(self.index_axes) if d not in self.loop)

    @cached_property
    def sliced(self) -> Geometry:
        """The same, with an index that is promised not to differ between the lanes of a slice taken at its word."""
        zero = self.index.layout.zero_axes
        still = {a for a in self.index_axes if a is not None and (a in zero or self.index.shape[a] == 1)}
        axes = tuple(None if d not in self.loop and a in still else a for d, a in enumerate(self.index_axes))
        return replace(self, index_axes=axes)

    @cached_property
    def slots(self) -> int:
        """Positions of the table under the indices."""
        return math.prod(self.table.shape[a] for a in self.indexed)

    @cached_property
    def extents(self) -> tuple[int, ...]:
        return tuple(self.table.shape[a] for a in self.indexed)

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        return (self.dense, self.table, self.index)

    @cached_property
    def packed(self) -> bool:
        return all(o.layout.packed for o in self.operands)

    @cached_property
    def index_items(self) -> tuple[int | None, ...]:
        """Which tensor of the index operand each index is; None where it is a single tensor."""
        if self.index.kind is OperandKind.TENSOR_LIST:
            return tuple(range(self.index.count))
        return (None,)

    @cached_property
    def position_axes(self) -> tuple[int, ...]:
        """Strides, by iteration dimension, that number the elements of the index tensor row-major."""
        strides = packed_strides(self.index.shape)
        return tuple(0 if axis is None else strides[axis] for axis in self.index_axes)

    @cached_property
    def duplicates_possible(self) -> int:
        """How many contributions can meet in one element of the table."""
        return self.fold[1]


@lru_cache(maxsize=4096)
def geometry(desc: IndexingDescriptor) -> Geometry:
    """The geometry of an indexing descriptor."""
    o = {operand.name: operand for operand in desc.operands()}
    match desc:
        case GatherDescriptor():
            return _full(desc.out_shape, desc.gather_dim, o["out"], o["src"], o["index"])
        case GatherBackwardDescriptor():
            return _full(desc.out_shape, desc.gather_dim, o["dout"], o["dsrc"], o["index"])
        case ScatterAddDescriptor() | ScatterDescriptor():
            return _full(desc.src_shape, desc.scatter_dim, o["src"], o["out"], o["index"])
        case IndexSelectDescriptor():
            return _slices(desc.out_shape, desc.select_dim, o["out"], o["src"], o["index"])
        case IndexSelectBackwardDescriptor():
            return _slices(desc.out_shape, desc.select_dim, o["dout"], o["dsrc"], o["index"])
        case IndexAddDescriptor():
            return _slices(desc.src_shape, desc.add_dim, o["src"], o["out"], o["index"])
        case EmbeddingDescriptor():
            return _leading(o["out"], o["weight"], o["index"])
        case EmbeddingBackwardDescriptor():
            return _leading(o["dout"], o["dweight"], o["index"], padding=desc.padding_idx)
        case IndexPutDescriptor():
            return _leading(o["values"], o["out"], o["indices"], indexed=desc.num_indices)
    raise TypeError(f"no indexing geometry for {type(desc).__name__}")


def _full(shape: tuple[int, ...], dim: int, dense: Operand, table: Operand, index: Operand) -> Geometry:
    axes: Axes = tuple(range(len(shape)))
    table_axes = tuple(None if a == dim else a for a in range(len(shape)))
    return Geometry(shape, dense, axes, table, table_axes, index, axes, (dim,))


def _slices(shape: tuple[int, ...], dim: int, dense: Operand, table: Operand, index: Operand) -> Geometry:
    axes: Axes = tuple(range(len(shape)))
    table_axes = tuple(None if a == dim else a for a in range(len(shape)))
    index_axes = tuple(0 if a == dim else None for a in range(len(shape)))
    return Geometry(shape, dense, axes, table, table_axes, index, index_axes, (dim,))


def _leading(dense: Operand, table: Operand, index: Operand, indexed: int = 1, padding: int | None = None) -> Geometry:
    axes: Axes = tuple(range(len(dense.shape)))
    n = len(index.shape)
    table_axes: Axes = (*(None,) * n, *range(indexed, len(table.shape)))
    index_axes: Axes = (*range(n), *(None,) * (len(dense.shape) - n))
    return Geometry(dense.shape, dense, axes, table, table_axes, index, index_axes, tuple(range(indexed)), padding)


def accumulates(desc: Any) -> bool:
    """Whether the op adds into its table."""
    return not isinstance(
        desc, (GatherDescriptor, IndexSelectDescriptor, EmbeddingDescriptor, ScatterDescriptor)
    ) and not (isinstance(desc, IndexPutDescriptor) and not desc.accumulate)


def keeps(desc: Any) -> bool:
    """Whether the table's former contents enter the result (as an addend, or where nothing is written)."""
    return isinstance(desc, IndexPutDescriptor) or getattr(desc, "accumulate", True)
