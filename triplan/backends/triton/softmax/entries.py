"""The kernel table's rows for softmax, log_softmax and their adjoints.

``rows`` holds whole rows in registers, ``looped`` walks along rows of any length, ``split`` gives each row to many
programs, which is for few and long ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch

from triplan.backends.runtime.launch import Arg, Launch, Scratch
from triplan.backends.table import kernel
from triplan.backends.triton.common.offsets import TL, ceil_power, padded_bytes, values
from triplan.backends.triton.common.rows import L2_BYTES, Rows, Tile, again_us, registers_for, waves_us
from triplan.backends.triton.softmax import looped_kernels, rows_kernels, split_kernels
from triplan.sku import (
    SUPPORTED,
    ElementKind,
    MathPrecision,
    PrecisionGuarantee,
    Support,
    Target,
    Tolerance,
    interpreting,
)

ELEMENTS = ("f16", "bf16", "f32", "f64")
#: Elements of a row that ``rows`` holds: registers for one operand forward, two backward.
MOST = {"softmax": 32768, "log_softmax": 32768, "softmax_backward": 16384, "log_softmax_backward": 16384}
#: Blocks of a row that ``split`` adds up at once.
MOST_BLOCKS = 4096


@lru_cache(maxsize=4096)
def view(desc: Any) -> Rows:
    return Rows(desc.operands(), desc.softmax_axis)


def is_log(desc: Any) -> bool:
    return str(desc.op).startswith("log_")


def is_backward(desc: Any) -> bool:
    return str(desc.op).endswith("_backward")


# --- what may be said ---


@lru_cache(maxsize=1024)
def _guarantee(element: ElementKind, depth: int, exponential: bool, batch: bool) -> PrecisionGuarantee:
    """``depth``: additions that a term of the sum passes through; ``batch``: the same ones in every batch.

    An exponential of -d has, beside its own error (2 ulp of ex2.approx, CUDA C Programming Guide), that of its
    argument: one rounding each of x - max, of the product with log2(e) and of that constant, d times over; a result
    above 0 has d < 104 (f32) or 746 (f64). The sum is of positive terms. For log_softmax what is left of an error of
    the sum is absolute, of the largest term's size: sum|terms| is 1.
    """
    compute = element.compute
    u, final = compute.unit_roundoff, element.unit_roundoff
    exponent = 104 if compute is ElementKind.F32 else 746
    error = math.expm1((depth + 16 + (3 * exponent if exponential else 0)) * u)
    info, small = torch.finfo(element.torch), torch.finfo(compute.torch)
    return PrecisionGuarantee(
        math_precision=MathPrecision(compute.value),
        accumulator=compute,
        deterministic=True,
        bit_stable_on_same_hardware=True,
        batch_invariant=batch,
        order_invariant=False,
        tolerance=Tolerance(
            rtol=error + (final if compute is not element else 0.0),
            ctol=error * (1 + final),
            # Approximate exponentials and products flush subnormals.
            underflow=float(info.smallest_normal * info.eps + (depth + 4) * small.smallest_normal),
        ),
    )


def depth(tile: Tile, n: int) -> int:
    """Roundings that a term passes through: those of additions within a block; and for each block that of an addition,
    and, where sums are scaled to a new maximum, those of an exponential and a product."""
    return tile.rows * tile.block // (32 * tile.warps) + 12 + 6 * -(-n // tile.block)


def guarantee(tiled: Callable[[Any], Tile | None], desc: Any) -> Mapping[str, PrecisionGuarantee]:
    tile = tiled(desc) or piece(desc)
    exponential = desc.op != "softmax_backward"
    (out,) = (o.name for o in desc.operands() if o.is_written)
    r = view(desc)
    return {out: _guarantee(desc.element, depth(tile, r.n), exponential, r.invariant)}


# --- when they apply, and what they cost ---


def holds_narrow(desc: Any, tile: Tile) -> bool:
    """Whether threads hold elements as they are read: where in f32 they would fill a multiprocessor's registers. (With
    an address for each of them narrow ones would not fit either.)"""
    return desc.element.itemsize == 2 and tile.block >= 32768 and view(desc).vectors


def whole(desc: Any) -> Tile | None:
    tile = view(desc).whole(desc.element, MOST[desc.op] // (4 if desc.element is ElementKind.F64 else 1))
    if tile is not None and not is_backward(desc) and holds_narrow(desc, tile):
        return replace(tile, warps=8)  # 128 elements a thread, and 128 registers for two of them each
    return tile


def piece(desc: Any) -> Tile:
    return view(desc).piece(desc.element, 2 if is_backward(desc) else 1, alone=True)


def walk(desc: Any) -> Tile:
    if not is_backward(desc):
        return view(desc).walk(desc.element, 16)
    # Of rows this long the L2 cache holds but one on each multiprocessor: it is one program's that fills it.
    long = view(desc).n * desc.element.itemsize > 1 << 16
    return view(desc).walk(desc.element, 32, 2, most_warps=32 if long else 16)


def _fits(programs: int) -> Support:
    if programs < 2**31:
        return SUPPORTED
    return Support.no(f"needs {programs} programs; a grid holds fewer than 2**31")


def rows_apply(desc: Any, target: Target) -> Support:
    tile = whole(desc)
    if tile is None:
        return Support.no(f"rows of {view(desc).n} elements do not fit in registers")
    return _fits(view(desc).programs(tile.rows))


def looped_applies(desc: Any, target: Target) -> Support:
    return _fits(view(desc).programs(walk(desc).rows))


def split_applies(desc: Any, target: Target) -> Support:
    r = view(desc)
    if _blocks(desc) > MOST_BLOCKS:
        return Support.no(f"rows have {_blocks(desc)} blocks; at most {MOST_BLOCKS} are added up at once")
    return _fits(r.count * _blocks(desc))


def _blocks(desc: Any) -> int:
    return -(-view(desc).n // piece(desc).block)


def _bytes(desc: Any) -> tuple[int, int]:
    """Bytes of all operands of one row, and of those that are read."""
    size, inputs = view(desc).n * desc.element.itemsize, 2 if is_backward(desc) else 1
    return (inputs + 1) * size, inputs * size


def rows_rank(desc: Any, target: Target) -> float:
    r, tile = view(desc), whole(desc)
    assert tile is not None
    return waves_us(r.programs(tile.rows), tile.rows * _bytes(desc)[0], target)


def looped_rank(desc: Any, target: Target) -> float:
    r, tile = view(desc), walk(desc)
    moved, read = _bytes(desc)
    # The second pass finds in the L2 cache what the rows under way have there.
    under_way = min(r.count, 2 * max(target.sm_count, 1)) * read
    again = (0.35 if under_way <= L2_BYTES else 0.8) * read
    return waves_us(r.programs(tile.rows), tile.rows * (moved + again), target)


def split_rank(desc: Any, target: Target) -> float:
    r, blocks = view(desc), _blocks(desc)
    moved, read = (r.sectors(desc.element) * nbytes for nbytes in _bytes(desc))
    first = waves_us(r.count * blocks, read / max(blocks, 1), target)
    return first + waves_us(r.count * blocks, (moved - read) / max(blocks, 1), target) + again_us(r.count * read)


# --- launches ---


def _common(desc: Any, tile: Tile) -> tuple[dict[str, Arg], dict[str, Any]]:
    r = view(desc)
    args: dict[str, Arg] = dict(r.arguments(tile.rows))
    for o in desc.operands():
        args |= {o.name: values(o), f"{o.name}_strides": r.strides(o)}
    return args, {"LOG": is_log(desc), "COMPUTE": TL[desc.element.compute], "BLOCK": tile.block}


def whole_launches(desc: Any, tile: Tile, narrow: bool | None = None) -> list[Launch]:
    """The launch of ``rows`` with a tile of one's own: what a sweep of tiles tries. ``narrow`` says if threads hold
    elements of 16 bits as they are."""
    r = view(desc)
    if r.count * r.n == 0:
        return []
    args, constexprs = _common(desc, tile)
    constexprs["ROWS"], grid = tile.rows, r.programs(tile.rows)
    if is_backward(desc):
        return [Launch(rows_kernels.softmax_backward_rows_kernel, grid, args, constexprs, tile.warps)]
    narrow = holds_narrow(desc, tile) if narrow is None else narrow
    constexprs["NARROW"] = narrow and not interpreting()
    most = registers_for(tile, 2) if constexprs["NARROW"] else 0
    return [Launch(rows_kernels.softmax_rows_kernel, grid, args, constexprs, tile.warps, max_registers=most)]


def looped_launches(desc: Any, tile: Tile, unroll: int = 0) -> list[Launch]:
    """The launch of ``looped`` with a tile of one's own, ``unroll`` of which are read at a time."""
    r = view(desc)
    if r.count * r.n == 0:
        return []
    args, constexprs = _common(desc, tile)
    constexprs["ROWS"], grid = tile.rows, r.programs(tile.rows)
    if is_backward(desc):
        constexprs["UNROLL"] = unroll or r.unroll(tile, 2 if r.vectors else 1)
        return [Launch(looped_kernels.softmax_backward_looped_kernel, grid, args, constexprs, tile.warps)]
    constexprs |= {"UNROLL": unroll or r.unroll(tile, 4), "VECTOR": r.vector(desc.element, tile)}
    return [Launch(looped_kernels.softmax_looped_kernel, grid, args, constexprs, tile.warps)]


