"""The launch of ``tiles_kernel``: which two dimensions its tiles have, and how many elements along each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from triplan.backends.runtime.launch import Arg, Int, Launch, Stride, power_of_two_in
from triplan.backends.triton.common.card import L2_SHARE
from triplan.backends.triton.common.offsets import I32_LIMIT, ceil_power, extent_int, extents, padded
from triplan.backends.triton.common.strides import Along, count, known_strides, row_tile
from triplan.backends.triton.indexing import traversals_kernels as kernels
from triplan.backends.triton.indexing.arguments import index_pointers, policy, traversal_arguments
from triplan.backends.triton.indexing.geometry import MIN_ROW, Axes, Geometry, stripe_columns
from triplan.backends.triton.indexing.points import ADD, PlaceStrides, Point
from triplan.descriptors import PACKED, Operand
from triplan.descriptors.indexing import IndexingDescriptor

#: Elements per program, four per thread. Untuned.
ELEMENTS = 512
#: The same where one index serves a row: two 16-byte loads per thread of 128 saturate memory.
ROW_BYTES = 4096
#: The same at most: each element has two addresses. Untuned.
MAX_ELEMENTS = 1024
#: Elements from which on there are enough programs of that size. Untuned.
MANY = 1 << 20
#: Part of a tile's columns that exist, at least; untuned. Where a third did not, sums took 1.4 times as long.
FILLED = 0.75
#: Rows of a tile where the operands are contiguous along different dimensions: a sector of its rows and more. Untuned.
TURNED_ROWS = 16
#: Elements of the shortest row of a written table that tiles are turned for: so many additions meet in one or two
#: sectors, which the cache updates at once. Untuned.
SHORTEST_ROW = 4

NO_STRIDE = Int(0, True, 16)


@dataclass(frozen=True, slots=True)
class Plane:
    """The dimensions of a tile's ``rows`` and ``cols``; ``turned``: one operand is contiguous along rows."""

    rows: int
    cols: int
    turned: bool


def _contiguous(g: Geometry, o: Operand, axes: Axes, shortest: int = MIN_ROW) -> int | None:
    """The dimension along which ``o`` is contiguous, if it has ``shortest`` elements."""
    moving = [a for a, n in enumerate(o.shape) if n > 1]
    unit = (moving[-1] if moving else None) if o.layout.packed else o.layout.unit_axis
    found = next((d for d, a in enumerate(axes) if a is not None and a == unit), None)
    return found if found is not None and g.sizes[found] >= shortest else None


def _near(g: Geometry) -> int | None:
    """The dimension along which neighbours share sectors of the table: it is contiguous along it, or along no axis, as
    every second column of a matrix is, and this is its last."""
    o = g.table
    if not o.layout.packed and o.layout.unit_axis is None:
        o = replace(o, layout=PACKED)
    return _contiguous(g, o, g.table_axes, SHORTEST_ROW)


def _stays(g: Geometry, d: int) -> bool:
    """Whether all points along dimension ``d`` reach one element of the table, which is expanded there."""
    moved = {g.table_axes[d], *(g.indexed if g.index_axes[d] is not None else ())} - {None}
    return moved <= set(g.table.layout.zero_axes)


