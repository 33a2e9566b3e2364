"""Kernel ``windows``: pooling and its gradients. Each element of the result is computed separately, without atomics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from triplan.backends.runtime.launch import Arg, Int, Launch, power_of_two_in
from triplan.backends.table import kernel
from triplan.backends.triton.common import bounds, card
from triplan.backends.triton.common.offsets import I32_LIMIT, TL, divisor, layout, values
from triplan.backends.triton.common.strides import count, known_strides, moving_strides
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.pooling import windows_kernels as kernels
from triplan.descriptors import (
    AdaptiveAvgPool2dBackwardDescriptor,
    AdaptiveAvgPool2dDescriptor,
    AvgPool2dBackwardDescriptor,
    AvgPool2dDescriptor,
    MaxPool2dBackwardDescriptor,
    MaxPool2dDescriptor,
    Operand,
)
from triplan.descriptors.pooling import AdaptiveProblem, AvgProblem, MaxProblem, PoolProblem, WindowsProblem
from triplan.sku import ArchSku, ElementKind, MathPrecision, PrecisionGuarantee, Support, Target
from triplan.sku.facts import fact

Given = TypeVar("Given")

ELEMENTS = ("f16", "bf16", "f32", "f64")
#: Limit for numbers of pixels and products of extents, which kernels compute in 32 bits.
MOST = 2**30
#: Elements of a tile of pixels and channels, half as many of f64, and its channels at most. Untuned.
AREA, CHANNELS = 1024, 64
#: Results from which on programs have tiles, which are large; and neighbouring results of a program of fewer and of
#: more. Untuned.
MANY, RESULTS = 1 << 17, (128, 256)
#: Pixels, and channels at most, of a tile where channels of some operands are adjacent and pixels of others: each is
#: accessed along what is adjacent, and threads exchange the tile. Untuned.
CROSSED = (32, 32)
#: Such a tile is taken if the operands of either kind have at least 1/CROSSED_PART of the bytes of the other. Untuned.
CROSSED_PART = 8
#: Elements of the tile of a single warp, which shares what it computes of a pixel among 2 to 8 channels a thread.
WARP_AREA = 256
WARPS = 4
#: Channels of a tile that sweeps over all of a pixel; windows (of resizing: readers) of a pixel in such a tile at most,
#: and in one of half as many pixels; and pixels from which on there are enough of such programs. Untuned.
SWEPT, SWEPT_WINDOWS, MANY_PIXELS = 32, (4, 9), 1 << 15
#: Loads of a thread that do not wait for each other, at most, and bytes that they fill registers with: more spill on
#: sm_80, and of f64, whose divisions take registers, a third. Of a single warp, whose threads load channels one by one,
#: and if they also load indices: loads for each channel. Untuned.
LOADS, LOADED_BYTES = 16, 288
WARP_LOADS, WARP_INDEX_LOADS = 4, 2
#: Bytes of a short vector, or of a lone element: a maximum's tile of such is half as large, as each has an address; and
#: loads of a single warp for each channel then. Untuned.
SHORT, SHORT_LOADS = 4, 9
#: Columns at most of a maximum's window that are loaded at once even if they are more than these loads. Untuned.
WHOLE = 7
#: Windows of a pixel from which on few of their maxima are that pixel: of the others no gradient is loaded. Untuned.
MANY_WINDOWS = 16
#: Elements of windows that one multiprocessor reduces per microsecond, about ten instructions each. Untuned.
SM_ELEMENTS_PER_US = 2e4
#: Roundings of an f32 ``a / b``: 4 for div.full (PTX ISA: 2 units in the last place), 1 for converting the divisor; and
#: of ``a * (1 / b)``, by which gradients are found.
QUOTIENT, RECIPROCAL_PRODUCT = 5, 6


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


class Tile(NamedTuple):
    """What a program computes.

    Attributes:
        pixels, channels: of its tile; with one channel, as many neighbouring results as ``pixels`` says.
        last: whether most bytes have their channels adjacent: results are numbered in this order then. None: no operand
            tells, and the kernel compares strides.
        warps: of its program.
        sweeps: whether it goes through all channels of its pixels.
        crossed: whether some operands have their channels adjacent and others their pixels.
    """

    pixels: int
    channels: int
    last: bool | None
    warps: int = WARPS
    sweeps: bool = False
    crossed: bool = False


def _unit_axis(o: Operand) -> int | None:
    """The axis of more than one element along which ``o`` is contiguous."""
    return next((axis for axis, stride in enumerate(known_strides(o, 4)) if stride == 1), None)


def _lanes(o: Operand, channels: int) -> int:
    """Neighbouring channels of ``o`` that one instruction moves."""
    steps = 0 if o.layout.packed else o.layout.stride_multiple
    return min(
        power_of_two_in(steps),
        power_of_two_in(channels),
        (o.layout.alignment or o.element.itemsize) // o.element.itemsize,
    )


def swept(desc: PoolProblem, reach: int, pixels: int) -> Tile | None:
    """The tile of a gradient whose program goes through all channels of its pixels, as the ``reach`` results that take
    part in a pixel's gradient need far more instructions than an element; None where there are few channels, few
    pixels or many such results."""
    if desc.channels <= SWEPT or reach > SWEPT_WINDOWS[-1] or pixels < MANY_PIXELS:
        return None
    across = SWEPT if 6 * (-desc.channels % SWEPT) <= desc.channels else SWEPT // 2
    return Tile((WARP_AREA // 2 if reach <= SWEPT_WINDOWS[0] else WARP_AREA // 4) // across, across, True, 1, True)


def _is_short(desc: PoolProblem) -> bool:
    """Whether it is a maximum whose elements are loaded by few bytes at a time."""
    if not isinstance(desc, MaxPool2dDescriptor):
        return False
    return _lanes(desc.operand("x"), desc.channels) * desc.element.itemsize <= SHORT


def _across(across: int, least: int, channels: int) -> int:
    """Channels of a tile: ``across``, or down to ``least`` until at most a sixth is idle."""
    while across > least and 6 * (-channels % across) > channels:
        across //= 2
    return across


def _is_rare(desc: PoolProblem) -> bool:
    """Whether gradients of maxima are loaded only where an index names the pixel."""
    return isinstance(desc, MaxPool2dBackwardDescriptor) and math.prod(_reach(desc)) >= MANY_WINDOWS


@fact
def tile(desc: PoolProblem) -> Tile:
    """Tiles of channels where these are adjacent and go in vectors; elsewhere neighbouring results, so that a program
    has no idle lanes whatever the extents. What lies otherwise is read and written with gaps."""
    images = [o for o in desc.operands() if o.name != "dout" or not _is_rare(desc)]
    written = next(o for o in images if o.is_written)
    votes = {axis: sum(o.nbytes for o in images if _unit_axis(o) == axis) for axis in (1, 3)}
    last = votes[1] >= votes[3] + (_unit_axis(written) != 1)
    order = last if any(votes.values()) else None
    # Of what is written and most of the bytes no axis may be adjacent: a tile of few pixels and many channels fills
    # sectors whichever of the two are nearer to each other.
    is_gapped = _unit_axis(written) not in votes and written.nbytes > max(votes.values())
    lanes = min((_lanes(o, desc.channels) for o in images if _unit_axis(o) == 1), default=1)
    results = written.numel
    if results < MANY:
        return Tile(RESULTS[0], 1, order)
    if desc.channels > 1 and CROSSED_PART * min(votes.values()) >= max(max(votes.values()), 1) and results < I32_LIMIT:
        return Tile(CROSSED[0], _across(CROSSED[1], CROSSED[1] // 2, desc.channels), last, crossed=True)
    vectors = last and lanes > 1
    across = CHANNELS if vectors and not is_gapped else WARP_AREA
    across = _across(across, lanes if vectors else 64 if last else across + 1, desc.channels)
    half = 2 if _is_short(desc) else 1
    fits = last and 6 * (-desc.channels % across) <= desc.channels
    if vectors or (fits and is_gapped) or results >= I32_LIMIT:
        return Tile((AREA if desc.element.itemsize < 8 else AREA // 2) // half // across, across, last)
    if fits:
        across = min(across, WARP_AREA // half)
        return Tile(WARP_AREA // half // across, across, last, warps=1)
    averages = isinstance(desc, (AvgPool2dBackwardDescriptor, AdaptiveAvgPool2dBackwardDescriptor))
    sweeps = swept(desc, math.prod(_reach(desc)), _pixels(desc)) if last and averages else None
    return sweeps or Tile(RESULTS[1], 1, order)


def unrolled(desc: PoolProblem, found: Tile, rows: int, columns: int, indices: bool = False) -> dict[str, int]:
    """The kernels' ROWS and COLUMNS for loops over ``rows`` by ``columns`` elements: all columns, if they are few, and
    as many rows as leave at most a fifth beyond the last. ``indices``: whether these are loaded too."""
    if found.sweeps:
        return {"ROWS": rows, "COLUMNS": columns}
    loads = WARP_INDEX_LOADS if indices else SHORT_LOADS if _is_short(desc) else WARP_LOADS
    if found.warps > 1:
        size = desc.element.itemsize + (ElementKind.I64.itemsize if indices and found.crossed else 0)
        each = found.pixels * found.channels * size // (32 * found.warps)
        most = LOADED_BYTES if desc.element.itemsize < 8 else LOADED_BYTES // 3
        loads = min(LOADS, max(most // each, 1))
    if isinstance(desc, MaxPool2dDescriptor):
        # (Nothing masks elements beyond a window: they would be loaded in vain.)
        across = next(n for n in range(min(loads, columns), 0, -1) if columns % n == 0)
        across = columns if across == 1 and columns <= WHOLE else across
        most = min(loads // across, rows) if across == columns else 1
        return {"ROWS": next((n for n in range(most, 1, -1) if rows % n == 0), 1), "COLUMNS": across}
    across = max(-(-columns // max(-(-columns // loads), 1)), 1)
    most = min(loads // across, rows) if across >= columns else 1
    return {"ROWS": next((n for n in range(most, 1, -1) if 5 * (-rows % n) <= rows), 1), "COLUMNS": across}


def _pixels(desc: PoolProblem) -> int:
    extents = (desc.height, desc.width) if is_backward(desc) else desc.out_extents
    return desc.batch * math.prod(extents)


def programs(desc: PoolProblem, found: Tile, pixels: int) -> int:
    """Programs for results of ``pixels`` pixels of all images."""
    if found.channels == 1:
        return -(-pixels * desc.channels // found.pixels)
    if found.sweeps:
        return -(-pixels // found.pixels)
    return -(-pixels // found.pixels) * -(-desc.channels // found.channels)


def extent(n: int, divides: bool) -> tuple[Arg, ...]:
    """(size, multiplier, shift): ``quotient`` needs the last two, which are None unless a kernel ``divides`` by it.

    Each argument that a launch passes takes the host time.
    """
    return (count(n), *(divisor(n, wide=False)[1:] if divides else (None, None)))


def image(desc: PoolProblem, name: str) -> dict[str, Arg]:
    """The operand ``name`` and its strides: of 32 bits if they are known and so are offsets within an image."""
    o = desc.operand(name)
    strides = moving_strides(o)
    known = [s for s in known_strides(o, 4) if isinstance(s, int)]
    if len(known) == 4 and known[0] < I32_LIMIT:
        far = 2 * max(desc.height, desc.width, *desc.out_extents)  # positions beyond the ends are masked, not moved
        if isinstance(desc, WindowsProblem):
            far += max(k * d + p for k, d, p in zip(desc.kernel, desc.dilation, desc.padding, strict=True))
        if sum(s * n for s, n in zip(known[1:], (desc.channels, far, far), strict=True)) < I32_LIMIT:
            strides = tuple(None if s == 1 else Int(s, False, power_of_two_in(s)) for s in known)
    return {name: values(o), f"{name}_strides": strides}


def geometry(desc: PoolProblem, found: Tile, back: bool, adaptive: bool = False) -> dict[str, Arg]:
    """What the kernels take of extents. They divide by those of what they write, and ``adaptive`` ones by ``rows`` and
    ``columns``."""
    rows, columns = desc.out_extents
    return {
        "batch": Int(desc.batch),
        "channels": extent(desc.channels, found.channels == 1),
        "height": extent(desc.height, back),
        "width": extent(desc.width, back),
        "rows": extent(rows, adaptive or not back),
        "columns": extent(columns, adaptive or not back),
        "tiles_channels": None if found.channels == 1 or found.sweeps else Int(-(-desc.channels // found.channels)),
    }


def _programs(desc: PoolProblem) -> int:
    return programs(desc, tile(desc), _pixels(desc))


def supports(desc: PoolProblem, target: Target) -> Support:
    sides = zip((desc.height, desc.width), desc.out_extents, strict=True)
    products = [(n + 1) * (m + 1) for n, m in sides] if isinstance(desc, AdaptiveProblem) else []
    reach: list[int] = []
    if isinstance(desc, WindowsProblem):
        axes = zip(desc.kernel, desc.dilation, desc.stride, desc.padding, desc.out_extents, strict=True)
        reach = [max(k * d, s * (m + 1), s + p) for k, d, s, p, m in axes]
    plane = max(desc.height * desc.width, _steps(desc), math.prod(_span(desc)), getattr(desc, "divisor", 0))
    largest = max(_pixels(desc), plane, desc.channels, *products, *reach)
    if largest >= MOST:
        return Support.no(f"{largest} pixels or positions; it counts fewer than {MOST}")
    return fits_grid(_programs(desc))


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
    per_term = _steps(desc) + (
        0 if isinstance(desc, MaxProblem) else RECIPROCAL_PRODUCT if is_backward(desc) else QUOTIENT
    )
    return bounds.of_outputs(desc, bounds.rounded(desc.element, desc.element.compute, 0, per_term, batch=True))


def numerics(desc: PoolProblem) -> str:
    """The numerics id: elements are added one by one in row-major order, whatever the tile."""
    return f"{desc.op}.windows.{desc.element}.v{_version(type(desc))}"


def _version(cls: type[PoolProblem]) -> int:
    """Of gradients of averages 2: they multiply by the reciprocal of a divisor."""
    return 2 if issubclass(cls, (AvgPool2dBackwardDescriptor, AdaptiveAvgPool2dBackwardDescriptor)) else 1


def _as_windows(desc: PoolProblem) -> PoolProblem:
    """Windows of one size, which divide the image, of ``desc`` if it has such: kernels find those without divisions."""
    if not isinstance(desc, AdaptiveProblem) or not all(desc.out_size):
        return desc
    if desc.height % desc.out_size[0] or desc.width % desc.out_size[1]:
        return desc
    sizes = desc.height // desc.out_size[0], desc.width // desc.out_size[1]
    cls = AvgPool2dBackwardDescriptor if is_backward(desc) else AvgPool2dDescriptor
    same: Any = {name: getattr(desc, name) for name in ("element", "batch", "channels", "height", "width", "layouts")}
    return cls(**same, kernel=sizes, stride=sizes, divisor=math.prod(sizes))


def _divisor(desc: PoolProblem) -> int:
    """By what every sum is divided; 0 if windows have different numbers of elements."""
    if not isinstance(desc, AvgProblem):
        return 0
    is_whole = desc.count_include_pad and not desc.ceil_mode  # no window reaches beyond the padding
    return desc.divisor or (math.prod(desc.kernel) if is_whole else 0)


def _is_even(desc: PoolProblem) -> bool:
    """Whether each window that a pixel looks at contains it."""
    if not isinstance(desc, WindowsProblem) or desc.dilation != (1, 1):
        return False
    return all(k % s == 0 for k, s in zip(desc.kernel, desc.stride, strict=True))


def taken(which: Any, given: Mapping[str, Given]) -> dict[str, Given]:
    """Those of ``given`` that kernel ``which`` takes."""
    return {name: value for name, value in given.items() if name in which.arg_names}


def build(desc: PoolProblem, target: Target) -> list[Launch]:
    if _programs(desc) == 0:
        return []
    desc = _as_windows(desc)
    back, largest, found = is_backward(desc), isinstance(desc, MaxProblem), tile(desc)
    names = ("dout", "dx") if back else ("x", "out")
    adaptive = isinstance(desc, AdaptiveProblem)
    args = geometry(desc, found, back, adaptive) | {"indices": None, "indices_strides": None}
    for name in (*names, "indices") if largest else names:
        args |= image(desc, name)
    windows = desc if isinstance(desc, WindowsProblem) else None
    # A gradient of a maximum compares indices, of adaptive windows it divides: neither asks how large a window is.
    sized = not back or not (largest or adaptive)
    pairs: dict[tuple[str, str], tuple[Arg, ...]] = {
        ("kernel_rows", "kernel_columns"): tuple(map(Int, _span(desc))) if sized else (None, None),
        ("stride_rows", "stride_columns"): tuple(extent(n, back) for n in windows.stride) if windows else (None, None),
        ("above", "left"): tuple(map(Int, windows.padding)) if windows else (None, None),
        ("dilation_rows", "dilation_columns"): tuple(
            Int(n) if sized and n > 1 else None for n in (windows.dilation if windows else (1, 1))
        ),
        **({("reach_rows", "reach_columns"): tuple(map(Int, _reach(desc)))} if back else {}),
    }
    args |= {name: arg for both, own in pairs.items() for name, arg in zip(both, own, strict=True)}
    args["divisor"] = Int(_divisor(desc)) if _divisor(desc) else None
    constants = {
        "MAX": largest,
        "ADAPTIVE": adaptive,
        "PADDED": adaptive or (isinstance(desc, AvgProblem) and desc.count_include_pad),
        **unrolled(desc, found, *(_reach(desc) if back else _span(desc)), indices=back and largest),
        "LAST": found.last,
        "BLOCK_P": found.pixels,
        "BLOCK_C": found.channels,
        "ACC": TL[desc.element.compute],
    }
    if back:
        constants |= {"EVEN": not largest and _is_even(desc), "RARE": _is_rare(desc)}
    which = kernels.pool_backward_kernel if back else kernels.pool_kernel
    if found.sweeps:
        which = kernels.average_backward_kernel
        args, constants = taken(which, args), taken(which, constants)
    # Left alone, ptxas spills registers to raise occupancy: of maxima from 4 bytes on, on sm_90a from 8 on; of their
    # gradients in f32 on sm_90a; of tiles that threads exchange.
    hopper, size = target.arch is ArchSku.SM90A, desc.element.itemsize
    left = not (found.crossed or (largest and ((hopper and size == 4) if back else size > (4 if hopper else 2))))
    most = None if left else card.MAX_THREAD_REGISTERS
    return [Launch(which, _programs(desc), args, constants, num_warps=found.warps, max_registers=most)]


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
            version=_version(_cls),
            layout=layout,
        )(build)
