"""Kernel ``depthwise``: convolution of each channel separately and its gradients, without matrix products."""

from __future__ import annotations

from collections.abc import Mapping

from triplan.backends.runtime.launch import Int, Launch
from triplan.backends.triton.common import card
from triplan.backends.triton.common.offsets import TL, ceil_power
from triplan.backends.triton.common.strides import count
from triplan.backends.triton.conv import depthwise_kernels as kernels, shared
from triplan.descriptors.conv import Conv2dProblem
from triplan.sku import MathPrecision, PrecisionGuarantee, Support, Target

#: Pixels of a tile, its rows at most, and its channels at most. Untuned.
PIXELS = 64
ROWS = 8
CHANNELS = 64
#: Elements of a tile of channels that are not read in vectors, whose addresses would spill, and of f64. Untuned.
RAGGED_AREA, WIDE_AREA = 2048, 1024
#: Tiles of pixels that keep any card busy, and pixels of one at least. Untuned.
BUSY_TILES, LEAST_PIXELS = 264, 16
#: How many more channels than there are, or pixels, tiles may have. Untuned.
IDLE = 1.2
#: Taps times pixels times channels of a tile of the gradient of weight: 32 accumulators a thread. Untuned.
SUMS = 4096
#: Programs of the gradient of weight that hide the latency of its loads, and parts at most. Untuned.
BUSY_PROGRAMS = 2112
MOST_PARTS = 256
WARPS = 4
#: Products that one multiprocessor accumulates per microsecond, for pixels and for the gradient of weight; measured on
#: an H200 with 3 x 3 taps.
SM_PRODUCTS_PER_US, SM_WEIGHT_PRODUCTS_PER_US = 2.3e4, 7e3


