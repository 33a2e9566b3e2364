"""Kernel ``windows``: pooling and its gradients. Each element of the result is computed separately, without atomics."""

from __future__ import annotations

import math
from collections.abc import Mapping

from triplan.backends.runtime.launch import Arg, Int, Launch
from triplan.backends.table import kernel
from triplan.backends.triton.common import bounds, card
from triplan.backends.triton.common.offsets import TL, ceil_power, layout, values
from triplan.backends.triton.common.strides import axis_strides, count
from triplan.backends.triton.pooling import windows_kernels as kernels
from triplan.descriptors import (
    AdaptiveAvgPool2dBackwardDescriptor,
    AdaptiveAvgPool2dDescriptor,
    AvgPool2dBackwardDescriptor,
    AvgPool2dDescriptor,
    MaxPool2dBackwardDescriptor,
    MaxPool2dDescriptor,
)
from triplan.descriptors.pooling import AdaptiveProblem, AvgProblem, MaxProblem, PoolProblem, WindowsProblem
from triplan.sku import SUPPORTED, ElementKind, MathPrecision, PrecisionGuarantee, Support, Target

ELEMENTS = ("f16", "bf16", "f32", "f64")
#: Limit for numbers of pixels and products of extents, which kernels compute in 32 bits.
MOST = 2**30
#: Elements of a tile, and its channels at most, where channels are adjacent in memory. Untuned.
AREA, CHANNELS = 1024, 64
#: Pixels of a tile where channels are not adjacent. Untuned.
PIXELS = 256
WARPS = 4
#: Elements of windows that one multiprocessor reduces per microsecond, about ten instructions each. Untuned.
SM_ELEMENTS_PER_US = 2e4
#: Roundings of an f32 ``a / b``: 4 for div.full (PTX ISA: 2 units in the last place), 1 for converting the divisor.
QUOTIENT = 5


def is_backward(desc: PoolProblem) -> bool:
    return isinstance(
        desc, (MaxPool2dBackwardDescriptor, AvgPool2dBackwardDescriptor, AdaptiveAvgPool2dBackwardDescriptor)
    )


