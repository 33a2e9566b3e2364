"""The kernel table's rows for cross_entropy and its adjoint.

``rows`` holds whole rows in registers, ``looped`` walks along rows of any length, ``split`` gives each row to many
programs, which is for few and long ones. The adjoint has one row, ``blocks``: nothing is left to add up along its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from triplan.backends.runtime.launch import Arg, Float, Int, Launch, Scratch
from triplan.backends.table import kernel
from triplan.backends.triton.common.card import L2_BYTES
from triplan.backends.triton.common.offsets import ceil_power, padded_bytes
from triplan.backends.triton.common.rows import Tile, across_rows, again_us, registers_for, waves_us
from triplan.backends.triton.losses import blocks_kernels, looped_kernels, rows_kernels, split_kernels
from triplan.backends.triton.losses import shared as losses
from triplan.backends.triton.losses.shared import arguments, constants, launch, view
from triplan.sku import ElementKind, PrecisionGuarantee, Support, Target, interpreting

#: Elements of a row that ``rows`` holds; where they have 16 bits and a gradient would read them again, and then as they
#: are read, so many a thread.
MOST, MOST_NARROW, NARROW = 8192, 32768, 128
#: What a program of ``looped`` or ``split`` costs beside its traffic, in microseconds.
PROGRAM_US = 1.5
#: Blocks of a row that ``split`` adds up at once.
MOST_BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class Loop:
    """What one program of ``looped`` holds at a time: ``rows`` x ``cols`` x ``vec`` elements, ``vec`` neighbours a
    thread."""

    rows: int
    cols: int
    vec: int
    warps: int

    @property
    def width(self) -> int:
        return self.cols * self.vec


# --- tiles ---


def whole(desc: Any) -> Tile | None:
    r, block = view(desc), ceil_power(view(desc).n)
    if is_narrow(desc, block) and r.vectors:
        return Tile(1, block, block // (32 * NARROW))
    return r.whole_tile(desc.element, MOST // (4 if desc.element is ElementKind.F64 else 1))


def is_narrow(desc: Any, block: int) -> bool:
    """Whether threads are to hold elements as they are read. (Weights of classes would need as much again.)"""
    fits = MOST < block <= MOST_NARROW and desc.element.itemsize == 2
    return fits and getattr(desc, "gradient", False) and not losses.smooths(desc)


def piece(desc: Any) -> Tile:
    return view(desc).block_tile(desc.element, alone=True)


def loop(desc: Any) -> Loop:
    """Not a function of the batch: the same row has the same bits in each."""
    r, size = view(desc), desc.element.itemsize
    if r.across:
        rows = across_rows(desc.element)
        return Loop(rows, 4096 // rows // 4, 4, 8)
    if not r.unit:
        return Loop(1, min(512, max(ceil_power(r.n) // 4, 1)), 4, 8)
    vec = 16 // size
    # Two 16-byte loads a thread and block, one where weights take as many registers again, or smoothing's sums have too
    # few beside addresses. With a gradient rows are read again: with so many warps as few are under way as stay in the
    # L2 cache meanwhile.
    warps = (32 if r.n * size > 65536 else 16) if desc.gradient else 8
    loads = 1 if losses.smooths(desc) and (desc.weight or not r.vectors) else 2
    return Loop(1, min(32 * warps * loads, max(ceil_power(r.n) // vec, 1)), vec, warps)


def tile_of(desc: Any) -> Tile:
    """The tile of the adjoint."""
    tile = whole(desc)
    return view(desc).block_tile(desc.element) if tile is None or tile.block > 4096 else tile


# --- what may be said ---


def _steps(kind: str, desc: Any) -> float:
    """Roundings of a row's sum of exponentials: additions, and exponentials of differences of maxima."""
    n = view(desc).n
    if kind == "looped":
        tile = loop(desc)
        return tile.vec + 5 * -(-n // tile.width) + 5 + math.log2(tile.cols)
    held = piece(desc) if kind == "split" else whole(desc) or piece(desc)
    return held.rows * held.block // (32 * held.warps) + 12 + -(-n // held.block)


def forward_guarantee(kind: str, desc: Any) -> Mapping[str, PrecisionGuarantee]:
    """The sum of n exponentials has a relative error of its additions' roundings and of the exponentials': 2 ulp of
    ex2.approx (CUDA C Programming Guide), and three roundings of the argument -d, d times over; weighted by exp(-d)
    these are at most 3 log n, as an entropy is. Its logarithm has them as an absolute error, beside roundings of the
    size of the maximum and the target's logit. What smoothing adds up has terms of differences of two logits, and no
    more roundings than the sum of exponentials; beside it stands the sum of the classes' weights. For the gradient: p
    has that relative error, and of its own argument one of 3 d u with p d < 1/2.
    """
    element, compute = desc.element, desc.element.compute
    total = _steps(kind, desc) + 3 * math.log(max(view(desc).n, 2)) + 16
    rows = losses.over_rows(desc)
    invariant = view(desc).invariant
    absolute = total + 4 + losses.over_classes(desc)
    of_rows = losses.guarantee(compute, compute, 4, absolute, invariant, False)
    found = {"losses": of_rows, "lse": of_rows}
    if desc.reduced:
        found["loss"] = losses.guarantee(element, compute, rows, absolute + rows, False, False)
    if desc.gradient:
        exact = losses.counts_exactly(desc)
        batch = desc.reduction == "sum" and invariant
        gradient = losses.guarantee(element, compute, total + 16 + (0 if exact else rows), total + 24, batch, False)
        found["x" if desc.in_place else "dx"] = gradient
    return {**found, **losses.status_guarantee(desc)}


def backward_guarantee(desc: Any) -> Mapping[str, PrecisionGuarantee]:
    """exp(x - lse) has roundings of the difference, at most of the size of lse where the exponential is not small, and
    those of ``forward_guarantee``."""
    exact = losses.counts_exactly(desc)
    rows, classes = 0 if exact else losses.over_rows(desc), losses.over_classes(desc)
    found = losses.guarantee(
        desc.element,
        desc.element.compute,
        24 + rows + classes,
        24 + classes,
        not losses.is_mean(desc),
        exact and not classes,
    )
    return {"dx": found, **losses.status_guarantee(desc)}


# --- when they apply, and what they cost ---


def _fits(programs: int, desc: Any) -> Support:
    if programs >= 2**31:
        return Support.no(f"needs {programs} programs; a grid holds fewer than 2**31")
    return losses.packed_tables(desc)


def rows_apply(desc: Any, target: Target) -> Support:
    tile = whole(desc)
    if tile is None:
        return Support.no(f"rows of {view(desc).n} elements do not fit in registers")
    return _fits(view(desc).programs(tile.rows), desc)


def looped_applies(desc: Any, target: Target) -> Support:
    return _fits(view(desc).programs(loop(desc).rows), desc)


def split_applies(desc: Any, target: Target) -> Support:
    r = view(desc)
    if _blocks(desc) > MOST_BLOCKS:
        return Support.no(f"rows have {_blocks(desc)} blocks; at most {MOST_BLOCKS} are added up at once")
    return _fits(r.count * _blocks(desc), desc)


def blocks_apply(desc: Any, target: Target) -> Support:
    tile = tile_of(desc)
    return _fits(view(desc).programs(tile.rows) * -(-view(desc).n // tile.block), desc)


def _blocks(desc: Any) -> int:
    return max(-(-view(desc).n // piece(desc).block), 1)


def _row_bytes(desc: Any) -> int:
    size: int = view(desc).n * desc.element.itemsize
    return size


def rows_rank(desc: Any, target: Target) -> float:
    r, tile = view(desc), whole(desc)
    assert tile is not None
    moved = tile.rows * _row_bytes(desc) * (2 if desc.gradient else 1)
    return losses.sums_us(desc) + waves_us(r.programs(tile.rows), moved, target)


def looped_rank(desc: Any, target: Target) -> float:
    r, tile, size = view(desc), loop(desc), _row_bytes(desc)
    moved: float = size
    if desc.gradient:
        # The second pass finds in the L2 cache what the rows under way have there.
        under_way = min(r.count, max(target.sm_count, 1) * (32 // tile.warps)) * size
        moved = (2.2 if under_way <= L2_BYTES else 2.7) * size
    programs = r.programs(tile.rows)
    alone = _programs_us(programs, tile.warps, target)
    return losses.sums_us(desc) + waves_us(programs, tile.rows * moved, target) + alone


def _programs_us(programs: int, warps: int, target: Target) -> float:
    """Reductions at their ends, and waits for their first loads; a multiprocessor holds 64 warps."""
    return programs * warps * PROGRAM_US / (64 * max(target.sm_count, 1))


def split_rank(desc: Any, target: Target) -> float:
    r, blocks = view(desc), _blocks(desc)
    size = r.sectors(desc.element) * _row_bytes(desc)
    found = losses.sums_us(desc) + waves_us(r.count * blocks, size / blocks, target)
    found += _programs_us(r.count * blocks, piece(desc).warps, target)
    found += waves_us(r.count * (blocks if desc.gradient else 1), size / blocks if desc.gradient else 64, target)
    return found + (again_us(r.count * size) if desc.gradient else 0.0)


def blocks_rank(desc: Any, target: Target) -> float:
    return losses.sums_us(desc) + waves_us(view(desc).count, 2 * _row_bytes(desc), target)


# --- launches ---


def _arguments(desc: Any, rows: int) -> dict[str, Arg]:
    return {**arguments(desc, rows), "smoothing": Float(desc.label_smoothing, desc.element.compute)}


def _with_sums(desc: Any, between: Sequence[Launch]) -> list[Launch]:
    return [*losses.before(desc, desc.gradient), *between, *losses.after(desc, desc.gradient)]


def _constexprs(desc: Any) -> dict[str, Any]:
    return {**constants(desc), "GRAD": desc.gradient}


def whole_launches(desc: Any, tile: Tile) -> list[Launch]:
    """The launches of ``rows`` with a tile of one's own: what a sweep of tiles tries."""
    if not view(desc).count:
        return _with_sums(desc, [])
    narrow = is_narrow(desc, tile.block) and not interpreting()
    constexprs = {**_constexprs(desc), "ROWS": tile.rows, "BLOCK": tile.block, "NARROW": narrow}
    grid, args = view(desc).programs(tile.rows), _arguments(desc, tile.rows)
    registers = min(registers_for(tile, 2), 128) if narrow else 0
    main = launch(rows_kernels.cross_entropy_rows_kernel, grid, args, constexprs, tile.warps, max_registers=registers)
    return _with_sums(desc, [main])


def looped_launches(desc: Any, tile: Loop) -> list[Launch]:
    """The launches of ``looped`` with a tile of one's own."""
    if not view(desc).count:
        return _with_sums(desc, [])
    constexprs = {**_constexprs(desc), "ROWS": tile.rows, "COLS": tile.cols, "VEC": tile.vec}
    grid, args = view(desc).programs(tile.rows), _arguments(desc, tile.rows)
    return _with_sums(desc, [launch(looped_kernels.cross_entropy_looped_kernel, grid, args, constexprs, tile.warps)])


def _rows(desc: Any, target: Target) -> list[Launch]:
    tile = whole(desc)
    assert tile is not None
    return whole_launches(desc, tile)


def _looped(desc: Any, target: Target) -> list[Launch]:
    return looped_launches(desc, loop(desc))


def _split_scratch(desc: Any) -> tuple[dict[str, Scratch], int]:
    """Results of blocks: maxima, sums, sums of weighted logits; and by row the target's logit."""
    compute, count = desc.element.compute, view(desc).count
    each = padded_bytes(count * _blocks(desc) * compute.itemsize)
    names = ("tops", "totals", *(("plains",) if losses.smooths(desc) else ()))
    sizes = {**dict.fromkeys(names, each), "mines": padded_bytes(count * compute.itemsize)}
    return losses.placed(sizes, compute, losses.scratch(desc)[1])


def _split_workspace(desc: Any, target: Target) -> int:
    return _split_scratch(desc)[1]


def _split(desc: Any, target: Target) -> list[Launch]:
    r, tile, blocks = view(desc), piece(desc), _blocks(desc)
    if not r.count:
        return _with_sums(desc, [])
    args = {**_arguments(desc, 1), "plains": None, **_split_scratch(desc)[0], "blocks": Int(blocks)}
    constexprs = {**_constexprs(desc), "BLOCK": tile.block, "BLOCKS": ceil_power(blocks)}
    return _with_sums(
        desc,
        [
            launch(split_kernels.cross_entropy_partial_kernel, r.count * blocks, args, constexprs, tile.warps),
            launch(
                split_kernels.cross_entropy_finish_kernel,
                r.count * (blocks if desc.gradient else 1),
                args,
                constexprs,
                tile.warps if desc.gradient else 4,
            ),
        ],
    )


def _blockwise(desc: Any, target: Target) -> list[Launch]:
    r, tile = view(desc), tile_of(desc)
    first = losses.before(desc, True)
    if not r.count:
        return first
    constexprs = {**constants(desc), "ROWS": tile.rows, "BLOCK": tile.block}
    grid = r.programs(tile.rows) * max(-(-r.n // tile.block), 1)
    args = _arguments(desc, tile.rows)
    return [*first, launch(blocks_kernels.cross_entropy_backward_kernel, grid, args, constexprs, tile.warps)]


def _workspace(desc: Any, target: Target) -> int:
    return losses.scratch(desc)[1]


def _numerics(kind: str, tiled: Callable[[Any], Any], desc: Any) -> str | None:
    tile = tiled(desc)
    shape = f"{tile.rows}x{tile.block}" if isinstance(tile, Tile) else f"{tile.rows}x{tile.cols}x{tile.vec}"
    return view(desc).numerics(f"{desc.op}.{kind}.v1.{desc.element}.{shape}w{tile.warps}", desc.operands())


def _backward_numerics(desc: Any) -> str:
    """Each element is by itself: neither tile nor load changes it. Only classes' weights are added up."""
    weight = desc.operand("weight").alignment if losses.smooths(desc) and desc.weight else 0
    return f"{desc.op}.blocks.v1.{desc.element}" + (f".weight{min(weight, 16)}" if weight else "")


def _register() -> None:
    common: dict[str, Any] = {
        "elements": losses.ELEMENTS,
        "index_elements": losses.INDICES,
        "layout": losses.layout,
    }
    for name, tiled, build, supports, rank, workspace, priority in (
        ("rows", whole, _rows, rows_apply, rows_rank, _workspace, 0),
        ("looped", loop, _looped, looped_applies, looped_rank, _workspace, 1),
        ("split", piece, _split, split_applies, split_rank, _split_workspace, 2),
    ):
        kernel(
            op="cross_entropy",
            name=name,
            guarantee=partial(forward_guarantee, name),
            supports=supports,
            rank=rank,
            workspace=workspace,
            numerics=partial(_numerics, name, tiled),
            priority=priority,
            **common,
        )(build)
    kernel(
        op="cross_entropy_backward",
        name="blocks",
        guarantee=backward_guarantee,
        supports=blocks_apply,
        rank=blocks_rank,
        workspace=_workspace,
        numerics=_backward_numerics,
        **common,
    )(_blockwise)


_register()
