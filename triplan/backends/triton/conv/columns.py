"""Kernel ``columns``: the gradient of weight in tf32, over copies of both factors whose columns are adjacent.

For strides and groups that ``wgmma`` does not take.

wgmma multiplies tf32 only if the terms of a sum are adjacent: here pixels, where channels are last in memory. A copy of
x has what each tap of a row reads, so that the pixels of both factors have the same columns, whatever the strides. In
the columns that are added both factors are 0, so that they change no sum: 0 times an infinity of x would be NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from triplan.backends.runtime.launch import Arg, Int, Launch
from triplan.backends.table import kernel
from triplan.backends.triton.common import card
from triplan.backends.triton.common.offsets import ceil_power
from triplan.backends.triton.common.strides import count
from triplan.backends.triton.conv import copies, shared
from triplan.backends.triton.conv.columns_kernels import conv2d_weight_columns_kernel
from triplan.backends.triton.conv.copies import Padded
from triplan.descriptors import Conv2dBackwardWeightDescriptor
from triplan.descriptors.conv import Conv2dProblem
from triplan.sku import MathPrecision, PrecisionGuarantee, Support, Target
from triplan.sku.facts import fact

#: Columns of a copy are a multiple of this: vectors of 16 bytes, and few kinds of binaries.
COLUMNS = 8
#: Filters, terms and pixels of a tile at most, stages of the pipeline, and warps. With 256 terms it would take up to
#: 16 % less time, but registers spill.
BLOCK, DEPTH, STAGES, WARPS = 128, 32, 4, 8
#: Programs that the sum is divided for, and parts at most. Untuned.
BUSY_PROGRAMS, MOST_PARTS = 264, 64
#: TFLOP/s of a whole card, microseconds of a step in which a program waits for what it reads, and those that small
#: launches wait for each other. On an H200.
TERAFLOPS, STEP_US, WAIT_US = 170.0, 0.7, 10.0


@dataclass(frozen=True, slots=True)
class Division:
    """Filters and terms of a tile; tiles of these in a group; parts, and the pixels of each."""

    m: int
    n: int
    tiles: tuple[int, int]
    parts: int
    each: int


def _wide(desc: Conv2dProblem) -> int:
    """Columns of the copies."""
    return -(-desc.out_extents[1] // COLUMNS) * COLUMNS


def _pixels(desc: Conv2dProblem) -> int:
    return desc.batch * desc.out_extents[0] * _wide(desc)


@fact
def _copies(desc: Conv2dProblem) -> tuple[Padded, Padded]:
    taps, left, filled = desc.kernel[1], desc.padding[2], desc.out_extents[1]
    how = {"taps": taps, "step": desc.stride[1], "dilation": desc.dilation[1], "filled": filled}
    x = Padded(desc.operand("x"), 0, desc.in_channels, _wide(desc), left, **how)
    return x, Padded(desc.operand("dout"), x.end, desc.out_channels, _wide(desc), taps=1, filled=filled)


@fact
def _division(desc: Conv2dProblem) -> Division:
    terms = desc.kernel[1] * desc.channels
    m, n = (min(BLOCK, max(ceil_power(size), 16)) for size in (desc.filters, terms))
    tiles = (-(-desc.filters // m), -(-terms // n))
    products, blocks = tiles[0] * tiles[1] * desc.groups * desc.kernel[0], -(-_pixels(desc) // DEPTH)
    parts, each = shared.parts_of(blocks, products, BUSY_PROGRAMS, MOST_PARTS)
    return Division(m, n, tiles, parts, each * DEPTH)


def _programs(desc: Conv2dProblem) -> int:
    d = _division(desc)
    return d.tiles[0] * d.tiles[1] * desc.groups * desc.kernel[0] * d.parts


def supports(desc: Conv2dProblem, target: Target) -> Support:
    if desc.multiplicands is not MathPrecision.TF32:
        return Support.no("f32 is multiplied as f32; it multiplies as tf32")
    if any(o.numel == 0 for o in desc.operands()):
        return Support.no("an operand is empty")
    if _pixels(desc) >= shared.MOST or desc.batch * desc.height >= shared.MOST:
        return Support.no(f"{_pixels(desc)} pixels with those that are added; it counts fewer than {shared.MOST}")
    return copies.counted(_copies(desc)) and shared.counted(desc, _programs(desc))


def rank(desc: Conv2dProblem, target: Target) -> float:
    """Estimated microseconds."""
    d, programs = _division(desc), _programs(desc)
    steps = d.each // DEPTH
    flops = 2.0 * programs * steps * DEPTH * d.m * d.n
    waiting = steps * STEP_US * max(programs / BUSY_PROGRAMS, 1.0)  # groups of few channels have narrow tiles
    work = max(flops / (TERAFLOPS * card.TERA_PER_US) * max(target.sm_count / programs, 1.0), waiting)
    launches = 2 if d.parts > 1 else 1
    moved = 8 * desc.operand("dweight").numel * d.parts
    beside = launches * card.LAUNCH_US + WAIT_US + moved / card.BYTES_PER_US
    return copies.rank(_copies(desc), False) + beside + work


def guarantee(desc: Conv2dProblem) -> Mapping[str, PrecisionGuarantee]:
    return shared.guaranteed(desc, desc.multiplicands, shared.pixels(desc), _division(desc).parts)


def workspace(desc: Conv2dProblem, target: Target) -> int:
    return _copies(desc)[-1].end + shared.parts_bytes(desc, _division(desc).parts)


def build(desc: Conv2dProblem, target: Target) -> list[Launch]:
    """The copies; each part of the pixels, then the sum of the parts."""
    d, (x, dout) = _division(desc), _copies(desc)
    found = shared.of_parts(desc, d.parts, d.each)
    args: dict[str, Arg] = {
        **{name: found[name] for name in ("x", "dout", "out", "out_strides", "part_stride", "each", "rows", "height")},
        "pixels": count(_pixels(desc)),
        "wide": count(_wide(desc)),
        "filters": count(desc.filters),
        "terms": count(desc.kernel[1] * desc.channels),
        "channels": Int(desc.channels),
        "groups": Int(desc.groups) if desc.groups > 1 else None,
        "kernel_rows": Int(desc.kernel[0]),
        "stride_rows": Int(desc.stride[0]),
        "above": Int(desc.padding[0]),
        "dilation_rows": Int(desc.dilation[0]),
        "tiles_m": Int(d.tiles[0]),
        "tiles_n": Int(d.tiles[1]),
    }
    constants = {"BLOCK_M": d.m, "BLOCK_N": d.n, "BLOCK_K": DEPTH, "PRECISION": "tf32"}
    warps = WARPS if d.m * d.n > 64 * 64 else 4
    main = Launch(conv2d_weight_columns_kernel, _programs(desc), args, constants, num_warps=warps, num_stages=STAGES)
    tensors = {c.operand.name: c.tensor for c in (x, dout)}
    return copies.around((x, dout), [main, *shared.fold(desc, d.parts, target)], tensors, dout.end)


kernel(
    op=Conv2dBackwardWeightDescriptor.ops()[0],
    name="columns",
    elements=("f32",),
    layout=shared.layout,
    supports=supports,
    rank=rank,
    workspace=workspace,
    guarantee=guarantee,
    priority=3,
    version=2,  # infinities of x that no tap reads
)(build)