def plane(g: Geometry, point: Point) -> Plane | None:
    """The dimensions of the tiles; None where tiles have nothing to gain over ``elements_kernel``.

    The columns are those of the operand that is written, if it is contiguous along a dimension. Where every element has
    an index, those of the index: then neighbours meet the table at random.
    """
    table, dense, index = (g.table, g.table_axes), (g.dense, g.dense_axes), (g.index, g.index_axes)
    first = index if g.full else table if g.table.is_written else dense
    sides = [first, table if first is dense else dense]
    found = [_contiguous(g, *side) for side in sides]
    if found[0] is None and found[1] is not None and g.table.is_written and not g.full:
        found[0] = _near(g)
    cols, other = found if found[0] is not None else found[::-1]
    # The grid must hold a program for every 16 elements.
    if cols is None or g.packed or max(g.numel // MIN_ROW, *g.sizes) >= I32_LIMIT:
        return None
    turned = other is not None and other != cols and (g.table.is_written or g.full or not _stays(g, cols))
    rest = [d for d, n in enumerate(g.sizes) if n > 1 and d != cols]
    if not rest:
        return None
    p = Plane(other if other is not None and turned else rest[-1], cols, turned)
    # elements_kernel visits the last dimension first: its neighbours are contiguous along no other.
    return p if turned or cols < rest[-1] or filled(g.sizes[cols], tile(g, p, point)[1]) else None


def filled(columns: int, width: int) -> bool:
    """Whether enough columns of tiles of ``width`` columns exist."""
    return columns >= FILLED * -(-columns // width) * width


def striped(g: Geometry, p: Plane, point: Point) -> bool:
    """Whether tiles are visited by stripes of columns: each column has a part of the table, which is larger than the L2
    cache."""
    return g.full and p.cols not in g.loop and g.table.nbytes > L2_SHARE


def shares_indices(g: Geometry, p: Plane) -> bool:
    """Whether tiles are visited by stripes of columns as all rows of a stripe have its indices, which are more than the
    L2 cache keeps."""
    moves, still = g.index_axes[p.cols] is not None, g.index_axes[p.rows] is None
    return moves and still and g.index.nbytes > L2_SHARE


def tile(g: Geometry, p: Plane, point: Point) -> tuple[int, int]:
    """(rows, columns) of a program."""
    rows, cols = g.sizes[p.rows], g.sizes[p.cols]
    many = not g.full and not p.turned and g.numel >= MANY
    most = point.elements or (min(ROW_BYTES // g.dense.element.itemsize, MAX_ELEMENTS) if many else ELEMENTS)
    if not p.turned:
        high, wide = row_tile(most, rows, cols)
        fitting = stripe_columns(g) if striped(g, p, point) else wide
        return high * wide // min(wide, fitting), min(wide, fitting)
    high = min(TURNED_ROWS, ceil_power(rows), max(most // 32, 1))
    wide = min(most // high, ceil_power(cols))
    return min(most // wide, ceil_power(rows)), wide


def adds_vectors(g: Geometry) -> bool:
    """Whether tiles add to aligned pairs of adjacent elements of one row of the table."""
    p = plane(g, ADD)
    if p is None or g.index_axes[p.cols] is not None or g.sizes[p.cols] % 2:
        return False
    layout = g.table.layout
    return _along_rows(g, p) and (layout.packed or layout.stride_multiple % 2 == 0)


def _along_rows(g: Geometry, p: Plane) -> bool:
    """Whether the table is contiguous along the columns of tiles."""
    return _contiguous(g, g.table, g.table_axes, SHORTEST_ROW) == p.cols


def shares_sectors(g: Geometry) -> bool:
    """Whether neighbours add to one sector of the table, if they have one index: it is contiguous along their rows."""
    if g.packed:
        return not g.scattered
    p = plane(g, ADD)
    cols = p.cols if p is not None else max((d for d, n in enumerate(g.sizes) if n > 1), default=0)
    return g.index_axes[cols] is None and _contiguous(g, g.table, g.table_axes, SHORTEST_ROW) == cols


def _stride(o: Operand, axis: int | None, item: int | None = None) -> Arg:
    """The stride of ``o`` along an axis, with what its layout promises; None for 1."""
    if axis is None:
        return NO_STRIDE
    known = known_strides(o, len(o.shape))[axis]
    if isinstance(known, Along):
        return Stride(o.name, axis, item, o.layout.stride_multiple)
    return None if known == 1 else Int(known, True, power_of_two_in(known))


def programs(g: Geometry, p: Plane, rows: int, cols: int) -> int:
    blocks = -(-g.sizes[p.rows] // rows) * -(-g.sizes[p.cols] // cols)
    return blocks * g.numel // (g.sizes[p.rows] * g.sizes[p.cols])


def tiles_launch(
    desc: IndexingDescriptor,
    g: Geometry,
    p: Plane,
    point: Point,
    args: Mapping[str, Arg],
    constexprs: Mapping[str, Any],
    place: PlaceStrides | None,
) -> Launch:
    """One launch over ``g``. ``args`` and ``constexprs``: what all traversals give ``point``, and ``place`` too."""
    others = [d for d in range(len(g.sizes)) if d not in (p.rows, p.cols)]
    rows, cols = tile(g, p, point)

    def three(found: Sequence[Arg]) -> tuple[Arg, ...]:
        """Of a stride for each dimension: (those of the others, along rows, along columns)."""
        known = (Int(1, True) if found[d] is None else found[d] for d in others)
        return padded(known, NO_STRIDE), found[p.rows], found[p.cols]

    def strides(o: Operand, axes: Axes, item: int | None = None) -> tuple[Arg, ...]:
        return three([_stride(o, a, item) for a in axes])

    axis_strides = [s if (s := _stride(g.table, a)) is not None else Int(1, True) for a in g.indexed]
    return Launch(
        kernels.tiles_kernel,
        programs(g, p, rows, cols),
        {
            **traversal_arguments(desc, g),
            "indices": index_pointers(g)[::-1],
            "rows": count(g.sizes[p.rows]),
            "cols": count(g.sizes[p.cols]),
            "sizes": extents((g.sizes[d] for d in others), wide=False),
            "dense_strides": strides(g.dense, g.dense_axes),
            "table_strides": strides(g.table, g.table_axes),
            "index_strides": tuple(strides(g.index, g.index_axes, item) for item in g.index_items)[::-1],
            "position_strides": three([Int(n, True) for n in g.position_strides]),
            "extents": tuple(extent_int(n) for n in g.extents)[::-1],
            "axis_strides": tuple(axis_strides)[::-1],
            "place_strides": None if place is None else (three(place[0]), place[1]),
            **args,
        },
        {
            **policy(desc, g),
            "STRIPED": striped(g, p, point) or shares_indices(g, p),
            "INDEX_MOVES": g.index_axes[p.cols] is not None,
            "BLOCK_ROWS": rows,
            "BLOCK_COLS": cols,
            **constexprs,
        },
        num_warps=point.warps,
    )
