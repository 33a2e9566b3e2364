"""Cost model of ``tiles`` and ``small_tiles``: microseconds on an H200, which select compares."""

from __future__ import annotations

import math

from triplan.backends.runtime.launch import power_of_two_in
from triplan.backends.triton.common import card
from triplan.backends.triton.conv import shared
from triplan.backends.triton.conv.copies import VECTOR
from triplan.backends.triton.conv.tile_shapes import (
    CHANNELS_TF32,
    Tiling,
    along_features,
    by_fma,
    is_whole,
    reduced,
    strided,
)
from triplan.descriptors import Operand
from triplan.descriptors.conv import Conv2dProblem
from triplan.sku import ArchSku, MathPrecision, Target

#: TFLOP/s of a whole card, by the precision of the multiplicands and architecture. Measured for tf32 on an H100 with
#: channels last, and for f32 on an H200; otherwise untuned.
TERAFLOPS = {
    MathPrecision.F16: {ArchSku.SM90A: 300.0, ArchSku.SM80: 150.0},
    MathPrecision.BF16: {ArchSku.SM90A: 300.0, ArchSku.SM80: 150.0},
    MathPrecision.TF32: {ArchSku.SM90A: 65.0, ArchSku.SM80: 70.0},
    MathPrecision.F32: {ArchSku.SM90A: 33.0, ArchSku.SM80: 8.0},
    MathPrecision.F64: {ArchSku.SM90A: 25.0, ArchSku.SM80: 8.0},
}
#: How much of that rate the gradient of weight reaches in tf32, as mma.sync reads its factors across. From drawn
#: problems on an H200.
TURNED_RATE = 0.8
#: How many times as much it reaches with CHANNELS_TF32 channels, as a step of half as many has four fifths of the
#: instructions. From drawn problems on an H200.
WIDE_RATE = 1.6
#: How many times as long products take whose factors are read element by element, by their bytes. Of tf32 and f64 from
#: drawn problems on an H200, otherwise untuned.
SCATTERED = {2: 8.0, 4: 4.0, 8: 1.0}
#: As SCATTERED, of the gradient of weight: its pixels, which are summed, are adjacent instead, and elements of 4 bytes
#: are copied while tiles are multiplied. From drawn problems on an H200, of 2 and 4 bytes.
SCATTERED_SUMS = {2: 4.0, 4: 1.0, 8: 1.0}
#: How much of that rate FMAs reach by whether weights are adjacent along the features; along what is summed, few
#: threads find them in different banks. From drawn problems on an H200.
FMA_RATE = {False: 0.4, True: 1.0}
#: Microseconds of one multiprocessor for an element of a step of pairs of a tap and a channel, by its bytes. From drawn
#: problems on an H200, of f16, tf32 and f64.
FLAT_US = {2: 4e-4, 4: 7e-4, 8: 4e-4}
#: As FLAT_US, of the gradient of weight, whose dout has one address for all pairs of a pixel: of x, also in tf32,
#: whose elements are copied one by one, and of dout. From drawn problems on an H200.
FLAT_SUMS_US, FLAT_SUMS_TF32_US, FLAT_SUMS_DOUT_US = 4.6e-4, 1.15e-3, 1.4e-4
#: Elements that a multiprocessor reads in a microsecond one by one, as strides are no multiples of a vector, by their
#: bytes: no copy of 2 bytes runs while tiles are multiplied; and those that it writes. From drawn problems on an H200.
RAGGED_PER_US = {2: 2700, 4: 2400, 8: 2000}
#: As RAGGED_PER_US, of the gradient of weight: both factors are transposed, which takes more registers; and of 2 bytes
#: in whole tiles whose other factor is copied while they are multiplied, which takes none. From drawn problems on an
#: H200.
RAGGED_SUMS_PER_US = {2: 1900, 4: 2400, 8: 2000}
RAGGED_FACTOR_PER_US = 3000
WRITTEN_PER_US = 4700
#: Elements that one warp reads in a microsecond one by one, if no other program reads; and of the gradient of weight in
#: steps of one tap, which find the addresses once for each pixel, and of elements of 8 bytes. From drawn problems on an
#: H200.
ALONE_PER_US = {False: 300, True: 800}
#: As the latter, where x has an odd number of channels of 2 bytes; and how many times as long its loads then take.
SINGLE_PER_US, SINGLE_SLOWER = 300, 2.0
#: Microseconds of one multiprocessor for an element of the result beside the steps: addresses, and the store. From
#: drawn problems on an H200.
RESULT_US = 3.5e-4
#: Microseconds of a step in which a program waits for what it reads; also of the gradient of weight. On an H200, of
#: elements of 2 bytes.
STEP_US = {False: 0.5, True: 1.0}
#: As STEP_US, of FMAs. From drawn problems on an H200.
FMA_STEP_US = 0.3
#: Microseconds of one multiprocessor for a step of narrow tiles of 2 bytes, and bytes that it then reads in each; how
#: many times as long steps take that mask channels. On an H100, of 16 to 48 channels.
NARROW_US, READ_PER_US, MASKED = 0.13, 7.9e4, 1.6
#: Microseconds of small tiles beside their steps: until all multiprocessors have a program, and to find the taps that
#: reach a remainder modulo the strides. From drawn problems on an H200, as all of small tiles.
SPREAD_US, REMAINDER_US = 0.3, 0.5
#: Microseconds of a step that waits for loads, for each of a thread's loads, and for each of its products without
#: tensor cores; programs of a multiprocessor that do not slow each other.
WAIT_US, LOAD_US, PRODUCT_US, RESIDENT = 0.3, 0.047, 0.008, 1.7
#: Such programs of the gradient of weight, by the bytes of an element: of 2 if a factor is read in vectors at least, so
#: that a program holds fewer registers; those of 8 have steps of half as many pixels. From drawn problems on an H200.
RESIDENT_SUMS = {2: 2.3, 4: RESIDENT, 8: 2.9}
#: As PRODUCT_US, of FMAs by whether weights are adjacent along the features, for the reason of FMA_RATE. From
#: drawn problems on an H200.
FMA_US = {False: 0.013, True: 0.002}
#: How much of the time of such loads, and of such products, programs take of which few run.
LONE, SOLO = 0.7, 0.2


