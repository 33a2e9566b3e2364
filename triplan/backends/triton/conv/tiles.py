"""Kernel ``tiles``: convolution and its gradients as matrix products of tiles, read through pointers; no atomics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch, Stride, power_of_two_in
from triplan.backends.table import kernel
from triplan.backends.triton.common import bounds, card
from triplan.backends.triton.common.offsets import TL, ceil_power, values
from triplan.backends.triton.conv import tiles_kernels as kernels
from triplan.descriptors import Operand, packed_strides
from triplan.descriptors.conv import Conv2dProblem
from triplan.sku import SUPPORTED, ArchSku, MathPrecision, PrecisionGuarantee, Support, Target
from triplan.sku.facts import fact

#: Rows, columns and positions are counted in 32 bits, and a sum of a few of them must fit.
MOST = 2**29
#: TFLOP/s of a whole card, by the precision of the multiplicands and architecture. Untuned.
TERAFLOPS = {
    MathPrecision.F16: {ArchSku.SM90A: 350.0, ArchSku.SM80: 150.0},
    MathPrecision.BF16: {ArchSku.SM90A: 350.0, ArchSku.SM80: 150.0},
    MathPrecision.TF32: {ArchSku.SM90A: 150.0, ArchSku.SM80: 70.0},
    MathPrecision.F32: {ArchSku.SM90A: 25.0, ArchSku.SM80: 8.0},
    MathPrecision.F64: {ArchSku.SM90A: 25.0, ArchSku.SM80: 8.0},
}
#: Operations per microsecond in 1 TFLOP/s.
TERA_PER_US = 10**6
#: Programs that keep any card busy: the gradient of weight divides its pixels into parts until there are so many. One
#: number for all targets, as bits depend on it. Untuned.
BUSY_PROGRAMS = 264
#: Blocks of pixels of a part at least, and parts at most. Untuned.
LEAST_BLOCKS = 16
MOST_PARTS = 128
#: Elements that a program of the fold writes.
FOLD_BLOCK = 512
#: Elements of a tile up to which 4 warps compute it, and not 8. Untuned.
FEW_WARPS = 64 * 64


@dataclass(frozen=True, slots=True)
class Tile:
    """Pixels (or filters), channels and terms of a step, and stages of the pipeline."""

    m: int
    n: int
    k: int
    stages: int

    @property
    def warps(self) -> int:
        return 4 if self.m * self.n <= FEW_WARPS else 8


#: Tiles by kind of arithmetic: the largest, as channels and terms may be fewer. Untuned.
TILES = {
    "half": Tile(128, 128, 64, 3),
    "tf32": Tile(64, 64, 32, 2),
    "f32": Tile(64, 64, 16, 3),
    "f64": Tile(32, 32, 16, 1),
}
#: Blocks of channels that may be summed in a step.
DEPTHS = (64, 32, 16)


def _known(desc: Conv2dProblem) -> Tile:
    return TILES["half" if desc.element.itemsize == 2 else desc.multiplicands.value]


def _fitting(most: int, extent: int) -> int:
    """A block of at least 16, as tensor cores need, and less than twice ``extent``."""
    return max(min(most, ceil_power(extent)), 16)


def _depth(desc: Conv2dProblem) -> int | None:
    """Channels of a step: the largest block of which the last leaves a quarter empty at most; None if there is none."""
    n = _reduced(desc)
    return next((k for k in DEPTHS if k <= _known(desc).k and -(-n // k) * k * 3 <= 4 * n), None)


@fact
def tile_of(desc: Conv2dProblem) -> Tile:
    """It must not depend on the batch, or bits would."""
    known = _known(desc)
    if desc.op == "conv2d_backward_weight":
        return Tile(_fitting(known.m, desc.filters), _fitting(known.n, desc.channels), known.k, known.stages)
    return Tile(known.m, _fitting(known.n, _features(desc)), _depth(desc) or min(known.k, 32), known.stages)


def _features(desc: Conv2dProblem) -> int:
    """Channels of a group of the result."""
    return desc.channels if desc.op == "conv2d_backward_input" else desc.filters


def _reduced(desc: Conv2dProblem) -> int:
    """Channels of a group that are summed."""
    return desc.filters if desc.op == "conv2d_backward_input" else desc.channels


def _pixels(desc: Conv2dProblem) -> int:
    """Pixels of the tensor that decides the grid: of the result, and of dout for the gradient of weight."""
    extents = (desc.height, desc.width) if desc.op == "conv2d_backward_input" else desc.out_extents
    return desc.batch * math.prod(extents)


def _tiles(desc: Conv2dProblem) -> tuple[int, int]:
    """Tiles along the rows and columns of the product, of one group (and tap)."""
    tile = tile_of(desc)
    if desc.op == "conv2d_backward_weight":
        return -(-desc.filters // tile.m), -(-desc.channels // tile.n)
    return -(-_pixels(desc) // tile.m), -(-_features(desc) // tile.n)


def _parts(desc: Conv2dProblem) -> tuple[int, int]:
    """Parts of the pixels of the gradient of weight, and the pixels of each: a multiple of its tile's."""
    m, n = _tiles(desc)
    block = tile_of(desc).k
    blocks = -(-_pixels(desc) // block)
    wanted = -(-BUSY_PROGRAMS // max(m * n * desc.taps * desc.groups, 1))
    parts = max(min(wanted, blocks // LEAST_BLOCKS, MOST_PARTS), 1)
    each = max(-(-blocks // parts), 1)
    return max(-(-blocks // each), 1), each * block


def programs(desc: Conv2dProblem) -> int:
    """Programs of the main launch."""
    m, n = _tiles(desc)
    if desc.op == "conv2d_backward_weight":
        return m * n * desc.taps * desc.groups * _parts(desc)[0]
    return m * n * desc.groups


def supports(desc: Conv2dProblem, target: Target) -> Support:
    weights = desc.out_channels * desc.channels * desc.taps
    sizes = (_pixels(desc), weights, desc.in_channels, desc.out_channels)
    reach = (*desc.padding, *(d * k for d, k in zip(desc.dilation, desc.kernel, strict=True)), *desc.stride)
    if max(*sizes, desc.height * desc.stride[0], desc.width * desc.stride[1], *reach) >= MOST:
        return Support.no(f"{max(*sizes, *reach)} pixels, weights or taps; it counts fewer than {MOST}")
    if (count := programs(desc)) >= 2**31:
        return Support.no(f"{count} programs; a grid holds fewer than 2**31")
    return SUPPORTED


def rank(desc: Conv2dProblem, target: Target) -> float:
    """Estimated microseconds."""
    products = desc.batch * math.prod(desc.out_extents) * desc.out_channels * desc.channels * desc.taps
    work = 2.0 * products / (TERAFLOPS[desc.multiplicands].get(target.arch, 1.0) * TERA_PER_US)
    idle = max(target.sm_count / max(programs(desc), 1), 1.0)
    nbytes = sum(o.nbytes for o in desc.operands())
    return card.LAUNCH_US + max(work * idle, nbytes / card.BYTES_PER_US)


def guarantee(desc: Conv2dProblem) -> Mapping[str, PrecisionGuarantee]:
    """A pixel is accumulated in one order, wherever it lies in its tile: images do not change each other's bits. The
    gradient of weight is a sum over all images."""
    weight = desc.op == "conv2d_backward_weight"
    terms = _pixels(desc) if weight else _reduced(desc) * desc.taps
    roundings = _parts(desc)[0] if weight else 1
    compute = desc.element.compute
    tolerance = bounds.tolerance(
        desc.element,
        compute,
        per_term=bounds.product_error(desc.element, desc.multiplicands, terms, roundings),
        lost=((terms + roundings) * bounds.flushed(compute),),
    )
    found = bounds.guarantee(compute, tolerance, math_precision=desc.multiplicands, batch=not weight)
    return bounds.of_outputs(desc, found)


def numerics(desc: Conv2dProblem) -> str | None:
    if desc.op == "conv2d_backward_weight":
        return None
    tile = tile_of(desc)
    shape = f"{_reduced(desc)}.{'x'.join(map(str, desc.kernel))}.{tile.n}x{tile.k}{_flat(desc) * 'f'}"
    return f"{desc.op}.tiles.{desc.element}.{desc.multiplicands}.{shape}.v1"


def workspace(desc: Conv2dProblem, target: Target) -> int:
    """Bytes of the parts' sums, if there are several."""
    if desc.op != "conv2d_backward_weight":
        return 0
    parts, weight = _parts(desc)[0], desc.operand("dweight")
    return parts * weight.numel * desc.element.compute.itemsize if parts > 1 else 0


def layout(desc: Conv2dProblem) -> str:
    return "packed" if all(o.layout.packed for o in desc.operands()) else "strided"


def _flat(desc: Conv2dProblem) -> bool:
    """Whether a step takes channels of several taps: where those of one would leave much of it empty."""
    return _depth(desc) is None


def _strides(o: Operand) -> Arg:
    known, last = packed_strides(o.shape), len(o.shape) - 1

    def along(axis: int) -> Arg:
        if o.layout.packed:
            return None if axis == last else Int(known[axis], True, power_of_two_in(known[axis]))
        if axis in o.layout.zero_axes:
            return Int(0, True, 16)
        return None if axis == o.layout.unit_axis else Stride(o.name, axis, divisibility=o.layout.stride_multiple)

    return tuple(along(axis) for axis in range(last + 1))


def _count(n: int) -> Int:
    """A number that masks compare with: they are of whole vectors if it is divisible by their length."""
    return Int(n, False, power_of_two_in(n))


def _shared(desc: Conv2dProblem) -> dict[str, Arg]:
    m, n = _tiles(desc)
    return {
        "pixels": Int(_pixels(desc)),
        "channels": _count(_reduced(desc)),
        "taps": Int(desc.taps),
        "kernel_columns": Int(desc.kernel[1]),
        "stride_rows": None if desc.stride == (1, 1) else Int(desc.stride[0]),
        "stride_columns": None if desc.stride == (1, 1) else Int(desc.stride[1]),
        "above": Int(desc.padding[0]),
        "left": Int(desc.padding[2]),
        "dilation_rows": Int(desc.dilation[0]),
        "dilation_columns": Int(desc.dilation[1]),
        "tiles_m": Int(m),
        "tiles_n": Int(n),
    }


def _constants(desc: Conv2dProblem) -> dict[str, object]:
    tile = tile_of(desc)
    precision = "tf32" if desc.multiplicands is MathPrecision.TF32 else "ieee"
    return {
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "PRECISION": precision,
        "ACC": TL[desc.element.compute],
    }


def of_pixels(desc: Conv2dProblem, target: Target) -> list[Launch]:
    """The result, or the gradient of x."""
    back = desc.op == "conv2d_backward_input"
    source, out = (desc.operand(name) for name in (("dout", "dx") if back else ("x", "out")))
    if out.numel == 0:
        return []
    weight, tile = desc.operand("weight"), tile_of(desc)
    bias = next((o for o in desc.operands() if o.name == "bias"), None)
    args: dict[str, Arg] = {
        "source": values(source),
        "weight": values(weight),
        "bias": None if bias is None else values(bias),
        "out": values(out),
        "source_strides": _strides(source),
        "weight_strides": _strides(weight),
        "bias_stride": None if bias is None else _strides(bias)[0],  # type: ignore[index]
        "out_strides": _strides(out),
        "rows": Int(out.shape[2]),
        "columns": Int(out.shape[3]),
        "source_rows": Int(source.shape[2]),
        "source_columns": Int(source.shape[3]),
        "features": _count(_features(desc)),
        "own_weights": Int(desc.filters),
        **_shared(desc),
    }
    constants = {**_constants(desc), "FLAT": _flat(desc), "TRANSPOSED": back}
    which = kernels.conv2d_tiles_kernel
    return [Launch(which, programs(desc), args, constants, num_warps=tile.warps, num_stages=tile.stages)]


def of_weight(desc: Conv2dProblem, target: Target) -> list[Launch]:
    """The gradient of weight: each part of the pixels, then the sum of the parts."""
    out, tile, compute = desc.operand("dweight"), tile_of(desc), desc.element.compute
    if out.numel == 0:
        return []
    parts, each = _parts(desc)
    apart = (desc.taps * desc.channels, None, desc.kernel[1] * desc.channels, desc.channels)
    args: dict[str, Arg] = {
        "x": values(desc.operand("x")),
        "dout": values(desc.operand("dout")),
        "out": Scratch(0, compute) if parts > 1 else values(out),
        "x_strides": _strides(desc.operand("x")),
        "dout_strides": _strides(desc.operand("dout")),
        "out_strides": tuple(s if s is None else _count(s) for s in apart) if parts > 1 else _strides(out),
        "part_stride": _count(out.numel),
        "each": Int(each, False, power_of_two_in(each)),
        "rows": Int(desc.out_extents[0]),
        "columns": Int(desc.out_extents[1]),
        "height": Int(desc.height),
        "width": Int(desc.width),
        "filters": _count(desc.filters),
        "groups": Int(desc.groups),
        **_shared(desc),
    }
    which = kernels.conv2d_weight_kernel
    found = [Launch(which, programs(desc), args, _constants(desc), num_warps=tile.warps, num_stages=tile.stages)]
    if parts > 1:
        args = {
            "parts": Scratch(0, compute),
            "out": values(out),
            "out_strides": _strides(out),
            "elements": _count(out.numel),
            "count": Int(parts),
            "channels": _count(desc.channels),
            "kernel_rows": Int(desc.kernel[0]),
            "kernel_columns": Int(desc.kernel[1]),
        }
        grid = -(-out.numel // FOLD_BLOCK)
        found.append(Launch(kernels.conv2d_fold_kernel, grid, args, {"BLOCK": FOLD_BLOCK}, num_warps=4))
    return found


for _op, _build in (
    ("conv2d", of_pixels),
    ("conv2d_backward_input", of_pixels),
    ("conv2d_backward_weight", of_weight),
):
    kernel(
        op=_op,
        name="tiles",
        elements=("f16", "bf16", "f32", "f64"),
        supports=supports,
        rank=rank,
        workspace=workspace,
        guarantee=guarantee,
        numerics=numerics,
        layout=layout,
    )(_build)
