"""Launches that visit every point once: by rows of packed operands, by tiles of others, or element by element.

What happens at a point (a copy, an atomic addition, ...) is a ``Point`` that the caller passes.
"""

from __future__ import annotations

from dataclasses import replace

import triton.language as tl

from triplan.backends.runtime.launch import Arg, Int, Launch, power_of_two_in
from triplan.backends.triton.common.card import L2_BYTES, L2_SHARE, SMS, WARP_THREADS
from triplan.backends.triton.common.fill import fill_launch
from triplan.backends.triton.common.offsets import I32_LIMIT, TL, ceil_power, divisor, extent_int
from triplan.backends.triton.indexing import points, traversals_kernels as kernels
from triplan.backends.triton.indexing.arguments import (
    Walk,
    axis_arguments,
    index_pointers,
    policy,
    status,
    traversal_arguments,
)
from triplan.backends.triton.indexing.geometry import (
    MAX_STRIPE,
    Geometry,
    fits_cache,
    geometry,
    index_alone,
    stripe_columns,
)
from triplan.backends.triton.indexing.points import PlaceStrides, Point
from triplan.backends.triton.indexing.tiles import filled, plane, tiles_launch
from triplan.descriptors import PACKED
from triplan.descriptors.fields import NO_BAD_INDEX
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import ElementKind

# Block sizes of ``rows_kernel``, measured on an H200: fewer, larger programs are slower at every size.
#: Bytes that a program reads where one index serves a row: two 16-byte loads per thread of 128 saturate memory.
ROW_BYTES = 4096
#: Most columns where one index serves a row.
MAX_COLS = 1024
#: Columns to which a tile is narrowed if many of its columns do not exist. Untuned.
MIN_COLS = 128
#: Elements that a program moves where every element has an index: four per thread.
SCATTERED_ELEMENTS = 512
#: The same for atomics in a stripe below ``WIDE_STRIPE`` columns: two per thread.
SCATTERED_ATOMICS = 256
#: Columns from which on atomics of a stripe take ``SCATTERED_ELEMENTS``.
WIDE_STRIPE = 256
#: Points per program of ``elements_kernel``: four per thread. Untuned.
ELEMENTS_BLOCK = 512
#: The same at least, where larger programs would leave multiprocessors idle: one per thread.
FEWEST_ELEMENTS = 128
#: Programs that are spread, where they contend for elements of the table: about those that run at a time. Neighbours
#: would meet more often, and rows that many indices choose would be computed one element at a time. FEWER where rows
#: are shorter than a program: else as many programs would begin at one column. From drawn problems on an H200, but for
#: products, which are untuned.
SPREAD, FEWER = 4096, 1024