def _span(desc: PoolProblem) -> tuple[int, int]:
    """Rows and columns of the largest window."""
    if isinstance(desc, WindowsProblem):
        return desc.kernel
    sizes = zip((desc.height, desc.width), desc.out_extents, strict=True)
    rows, columns = (n // m if n % m == 0 else min(-(-n // m) + 1, n) for n, m in sizes)
    return rows, columns


def _reach(desc: PoolProblem) -> tuple[int, int]:
    """Rows and columns of windows that contain one element, at most."""
    if isinstance(desc, WindowsProblem):
        axes = zip(desc.kernel, desc.dilation, desc.stride, strict=True)
        rows, columns = (d * (k - 1) // s + 1 for k, d, s in axes)
        return rows, columns
    sizes = zip((desc.height, desc.width), desc.out_extents, strict=True)
    rows, columns = (1 if n % m == 0 else m // n if m % n == 0 else min(-(-m // n) + 1, m) for n, m in sizes)
    return rows, columns


def _steps(desc: PoolProblem) -> int:
    """Elements that are read for one element of the result, at most."""
    return math.prod(_reach(desc) if is_backward(desc) else _span(desc))


def tile(desc: PoolProblem) -> tuple[int, int]:
    """(pixels, channels) of a tile; one channel unless channels are adjacent in every tensor."""
    last = all(not o.layout.packed and o.layout.unit_axis == 1 for o in desc.operands())
    across = min(CHANNELS, ceil_power(desc.channels)) if last else 1
    return (min(AREA // across, PIXELS) if across > 1 else PIXELS), across


def _pixels(desc: PoolProblem) -> int:
    extents = (desc.height, desc.width) if is_backward(desc) else desc.out_extents
    return desc.batch * math.prod(extents)


def _programs(desc: PoolProblem) -> int:
    pixels, channels = tile(desc)
    return -(-_pixels(desc) // pixels) * -(-desc.channels // channels)


def supports(desc: PoolProblem, target: Target) -> Support:
    sides = zip((desc.height, desc.width), desc.out_extents, strict=True)
    products = [(n + 1) * (m + 1) for n, m in sides] if isinstance(desc, AdaptiveProblem) else []
    reach: list[int] = []
    if isinstance(desc, WindowsProblem):
        axes = zip(desc.kernel, desc.dilation, desc.stride, desc.padding, desc.out_extents, strict=True)
        reach = [max(k * d, s * (m + 1), s + p) for k, d, s, p, m in axes]
    plane = max(desc.height * desc.width, _steps(desc), getattr(desc, "divisor", 0))
    largest = max(_pixels(desc), plane, desc.channels, *products, *reach)
    if largest >= MOST:
        return Support.no(f"{largest} pixels or positions; it counts fewer than {MOST}")
    if _programs(desc) >= 2**31:
        return Support.no(f"{_programs(desc)} programs; a grid holds fewer than 2**31")
    return SUPPORTED


def rank(desc: PoolProblem, target: Target) -> float:
    """Estimated microseconds."""
    work = _pixels(desc) * desc.channels * _steps(desc)
    busy = min(target.sm_count, max(_programs(desc), 1))
    nbytes = sum(o.nbytes for o in desc.operands())
    return card.LAUNCH_US + max(work / (SM_ELEMENTS_PER_US * busy), nbytes / card.BYTES_PER_US)


def guarantee(desc: PoolProblem) -> Mapping[str, PrecisionGuarantee]:
    """Additions in a fixed order, the same for every image, and the division of an average."""
    if isinstance(desc, MaxPool2dDescriptor):
        exact = bounds.guarantee(ElementKind.I64, bounds.EXACT, math_precision=MathPrecision.EXACT, batch=True)
        return {"out": bounds.guarantee(desc.element.compute, bounds.EXACT, batch=True), "indices": exact}
    per_term = _steps(desc) + (0 if isinstance(desc, MaxProblem) else QUOTIENT)
    return bounds.of_outputs(desc, bounds.rounded(desc.element, desc.element.compute, 0, per_term, batch=True))


def numerics(desc: PoolProblem) -> str:
    """The numerics id: elements are added one by one in row-major order, whatever the tile."""
    return f"{desc.op}.windows.{desc.element}.v1"


def build(desc: PoolProblem, target: Target) -> list[Launch]:
    if _programs(desc) == 0:
        return []
    back, largest = is_backward(desc), isinstance(desc, MaxProblem)
    pixels, channels = tile(desc)
    source, out = (desc.operand(name) for name in (("dout", "dx") if back else ("x", "out")))
    indices = desc.operand("indices") if largest else None
    names = ("dout", "dx") if back else ("x", "out")
    args: dict[str, Arg] = {
        names[0]: values(source),
        names[1]: values(out),
        "indices": None if indices is None else values(indices),
        f"{names[0]}_strides": axis_strides(source),
        f"{names[1]}_strides": axis_strides(out),
        "indices_strides": None if indices is None else axis_strides(indices),
        "batch": Int(desc.batch),
        "channels": count(desc.channels),
        "height": Int(desc.height),
        "width": Int(desc.width),
        "divisor": Int(desc.divisor) if isinstance(desc, AvgProblem) and desc.divisor else None,
        "tiles_channels": Int(-(-desc.channels // channels)),
    }
    windows = desc if isinstance(desc, WindowsProblem) else None
    pairs = {
        ("rows", "columns"): desc.out_extents,
        ("kernel_rows", "kernel_columns"): _span(desc),
        ("stride_rows", "stride_columns"): windows.stride if windows else (1, 1),
        ("above", "left"): windows.padding if windows else (0, 0),
        ("dilation_rows", "dilation_columns"): windows.dilation if windows else (1, 1),
        **({("reach_rows", "reach_columns"): _reach(desc)} if back else {}),
    }
    args |= {name: Int(n) for both, found in pairs.items() for name, n in zip(both, found, strict=True)}
    constants = {
        "MAX": largest,
        "ADAPTIVE": isinstance(desc, AdaptiveProblem),
        "PADDED": isinstance(desc, AdaptiveProblem) or (isinstance(desc, AvgProblem) and desc.count_include_pad),
        "BLOCK_P": pixels,
        "BLOCK_C": channels,
        "ACC": TL[desc.element.compute],
    }
    which = kernels.pool_backward_kernel if back else kernels.pool_kernel
    return [Launch(which, _programs(desc), args, constants, num_warps=WARPS)]


for _cls in (
    MaxPool2dDescriptor,
    MaxPool2dBackwardDescriptor,
    AvgPool2dDescriptor,
    AvgPool2dBackwardDescriptor,
    AdaptiveAvgPool2dDescriptor,
    AdaptiveAvgPool2dBackwardDescriptor,
):
    for _op in _cls.ops():
        kernel(
            op=_op,
            name="windows",
            elements=ELEMENTS,
            supports=supports,
            rank=rank,
            guarantee=guarantee,
            numerics=numerics,
            layout=layout,
        )(build)
