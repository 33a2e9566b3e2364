"""Kernel ``depthwise``: convolution of each channel separately and its gradients, without matrix products."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from triplan.backends.runtime.launch import Arg, Int, Launch, power_of_two_in
from triplan.backends.triton.common import card
from triplan.backends.triton.common.offsets import TL
from triplan.backends.triton.common.strides import axis_strides, count
from triplan.backends.triton.conv import depthwise_kernels as kernels, shared
from triplan.descriptors.conv import Conv2dProblem
from triplan.sku import ArchSku, MathPrecision, PrecisionGuarantee, Support, Target
from triplan.sku.facts import fact

#: Rows and columns of a thread at most, and its lanes if channels are read in vectors; of pairs it has two, else one.
#: Untuned.
MOST_LINES, MOST_ACROSS, VECTOR_LANES = 8, 4, 4
#: Taps that a thread holds at most, results, and their products; taps of a row that are unrolled. Untuned.
MOST_WEIGHTS, MOST_RESULTS, MOST_PRODUCTS, MOST_TAPS = 64, 64, 800, 7
#: Channels of a tile, about, where there are more: columns of fewer bytes share lines of the L1 cache. Untuned.
CHANNELS = 64
#: Tiles that keep any card busy, and programs from which on each has several tiles. Untuned.
BUSY_TILES, MANY_PROGRAMS = 264, 2112
#: What a load takes beside those that its columns share, and a step of the gradient of weight, in loads. Untuned.
SINGLE, STEP = 0.6, 20
#: Tiles may have so many times the rows or lanes that exist. Untuned.
IDLE = 1.2
#: Programs of four warps of the gradient of weight that run at once on an H200, and those of threads with more taps
#: than so many, which have more registers. And parts at most of which a tap and a channel is the sum.
RESIDENT, RESIDENT_LARGE, MANY_TAPS, MOST_PARTS = 396, 264, 32, 8192
#: Warps of a tile at most.
WARPS = 4
#: Products that one multiprocessor accumulates per microsecond, for pixels and for the gradient of weight; measured on
#: an H200 with 3 x 3 taps and channels that are not read in vectors.
SM_PRODUCTS_PER_US, SM_WEIGHT_PRODUCTS_PER_US = 3.3e4, 3.8e4
#: The latter for bf16 and threads of MOST_ACROSS columns, on an H200: with 3 x 3 and 5 x 5 taps, and with 7 x 7, which
#: are more than MANY_TAPS.
SM_HALF_WEIGHT_PRODUCTS_PER_US, SM_MANY_TAPS_PRODUCTS_PER_US = 5.2e4, 7.5e4
#: Microseconds that results take longer for each tap, which a thread reads after another. From small drawn problems on
#: an H200.
TAP_US = 0.03
#: Microseconds that a program of the gradient of weight waits for what a step reads. From small drawn problems on an
#: H200.
STEP_US = 0.5


def _joined(desc: Conv2dProblem) -> bool:
    """Whether the rows of all images are those of one: under one tap that is so in memory, and few are left over."""
    return shared.of_weight(desc) and shared.is_matrix(desc)


def _images(desc: Conv2dProblem) -> int:
    return 1 if _joined(desc) else desc.batch


def _extents(desc: Conv2dProblem) -> tuple[int, int]:
    if _joined(desc):
        return desc.batch * desc.height, desc.width
    rows, columns = (desc.height, desc.width) if shared.of_input(desc) else desc.out_extents
    return rows, columns // _together(desc)


def _lanes(desc: Conv2dProblem) -> int:
    """Lanes of a thread that reads vectors."""
    return VECTOR_LANES * 4 // max(desc.element.itemsize, 4)


@fact
def _together(desc: Conv2dProblem) -> int:
    """Adjacent columns that are one, with the channels of all: the fewest that are whole vectors.

    Under one tap columns share nothing, so that without gaps between them they may be divided anywhere.
    """
    whole = _lanes(desc) // math.gcd(_lanes(desc), desc.in_channels)
    images = (o for o in desc.operands() if o.name in ("x", "out", "dout", "dx"))
    if shared.of_weight(desc) or not shared.is_matrix(desc) or desc.width % whole:
        return 1
    return whole if all(o.alignment >= _lanes(desc) * o.element.itemsize for o in images) else 1


def _channels(desc: Conv2dProblem) -> int:
    """Channels of a column."""
    return desc.in_channels * _together(desc)


def _columns_first(desc: Conv2dProblem) -> bool:
    """Whether columns are adjacent in what a tile reads at every tap."""
    layout = desc.operands()[0].layout
    return layout.packed or layout.unit_axis == 3


def _vectors(desc: Conv2dProblem) -> bool:
    """Whether what a tile reads at every tap is read in vectors."""
    return shared.in_vectors(desc.operands()[0])


def _pairs(desc: Conv2dProblem) -> bool:
    """Whether two channels can be read at once of what a tile reads at every tap."""
    o = desc.operands()[0]
    adjacent = not o.layout.packed and o.layout.unit_axis == 1
    return adjacent and o.layout.stride_multiple % 2 == 0 and o.alignment >= 2 * o.element.itemsize


def _block(desc: Conv2dProblem) -> int:
    """Channels of a tile: an equal share of all of them, of whole vectors if vectors are read.

    Under one tap no columns share what they read: tiles then follow each other as pixels do, through all channels.
    """
    if desc.taps == 1 and not shared.of_weight(desc):
        return max(_channels(desc), 1)
    vector = 16 // desc.element.itemsize if _vectors(desc) else 2 if _pairs(desc) else 1
    each = -(-desc.in_channels // max(desc.in_channels // CHANNELS, 1))
    return max(-(-each // vector) * vector, 1)


def _divisor(n: int, most: int) -> int:
    """The largest divisor of ``n`` up to ``most``."""
    return next(d for d in range(min(n, max(most, 1)), 0, -1) if n % d == 0)


def _taps(desc: Conv2dProblem, each: int) -> tuple[int, int]:
    """Rows and columns of the taps that are unrolled, by the lanes of a thread."""
    columns = _divisor(desc.kernel[1], MOST_TAPS)
    return _divisor(desc.kernel[0], MOST_WEIGHTS // (columns * each)), columns


class Division(NamedTuple):
    """Rows of a tile, columns of a lane, lanes, the rows and columns of the taps that it takes at a time, and warps."""

    lines: int
    across: int
    lanes: int
    taps: tuple[int, int]
    warps: int


def _registers(desc: Conv2dProblem) -> int:
    """Registers of a sum."""
    return desc.element.compute.itemsize // 4


def _skips(desc: Conv2dProblem) -> tuple[int, int]:
    """A tap reaches one row, and one column, in so many: the strides, for the gradient of x."""
    return desc.stride if shared.of_input(desc) else (1, 1)


def _groups(desc: Conv2dProblem, across: int) -> int:
    """Groups of so many columns."""
    return -(-_extents(desc)[1] // (_skips(desc)[1] * across))


def _all_lanes(desc: Conv2dProblem, across: int) -> int:
    """Lanes of a row."""
    return _groups(desc, across) * (_channels(desc) if _columns_first(desc) else _block(desc))


def _wide(desc: Conv2dProblem, across: int, each: int) -> int:
    """Lanes of a tile: the most of which few are idle."""
    lanes, wide = _all_lanes(desc, across), 32 * WARPS * each
    while wide > 32 and -(-lanes // wide) * wide > IDLE * lanes:
        wide //= 2
    return wide


def _rows_of_tiles(desc: Conv2dProblem, across: int, each: int) -> int:
    """Tiles of one row."""
    return _images(desc) * -(-_all_lanes(desc, across) // _wide(desc, across, each)) * _blocks(desc) * _extents(desc)[0]


def _across(desc: Conv2dProblem, each: int) -> int:
    """Columns of a lane: those that share the most loads, if few are idle and the card is busy all the same.

    Under one tap they share none, and more programs of fewer registers end in a shorter last wave.
    """
    columns = -(-_extents(desc)[1] // _skips(desc)[1])
    if _columns_first(desc) or columns == 0 or (desc.taps == 1 and not shared.of_weight(desc)):
        return 1
    if shared.of_weight(desc):  # no column may be idle: 0 times an infinity would be NaN
        return _divisor(columns, MOST_ACROSS)
    found = (n for n in range(1, MOST_ACROSS + 1) if n == 1 or _rows_of_tiles(desc, n, each) >= BUSY_TILES)
    return min(found, key=lambda n: -(-columns // n) * (n + SINGLE))


def _summed_lines(desc: Conv2dProblem, d: Division, most: int) -> int:
    """Rows of dout of a step: those with the fewest loads of a part, with the rows that are left, read one by one."""
    rows, wide = _extents(desc)[0], (d.across - 1) * desc.stride[1] + (d.taps[1] - 1) * desc.dilation[1] + 1

    def loads(lines: int) -> int:
        return ((lines - 1) * desc.stride[0] + (d.taps[0] - 1) * desc.dilation[0] + 1) * wide + lines * d.across + STEP

    def of_part(lines: int) -> float:
        whole, left = _steps(desc, d._replace(lines=lines))
        return whole * loads(lines) + left * loads(1)

    return min(range(1, min(most, rows) + 1), key=of_part)


def _steps(desc: Conv2dProblem, d: Division) -> tuple[int, float]:
    """Steps of a part of the gradient of weight, and its rows that are left, each of which is one more."""
    parts, each = _units_by(desc, d)
    return each, max(_images(desc) / parts, 1.0) * (_extents(desc)[0] % d.lines)


@fact
def _division(desc: Conv2dProblem) -> Division:
    """The most lanes, rows and columns of which few are idle, but enough tiles to keep a card busy."""
    rows = _extents(desc)[0]
    each = _lanes(desc) if _vectors(desc) or _together(desc) > 1 else 2 if _pairs(desc) else 1
    while each > 1 and _taps(desc, each)[0] < desc.kernel[0]:
        each //= 2
    across, taps = _across(desc, each), _taps(desc, each)
    wide = _wide(desc, across, each)
    held = min(MOST_RESULTS, MOST_PRODUCTS // math.prod(taps)) // (each * across * _registers(desc))
    # Under one tap no rows share what they read: a step has as many as wait for it together.
    most = held if desc.taps == 1 and shared.of_weight(desc) else min(MOST_LINES, held)
    most, step = max(most, 1), _skips(desc)[0]
    warps = max(wide // (32 * each), 1)
    if shared.of_weight(desc):
        found = Division(1, across, wide, taps, warps)
        return found._replace(lines=_summed_lines(desc, found, most)) if rows else found
    most = min(max(_rows_of_tiles(desc, across, each) // BUSY_TILES, 1), most, max(rows, 1))
    heights = range(-(-most // step) * step, 0, -step)
    lines = min(heights, key=lambda h: (max(-(-rows // h) * h, IDLE * rows), -h))
    return Division(lines, across, wide, taps, warps)


def _blocks(desc: Conv2dProblem) -> int:
    """Blocks of channels."""
    return 1 if _columns_first(desc) else -(-_channels(desc) // _block(desc))


def _tiles(desc: Conv2dProblem) -> tuple[int, int, int, int, int]:
    return _tiles_by(desc, _division(desc))


def _tiles_by(desc: Conv2dProblem, d: Division) -> tuple[int, int, int, int, int]:
    """Tiles of the rows of an image (of the gradient of weight, of whole ones), of lanes, blocks of channels, tiles of
    taps, and of their columns."""
    rows = _extents(desc)[0]
    taps = [n // each for n, each in zip(desc.kernel, d.taps, strict=True)]
    tall = rows // d.lines if shared.of_weight(desc) else -(-rows // d.lines)
    return tall, -(-_all_lanes(desc, d.across) // d.lanes), _blocks(desc), taps[0] * taps[1], taps[1]


def _turns(desc: Conv2dProblem) -> int:
    """Tiles of rows that a program computes, so that it loads its taps once. One tap costs less than uneven waves."""
    tall, lanes, blocks, *_ = _tiles(desc)
    if desc.taps == 1:
        return 1
    most = max(min(tall, desc.batch * tall * lanes * blocks // MANY_PROGRAMS), 1)
    return -(-tall // max(-(-tall // most), 1)) or 1


def _units(desc: Conv2dProblem) -> tuple[int, int]:
    return _units_by(desc, _division(desc))


def _units_by(desc: Conv2dProblem, d: Division) -> tuple[int, int]:
    """Parts that the gradient of weight sums, and the tiles of rows of each."""
    tall, lanes, blocks, taps, _ = _tiles_by(desc, d)
    programs = lanes * blocks * taps
    most = max(MOST_PARTS // max(_groups(desc, d.across), 1), 1)
    resident = RESIDENT_LARGE if math.prod(d.taps) > MANY_TAPS else RESIDENT
    # One more than these would wait for all of them.
    most = min(most, max(resident * WARPS // d.warps // max(programs, 1), 1))
    return shared.parts_of(_images(desc) * tall, programs, resident * WARPS // d.warps, most)


def _parts(desc: Conv2dProblem) -> int:
    """Sums of a tap and a channel: of each part of the rows, one of each group of columns."""
    return _units(desc)[0] * _groups(desc, _division(desc).across)


def programs(desc: Conv2dProblem) -> int:
    tall, lanes, blocks, taps, _ = _tiles(desc)
    if shared.of_weight(desc):
        return lanes * blocks * taps * _units(desc)[0]
    return desc.batch * -(-tall // _turns(desc)) * lanes * blocks


def supports(desc: Conv2dProblem, target: Target) -> Support:
    if desc.channels != 1 or desc.filters != 1:
        return Support.no(f"groups of {desc.channels} channels and {desc.filters} filters; it takes one of each")
    skips, taps = _skips(desc), _division(desc).taps if programs(desc) else desc.kernel
    if any(n % s and n < whole for n, s, whole in zip(taps, skips, desc.kernel, strict=True)):
        return Support.no(f"a kernel of {desc.kernel} with strides {desc.stride}; it unrolls {taps} taps of it")
    lanes = _tiles(desc)[1] * _division(desc).lanes
    if lanes > 2**31:  # the last one is 2**31 - 1
        return Support.no(f"{lanes} lanes of a row; 31 bits count them")
    return shared.counted(desc, programs(desc))


def _rate(desc: Conv2dProblem) -> float:
    """Products that a multiprocessor accumulates per microsecond."""
    if not shared.of_weight(desc):
        return SM_PRODUCTS_PER_US
    d = _division(desc)
    if desc.element.itemsize > 2 or d.across < MOST_ACROSS or not _vectors(desc):
        return SM_WEIGHT_PRODUCTS_PER_US
    return SM_MANY_TAPS_PRODUCTS_PER_US if math.prod(d.taps) > MANY_TAPS else SM_HALF_WEIGHT_PRODUCTS_PER_US


def rank(desc: Conv2dProblem, target: Target) -> float:
    """Estimated microseconds."""
    products = shared.pixels(desc) * desc.in_channels * desc.taps
    work = products / (_rate(desc) * min(target.sm_count, max(programs(desc), 1)))
    found = max(work, sum(o.nbytes for o in desc.operands()) / card.BYTES_PER_US)
    if not shared.of_weight(desc):
        return shared.launch_us(programs(desc), target) + TAP_US * desc.taps + found
    steps = sum(_steps(desc, _division(desc)))
    return shared.launches_us(2 if _parts(desc) > 1 else 1) + max(found + STEP_US, steps * STEP_US)


def _precision(desc: Conv2dProblem) -> MathPrecision:
    """The precision of products: the element's own, because without tensor cores nothing is rounded to tf32."""
    return MathPrecision(desc.element.value)


