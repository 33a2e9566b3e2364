"""What all rows of the norms share: tiles, what may be said of results, arguments, and the parameters' partial sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from triplan.backends.runtime.launch import Arg, Float, Int, Launch, Ptr, Scratch
from triplan.backends.triton.common.offsets import TL, ceil_power, padded_bytes, values
from triplan.backends.triton.common.rows import LAUNCH_US, Rows, Tile
from triplan.backends.triton.norms import parameters_kernels
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
OPS = ("rms_norm", "layer_norm", "l2_norm")
#: Elements of a row that ``rows`` holds: forward those of x, backward also of dout, weight and two sums.
MOST = dict.fromkeys(OPS, 16384) | dict.fromkeys((f"{op}_backward" for op in OPS), 8192)
#: Lines of partial sums: an H200's multiprocessors. One number for all targets, as tolerances depend on it.
LINES = 132
#: Groups of rows that are added up in one line, which needs no fold, and from how many blocks of columns on.
FEW_GROUPS, ONE_LINE = 4, 128
#: Columns of a block of which elements of 16 bits add up exactly in f32, and their mean's 14 leading bits times them.
SHORT = 1024
#: Bytes of an operand that a program of an adjoint holds if rows are short. As many as in long ones: two such programs
#: on a multiprocessor, with the next rows on their way, keep memory busy.
HELD = 16384
#: Lines that the fold adds up at most, in so many columns a program; a few in more columns; and its warps.
FOLD, FOLD_COLUMNS, FEW_LINES, FOLD_WARPS = ceil_power(LINES), 16, 16, 8


@lru_cache(maxsize=4096)
def view(desc: Any) -> Rows:
    whole = [o for o in desc.operands() if o.shape == desc.input_shape]
    return Rows(whole, len(desc.input_shape) - 1, in_order=True)


def is_backward(desc: Any) -> bool:
    return str(desc.op).endswith("_backward")


def is_centred(desc: Any) -> bool:
    return str(desc.op).startswith("layer_norm")


def read_twice(desc: Any) -> int:
    """Operands of whole rows that a loop over them reads twice."""
    return sum(o.shape == desc.input_shape and not o.is_written and o.name != "dsummed" for o in desc.operands())


def whole(desc: Any) -> Tile | None:
    most = MOST[desc.op] // (4 if desc.element is ElementKind.F64 else 1)
    if not is_backward(desc):
        tile = view(desc).whole(desc.element, most)
        if tile is None or desc.element.itemsize != 2:
            return tile
        if tile.block >= 8192:
            return replace(tile, warps=tile.block // 1024)  # smaller programs wait less for each other
        if is_centred(desc) and view(desc).unit and tile.block <= 512:
            return Tile(4096 // tile.block, tile.block, 4)  # parameters of vectors are converted once for four rows
        return tile
    tile = view(desc).whole(desc.element, most, HELD)
    if tile is None:
        return None
    # Weights that several rows of several warps share come through shared memory; with two sums registers run out.
    crowded = is_centred(desc) and tile.block > 256 and desc.element.itemsize == 2
    rows = max(tile.rows // 2, 1) if view(desc).across or crowded else tile.rows
    each = 4 if desc.element is ElementKind.F64 else 8
    return Tile(rows, tile.block, min(max(rows * tile.block // (32 * each), 1), 16))


def adds_up(desc: Any, tile: Tile) -> bool:
    """Whether the mean of a row that ``tile`` holds whole comes from one sum, which is all but exact."""
    alone = is_centred(desc) and desc.element.itemsize == 2 and not getattr(desc, "residual", False)
    return alone and view(desc).n <= tile.block <= SHORT


def abreast(desc: Any, tile: Tile) -> int:
    """Rows of a tile that all of a program's threads hold one vector each of; all, where they load no vectors."""
    vectors = 32 * tile.warps * view(desc).vector(desc.element, tile)
    return min(max(vectors // tile.block, 1), tile.rows) if view(desc).vectors else tile.rows


def strip(desc: Any) -> Tile:
    """What a program of ``norm_parameters_kernel`` reads at a time: a few rows of as many columns as threads load."""
    vector = 16 // desc.element.itemsize if view(desc).unit else 1
    block = min(ceil_power(view(desc).n), 256 * vector)
    return Tile(4, block, max(block // (32 * vector), 1))


def walk(desc: Any) -> Tile:
    # By sweeps on an H200: what registers leave room for, beside a row's sums.
    size, centred, operands = desc.element.itemsize, is_centred(desc), read_twice(desc)
    if is_backward(desc):
        return view(desc).walk(desc.element, 32 if centred and size < 8 else 16, operands)
    if operands > 1:
        return view(desc).walk(desc.element, 8 if centred and size == 2 else 16, operands)
    if centred and size == 4:
        return view(desc).walk(desc.element, 64, most_warps=16)
    return view(desc).walk(desc.element, 16 if centred and size == 8 else 32)


# --- what may be said ---


@lru_cache(maxsize=1024)
def _guarantee(
    element: ElementKind, compute: ElementKind, roundings: int, relative: bool, batch: bool, squares: int = 0
) -> PrecisionGuarantee:
    """``roundings``, in the compute element, of a result; ``relative`` where all terms have one sign. A result that is
    the root of so many ``squares`` is without those that vanish."""
    u, final = compute.unit_roundoff, element.unit_roundoff
    error = math.expm1(roundings * u)
    info, small = torch.finfo(element.torch), torch.finfo(compute.torch)
    narrowed = final if compute is not element else 0.0
    return PrecisionGuarantee(
        math_precision=MathPrecision(compute.value),
        accumulator=compute,
        deterministic=True,
        bit_stable_on_same_hardware=True,
        batch_invariant=batch,
        order_invariant=False,
        tolerance=Tolerance(
            rtol=error + narrowed,
            ctol=0.0 if relative else error * (1 + final),
            underflow=float(
                info.smallest_normal * info.eps
                + roundings * small.smallest_normal
                + math.sqrt(squares * small.smallest_normal)
            ),
        ),
    )


def guarantee(
    tiled: Callable[[Any], Tile | None], parameters: Callable[[Any], Tile | None], desc: Any
) -> Mapping[str, PrecisionGuarantee]:
    """Squares add up relative to their sum. What is centred has errors of a deviation's size, once for each of two
    means, and the results of the adjoints have those of their terms; for layer_norm they hold while the mean is less
    than 2**18 standard deviations off zero, beyond which f32 cannot hold the values themselves (with a residual, a
    hundred: their sum is rounded first), and for l2_norm while eps**2 is above the n smallest normal numbers of the
    compute element: squares below those vanish.

    Where layer_norm's ``looped`` takes deviations d, sum(d**2) is at most 4 * n * s**2, s the standard deviation, or
    the row is read again. That sum and sum(d)**2 / n, the lesser of the two, are within depth + 3 and 2 * depth + 5
    roundings, so n * s**2 within 12 * depth + 32, and its root within half of that.

    Where ``rows`` takes the mean from one sum of elements of 16 bits, that is exact unless the largest is more than
    twice another: s is then at least a share 1 / (2 * sqrt(2 * n)) of it, and the sum within depth roundings of it.
    Squares are those of deviations from 14 bits of the mean, 8 * s at most from it.
    """
    tile, element, compute = tiled(desc) or walk(desc), desc.element, desc.element.compute
    n = view(desc).n
    depth = tile.rows * tile.block // (32 * tile.warps) + 12 + -(-n // tile.block)
    shared = parameters(desc) or strip(desc)
    found = {}
    for o in desc.operands():
        if o.name in ("dweight", "dbias"):
            _, each = lines_of(desc, shared)
            # Group by group, then those of a program, then lines; within each, first a thread's, then all threads'.
            meeting = shared.rows * shared.block // (32 * shared.warps) + 12
            folded = FOLD * FOLD_COLUMNS // (32 * FOLD_WARPS) + 12
            roundings = each + meeting + folded + 4
            found[o.name] = _guarantee(element, compute, roundings, False, False)
        elif o.is_written:
            looped = 6 * depth + 16 if is_centred(desc) else 0
            if adds_up(desc, tile):
                looped = max(looped, math.ceil(2 * depth * math.sqrt(2 * n)))
            roundings = (3 if is_centred(desc) else 2) * (depth + 12) + looped
            relative = o.name in ("rstd", "norm", "summed") or desc.op in ("rms_norm", "l2_norm")
            squares = n if o.name == "norm" else 0
            found[o.name] = _guarantee(o.element, compute, roundings, relative, view(desc).invariant, squares)
    return found


# --- when they apply, and what they cost ---


def packed_parameters(desc: Any) -> Support:
    for o in desc.operands():
        if o.shape != desc.input_shape and not o.layout.packed:
            return Support.no(f"{o.name} is not promised packed: statistics, weights and biases must be")
    return SUPPORTED


def row_bytes(desc: Any) -> tuple[int, int]:
    """Bytes of one row in all operands, and in those that are read twice."""
    size = view(desc).n * desc.element.itemsize
    return sum(o.shape == desc.input_shape for o in desc.operands()) * size, read_twice(desc) * size


def fold_us(desc: Any, tile: Tile) -> float:
    if part_bytes(desc, tile) == 0:
        return 0.0
    names = [n for n in ("dweight", "dbias") if any(o.name == n for o in desc.operands())]
    size: int = desc.element.compute.itemsize
    return LAUNCH_US + len(names) * 2 * lines_of(desc, tile)[0] * view(desc).n * size / 3.8e6 if names else 0.0


# --- parts of launches ---


def operand_arguments(desc: Any, tile_rows: int) -> dict[str, Arg]:
    r = view(desc)
    args: dict[str, Arg] = dict(r.arguments(tile_rows))
    absent = ("mean", "weight", "bias", "dweights", "dbiases", "residual", "summed", "dsummed", "totals", "projections")
    args |= dict.fromkeys((*absent, "residual_strides", "summed_strides", "dsummed_strides"))
    args["rows"] = Int(r.count, r.count >= 2**31 - 2**16)
    args["eps"] = Float(getattr(desc, "eps", 0.0), desc.element.compute)
    for o in desc.operands():
        args["rstd" if o.name == "norm" else o.name] = values(o)
        if o.shape == desc.input_shape:
            args[f"{o.name}_strides"] = r.strides(o)
    return args


def launch_of(
    which: Any, grid: int, args: Mapping[str, Arg], constexprs: Mapping[str, Any], warps: int, most_registers: int = 0
) -> Launch:
    names = set(which.arg_names)
    return Launch(
        which,
        grid,
        {k: v for k, v in args.items() if k in names},
        {k: v for k, v in constexprs.items() if k in names},
        warps,
        max_registers=most_registers,
    )


def constexprs_of(desc: Any, tile: Tile) -> dict[str, Any]:
    compute = TL[desc.element.compute]
    return {
        "CENTRED": is_centred(desc),
        "LENGTH": str(desc.op).startswith("l2_norm"),
        "OFFSET": getattr(desc, "weight_offset", 0),
        "COMPUTE": compute,
        "ROWS": tile.rows,
        "BLOCK": tile.block,
    }


def lines_of(desc: Any, tile: Tile) -> tuple[int, int]:
    """Lines of partial sums, and groups of a tile's rows that are added up in each: one line of few rows that are so
    long that their columns keep a card busy."""
    groups = -(-view(desc).count // tile.rows)
    most = 1 if groups <= FEW_GROUPS and -(-view(desc).n // tile.block) >= ONE_LINE else LINES
    each = max(-(-groups // most), 1)
    return -(-groups // each), each


def part_bytes(desc: Any, tile: Tile) -> int:
    """Of one parameter's lines, if there is more than one. A line even where there are no rows: what adds up none of
    them is given an address all the same."""
    lines = lines_of(desc, tile)[0]
    return 0 if lines == 1 else padded_bytes(max(lines, 1) * view(desc).n * desc.element.compute.itemsize)


def parts_of(desc: Any, tile: Tile) -> dict[str, tuple[Arg, Ptr]]:
    """By the kernels' name: where partial sums lie, and the gradient that they become; a lone line is that gradient."""
    found: dict[str, tuple[Arg, Ptr]] = {}
    size = part_bytes(desc, tile)
    for o in desc.operands():
        if o.name in ("dweight", "dbias"):
            name = "dweights" if o.name == "dweight" else "dbiases"
            found[name] = (Scratch(len(found) * size, desc.element.compute) if size else values(o), values(o))
    return found


def workspace(parameters: Callable[[Any], Tile | None], desc: Any, target: Target) -> int:
    tile = parameters(desc)
    if tile is None or not is_backward(desc):
        return 0
    return len(parts_of(desc, tile)) * part_bytes(desc, tile)


def folds_of(desc: Any, tile: Tile) -> list[Launch]:
    n, parts = view(desc).n, parts_of(desc, tile)
    if n == 0 or not parts or part_bytes(desc, tile) == 0:
        return []
    args: dict[str, Arg] = dict.fromkeys(("dweights", "dweight", "dbiases", "dbias"))
    for name, (scratch, out) in parts.items():
        args |= {name: scratch, out.operand: out}
    lines = lines_of(desc, tile)[0]
    held = FEW_LINES if lines <= FEW_LINES else FOLD
    # (In the interpreter programs take turns: there fewer of them.)
    columns = min(FOLD * (1024 if interpreting() else FOLD_COLUMNS) // held, max(ceil_power(n), FOLD_COLUMNS))
    blocks = -(-n // columns)
    args |= {"n": Int(n, n >= 2**31), "lines": Int(lines), "blocks": Int(blocks)}
    constexprs = {"ROWS": held, "BLOCK": columns}
    return [launch_of(parameters_kernels.norm_fold_kernel, len(parts) * blocks, args, constexprs, FOLD_WARPS)]


def numerics(kind: str, tiled: Callable[[Any], Tile | None], desc: Any) -> str | None:
    tile = tiled(desc)
    assert tile is not None
    name = f"{desc.op}.{kind}.v2.{desc.element}.{tile.rows}x{tile.block}w{tile.warps}"
    return view(desc).numerics(name, desc.operands())


def layout(desc: Any) -> str:
    return "packed" if all(o.layout.packed for o in desc.operands()) else "strided"
