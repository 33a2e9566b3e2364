"""The kernel table's rows for norms of few and long rows: ``split`` gives each row to many programs.

Forward, parts of a row's statistics come first, then results. Backward, the kernel that adds up the parameters'
gradients finds parts of each row's sums on its way, so that no operand is read a third time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch
from triplan.backends.table import kernel
from triplan.backends.triton.common.offsets import ceil_power, padded_bytes
from triplan.backends.triton.common.rows import LAUNCH_US, Tile, again_us, registers_for, waves_us
from triplan.backends.triton.norms import parameters_kernels
from triplan.backends.triton.norms import split_kernels as kernels
from triplan.backends.triton.norms.shared import (
    ELEMENTS,
    MOST,
    constexprs_of,
    fold_us,
    folds_of,
    guarantee,
    is_backward,
    is_centred,
    launch_of,
    layout,
    lines_of,
    numerics,
    operand_arguments,
    packed_parameters,
    part_bytes,
    parts_of,
    read_twice,
    row_bytes,
    strip,
    view,
)
from triplan.sku import ElementKind, Support, Target

#: Parts of a row that are added up at once.
MOST_PARTS = 4096


def piece(desc: Any) -> Tile:
    """What one program turns into results."""
    return view(desc).piece(desc.element, read_twice(desc))


def summed_up(desc: Any) -> Tile:
    """What one program adds up."""
    return strip(desc) if is_backward(desc) else piece(desc)


def parts(desc: Any) -> int:
    """Of a row: what is added up apart."""
    return max(-(-view(desc).n // summed_up(desc).block), 1)


def pieces(desc: Any) -> int:
    """Of a row: what is written apart."""
    return max(-(-view(desc).n // piece(desc).block), 1)


def scratch(desc: Any) -> tuple[dict[str, Arg], int]:
    """Where the rows' parts lie, by the kernels' name, and the bytes of the whole workspace."""
    shared, compute = strip(desc), desc.element.compute
    start = len(parts_of(desc, shared)) * part_bytes(desc, shared)  # none forward
    names: tuple[str, ...] = ("projections", "totals") if is_backward(desc) else ("squares", "centres", "rests")
    names = names if is_centred(desc) else names[:1]
    found: dict[str, Arg] = dict.fromkeys(("projections", "totals", "squares", "centres", "rests"))
    each = padded_bytes(view(desc).count * parts(desc) * compute.itemsize)
    found |= {name: Scratch(start + i * each, compute) for i, name in enumerate(names)}
    return found, start + len(names) * each


def applies(desc: Any, target: Target) -> Support:
    r = view(desc)
    if r.across:
        return Support.no("rows lie side by side: their elements are read together")
    if parts(desc) > MOST_PARTS:
        return Support.no(f"rows have {parts(desc)} parts; at most {MOST_PARTS} are added up at once")
    programs = r.count * max(parts(desc), pieces(desc))
    if programs >= 2**31:
        return Support.no(f"needs {programs} programs; a grid holds fewer than 2**31")
    return packed_parameters(desc)


def rank(desc: Any, target: Target) -> float:
    count, n, (moved, read) = view(desc).count, parts(desc), row_bytes(desc)
    # One launch: the others are placed while the one ahead of them ends.
    written = waves_us(count * pieces(desc), (moved - read) / pieces(desc), target) + again_us(count * read) - LAUNCH_US
    if not is_backward(desc):
        return waves_us(count * n, read / n, target) + written
    shared = strip(desc)
    lines, each = lines_of(desc, shared)
    return waves_us(lines * n, each * shared.rows * read / n, target) + written + fold_us(desc, shared)


def split(desc: Any, target: Target) -> list[Launch]:
    """Each of the launches is placed while the one ahead of it ends: they are short."""
    return [replace(launch, overlaps=True) for launch in _launches(desc)]


def _launches(desc: Any) -> list[Launch]:
    r, backward, tile = view(desc), is_backward(desc), piece(desc)
    shared = strip(desc)
    folds = folds_of(desc, shared) if backward else []
    if r.count == 0 or (r.n == 0 and backward):
        return folds
    args = operand_arguments(desc, 1) | scratch(desc)[0] | {"blocks": Int(pieces(desc)), "parts": Int(parts(desc))}
    found = constexprs_of(desc, tile) | {"BLOCKS": ceil_power(pieces(desc)), "PARTS": ceil_power(parts(desc))}
    grid = r.count * pieces(desc)
    if not backward:
        return [
            launch_of(kernels.norm_partial_kernel, grid, args, found, tile.warps),
            launch_of(kernels.norm_finish_kernel, grid, args, found, tile.warps),
        ]
    lines, each = lines_of(desc, shared)
    if not parts_of(desc, shared):  # nothing is shared: a program for each group of rows
        lines, each = -(-r.count // shared.rows), 1
    of_parts = args | {"each": Int(each), "blocks": Int(parts(desc))}
    of_parts |= {name: where for name, (where, _) in parts_of(desc, shared).items()}
    added = constexprs_of(desc, shared)
    # In f64 sums along rows and columns leave room for two programs; left alone, ptxas may spill to fit a fifth.
    most = registers_for(shared, 2) if desc.element is ElementKind.F64 else 0
    return [
        launch_of(parameters_kernels.norm_parameters_kernel, lines * parts(desc), of_parts, added, shared.warps, most),
        launch_of(kernels.norm_backward_finish_kernel, grid, args, found, tile.warps),
        *folds,
    ]


for _op in MOST:
    kernel(
        op=_op,
        name="split",
        elements=ELEMENTS,
        guarantee=partial(guarantee, summed_up, strip),
        supports=applies,
        workspace=lambda desc, target: scratch(desc)[1],
        rank=rank,
        numerics=partial(numerics, "split", summed_up),
        priority=2,
        layout=layout,
    )(split)