def _rows(desc: Any, target: Target) -> list[Launch]:
    tile = whole(desc)
    assert tile is not None
    return whole_launches(desc, tile)


def _looped(desc: Any, target: Target) -> list[Launch]:
    return looped_launches(desc, walk(desc))


def _scratch(desc: Any) -> tuple[dict[str, Arg], int]:
    """Addresses of the partial results, and bytes of all."""
    compute, backward = desc.element.compute, is_backward(desc)
    each = padded_bytes(view(desc).count * _blocks(desc) * compute.itemsize)
    names = ("totals",) if backward else ("tops", "totals")
    return {name: Scratch(i * each, compute) for i, name in enumerate(names)}, each * len(names)


def _split_workspace(desc: Any, target: Target) -> int:
    return _scratch(desc)[1]


def _split(desc: Any, target: Target) -> list[Launch]:
    r, tile = view(desc), piece(desc)
    if r.count * r.n == 0:
        return []
    args, constexprs = _common(desc, tile)
    args |= _scratch(desc)[0]
    args["blocks"] = r.blocks(_blocks(desc))
    backward = is_backward(desc)
    partial_kernel = split_kernels.softmax_backward_partial_kernel if backward else split_kernels.softmax_partial_kernel
    finish_kernel = split_kernels.softmax_backward_finish_kernel if backward else split_kernels.softmax_finish_kernel
    read = {name: arg for name, arg in args.items() if name in partial_kernel.arg_names}
    first = {name: value for name, value in constexprs.items() if name in partial_kernel.arg_names}
    grid = r.count * _blocks(desc)
    return [
        Launch(partial_kernel, grid, read, first, tile.warps),
        Launch(finish_kernel, grid, args, {**constexprs, "BLOCKS": ceil_power(_blocks(desc))}, tile.warps),
    ]


