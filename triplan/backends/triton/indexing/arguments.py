"""Arguments and constexprs that the kernels of this family share, from a geometry and a descriptor.

Tuples of sizes, strides and indexed axes run from the innermost dimension outwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from triplan.backends.runtime.launch import Arg, Int, Ptr, Scalar
from triplan.backends.triton.common.offsets import I32_LIMIT, extent_int, extents, padded, strides
from triplan.backends.triton.indexing.geometry import Axes, Geometry
from triplan.descriptors import PACKED, Operand
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import ElementKind


def index_pointers(g: Geometry) -> tuple[Ptr, ...]:
    """The address of each index tensor."""
    return tuple(Ptr(g.index.name, g.index.element, g.index.alignment, item) for item in g.index_items)


def policy(desc: IndexingDescriptor, g: Geometry) -> dict[str, Any]:
    """Constexprs: what to do with negative and bad indices."""
    # With nothing to clamp to, a clamped index is dropped like any other bad one.
    clamp = desc.out_of_bounds == "clamp" and all(n > 0 for n in g.extents)
    return {"REPORT": desc.out_of_bounds == "error", "WRAP": desc.wrap_negative, "CLAMP": clamp}


def alpha(desc: IndexingDescriptor, element: ElementKind) -> Scalar | None:
    """The factor of every contribution, passed as ``element``; None where the op has none."""
    return Scalar("alpha", element, 1) if any(o.name == "alpha" for o in desc.operands()) else None


def status(desc: IndexingDescriptor) -> Ptr | None:
    """Where the lowest bad position is recorded; None where the policy records none."""
    return Ptr("status", ElementKind.I64, 8) if desc.out_of_bounds == "error" else None


def padding(g: Geometry) -> Int | None:
    """The index value whose contributions are dropped; None where the op has none."""
    return None if g.padding is None else Int(g.padding, wide=g.padding >= I32_LIMIT)


def traversal_arguments(desc: IndexingDescriptor, g: Geometry) -> dict[str, Arg]:
    """The arguments that every traversal takes."""
    return {"status": status(desc), "alpha": alpha(desc, desc.element.compute), "padding": padding(g)}


def axis_arguments(g: Geometry) -> dict[str, Arg]:
    """The indices and the table axes that they select along, last axis first."""
    along = strides(g.table, g.indexed, g.wide)
    return {
        "indices": index_pointers(g)[::-1],
        "extents": tuple(extent_int(n) for n in g.extents)[::-1],
        "axis_strides": tuple(along)[::-1],
    }


class Walk:
    """Some of the iteration dimensions, and each operand's strides along them.

    Adjacent dimensions are merged where all operands are packed: fewer divisions in the kernel.
    """

    def __init__(self, g: Geometry, dims: Sequence[int]) -> None:
        self.g = g
        self.groups: list[list[int]] = []
        previous: int | None = None
        for d in dims:
            mergeable = previous is not None and d == previous + 1 and g.packed and self._moves_alike(previous, d)
            if mergeable:
                self.groups[-1].append(d)
            else:
                self.groups.append([d])
            previous = d

    def _moves_alike(self, a: int, b: int) -> bool:
        """Whether each operand moves along both dimensions or along neither (the dense one moves along all)."""
        return all((axes[a] is None) == (axes[b] is None) for axes in (self.g.table_axes, self.g.index_axes))

    @property
    def numel(self) -> int:
        return math.prod(self.g.sizes[d] for group in self.groups for d in group)

    def sizes(self) -> tuple[Arg, ...]:
        # As wide as the points, whatever the strides: 64-bit division is many times slower.
        wide = self.numel >= I32_LIMIT
        return extents((math.prod(self.g.sizes[d] for d in group) for group in self.groups), wide)

    def _strides(self, operand: Operand, axes: Axes, item: int | None = None) -> tuple[Arg, ...]:
        # The stride of a merged group is that of its innermost dimension.
        found = strides(operand, [axes[group[-1]] for group in self.groups], self.g.wide, item)
        return padded(found, Int(0, self.g.wide))

    def padded(self, along: Sequence[Arg]) -> tuple[Arg, ...]:
        """A stride along each dimension, as arguments."""
        return padded((along[group[-1]] for group in self.groups), Int(0, True))

    def dense(self) -> tuple[Arg, ...]:
        return self._strides(self.g.dense, self.g.dense_axes)

    def table(self) -> tuple[Arg, ...]:
        return self._strides(self.g.table, self.g.table_axes)

    def packed_table(self) -> tuple[Arg, ...]:
        """The table's strides if it were packed: they number its elements row-major."""
        return self._strides(replace(self.g.table, layout=PACKED), self.g.table_axes)

    def index(self) -> tuple[Arg, ...]:
        """Strides of each index tensor, that of the last indexed axis first."""
        found = tuple(self._strides(self.g.index, self.g.index_axes, item) for item in self.g.index_items)
        return found[::-1]

    def position(self) -> tuple[Arg, ...]:
        """Strides that number the index tensor's elements row-major: what ``status`` records."""
        by_dim = self.g.position_strides
        return padded((Int(by_dim[group[-1]], self.g.wide) for group in self.groups), Int(0, self.g.wide))
