"""From an indexing geometry to launches: block sizes, offsets' widths, strides known or read off the tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import triton.language as tl

from triplan.backends.runtime.launch import Arg, Int, Launch, Ptr, Scalar, power_of_two_in
from triplan.backends.triton.common.fill import fill_launch
from triplan.backends.triton.common.offsets import I32_LIMIT, TL, ceil_power, extent_int, padded, strides
from triplan.backends.triton.indexing import kernels
from triplan.backends.triton.indexing.geometry import Axes, Geometry, geometry, keeps
from triplan.descriptors import PACKED, Operand
from triplan.descriptors.bad_indices import NO_BAD_INDEX
from triplan.sku import ElementKind

L2_SHARE = 16 * 2**20  # of 40 MB (A100) to 60 MB (H200), which the other operands pass through as well


def index_pointers(g: Geometry) -> tuple[Ptr, ...]:
    return tuple(Ptr(g.index.name, g.index.element, g.index.alignment, item) for item in g.index_items)


def wide(g: Geometry) -> bool:
    """Whether offsets need 64 bits: an operand passes 2**31 elements, or its strides are unknown."""
    return not g.packed or max(g.numel, *(o.numel for o in g.operands)) >= I32_LIMIT


def policy(desc: Any, g: Geometry) -> dict[str, Any]:
    # With nothing to clamp to, a clamped index is dropped like any other bad one.
    clamp = desc.out_of_bounds == "clamp" and all(n > 0 for n in g.extents)
    return {"REPORT": desc.out_of_bounds == "error", "WRAP": desc.wrap_negative, "CLAMP": clamp}


def common(desc: Any, g: Geometry) -> dict[str, Arg]:
    """The arguments that every traversal takes."""
    reports = desc.out_of_bounds == "error"
    has_alpha = any(o.name == "alpha" for o in desc.operands())
    return {
        "status": Ptr("status", ElementKind.I64, 8) if reports else None,
        "alpha": Scalar("alpha", desc.element.compute, 1) if has_alpha else None,
        "padding": None if g.padding is None else Int(g.padding, wide=g.padding >= I32_LIMIT),
    }


class Walk:
    """A list of iteration dimensions and how each operand walks them; adjacent ones are merged where all are packed."""

    def __init__(self, g: Geometry, dims: Sequence[int]) -> None:
        self.g, self.wide = g, wide(g)
        self.groups: list[list[int]] = []
        previous: int | None = None
        for d in dims:
            # Two adjacent dimensions are one where the layout is known and each operand walks both or neither.
            together = previous is not None and d == previous + 1 and g.packed and self._same_walk(previous, d)
            if together:
                self.groups[-1].append(d)
            else:
                self.groups.append([d])
            previous = d

    def _same_walk(self, a: int, b: int) -> bool:
        walks = (self.g.table_axes, self.g.index_axes)
        return all((w[a] is None) == (w[b] is None) for w in walks)

    @property
    def numel(self) -> int:
        return math.prod(self.g.sizes[d] for group in self.groups for d in group)

    def sizes(self) -> tuple[Arg, ...]:
        # Sizes stay narrow while the points do, whatever the strides: 64-bit division is many times slower.
        big = self.numel >= I32_LIMIT
        return padded((Int(math.prod(self.g.sizes[d] for d in group), big) for group in self.groups), Int(1, big))

    def _strides(self, operand: Operand, axes: Sequence[int | None], item: int | None = None) -> tuple[Arg, ...]:
        # A merged group walks with the stride of its innermost dimension.
        found = strides(operand, [axes[group[-1]] for group in self.groups], self.wide, item)
        return padded(found, Int(0, self.wide))

    def dense(self) -> tuple[Arg, ...]:
        return self._strides(self.g.dense, self.g.dense_axes)

    def table(self) -> tuple[Arg, ...]:
        return self._strides(self.g.table, self.g.table_axes)

    def packed_table(self) -> tuple[Arg, ...]:
        """How the table would be walked if it were packed: what numbers its elements."""
        return self._strides(replace(self.g.table, layout=PACKED), self.g.table_axes)

    def index(self) -> tuple[Arg, ...]:
        # Reversed, as the kernels walk indexed axes from the last to the first.
        found = tuple(self._strides(self.g.index, self.g.index_axes, item) for item in self.g.index_items)
        return found[::-1]

    def position(self) -> tuple[Arg, ...]:
        by_dim = self.g.position_axes
        return padded((Int(by_dim[group[-1]], self.wide) for group in self.groups), Int(0, self.wide))


def axis_arguments(g: Geometry) -> dict[str, Arg]:
    """What the kernels know of the indexed axes, last axis first."""
    along = strides(g.table, g.indexed, wide(g))
    return {
        "indices": index_pointers(g)[::-1],
        "extents": tuple(extent_int(n) for n in g.extents)[::-1],
        "axis_strides": tuple(along)[::-1],
    }


def scattered_add(desc: Any) -> Any:
    """The point function for additions at scattered places (in ``rows_kernel`` with a full index, or one by one)."""
    table = geometry(desc).table
    half = desc.element.is_floating_point and table.element.itemsize == 2
    pairs_inside = table.layout.packed and table.alignment >= 4 and table.numel % 2 == 0
    return kernels.atomic_pair_point if half and pairs_inside else kernels.atomic_point


def fits_rows(g: Geometry) -> bool:
    """Whether the rows traversal applies: all packed, one index, and rows wide enough to fill vectors."""
    return g.packed and len(g.indexed) == 1 and g.fold[2] >= 16


def stripe(g: Geometry) -> int:
    """Columns of the table, 64 to 512, whose every row together stays within a part of the L2 cache, if 64 can.

    Fewer would split the contiguous runs that indices often have: measured, that costs more than the cache gives.
    """
    fitting = L2_SHARE // max(g.extents[0] * g.table.element.itemsize, 1)
    return min(512, max(64, 1 << max(fitting, 1).bit_length() - 1))


def rows_launch(desc: Any, point: Any, dense: Arg, table: Arg, compute: ElementKind) -> Launch:
    """One launch of ``rows_kernel``."""
    g = geometry(desc)
    outer, count, inner = g.fold
    sums = isinstance(table, tuple)  # of 64 bits, each with a few more registers behind it than a plain addition
    cols = min(max(ceil_power(inner), 16), stripe(g) if g.full else 512 if sums else 1024)
    # Measured on an H200: two 16-byte loads a thread saturate memory when rows are contiguous; scattered elements want
    # four a thread, or two where atomics share a narrow stripe. Fewer, larger programs are slower at every size.
    if g.full:
        per_program = 256 if cols < 256 and point is not kernels.gather_point else 512
    else:
        per_program = max(512 if sums else 4096 // desc.element.itemsize, cols)
    rows = per_program // cols
    offsets_wide = wide(g)
    return Launch(
        kernels.rows_kernel,
        -(-outer * count // rows) * -(-inner // cols),
        {
            **common(desc, g),
            "dense": dense,
            "table": table,
            "index": index_pointers(g)[0],
            "n_rows": Int(outer * count, offsets_wide),
            "count": Int(count, offsets_wide),
            "inner": Int(inner, offsets_wide, power_of_two_in(inner)),
            "extent": extent_int(g.extents[0]),
        },
        {
            **policy(desc, g),
            "POINT": point,
            "FULL": g.full,
            "OFFSET": tl.int64 if offsets_wide else tl.int32,
            "COMPUTE": TL[compute],
            "BLOCK_ROWS": rows,
            "BLOCK_COLS": cols,
        },
    )


def elements_launch(
    desc: Any,
    point: Any,
    dense: Arg,
    table: Arg,
    compute: ElementKind,
    packed_table: bool = False,
    g: Geometry | None = None,
) -> Launch:
    """One launch of ``elements_kernel``, over ``g`` (default: the descriptor's geometry).

    ``packed_table``: the table pointer is a packed copy of the table operand.
    """
    g = geometry(desc) if g is None else g
    if packed_table and not g.table.layout.packed:
        g = replace(g, table=replace(g.table, layout=PACKED))
    walk = Walk(g, range(len(g.sizes)))
    block = 512
    return Launch(
        kernels.elements_kernel,
        -(-g.numel // block),
        {
            **common(desc, g),
            **axis_arguments(g),
            "dense": dense,
            "table": table,
            "numel": Int(g.numel, g.numel >= I32_LIMIT),
            "sizes": walk.sizes(),
            "dense_strides": walk.dense(),
            "table_strides": walk.table(),
            "index_strides": walk.index(),
            "position_strides": walk.position(),
        },
        {
            **policy(desc, g),
            "POINT": point,
            "POINT_TYPE": tl.int64 if g.numel >= I32_LIMIT else tl.int32,
            "COMPUTE": TL[compute],
            "DENSE_FLAT": g.dense.layout.packed,
            "INDEX_FLAT": g.index.layout.packed and None not in g.index_axes,
            "BLOCK": block,
        },
    )


def ordered_tile(g: Geometry) -> tuple[int, int]:
    """(slots, lanes) of the table that one program of ``ordered_kernel`` owns."""
    lanes = g.fold[0] * g.fold[2]
    block_lanes = min(max(ceil_power(lanes), 16), 128)
    return min(max(ceil_power(g.slots), 1), 8), block_lanes  # 16 slots spill where strides are unknown


def ordered_launch(desc: Any, step: Any, pointer: Any, compute: ElementKind) -> Launch:
    """One launch of ``ordered_kernel``."""
    g = geometry(desc)
    lanes = Walk(g, [d for d in range(len(g.sizes)) if d not in g.loop])
    steps = Walk(g, g.loop)
    block_slots, block_lanes = ordered_tile(g)
    big = max(g.slots, lanes.numel, steps.numel) >= I32_LIMIT
    return Launch(
        kernels.ordered_kernel,
        max(1, -(-g.slots // block_slots) * -(-lanes.numel // block_lanes)),
        {
            **common(desc, g),
            **axis_arguments(g),
            "dense": pointer(g.dense),
            "table": pointer(g.table),
            "slots": Int(g.slots, big),
            "lanes": Int(lanes.numel, big),
            "steps": Int(steps.numel, big),
            "lane_sizes": lanes.sizes(),
            "lane_dense": lanes.dense(),
            "lane_table": lanes.table(),
            "lane_index": lanes.index(),
            "lane_position": lanes.position(),
            "step_sizes": steps.sizes(),
            "step_dense": steps.dense(),
            "step_index": steps.index(),
            "step_position": steps.position(),
        },
        {
            **policy(desc, g),
            "STEP": step,
            "KEEP": keeps(desc),
            "POINT_TYPE": tl.int64 if big else tl.int32,
            "COMPUTE": TL[compute],
            "BLOCK_SLOTS": block_slots,
            "BLOCK_LANES": block_lanes,
        },
    )


def status_launch(desc: Any) -> list[Launch]:
    """Reset ``status`` where the policy records bad indices; if no other launch meets the indices, record them too."""
    if desc.out_of_bounds != "error":
        return []
    reset = fill_launch(Ptr("status", ElementKind.I64, 8), 1, NO_BAD_INDEX)
    g = geometry(desc)
    if not g.idle or not g.index.numel:
        return [reset]
    # There is nothing to move or add, but the indices are there, and may be bad.
    axes = tuple(range(len(g.index.shape)))
    nowhere: Axes = (None,) * len(axes)
    bare = replace(g, sizes=g.index.shape, dense_axes=nowhere, table_axes=nowhere, index_axes=axes, padding=None)
    any_pointer = index_pointers(g)[0]
    return [reset, elements_launch(desc, kernels.no_point, any_pointer, any_pointer, ElementKind.I32, g=bare)]


def table_bytes(desc: Any, element: ElementKind) -> int:
    """Bytes of a packed table of ``element``, rounded up to a vector."""
    return -(-geometry(desc).table.numel * element.itemsize // 16) * 16
