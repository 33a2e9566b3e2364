"""A packed copy of contributions that lie across the contiguous axis of memory, made before they are summed.

A sum reads whole contributions, in the order of their slots. Where those to one element of the table are adjacent in
memory, not those to its neighbours, each element that is read is in a sector of its own. Tiles of a copy read and write
whole sectors.
"""

from __future__ import annotations

from dataclasses import replace

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch, power_of_two_in
from triplan.backends.triton.common.card import BYTES_PER_US, COPIED_BYTES_PER_US, LAUNCH_US, MAX_THREAD_REGISTERS
from triplan.backends.triton.common.copied_kernels import matrix_copy_kernel
from triplan.backends.triton.common.offsets import bits, ceil_power, divisible_extent, extents, padded
from triplan.backends.triton.common.strides import axis_strides
from triplan.backends.triton.indexing.geometry import Geometry
from triplan.descriptors import PACKED, packed_strides

#: Time of a sum relative to packed contributions, where each element is in a sector of its own. From 1.2 GB of f32 in
#: ``bench anywhere indexing --seed 3`` on an H200.
ACROSS = 6.5
#: Elements of a tile and its longest side, in 8 warps. Those of ``transposed`` of the copies.
ELEMENTS, SIDE = 4096, 64
WARPS = 8
#: Columns of a tile of short rows.
SHORT = 16
#: Bytes of the widest access of a thread.
VECTOR_BYTES = 16
#: Vectors of the shortest row that is padded to whole vectors: its copy is at most a quarter larger.
PADDED_VECTORS = 4


def lies_across(g: Geometry) -> bool:
    """Whether contributions to one element, not those to its neighbours, are adjacent in memory."""
    unit = g.dense.layout.unit_axis
    return unit is not None and any(g.dense_axes[d] == unit and g.sizes[d] > 1 for d in g.loop)


def copied(g: Geometry) -> bool:
    """Whether a copy takes less time than it saves."""
    if g.idle or g.full or g.fold[2] == 1 or g.dense.layout.zero_axes or not lies_across(g):
        return False
    return copy_us(g) < (ACROSS - 1) * g.dense.nbytes / BYTES_PER_US


def copy_us(g: Geometry) -> float:
    return LAUNCH_US + 2 * g.dense.nbytes / COPIED_BYTES_PER_US


def on_copy(g: Geometry) -> Geometry:
    """The same geometry with packed contributions."""
    return replace(g, dense=replace(g.dense, layout=PACKED))


def span(g: Geometry) -> int:
    """Elements from one contribution to the next in the copy: whole vectors, where an end that none reaches is short.

    Only for a packed table: other kernels walk over the axes of packed contributions.
    """
    inner, vector = g.fold[2], VECTOR_BYTES // g.dense.element.itemsize
    if not g.table.layout.packed or g.dense.shape[_plane(g)[1]] != inner or inner <= PADDED_VECTORS * vector:
        return inner
    return -(-inner // vector) * vector


def _plane(g: Geometry) -> tuple[int, int]:
    """The axes of a tile: along which the contributions are contiguous, and the copy."""
    unit = g.dense.layout.unit_axis
    assert unit is not None
    return unit, max(a for a, n in enumerate(g.dense.shape) if n > 1)


def _tile(g: Geometry) -> tuple[int, int]:
    """(rows, columns): extents of a tile along the two axes."""
    rows, cols = (ceil_power(g.dense.shape[a]) for a in _plane(g))
    wide = min(cols, max(SIDE, ELEMENTS // rows))
    return min(rows, ELEMENTS // wide), wide


def programs(g: Geometry) -> int:
    shape, plane, (high, wide) = g.dense.shape, _plane(g), _tile(g)
    rows, cols = (shape[a] for a in plane)
    return -(-rows // high) * -(-cols // wide) * (g.dense.numel // (rows * cols))


def copy_launch(g: Geometry, to: Scratch) -> Launch:
    """Copies the contributions to ``to``, packed but for ``span``."""
    o, (row, col), (high, wide) = g.dense, _plane(g), _tile(g)
    others = [a for a in range(len(o.shape)) if a not in (row, col)]

    def batch(found: tuple[Arg, ...]) -> Arg:
        """Of a stride for each axis those of the others, which number the matrices; None if there are none."""
        return padded((found[a] or Int(1, True) for a in others), Int(0, True, 16)) if others else None

    width = o.shape[col] if span(g) == g.fold[2] else span(g)
    steps = (n if a >= col else n // o.shape[col] * width for a, n in enumerate(packed_strides(o.shape)))
    lies, copy = axis_strides(o), tuple(Int(n, True, power_of_two_in(n)) for n in steps)
    return Launch(
        matrix_copy_kernel,
        programs(g),
        {
            "source": bits(o),
            "out": replace(to, element=o.element.bits),
            "rows": divisible_extent(o.shape[row]),
            "source_columns": divisible_extent(o.shape[col]),
            "out_columns": divisible_extent(width),
            "source_n": lies[col],
            "source_batch": batch(lies),
            "out_m": copy[row],
            "out_batch": batch(copy),
            "sizes": extents((o.shape[a] for a in others), wide=False) if others else None,
        },
        {"source_m": 1, "out_n": 1, "ROWS": high, "COLUMNS": wide},
        num_warps=WARPS,
        # Left alone, ptxas spills a few on sm80 to raise occupancy.
        max_registers=MAX_THREAD_REGISTERS if o.element.itemsize == 8 and wide <= SHORT else None,
    )
