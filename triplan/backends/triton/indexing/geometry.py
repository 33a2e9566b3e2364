"""One geometry for every indexing op: an iteration space, a dense operand, a table, and the indices into the table.

A point ``c`` of the iteration space has its dense element at offset ``sum_d c[d] * dense_stride[d]`` and its table
element at ``sum_d c[d] * table_stride[d] + sum_k index_k(c) * axis_stride[k]``. ``geometry`` says for each op which
axes these are; kernels need nothing else of an op.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from triplan.backends.triton.common.card import L2_BYTES, L2_SHARE, SECTOR
from triplan.backends.triton.common.offsets import I32_LIMIT
from triplan.descriptors import (
    EmbeddingBackwardDescriptor,
    EmbeddingDescriptor,
    GatherBackwardDescriptor,
    GatherDescriptor,
    IndexAddDescriptor,
    IndexPutDescriptor,
    IndexSelectBackwardDescriptor,
    IndexSelectDescriptor,
    Operand,
    OperandKind,
    Role,
    ScatterAddDescriptor,
    ScatterDescriptor,
    ScatterReduceDescriptor,
    packed_strides,
)
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku.facts import cached_property, fact

#: Columns of the narrowest stripe of the table. Narrower ones would split the runs of equal indices that are common:
#: measured, that costs more than the cache gives.
MIN_STRIPE = 64
#: Columns of the widest stripe of the table.
MAX_STRIPE = 512
#: Elements of the shortest row that ``rows_kernel`` takes: shorter ones do not fill vectors. Untuned.
MIN_ROW = 16

#: For each iteration dimension, the operand's axis that it advances along; None: it does not move in that operand.
Axes = tuple[int | None, ...]


@dataclass(frozen=True)
class Geometry:
    """How an op iterates over its operands. Dimensions are ordered outermost first.

    Attributes:
        sizes: extents of the iteration space.
        dense: the operand with one element per point.
        dense_axes: its axis for each dimension.
        table: the operand that the indices point into.
        table_axes: its axis for each dimension; None for the dimensions along which contributions to one table element
            meet. Those dimensions (``loop``) are adjacent in every op.
        index: the index operand, one tensor or a list.
        index_axes: its axis for each dimension.
        indexed: the k-th index selects along table axis ``indexed[k]``.
        padding: the index value whose contributions are dropped.
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
        """Points of the iteration space."""
        return math.prod(self.sizes)

    @cached_property
    def idle(self) -> bool:
        """Whether there is nothing to move or add: no points, or a written table without elements."""
        return self.numel == 0 or (self.table.is_written and self.table.numel == 0)

    @cached_property
    def keeps(self) -> bool:
        """Whether a written table keeps its contents where nothing is written, and adds to them where something is."""
        return self.table.role is Role.IN_OUT

    @cached_property
    def loop(self) -> tuple[int, ...]:
        """The dimensions that do not move in the table: contributions to one table element differ only in these."""
        return tuple(d for d, axis in enumerate(self.table_axes) if axis is None)

    @cached_property
    def fold(self) -> tuple[int, int, int]:
        """(outer, count, inner): the iteration space folded to three dimensions, ``loop`` in the middle."""
        first, last = self.loop[0], self.loop[-1] + 1
        return math.prod(self.sizes[:first]), math.prod(self.sizes[first:last]), math.prod(self.sizes[last:])

    @cached_property
    def most_contributions(self) -> int:
        """The most contributions that one table element can receive."""
        return self.fold[1]

    @cached_property
    def full(self) -> bool:
        """Whether every element has an index of its own (as in torch.gather); else one index serves a whole slice."""
        return any(axis is not None for d, axis in enumerate(self.index_axes) if d not in self.loop)

    @cached_property
    def scattered(self) -> bool:
        """Whether neighbours lie in different sectors of a packed table: they have other indices, or short rows."""
        return self.full or self.fold[2] * self.table.element.itemsize < SECTOR

    @cached_property
    def apart(self) -> bool:
        """Whether neighbours in a slice surely lie in different sectors: the table is contiguous along an index."""
        return not self.full and self.table.layout.unit_axis in self.indexed

    @cached_property
    def neighbours_meet(self) -> bool:
        """Whether points that follow each other may meet in an element of the table."""
        return max((d for d, n in enumerate(self.sizes) if n > 1), default=None) in self.loop

    @cached_property
    def sliced(self) -> Geometry:
        """The same geometry, not ``full`` where the index's layout promises one index per slice (stride 0)."""
        zero = self.index.layout.zero_axes
        still = {a for a in self.index_axes if a is not None and (a in zero or self.index.shape[a] == 1)}
        axes = tuple(None if d not in self.loop and a in still else a for d, a in enumerate(self.index_axes))
        return replace(self, index_axes=axes)

    @cached_property
    def once(self) -> Geometry:
        """The same geometry without points that always meet in the table, except the first of them: those along
        dimensions of the loop in which the index's layout promises stride 0."""
        zero = self.index.layout.zero_axes
        alike = [d for d in self.loop if self.index_axes[d] in zero]
        sizes = tuple(min(n, 1) if d in alike else n for d, n in enumerate(self.sizes))
        return replace(self, sizes=sizes) if alike else self

    @cached_property
    def extents(self) -> tuple[int, ...]:
        """The table's extent along each indexed axis."""
        return tuple(self.table.shape[a] for a in self.indexed)

    @cached_property
    def slots(self) -> int:
        """Positions of the table that the indices can select."""
        return math.prod(self.extents)

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        return (self.dense, self.table, self.index)

    @cached_property
    def packed(self) -> bool:
        return all(o.layout.packed for o in self.operands)

    @cached_property
    def layout(self) -> str:
        """The SKU's layout."""
        return "packed" if self.packed else "strided"

    @cached_property
    def fits_rows(self) -> bool:
        """Whether ``rows_kernel`` applies: packed operands, one index, and rows long enough for vector accesses."""
        return self.packed and len(self.indexed) == 1 and self.fold[2] >= MIN_ROW

    @cached_property
    def wide(self) -> bool:
        """Whether offsets need 64 bits: an operand passes 2**31 elements, or its strides are unknown."""
        return not self.packed or max(self.numel, *(o.numel for o in self.operands)) >= I32_LIMIT

    @cached_property
    def index_items(self) -> tuple[int | None, ...]:
        """Position of each index tensor in the index operand's list; (None,) if the operand is a single tensor."""
        if self.index.kind is OperandKind.TENSOR_LIST:
            return tuple(range(self.index.count))
        return (None,)

    @cached_property
    def position_strides(self) -> tuple[int, ...]:
        """For each dimension, its stride in the row-major numbering of the index tensor's elements."""
        strides = packed_strides(self.index.shape)
        return tuple(0 if axis is None else strides[axis] for axis in self.index_axes)