def _numerics(kind: str, tiled: Callable[[Any], Tile | None], desc: Any) -> str | None:
    tile = tiled(desc)
    assert tile is not None
    name = f"{desc.op}.{kind}.v2.{desc.element}.{tile.rows}x{tile.block}w{tile.warps}"
    return view(desc).numerics(name, desc.operands())


def layout(desc: Any) -> str:
    return "packed" if all(o.layout.packed for o in desc.operands()) else "strided"


def _register() -> None:
    for op in MOST:
        common: dict[str, Any] = {"op": op, "elements": ELEMENTS, "layout": layout}
        kernel(
            name="rows",
            guarantee=partial(guarantee, whole),
            supports=rows_apply,
            rank=rows_rank,
            numerics=partial(_numerics, "rows", whole),
            priority=0,
            **common,
        )(_rows)
        kernel(
            name="looped",
            guarantee=partial(guarantee, walk),
            supports=looped_applies,
            rank=looped_rank,
            numerics=partial(_numerics, "looped", walk),
            priority=2,
            **common,
        )(_looped)
        kernel(
            name="split",
            guarantee=partial(guarantee, piece),
            supports=split_applies,
            rank=split_rank,
            workspace=_split_workspace,
            numerics=partial(_numerics, "split", piece),
            priority=1,
            **common,
        )(_split)


_register()
