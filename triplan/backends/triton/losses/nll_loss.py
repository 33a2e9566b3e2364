"""The kernel table's rows for nll_loss, its adjoint, and the scaling of gradients that are there already."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from triplan.backends.runtime.launch import Arg, Int, Launch
from triplan.backends.table import kernel
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.offsets import TL, values
from triplan.backends.triton.common.rows import Rows, Tile, waves_us
from triplan.backends.triton.losses import blocks_kernels, elements_kernels, rows_kernels
from triplan.backends.triton.losses import shared as losses
from triplan.backends.triton.losses.shared import arguments, constants, launch, view
from triplan.sku import SUPPORTED, PrecisionGuarantee, Support, Target

#: Rows of one program of nll_loss; elements of a block of scale_gradient, and blocks of a multiprocessor at a time.
ROWS, BLOCK, RESIDENT = 128, 8192, 4


def forward_guarantee(desc: Any) -> Mapping[str, PrecisionGuarantee]:
    """One product a row."""
    rows, compute = losses.over_rows(desc), desc.element.compute
    found = {"losses": losses.guarantee(compute, compute, 2, 0, True, True)}
    if desc.reduced:
        found["loss"] = losses.guarantee(desc.element, compute, rows, rows, False, False)
    return {**found, **losses.status_guarantee(desc)}


def backward_guarantee(desc: Any) -> Mapping[str, PrecisionGuarantee]:
    """Products, and what they are divided by."""
    exact = losses.counts_exactly(desc)
    roundings = 8 + (0 if exact else losses.over_rows(desc))
    batch = not losses.is_mean(desc)
    found = losses.guarantee(desc.element, desc.element.compute, roundings, 0, batch, exact)
    return {"dx": found, **losses.status_guarantee(desc)}


def scale_guarantee(desc: Any) -> Mapping[str, PrecisionGuarantee]:
    """One product."""
    return {"dx": losses.guarantee(desc.element, desc.element.compute, 2, 0, True, True)}


def tile_of(desc: Any) -> Tile:
    r = view(desc)
    return r.whole_tile(desc.element, 4096) or r.block_tile(desc.element)


def _applies(desc: Any, target: Target) -> Support:
    if view(desc).count * -(-max(view(desc).n, 1) // 64) >= 2**31:
        return Support.no(f"{view(desc).count} rows of {view(desc).n} need too many programs")
    return losses.packed_tables(desc)


def _rank(desc: Any, target: Target) -> float:
    return losses.sums_us(desc) + view(desc).count * 64 / BYTES_PER_US


def _backward_rank(desc: Any, target: Target) -> float:
    r = view(desc)
    return losses.sums_us(desc) + waves_us(r.count, r.n * desc.element.itemsize, target)


def _build(desc: Any, target: Target) -> list[Launch]:
    first, last = losses.before(desc, False), losses.after(desc, False)
    if not view(desc).count:
        return [*first, *last]
    grid = view(desc).programs(ROWS)
    args, constexprs = arguments(desc, ROWS), {**constants(desc), "ROWS": ROWS}
    return [*first, launch(rows_kernels.nll_loss_kernel, grid, args, constexprs, 4), *last]


def _backward(desc: Any, target: Target) -> list[Launch]:
    r, tile = view(desc), tile_of(desc)
    first = losses.before(desc, True)
    if not r.count:
        return first
    grid = r.programs(tile.rows) * max(-(-r.n // tile.block), 1)
    constexprs = {**constants(desc), "ROWS": tile.rows, "BLOCK": tile.block}
    args = arguments(desc, tile.rows)
    return [*first, launch(blocks_kernels.nll_loss_backward_kernel, grid, args, constexprs, tile.warps)]


def _workspace(desc: Any, target: Target) -> int:
    return losses.scratch(desc)[1]


def _numerics(desc: Any) -> str:
    return f"{desc.op}.{desc.element}.v1"


# --- scale_gradient ---


def _packed(desc: Any, target: Target) -> Support:
    for o in desc.operands():
        if not o.layout.packed and o.numel > 1:
            return Support.no(f"{o.name} is not promised packed")
    return SUPPORTED


def _scale_rank(desc: Any, target: Target) -> float:
    nbytes: int = desc.operand("dx").nbytes
    return LAUNCH_US + 2 * nbytes / BYTES_PER_US


@lru_cache(maxsize=4096)
def _lines(desc: Any) -> tuple[Rows, Tile, int]:
    """The rows along the last axis, what a program scales at a time, and how many of those there are."""
    r = Rows([o for o in desc.operands() if o.name != "dloss"], len(desc.input_shape) - 1)
    tile = r.whole_tile(desc.element, BLOCK) or r.block_tile(desc.element)
    return r, tile, r.programs(tile.rows) * -(-r.n // tile.block)


def _in_lines(desc: Any, target: Target) -> Support:
    if not desc.input_shape:
        return Support.no("a scalar has no rows")
    if _lines(desc)[2] >= 2**31:
        return Support.no(f"{_lines(desc)[2]} blocks of rows; at most 2**31 - 1 are counted")
    return SUPPORTED


def _lines_rank(desc: Any, target: Target) -> float:
    return 1.2 * _scale_rank(desc, target)  # addresses are computed, and loads may be narrow


def _scale(desc: Any, target: Target) -> list[Launch]:
    out = desc.operand("dx")
    if out.numel == 0:
        return []
    grid = min(-(-out.numel // BLOCK), RESIDENT * max(target.sm_count, 1))
    args: dict[str, Arg] = {o.name: values(o) for o in desc.operands()}
    args.setdefault("unscaled", args["dx"])
    args["numel"] = Int(out.numel, out.numel >= 2**31 - 2**16, 16 if out.numel % 16 == 0 else 1)
    constexprs = {"IN_PLACE": desc.in_place, "COMPUTE": TL[desc.element.compute], "BLOCK": BLOCK}
    return [Launch(elements_kernels.scale_gradient_kernel, grid, args, constexprs, 16)]


def _scale_lines(desc: Any, target: Target) -> list[Launch]:
    r, tile, tiles = _lines(desc)
    if r.count * r.n == 0:
        return []
    args: dict[str, Arg] = {**r.arguments(tile.rows), "tiles": Int(tiles)}
    for o in desc.operands():
        args[o.name] = values(o)
        if o.name != "dloss":
            args[f"{o.name}_strides"] = r.strides(o)
    for name in ("unscaled", "unscaled_strides"):
        args.setdefault(name, args[name.replace("unscaled", "dx")])
    constexprs = {"IN_PLACE": desc.in_place, "COMPUTE": TL[desc.element.compute], "ROWS": tile.rows}
    grid = min(tiles, RESIDENT * max(target.sm_count, 1))
    return [
        Launch(rows_kernels.scale_gradient_rows_kernel, grid, args, {**constexprs, "BLOCK": tile.block}, tile.warps)
    ]


def _register() -> None:
    common: dict[str, Any] = {
        "elements": losses.ELEMENTS,
        "index_elements": losses.INDICES,
        "layout": losses.layout,
        "supports": _applies,
        "workspace": _workspace,
        "numerics": _numerics,
    }
    kernel(op="nll_loss", name="rows", guarantee=forward_guarantee, rank=_rank, **common)(_build)
    kernel(op="nll_loss_backward", name="blocks", guarantee=backward_guarantee, rank=_backward_rank, **common)(
        _backward
    )
    for name, build, supports, rank in (
        ("elements", _scale, _packed, _scale_rank),
        ("rows", _scale_lines, _in_lines, _lines_rank),
    ):
        kernel(
            op="scale_gradient",
            name=name,
            elements=losses.ELEMENTS,
            guarantee=scale_guarantee,
            supports=supports,
            rank=rank,
            numerics=_numerics,
            layout=losses.layout,
        )(build)


_register()