def _block(desc: Conv2dProblem) -> int:
    """Channels of a tile: the most of which few are idle."""
    n = desc.in_channels
    padded = {b: -(-n // b) * b for b in (CHANNELS, CHANNELS // 2, CHANNELS // 4) if b < 2 * n or b == CHANNELS // 4}
    few = (b for b, channels in padded.items() if channels <= IDLE * n)
    return min(next(few, min(padded, key=lambda b: padded[b])), max(ceil_power(n), 8))


def _tile(desc: Conv2dProblem) -> tuple[int, int]:
    """Rows and columns of a tile of pixels. 0 rows: its pixels follow each other row by row."""
    rows, columns = _extents(desc)
    block = _block(desc)
    area = WIDE_AREA // block if desc.element.itemsize > 4 else PIXELS
    if any(o.layout.unit_axis == 1 and o.layout.stride_multiple * o.element.itemsize < 16 for o in desc.operands()):
        area = min(area, RAGGED_AREA // block)
    pixels = desc.batch * rows * columns * -(-desc.in_channels // block)
    area = min(area, max(ceil_power(pixels // BUSY_TILES), LEAST_PIXELS))
    height = min(ROWS, ceil_power(rows), area)
    width = min(area // height, ceil_power(columns))
    if -(-rows // height) * height * -(-columns // width) * width <= IDLE * rows * columns:
        return height, width
    return 0, min(area, ceil_power(rows * columns))


def _extents(desc: Conv2dProblem) -> tuple[int, int]:
    return (desc.height, desc.width) if shared.of_input(desc) else desc.out_extents


def _tiles(desc: Conv2dProblem) -> tuple[int, int, int]:
    """Tiles of rows, of columns and of channels."""
    (rows, columns), (height, width) = _extents(desc), _tile(desc)
    channels = -(-desc.in_channels // _block(desc))
    if height == 0:
        return 1, -(-rows * columns // width), channels
    return -(-rows // height), -(-columns // width), channels


def _lanes(desc: Conv2dProblem) -> tuple[int, int]:
    """Lines and columns of them that a tile of the gradient of weight accumulates side by side."""
    lanes = max(SUMS // (ceil_power(desc.kernel[1]) * _block(desc)), 1)
    wide = min(lanes, ceil_power(desc.out_extents[1]))
    return lanes // wide, wide


def _parts(desc: Conv2dProblem) -> tuple[int, int]:
    """Parts of the lines that the gradient of weight sums, and the lines of each."""
    programs, lines = desc.kernel[0] * _tiles(desc)[2], _lanes(desc)[0]
    blocks = -(-desc.batch * desc.out_extents[0] // lines)
    parts, each = shared.parts_of(blocks, programs, BUSY_PROGRAMS, MOST_PARTS)
    return parts, each * lines


def programs(desc: Conv2dProblem) -> int:
    rows, columns, channels = _tiles(desc)
    if shared.of_weight(desc):
        return desc.kernel[0] * channels * _parts(desc)[0]
    return desc.batch * rows * columns * channels


def supports(desc: Conv2dProblem, target: Target) -> Support:
    if desc.channels != 1 or desc.filters != 1:
        return Support.no(f"groups of {desc.channels} channels and {desc.filters} filters; it takes one of each")
    if shared.of_weight(desc) and ceil_power(desc.kernel[1]) > SUMS // _block(desc):
        return Support.no(f"a kernel of {desc.kernel[1]} columns; it takes {SUMS // _block(desc)} at most")
    return shared.counted(desc, programs(desc))


def rank(desc: Conv2dProblem, target: Target) -> float:
    """Estimated microseconds."""
    products = shared.pixels(desc) * desc.in_channels * desc.taps
    rate = SM_WEIGHT_PRODUCTS_PER_US if shared.of_weight(desc) else SM_PRODUCTS_PER_US
    work = products / (rate * min(target.sm_count, max(programs(desc), 1)))
    return card.LAUNCH_US + max(work, sum(o.nbytes for o in desc.operands()) / card.BYTES_PER_US)


def _precision(desc: Conv2dProblem) -> MathPrecision:
    """The precision of products: the element's own, because without tensor cores nothing is rounded to tf32."""
    return MathPrecision(desc.element.value)


def guarantee(desc: Conv2dProblem) -> Mapping[str, PrecisionGuarantee]:
    if shared.of_weight(desc):
        return shared.guaranteed(desc, _precision(desc), shared.pixels(desc), _parts(desc)[0])
    return shared.guaranteed(desc, _precision(desc), desc.taps, 1)


def numerics(desc: Conv2dProblem) -> str | None:
    """The numerics id: the taps of a pixel are added one by one, whatever its tile."""
    kernel = "x".join(map(str, desc.kernel))
    return None if shared.of_weight(desc) else f"{desc.op}.depthwise.{desc.element}.{kernel}.v1"


def workspace(desc: Conv2dProblem, target: Target) -> int:
    return shared.parts_bytes(desc, _parts(desc)[0]) if shared.of_weight(desc) else 0


def build(desc: Conv2dProblem, target: Target) -> list[Launch]:
    """The launch for the result, or for the gradient of x."""
    if programs(desc) == 0:
        return []
    height, width = _tile(desc)
    names = ("tiles_rows", "tiles_columns", "tiles_channels")
    args = {
        **shared.of_pixels(desc),
        **shared.geometry(desc),
        **{name: Int(n) for name, n in zip(names, _tiles(desc), strict=True)},
        **({} if height else {"tiles_rows": None}),
        "channels": count(desc.in_channels),
        "taps": Int(desc.taps),
    }
    constants = {"TILE_ROWS": max(height, 1), "TILE_COLUMNS": width, "BLOCK_C": _block(desc)}
    constants |= {"TRANSPOSED": shared.of_input(desc), "ACC": TL[desc.element.compute]}
    return [Launch(kernels.conv2d_depthwise_kernel, programs(desc), args, constants, num_warps=WARPS)]


def build_weight(desc: Conv2dProblem, target: Target) -> list[Launch]:
    """The launches for the gradient of weight: sums over each part of the pixels, then the sum of the parts."""
    if programs(desc) == 0:
        return []
    parts, each = _parts(desc)
    (lines, wide), found = _lanes(desc), shared.of_parts(desc, parts, each)
    del found["pixels"]
    args = {
        **found,
        **shared.geometry(desc),
        "lines": Int(desc.batch * desc.out_extents[0]),
        "channels": count(desc.in_channels),
        "kernel_rows": Int(desc.kernel[0]),
        "tiles_channels": Int(_tiles(desc)[2]),
    }
    constants = {"LINES": lines, "WIDE": wide, "BLOCK_C": _block(desc), "ACC": TL[desc.element.compute]}
    constants["TAPS"] = ceil_power(desc.kernel[1])
    main = Launch(kernels.conv2d_depthwise_weight_kernel, programs(desc), args, constants, num_warps=WARPS)
    return [main, *shared.fold(desc, parts)]


shared.register(
    build,
    build_weight,
    name="depthwise",
    supports=supports,
    rank=rank,
    workspace=workspace,
    guarantee=guarantee,
    numerics=numerics,
)