def guarantee(desc: Conv2dProblem) -> Mapping[str, PrecisionGuarantee]:
    if shared.of_weight(desc):
        return shared.guaranteed(desc, _precision(desc), shared.pixels(desc), _parts(desc))
    return shared.guaranteed(desc, _precision(desc), desc.taps, 1)


def numerics(desc: Conv2dProblem) -> str | None:
    """The numerics id: the taps of a pixel are added in one order, whatever its tile."""
    kernel = "x".join(map(str, desc.kernel))
    return None if shared.of_weight(desc) else f"{desc.op}.depthwise.{desc.element}.{kernel}.v3"


def workspace(desc: Conv2dProblem, target: Target) -> int:
    return shared.parts_bytes(desc, _parts(desc)) if shared.of_weight(desc) else 0


def build(desc: Conv2dProblem, target: Target) -> list[Launch]:
    """The launch for the result, or for the gradient of x."""
    if programs(desc) == 0:
        return []
    back, (before, step) = shared.of_input(desc), ((desc.padding[0], desc.padding[2]), desc.stride)
    found = _division(desc)
    constants = _constants(desc)
    rest = tuple(n % s if back else 0 for n, s in zip(before, step, strict=True))
    reach = (found.taps[0] - 1) * desc.dilation[0]
    lowest = -((reach - rest[0]) // step[0]) if back else 0
    highest = (found.lines - 1 + rest[0]) // step[0] if back else (found.lines - 1) * step[0] + reach
    left, right = _columns_read(desc, found)
    tiles, single = _shared(desc), _tiles(desc)[3] == 1
    args = {
        **shared.of_pixels(desc),
        **(_of_columns_together(desc) if _together(desc) > 1 else {"period": None}),
        **tiles,
        "tiles_rows": Int(-(-_tiles(desc)[0] // _turns(desc))),
        "tiles_taps": None if single else tiles["tiles_taps"],
        "tiles_tap_columns": None if single else tiles["tiles_tap_columns"],
        "turns": Int(_turns(desc)),
        **dict(zip(("first_row", "first_column"), _first(desc), strict=True)),
    }
    constants |= {"REST_ROWS": rest[0], "REST_COLUMNS": rest[1], "LOWEST": lowest, "SPAN": highest - lowest + 1}
    constants |= {"LEFT": left, "COUNT": right - left + 1, "TRANSPOSED": back}
    early, which = shared.begins_early(programs(desc), target), kernels.conv2d_depthwise_kernel
    return [Launch(which, programs(desc), args, constants, num_warps=found.warps, overlaps=early)]


def _of_columns_together(desc: Conv2dProblem) -> dict[str, Arg]:
    """Arguments where several columns are one: without gaps, strides follow from the extents."""
    columns, channels = _extents(desc)[1], _channels(desc)
    row = columns * channels
    image, line = (Int(n, True, power_of_two_in(n)) for n in (desc.height * row, row))
    strides = (image, None, line, count(channels))
    return {
        "source_strides": strides,
        "out_strides": strides,
        "columns": Int(columns),
        "source_columns": Int(columns),
        "period": Int(desc.in_channels),
    }


def _columns_read(desc: Conv2dProblem, d: Division) -> tuple[int, int]:
    """The first and the last column that a lane reads, counted from its first one."""
    step, reach = desc.stride[1], (d.taps[1] - 1) * desc.dilation[1]
    if not shared.of_input(desc):
        return 0, (d.across - 1) * step + reach
    rest = desc.padding[2] % step
    return (rest - reach) // step, d.across - 1 + (step - 1 + rest) // step


def _first(desc: Conv2dProblem) -> tuple[Arg, Arg]:
    """Where the first tap reads for the first row and column; of the gradient of x, in whole strides."""
    first = (desc.padding[0], desc.padding[2])
    if shared.of_input(desc):
        return Int(first[0] // desc.stride[0]), Int(first[1] // desc.stride[1])
    return Int(-first[0]), Int(-first[1])


def _shared(desc: Conv2dProblem) -> dict[str, Arg]:
    names = ("tiles_rows", "tiles_lanes", "tiles_channels", "tiles_taps", "tiles_tap_columns")
    return {
        "channels": count(_channels(desc)),
        "block": None if _columns_first(desc) else count(_block(desc)),
        "groups": Int(_groups(desc, _division(desc).across)),
        **{name: Int(n) for name, n in zip(names, _tiles(desc), strict=True)},
    }


def _constants(desc: Conv2dProblem) -> dict[str, object]:
    d = _division(desc)
    return {
        "LINES": d.lines,
        "ACROSS": d.across,
        "LANES": d.lanes,
        "ROWS": d.taps[0],
        "TAPS": d.taps[1],
        "STRIDE_ROWS": desc.stride[0],
        "STRIDE_COLUMNS": desc.stride[1],
        "DILATION_ROWS": desc.dilation[0],
        "DILATION_COLUMNS": desc.dilation[1],
        "ACC": TL[desc.element.compute],
    }


def _of_images_joined(desc: Conv2dProblem) -> dict[str, Arg]:
    """Arguments where the rows of all images are those of one.

    Without gaps, the step from row to row follows from the extents. Of images of one row, no tensor's stride tells it.
    """
    rows, row = Int(_extents(desc)[0]), desc.width * desc.in_channels
    step = Int(row, True, power_of_two_in(row))
    strides = {f"{name}_strides": axis_strides(desc.operand(name)) for name in ("x", "dout")}
    return {"rows": rows, "height": rows} | {k: (*s[:2], step, s[3]) for k, s in strides.items()}


def build_weight(desc: Conv2dProblem, target: Target) -> list[Launch]:
    """The launches for the gradient of weight: sums over each part of the pixels, then the sum of the parts."""
    if programs(desc) == 0:
        return []
    parts = _parts(desc)
    args = {
        **shared.of_parts(desc, parts, _units(desc)[1]),
        **(_of_images_joined(desc) if _joined(desc) else {}),
        **_shared(desc),
        "units": Int(_images(desc) * _tiles(desc)[0]),
        **dict(zip(("first_row", "first_column"), _first(desc), strict=True)),
    }
    which, warps = kernels.conv2d_depthwise_weight_kernel, _division(desc).warps
    # For sm80 ptxas would spill two registers to raise occupancy.
    most = None if target.arch is ArchSku.SM90A else card.MAX_THREAD_REGISTERS
    constants = _constants(desc)
    early = shared.begins_early(programs(desc), target)
    main = Launch(which, programs(desc), args, constants, num_warps=warps, overlaps=early, max_registers=most)
    return [main, *shared.fold(desc, parts, target)]


shared.register(
    build,
    build_weight,
    name="depthwise",
    supports=supports,
    rank=rank,
    workspace=workspace,
    guarantee=guarantee,
    numerics=numerics,
    weight={"version": 4},
)