def estimated_us(tiling: Tiling, desc: Conv2dProblem, target: Target) -> float:
    """Estimated microseconds, with what tiles multiply beside the operands."""
    tile = tiling.tile_of(desc)
    launches = 2 if tiling.parts_bytes(desc) else 1
    nbytes = shared.moved(desc) + 2 * tiling.parts_bytes(desc)
    beside = launches * card.OVERLAPPED_LAUNCH_US + nbytes / card.BYTES_PER_US
    if shared.of_weight(desc):
        terms = -(-shared.pixels(desc) // tile.k) * tile.k
    else:
        taps = -(-desc.taps // math.prod(desc.stride)) if strided(desc) else desc.taps
        terms = -(-taps * reduced(desc) // tile.k) if tiling.flat(desc) else taps * -(-reduced(desc) // tile.k)
        terms *= tile.k
    if tiling.small:
        parts = tiling.parts(desc)[0] if shared.of_weight(desc) else 1
        steps, each = terms // tile.k, _step_us(tiling, desc, target)
        waves = max(tiling.programs(desc) / (_resident(tiling, desc) * target.sm_count), 1.0)
        begun = SPREAD_US * _busy(tiling, desc, target) + (REMAINDER_US if strided(desc) else 0.0)
        return beside + (begun + each * max(steps / parts, 1.0)) * waves
    products = tiling.products(desc) * tile.m * tile.n * terms
    rate = TERAFLOPS[desc.multiplicands].get(target.arch, 1.0)
    if by_fma(desc):
        # Narrow tiles have few sums a thread.
        rate *= FMA_RATE[along_features(desc)] * min(tile.n / 64, 1.0)
    elif target.arch is ArchSku.SM90A and desc.multiplicands is not MathPrecision.F64:
        # wgmma takes 64 rows; fewer are multiplied as on older cards
        rate *= min(tile.m, 64) / 64
        if shared.of_weight(desc) and desc.multiplicands is MathPrecision.TF32:
            rate *= TURNED_RATE * (WIDE_RATE if tile.n == CHANNELS_TF32 else 1.0)
    work = 2.0 * products / (rate * card.TERA_PER_US)
    apart = [o.name for o in shared.channels_apart(desc) if not o.is_written]
    if apart and not (apart == ["weight"] and by_fma(desc) and along_features(desc)):
        work *= (SCATTERED_SUMS if shared.of_weight(desc) else SCATTERED)[desc.element.itemsize]
    steps, launched = products // (tile.m * tile.n * tile.k), max(tiling.programs(desc), 1)
    # FMAs of a program do not hide what it waits for.
    chain = (work * target.sm_count + steps * FMA_STEP_US) / launched if by_fma(desc) else 0.0
    rates = RAGGED_SUMS_PER_US if shared.of_weight(desc) else RAGGED_PER_US
    ragged = _ragged(tiling, desc) / rates[desc.element.itemsize]
    one_factor = _ragged(tiling, desc) <= tile.k * max(tile.m, tile.n)
    if shared.of_weight(desc) and desc.element.itemsize == 2 and tile.m == tile.n == 128 and one_factor:
        ragged = _ragged(tiling, desc) / RAGGED_FACTOR_PER_US
    one_tap = shared.of_weight(desc) and not tiling.flat(desc)
    per_us = SINGLE_PER_US if one_tap and _singly(desc) else ALONE_PER_US[one_tap or desc.element.itemsize > 4]
    alone = _ragged(tiling, desc) / (per_us * tile.warps)
    work = max(work, steps * ragged / target.sm_count)
    written = next(o for o in desc.operands() if o.is_written)
    loose = not shared.of_weight(desc) and not is_whole(written)
    stored = tile.m * tile.n / WRITTEN_PER_US if loose else 0.0
    if desc.element.itemsize == 2 and not shared.of_weight(desc):
        read = NARROW_US + 2 * (tile.m + tile.n) * tile.k / READ_PER_US
        masked = MASKED if reduced(desc) % tile.k else 1.0
        work = max(work, steps * read * masked / target.sm_count)
    if tiling.flat(desc):
        each = FLAT_US[desc.element.itemsize] * (tile.m + tile.n)
        if shared.of_weight(desc):
            of_x = FLAT_SUMS_TF32_US if desc.multiplicands is MathPrecision.TF32 else FLAT_SUMS_US
            each = of_x * tile.n + FLAT_SUMS_DOUT_US * tile.m
        work = max(work, steps * each * tile.k / target.sm_count)
    waiting = max(steps / launched * max(STEP_US[shared.of_weight(desc)], alone), chain)
    work = max(work * max(target.sm_count / launched, 1.0), waiting)
    # A program that multiplies tiles waits for what it reads first, and others do not make up for all of it.
    stored = stored * max(launched / target.sm_count, 1.0)
    begun = RESULT_US * tile.m * tile.n + (REMAINDER_US if strided(desc) else 0.0)
    return beside + work + stored + begun * max(launched / (2 * target.sm_count), 1.0)


def _busy(tiling: Tiling, desc: Conv2dProblem, target: Target) -> float:
    """The part of the multiprocessors that have a program."""
    return min(tiling.programs(desc) / target.sm_count, 1.0)


def _resident(tiling: Tiling, desc: Conv2dProblem) -> float:
    """Programs of small tiles of a multiprocessor that do not slow each other."""
    factors = [o for o in desc.operands() if o.name in ("x", "dout")]
    singly = desc.element.itemsize == 2 and (tiling.flat(desc) or not any(map(is_whole, factors)))
    return RESIDENT if singly or not shared.of_weight(desc) else RESIDENT_SUMS[desc.element.itemsize]


def _step_us(tiling: Tiling, desc: Conv2dProblem, target: Target) -> float:
    """Of a step of small tiles, which waits for what it reads: loads of vectors, or of elements."""
    tile, flat, apart = tiling.tile_of(desc), tiling.flat(desc), shared.channels_apart(desc)
    found, busy = WAIT_US, _busy(tiling, desc, target)
    load_us = LOAD_US * (LONE + (1.0 - LONE) * busy)
    for o in desc.operands():
        if o.is_written or len(o.shape) != 4:
            continue
        vector = VECTOR * 2 // o.element.itemsize
        whole = is_whole(o) and not (flat and (not shared.of_weight(desc) or o.name == "x"))
        scattered = shared.of_weight(desc) and (flat or o in apart)
        single = o.name == "x" and not flat and shared.of_weight(desc) and _singly(desc)
        each = 1.5 / vector if whole else 1.5 if scattered else SINGLE_SLOWER if single else 1.0
        found += load_us * each * tile.k * tile.m / (32 * tile.warps)
    if desc.multiplicands in (MathPrecision.F32, MathPrecision.F64):
        product_us = FMA_US[along_features(desc)] if by_fma(desc) else PRODUCT_US
        found += product_us * max(busy, SOLO) * tile.k * tile.m * tile.n / (32 * tile.warps)
    return found


def _ragged(tiling: Tiling, desc: Conv2dProblem) -> int:
    """Elements, or short vectors of halves, that a step reads one by one: channels are last, but not in vectors."""
    tile = tiling.tile_of(desc)
    sides = {"x": tile.n if shared.of_weight(desc) else tile.m, "dout": tile.m, "weight": tile.n}
    apart = shared.channels_apart(desc)
    read = (o for o in desc.operands() if o.name in sides and o.shape[1] > 1 and not (o.layout.packed or o in apart))
    whole = desc.operand("weight") if by_fma(desc) and along_features(desc) else None
    found = (o for o in read if not (shared.in_vectors(o) or o == whole))
    return sum(tile.k * sides[o.name] // _at_once(desc, o) for o in found)


def _singly(desc: Conv2dProblem) -> bool:
    """Whether no two channels of x, of 2 bytes, are known to lie in one word."""
    return desc.element.itemsize == 2 and desc.in_channels % 2 == 1


def _at_once(desc: Conv2dProblem, o: Operand) -> int:
    """Halves of a short vector, which is copied while tiles are multiplied; else 1."""
    if o.element.itemsize > 2 or o.alignment < 16:
        return 1
    channels = o.shape[1] // (1 if o.name == "weight" else desc.groups)
    return min(power_of_two_in(channels), o.layout.stride_multiple, VECTOR)