def stripe_columns(g: Geometry) -> int:
    """Columns of a stripe: as many as fit in ``L2_SHARE`` with all rows, a power of two within the limits above."""
    fitting = L2_SHARE // max(g.extents[0] * g.table.element.itemsize, 1)
    return min(MAX_STRIPE, max(MIN_STRIPE, 1 << max(fitting, 1).bit_length() - 1))


def fits_cache(g: Geometry) -> bool:
    """Whether the L2 cache keeps all that the indices of one row of the outer dimensions can reach.

    Then nothing is gained by visiting columns by stripes, and much is lost where many indices choose one row: programs
    that run at a time would all write to the few elements of one stripe, and wait for each other.
    """
    return g.extents[0] * g.fold[2] * g.table.element.itemsize <= L2_SHARE


def stripes_stay(g: Geometry) -> bool:
    """Whether the L2 cache keeps a stripe, and finds its sectors again: there are more points than sectors."""
    stripe = g.extents[0] * min(stripe_columns(g), g.fold[2]) * g.table.element.itemsize
    return stripe <= L2_BYTES and g.numel > g.table.nbytes / SECTOR


def index_alone(g: Geometry) -> Geometry:
    """The points are the elements of the indices: nothing moves in the table but by them."""
    axes = tuple(range(len(g.index.shape)))
    nowhere: Axes = (None,) * len(axes)
    return replace(g, sizes=g.index.shape, dense_axes=nowhere, table_axes=nowhere, index_axes=axes, padding=None)


@fact
def geometry(desc: IndexingDescriptor) -> Geometry:
    """The geometry of ``desc``."""
    o = {operand.name: operand for operand in desc.operands()}
    match desc:
        case GatherDescriptor():
            return _full(desc.out_shape, desc.gather_dim, o["out"], o["src"], o["index"])
        case GatherBackwardDescriptor():
            return _full(desc.out_shape, desc.gather_dim, o["dout"], o["dsrc"], o["index"])
        case ScatterAddDescriptor() | ScatterDescriptor() | ScatterReduceDescriptor():
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


# In each of these the iteration space is the dense operand's shape, so dense axes are 0, 1, 2, ...


def _full(shape: tuple[int, ...], dim: int, dense: Operand, table: Operand, index: Operand) -> Geometry:
    """One index per element, along ``dim``."""
    axes: Axes = tuple(range(len(shape)))
    table_axes = tuple(None if a == dim else a for a in range(len(shape)))
    return Geometry(shape, dense, axes, table, table_axes, index, axes, (dim,))


def _slices(shape: tuple[int, ...], dim: int, dense: Operand, table: Operand, index: Operand) -> Geometry:
    """A 1-D index: one per slice along ``dim``."""
    axes: Axes = tuple(range(len(shape)))
    table_axes = tuple(None if a == dim else a for a in range(len(shape)))
    index_axes = tuple(0 if a == dim else None for a in range(len(shape)))
    return Geometry(shape, dense, axes, table, table_axes, index, index_axes, (dim,))


def _leading(dense: Operand, table: Operand, index: Operand, indexed: int = 1, padding: int | None = None) -> Geometry:
    """Indices into the ``indexed`` leading axes of the table; the dense operand has their shape, then the rest."""
    axes: Axes = tuple(range(len(dense.shape)))
    n = len(index.shape)
    table_axes: Axes = (*(None,) * n, *range(indexed, len(table.shape)))
    index_axes: Axes = (*range(n), *(None,) * (len(dense.shape) - n))
    return Geometry(dense.shape, dense, axes, table, table_axes, index, index_axes, tuple(range(indexed)), padding)
