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
    """Channels of a tile."""
    return min(CHANNELS, max(ceil_power(desc.in_channels), 8))


def _tile(desc: Conv2dProblem) -> tuple[int, int]:
    """Rows and columns of a tile of pixels."""
    rows, columns = _extents(desc)
    height = min(ROWS, ceil_power(rows))
    return height, min(PIXELS // height, ceil_power(columns))


def _extents(desc: Conv2dProblem) -> tuple[int, int]:
    return (desc.height, desc.width) if shared.of_input(desc) else desc.out_extents


def _tiles(desc: Conv2dProblem) -> tuple[int, int, int]:
    """Tiles of rows, of columns and of channels."""
    across = zip(_extents(desc), _tile(desc), strict=True)
    rows, columns = (-(-n // tile) for n, tile in across)
    return rows, columns, -(-desc.in_channels // _block(desc))


def _lanes(desc: Conv2dProblem) -> int:
    """Pixels that a tile of the gradient of weight accumulates side by side."""
    return max(SUMS // (ceil_power(desc.kernel[1]) * _block(desc)), 1)


def _parts(desc: Conv2dProblem) -> tuple[int, int]:
    programs = desc.kernel[0] * _tiles(desc)[2]
    return shared.parts_of(desc, _lanes(desc), programs, BUSY_PROGRAMS, MOST_PARTS)


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
        "channels": count(desc.in_channels),
        "taps": Int(desc.taps),
    }
    constants = {"TILE_ROWS": height, "TILE_COLUMNS": width, "BLOCK_C": _block(desc), "ACC": TL[desc.element.compute]}
    constants["TRANSPOSED"] = shared.of_input(desc)
    return [Launch(kernels.conv2d_depthwise_kernel, programs(desc), args, constants, num_warps=WARPS)]


def build_weight(desc: Conv2dProblem, target: Target) -> list[Launch]:
    """The launches for the gradient of weight: sums over each part of the pixels, then the sum of the parts."""
    if programs(desc) == 0:
        return []
    parts, each = _parts(desc)
    args = {
        **shared.of_parts(desc, parts, each),
        **shared.geometry(desc),
        "channels": count(desc.in_channels),
        "kernel_rows": Int(desc.kernel[0]),
        "tiles_channels": Int(_tiles(desc)[2]),
    }
    constants = {"BLOCK_P": _lanes(desc), "BLOCK_C": _block(desc), "ACC": TL[desc.element.compute]}
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
