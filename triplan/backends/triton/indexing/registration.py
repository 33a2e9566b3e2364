"""Registers an entry of the kernel table for all ops that its kernel computes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from triplan.backends.table import Build, Guarantee, kernel
from triplan.backends.triton.indexing.geometry import MIN_ROW, geometry
from triplan.descriptors import IndexPutDescriptor
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import SUPPORTED, IndexElementKind, Support, Target

#: Elements of the ops that move elements.
COPIED = ("f16", "bf16", "f32", "f64", "i8", "u8", "i16", "i32", "i64", "bool")
#: Elements of the ops that accumulate.
ADDED = ("f16", "bf16", "f32", "f64", "i32", "i64")
HALF = ("f16", "bf16")

# ``index_put`` stores or accumulates, as its descriptor says. It is in STORES and in SUMS; each refuses the other case.
GATHERS = ("gather", "index_select", "embedding")
STORES = ("scatter", "index_put")
#: Sums into a table where every element has an index of its own.
ELEMENT_SUMS = ("gather_backward", "scatter_add")
#: Sums into a table where one index serves a slice.
SLICE_SUMS = ("index_select_backward", "index_add", "embedding_backward", "index_put")
SUMS = (*ELEMENT_SUMS, *SLICE_SUMS)

Applies = Callable[[IndexingDescriptor, Target], Support]
Rank = Callable[[IndexingDescriptor, Target], float]


def always(desc: IndexingDescriptor, target: Target) -> Support:
    return SUPPORTED


def rows_apply(desc: IndexingDescriptor, target: Target) -> Support:
    """Whether ``rows_kernel`` applies."""
    if geometry(desc).fits_rows:
        return SUPPORTED
    needed = f"at least {MIN_ROW} contiguous elements behind the indexed axis"
    return Support.no(f"needs one index, packed operands and {needed}")


def entry(
    name: str,
    ops: Collection[str],
    *,
    elements: Collection[str],
    rank: Rank,
    guarantee: Guarantee,
    supports: Applies = always,
    **fields: Any,
) -> Callable[[Build], Build]:
    """Register the decorated function, which returns the launches, as kernel ``name`` of each of ``ops``.

    ``elements``, ``supports``, ``guarantee``, ``rank`` and ``fields`` are those of ``triplan.backends.table.kernel``.
    """
    put_applies = _put_applies(accumulate=ops != STORES, supports=supports)

    def register(build: Build) -> Build:
        for op in ops:
            kernel(
                op=op,
                name=name,
                elements=elements,
                index_elements=tuple(IndexElementKind),
                supports=put_applies if op == "index_put" else supports,
                rank=rank,
                guarantee=guarantee,
                layout=lambda desc: geometry(desc).layout,
                **fields,
            )(build)
        return build

    return register


def _put_applies(accumulate: bool, supports: Applies) -> Callable[[IndexPutDescriptor, Target], Support]:
    def applies(desc: IndexPutDescriptor, target: Target) -> Support:
        if desc.accumulate is accumulate:
            return supports(desc, target)
        return Support.no(f"accumulate is {desc.accumulate}; this kernel {'adds' if accumulate else 'stores'}")

    return applies