def rows_tile(desc: IndexingDescriptor, point: Point) -> tuple[int, int]:
    """(rows, columns) of a program of ``rows_kernel``."""
    g = geometry(desc)
    widest = min(stripe_columns(g), point.elements or MAX_STRIPE) if g.full else point.elements or MAX_COLS
    cols = min(max(ceil_power(g.fold[2]), 16), widest)
    if g.full:
        copies = point is points.GATHER
        most = SCATTERED_ELEMENTS if copies or cols >= WIDE_STRIPE else SCATTERED_ATOMICS
        elements = min(point.elements or most, most)
    else:
        while cols > MIN_COLS and not filled(g.fold[2], cols):
            cols //= 2
        elements = max(point.elements or ROW_BYTES // desc.element.itemsize, cols)
    return elements // cols, cols


def rows_launch(desc: IndexingDescriptor, point: Point, dense: Arg, table: Arg, compute: ElementKind) -> Launch:
    """One launch of ``rows_kernel``; ``table`` is a tuple where ``point`` adds to 64-bit sums."""
    g = geometry(desc)
    outer, count, inner = g.fold
    rows, cols = rows_tile(desc, point)
    return Launch(
        kernels.rows_kernel,
        -(-outer * count // rows) * -(-inner // cols),
        {
            **traversal_arguments(desc, g),
            "dense": dense,
            "table": table,
            "index": index_pointers(g)[0],
            "n_rows": Int(outer * count, g.wide),
            "count": Int(count, g.wide),
            "inner": Int(inner, g.wide, power_of_two_in(inner)),
            "extent": extent_int(g.extents[0]),
            "run": points.run_length(g, point),
        },
        {
            **policy(desc, g),
            "POINT": point.function,
            "PAIRS": point.pairs,
            "FULL": g.full,
            "STRIPED": g.full and not fits_cache(g),
            "OFFSET": tl.int64 if g.wide else tl.int32,
            "COMPUTE": TL[compute],
            "BLOCK_ROWS": rows,
            "BLOCK_COLS": cols,
        },
        num_warps=point.warps,
    )


def elements_block(g: Geometry, point: Point) -> int:
    """Points of a program of ``elements_kernel``: fewer where there are less than two programs per multiprocessor."""
    block = point.elements or ELEMENTS_BLOCK
    while block > FEWEST_ELEMENTS and g.numel <= 2 * SMS * block:
        block //= 2
    return block


def _spread(g: Geometry, point: Point, block: int, programs: int) -> tuple[int, int]:
    """(programs that are spread, how many that follow each other in memory lie between them), where those would write
    to the few elements of one row of the outer dimensions; else (1, 1).

    All programs of SPREAD times as many are spread over their points, then those of the next ones.
    """
    fits = g.table.nbytes <= L2_BYTES
    if not point.contends and not (g.full and g.table.is_written and fits):
        return 1, 1
    spread = SPREAD if point.contends or g.fold[2] >= block else FEWER
    each = -(-programs // spread)
    if not fits and g.fold[0] > 1:
        # Only over as many rows of the outer dimensions as the cache holds the table of, else no access would find it.
        held = max(L2_SHARE * g.fold[0] // g.table.nbytes, 1) * programs // g.fold[0]
        windows = -(-programs // max(held // spread * spread, spread))
        each = -(-programs // (windows * spread))
    return (spread, each) if each > 1 else (1, 1)


def columns(g: Geometry, joined: int) -> tuple[int, int]:
    """(adjacent points between two of a thread that has ``joined`` in one column, how many times joined of these a row
    of the outer dimensions has): whole rows of the inner dimensions, several where they are shorter than a warp."""
    _, count, inner = g.fold
    beside = inner * max(min(-(-WARP_THREADS // inner), count // joined), 1)
    return beside, -(-count * inner // (joined * beside))


def elements_launch(
    desc: IndexingDescriptor,
    point: Point,
    dense: Arg,
    table: Arg,
    compute: ElementKind,
    packed_table: bool = False,
    g: Geometry | None = None,
    places: tuple[Arg, PlaceStrides] | None = None,
) -> Launch:
    """One launch of ``elements_kernel``, over ``g`` (default: the descriptor's geometry).

    ``packed_table``: ``table`` has the table operand's shape, but is packed. ``places``: an address, and how the offset
    to it follows, which ``point`` gets in place of a run and the place there.
    """
    g = geometry(desc) if g is None else g
    if packed_table and not g.table.layout.packed:
        g = replace(g, table=replace(g.table, layout=PACKED))
    walk = Walk(g, range(len(g.sizes)))
    run, place = places or (points.run_length(g, point), points.place_strides(g, point))
    args: dict[str, Arg] = {"dense": dense, "table": table, "run": run}
    constexprs = {"POINT": point.function, "PAIRS": point.pairs, "COMPUTE": TL[compute]}
    if not point.contends and (tiles := plane(g, point)) is not None:
        return tiles_launch(desc, g, tiles, point, args, constexprs, place)
    joined = points.joined(g, point)
    block = WARP_THREADS * joined if point.contends else elements_block(g, point)
    beside, chunks = columns(g, joined) if point.contends else (g.numel, 1)
    programs = -(-(g.fold[0] * chunks * beside * joined if point.contends else g.numel) // block)
    spread, each = _spread(g, point, block, programs)
    programs = -(-programs // (spread * each)) * spread * each
    wide = programs * block >= I32_LIMIT
    return Launch(
        kernels.elements_kernel,
        programs,
        {
            **traversal_arguments(desc, g),
            **axis_arguments(g),
            **args,
            "numel": Int(g.numel, wide),
            "each": Int(each) if spread > 1 else None,
            "sizes": walk.sizes(),
            "dense_strides": walk.dense(),
            "table_strides": walk.table(),
            "index_strides": walk.index(),
            "position_strides": walk.position(),
            "place_strides": None if place is None else (walk.padded(place[0]), place[1]),
            "beside": (divisor(beside, wide), divisor(chunks, wide)) if point.contends else None,
            "span": Int(g.fold[1] * g.fold[2], wide) if point.contends else None,
        },
        {
            **policy(desc, g),
            **constexprs,
            "POINT": point.function if joined == 1 else point.joined,
            "POINT_TYPE": tl.int64 if wide else tl.int32,
            "DENSE_FLAT": g.dense.layout.packed and g.dense.numel == g.numel,
            "INDEX_FLAT": g.index.layout.packed and None not in g.index_axes,
            # Stores of adjacent points share their sectors, and additions only take turns there.
            "SINGLE": g.table.is_written and point is not points.STORE,
            "JOINED": joined,
            "SPREAD": spread,
            "BLOCK": block,
        },
        num_warps=point.warps if joined == 1 else block // (joined * WARP_THREADS),
    )


def scratch_launch(desc: IndexingDescriptor, point: Point, dense: Arg, table: Arg, compute: ElementKind) -> Launch:
    """One launch over a ``table`` in the workspace: packed, whatever the table operand's layout."""
    if geometry(desc).fits_rows:
        return rows_launch(desc, point, dense, table, compute)
    return elements_launch(desc, point, dense, table, compute, packed_table=True)


def status_launches(desc: IndexingDescriptor) -> list[Launch]:
    """Reset ``status`` where the policy records bad indices; if no other launch reads the indices, record them too."""
    pointer = status(desc)
    if pointer is None:
        return []
    reset = fill_launch(pointer, 1, NO_BAD_INDEX)
    g = geometry(desc)
    if not g.idle or not g.index.numel:
        return [reset]
    # There is nothing to move or add, but there are indices, and they may be bad.
    unused = index_pointers(g)[0]
    return [reset, elements_launch(desc, points.NOTHING, unused, unused, ElementKind.I32, g=index_alone(g))]
