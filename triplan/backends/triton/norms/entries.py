"""The kernel table's rows for rms_norm, layer_norm, l2_norm and their adjoints.

``rows`` holds whole rows in registers, ``looped`` walks along rows of any length. Gradients of weight and bias are
partial sums in the workspace, as many lines as there are programs, then folded in one order: no atomics.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from triplan.backends.runtime.launch import Int, Launch
from triplan.backends.table import kernel
from triplan.backends.triton.common.rows import L2_BYTES, LAUNCH_US, Tile, registers_for, waves_us
from triplan.backends.triton.norms import looped_kernels, parameters_kernels, rows_kernels
from triplan.backends.triton.norms.shared import (
    ELEMENTS,
    MOST,
    abreast,
    adds_up,
    constexprs_of,
    fold_us,
    folds_of,
    guarantee,
    is_backward,
    launch_of,
    layout,
    lines_of,
    numerics,
    operand_arguments,
    packed_parameters,
    parts_of,
    read_twice,
    row_bytes,
    strip,
    view,
    walk,
    whole,
    workspace,
)
from triplan.sku import ElementKind, Support, Target

# --- when they apply, and what they cost ---


def _applies(tiled: Callable[[Any], Tile | None], desc: Any, target: Target) -> Support:
    tile = tiled(desc)
    if tile is None:
        return Support.no(f"rows of {view(desc).n} elements do not fit in registers")
    if view(desc).programs(tile.rows) >= 2**31:
        return Support.no(f"needs {view(desc).programs(tile.rows)} programs; a grid holds fewer than 2**31")
    return packed_parameters(desc)


def rows_rank(desc: Any, target: Target) -> float:
    tile = whole(desc)
    assert tile is not None
    moved = waves_us(view(desc).programs(tile.rows), tile.rows * row_bytes(desc)[0], target)
    return moved + (fold_us(desc, tile) if is_backward(desc) else 0.0)


def looped_rank(desc: Any, target: Target) -> float:
    r, (moved, read) = view(desc), row_bytes(desc)
    under_way = min(r.count, 2 * max(target.sm_count, 1)) * read
    again = (0.35 if under_way <= L2_BYTES else 0.8) * read
    found = waves_us(r.count, moved + again, target)
    if is_backward(desc) and parts_of(desc, strip(desc)):
        found += LAUNCH_US + r.count * read / 3.8e6 + fold_us(desc, strip(desc))
    return found


# --- launches ---


def _fits_once(desc: Any, tile: Tile) -> bool:
    """Whether a program of an adjoint takes more than half of a multiprocessor's registers, but so few more that ptxas,
    left alone, may spill to fit a second one: where a warp holds whole rows, read by vectors, and two parameters' sums.
    """
    short = desc.element is ElementKind.F32 and tile.block <= 128
    return short and view(desc).vectors and len(parts_of(desc, tile)) == 2


def whole_launches(desc: Any, tile: Tile, stages: int = 3) -> list[Launch]:
    """The launches of ``rows`` with a tile of one's own: what a sweep of tiles tries.

    ``stages`` is how far the programs of adjoints, which stay for several groups of rows, fetch ahead: with 3 there are
    two copies of what is fetched, else only one row is there or on its way.
    """
    r, backward = view(desc), is_backward(desc)
    folds = folds_of(desc, tile) if backward else []
    if r.count == 0 or (r.n == 0 and backward):
        return folds
    args, constexprs = operand_arguments(desc, tile.rows), constexprs_of(desc, tile)
    if not backward:
        constexprs |= {"FULL": r.n == tile.block, "ABREAST": abreast(desc, tile), "ADDS_UP": adds_up(desc, tile)}
        return [launch_of(rows_kernels.norm_rows_kernel, r.programs(tile.rows), args, constexprs, tile.warps)]
    constexprs["STAGES"] = stages
    lines, each = lines_of(desc, tile)
    args |= {"each": Int(each), **{name: parts for name, (parts, _) in parts_of(desc, tile).items()}}
    if not parts_of(desc, tile):  # nothing is shared: a program for each group of rows
        lines, args["each"] = -(-r.count // tile.rows), Int(1)
    most_registers = registers_for(tile, 1) if _fits_once(desc, tile) else 0
    return [
        launch_of(rows_kernels.norm_backward_rows_kernel, lines, args, constexprs, tile.warps, most_registers),
        *folds,
    ]


def looped_launches(desc: Any, tile: Tile, shared: Tile | None = None, unroll: int = 0) -> list[Launch]:
    """The launches of ``looped`` with a tile of one's own, ``unroll`` of which are read at a time, and one for the
    parameters' gradients."""
    r, backward, shared = view(desc), is_backward(desc), shared or strip(desc)
    folds = folds_of(desc, shared) if backward else []
    if r.count == 0 or (r.n == 0 and backward):
        return folds
    args, constexprs = operand_arguments(desc, tile.rows), constexprs_of(desc, tile)
    unroll = unroll or r.unroll(tile, 4 if r.vectors else max(2 // read_twice(desc), 1))
    full = r.n % (tile.block * unroll) == 0
    constexprs |= {"UNROLL": unroll, "VECTOR": r.vector(desc.element, tile), "FULL": full}
    if not backward:
        # (Left alone, ptxas may spill a few of f64's to fit another program.)
        most_registers = registers_for(tile, 1) if desc.element is ElementKind.F64 else 0
        return [launch_of(looped_kernels.norm_looped_kernel, r.count, args, constexprs, tile.warps, most_registers)]
    first = launch_of(looped_kernels.norm_backward_looped_kernel, r.count, args, constexprs, tile.warps)
    if not parts_of(desc, shared):
        return [first]
    lines, each = lines_of(desc, shared)
    blocks = -(-r.n // shared.block)
    args |= {"each": Int(each), "blocks": Int(blocks)}
    args |= {name: parts for name, (parts, _) in parts_of(desc, shared).items()}
    constexprs = constexprs_of(desc, shared)
    return [
        first,
        launch_of(parameters_kernels.norm_parameters_kernel, lines * blocks, args, constexprs, shared.warps),
        *folds,
    ]


def _rows(desc: Any, target: Target) -> list[Launch]:
    tile = whole(desc)
    assert tile is not None
    return whole_launches(desc, tile)


def _looped(desc: Any, target: Target) -> list[Launch]:
    return looped_launches(desc, walk(desc))


def _register() -> None:
    for op in MOST:
        for name, tiled, parameters, build, rank, priority in (
            ("rows", whole, whole, _rows, rows_rank, 0),
            ("looped", walk, strip, _looped, looped_rank, 1),
        ):
            kernel(
                op=op,
                name=name,
                elements=ELEMENTS,
                guarantee=partial(guarantee, tiled, parameters),
                supports=partial(_applies, tiled),
                workspace=partial(workspace, parameters),
                rank=rank,
                numerics=partial(numerics, name, tiled),
                priority=priority,
                layout=layout,
            )(build)


_register()
