"""Kernel ``tiles``: convolution and its gradients as matrix products of tiles, read through pointers; no atomics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triplan.backends.runtime.launch import Arg, Int, Launch, power_of_two_in
from triplan.backends.triton.common import card
from triplan.backends.triton.common.offsets import TL, ceil_power, divisor
from triplan.backends.triton.common.strides import count
from triplan.backends.triton.conv import shared, tiles_kernels as kernels
from triplan.backends.triton.conv.copies import VECTOR
from triplan.descriptors import Operand
from triplan.descriptors.conv import Conv2dProblem
from triplan.sku import ArchSku, MathPrecision, PrecisionGuarantee, Support, Target
from triplan.sku.facts import fact

#: TFLOP/s of a whole card, by the precision of the multiplicands and architecture. Measured for tf32 on an H100 with
#: channels last; otherwise untuned.
TERAFLOPS = {
    MathPrecision.F16: {ArchSku.SM90A: 300.0, ArchSku.SM80: 150.0},
    MathPrecision.BF16: {ArchSku.SM90A: 300.0, ArchSku.SM80: 150.0},
    MathPrecision.TF32: {ArchSku.SM90A: 65.0, ArchSku.SM80: 70.0},
    MathPrecision.F32: {ArchSku.SM90A: 25.0, ArchSku.SM80: 8.0},
    MathPrecision.F64: {ArchSku.SM90A: 25.0, ArchSku.SM80: 8.0},
}
#: How much of that rate the gradient of weight reaches in tf32, as mma.sync reads its factors across. From drawn
#: problems on an H200.
TURNED_RATE = 0.8
#: How many times as much it reaches with CHANNELS_TF32 channels, as a step of half as many has four fifths of the
#: instructions. From drawn problems on an H200.
WIDE_RATE = 1.6
#: How many times as long products take whose factors are read element by element, by their bytes. Of f64 from drawn
#: problems on an H200, otherwise untuned.
SCATTERED = {2: 8.0, 4: 8.0, 8: 1.0}
#: As SCATTERED, of the gradient of weight: its pixels, which are summed, are adjacent instead, and elements of 4 bytes
#: are copied while tiles are multiplied. From drawn problems on an H200, of 2 and 4 bytes.
SCATTERED_SUMS = {2: 4.0, 4: 1.0, 8: 1.0}
#: TFLOP/s of FMAs, by whether weights are adjacent along the features; along what is summed, few threads find them in
#: different banks. Measured on an H200, where large problems reach more of those along the features.
FMA_TERAFLOPS = {False: 13.0, True: 25.0}
#: Microseconds of one multiprocessor for an element of a step of pairs of a tap and a channel, by its bytes. From drawn
#: problems on an H200, of f16, tf32 and f64.
FLAT_US = {2: 4e-4, 4: 7e-4, 8: 4e-4}
#: As FLAT_US, of the gradient of weight, whose dout has one address for all pairs of a pixel: of x, and of dout.
FLAT_SUMS_US = (4.6e-4, 1.4e-4)
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
#: steps of one tap, which find the addresses once for each pixel. From drawn problems on an H200.
ALONE_PER_US = {False: 300, True: 800}
#: Microseconds of one multiprocessor for an element of the result beside the steps: addresses, and the store. From
#: drawn problems on an H200.
RESULT_US = 3.5e-4
#: Microseconds of a step in which a program waits for what it reads; also of the gradient of weight. On an H200, of
#: elements of 2 bytes.
STEP_US = {False: 0.5, True: 1.0}
#: Microseconds of one multiprocessor for a step of narrow tiles of 2 bytes, and bytes that it then reads in each; how
#: many times as long steps take that mask channels. On an H100, of 16 to 48 channels.
NARROW_US, READ_PER_US, MASKED = 0.13, 7.9e4, 1.6
#: Programs that keep any card busy, and parts of the gradient of weight at most. Untuned.
BUSY_PROGRAMS = 528
MOST_PARTS = 128
#: Pairs of a tap and a channel of a tile at most, and of FMAs, whose registers would spill. Untuned.
FLAT_COLUMNS, FLAT_COLUMNS_FMA = 64, 32
#: Elements of a tile up to which 4 warps compute it, and not 8. Untuned.
FEW_WARPS = 64 * 64
#: Elements of a tile at least, of FMAs 8 of each thread, of f64 one instruction of each of 4 warps. Untuned below.
FEW_SUMS = {MathPrecision.F32: 16 * 64, MathPrecision.F64: 4 * 16 * 8}


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


#: Tiles by kind of arithmetic: the largest, as channels and terms may be fewer. Of f64, a warp of 32 by 32 results
#: reads shared memory in half of the time that its products take; of 16 by 16, in all of it. Untuned.
TILES = {
    "half": Tile(128, 128, 64, 3),
    "tf32": Tile(64, 64, 32, 3),
    "f32": Tile(64, 64, 16, 3),
    "f64": Tile(64, 64, 16, 3),
}
#: Of halves that are not all read and written in vectors: each element has an address, and larger tiles spill so many
#: registers that these leave the L1 cache.
RAGGED_HALF = Tile(128, 64, 32, 3)
#: Filters of a tile of the gradient of weight in tf32 at most, too few for wgmma; and channels, for which a pixel's
#: addresses are computed once.
FILTERS_TF32, CHANNELS_TF32 = 32, 128
#: Of ``small_tiles``; and blocks of pixels that a program sums alone, because a second launch takes longer.
SMALL, WHOLE = Tile(16, 16, 128, 1), 4
#: Microseconds of small tiles beside their steps: until all multiprocessors have a program, and to find the taps that
#: reach a remainder modulo the strides. From drawn problems on an H200, as all of small tiles.
SPREAD_US, REMAINDER_US = 0.3, 0.5
#: Microseconds of a step that waits for loads, for each of a thread's loads, and for each of its products without
#: tensor cores; programs of a multiprocessor that do not slow each other.
WAIT_US, LOAD_US, PRODUCT_US, RESIDENT = 0.3, 0.047, 0.008, 1.7
#: How much of the time of such loads, and of such products, programs take of which few run.
LONE, SOLO = 0.7, 0.2
#: Blocks of channels that may be summed in a step.
DEPTHS = (128, 64, 32, 16)


def _fitting(most: int, extent: int) -> int:
    """A block of at least 16, as tensor cores need, and less than twice ``extent``."""
    return max(min(most, ceil_power(extent)), 16)


def by_fma(desc: Conv2dProblem) -> bool:
    """Whether pixels are sums of FMAs, whose order is that of the terms, whatever the tile."""
    return desc.multiplicands is MathPrecision.F32 and not shared.of_weight(desc)


def along_features(desc: Conv2dProblem) -> bool:
    """Whether weights are known to be adjacent along the features."""
    o, axis = desc.operand("weight"), int(shared.of_input(desc))
    return o.layout.unit_axis == axis or (o.layout.packed and axis == 1 and math.prod(o.shape[2:]) == 1)


def _whole(o: Operand) -> bool:
    """Whether channels are read and written in vectors: packed ones are if there is one pixel or tap."""
    one = o.layout.packed and math.prod(o.shape[2:]) == 1
    return shared.in_vectors(o) or (one and o.shape[1] * o.element.itemsize % 16 == 0 and o.alignment >= 16)


def _at_once(desc: Conv2dProblem, o: Operand) -> int:
    """Halves of a short vector, which is copied while tiles are multiplied; else 1."""
    if o.element.itemsize > 2 or o.alignment < 16:
        return 1
    channels = o.shape[1] // (1 if o.name == "weight" else desc.groups)
    return min(power_of_two_in(channels), o.layout.stride_multiple, VECTOR)


def _features(desc: Conv2dProblem) -> int:
    """Channels of a group of the result."""
    return desc.channels if shared.of_input(desc) else desc.filters


def _reduced(desc: Conv2dProblem) -> int:
    """Channels of a group that are summed."""
    return desc.filters if shared.of_input(desc) else desc.channels


def _strided(desc: Conv2dProblem) -> bool:
    """Whether rows and columns are divided by remainders modulo the strides, which tell the taps that reach them."""
    return shared.of_input(desc) and desc.stride != (1, 1)


def _rows(desc: Conv2dProblem) -> int:
    """Pixels, or the most that have one remainder."""
    if not _strided(desc):
        return shared.pixels(desc)
    return desc.batch * -(-desc.height // desc.stride[0]) * -(-desc.width // desc.stride[1])


def _periods(desc: Conv2dProblem) -> tuple[int, int]:
    """One in so many taps of each axis reaches a row or column."""
    first, second = (s // math.gcd(s, d) for s, d in zip(desc.stride, desc.dilation, strict=True))
    return first, second


@dataclass(frozen=True)
class Tiles:
    """How the entry ``name`` divides problems; ``small``: into tiles of few results, whose sums have few steps.

    A step of a small tile takes many terms, all of which are read at once: where a problem is small, its time is what a
    program waits, and more programs take no longer.
    """

    name: str
    small: bool = False

    def _known(self, desc: Conv2dProblem) -> Tile:
        if self.small:
            return SMALL
        if desc.element.itemsize > 2:
            return TILES[desc.multiplicands.value]
        images = (o for o in desc.operands() if len(o.shape) == 4 and o.shape[1] > 1)
        whole = shared.of_weight(desc) or all(map(_whole, images))
        return TILES["half"] if whole else RAGGED_HALF

    def _depth(self, desc: Conv2dProblem) -> int | None:
        """Channels of a step: the largest block whose last leaves a quarter empty at most; None if there is none."""
        n, most = _reduced(desc), self._known(desc).k
        return next((k for k in DEPTHS if k <= most and -(-n // k) * k * 3 <= 4 * n), None)

    @fact
    def tile_of(self, desc: Conv2dProblem) -> Tile:
        """It must not depend on the batch, or bits would; but for the pixels of FMAs and of f64."""
        known, stages = self._known(desc), self._known(desc).stages
        if self.small:
            n = _fitting(known.n, _features(desc))
            terms = shared.pixels(desc) if shared.of_weight(desc) else desc.taps * _reduced(desc)
            each = None if shared.of_weight(desc) else self._depth(desc)
            # More elements of f64 and their addresses than registers hold, where each has an address of its own.
            most = known.k // 2 if shared.of_weight(desc) and desc.element.itemsize > 4 else known.k
            return Tile(known.m, n, each or _fitting(most, terms), stages)
        if self._flat(desc) and desc.multiplicands is MathPrecision("f32" if shared.of_weight(desc) else "tf32"):
            stages = 2  # with 3, registers spill
        if shared.of_weight(desc):
            tf32 = desc.multiplicands is MathPrecision.TF32
            if self._flat(desc):
                fma = desc.multiplicands is MathPrecision.F32
                columns = FLAT_COLUMNS_FMA if fma else FLAT_COLUMNS
                n, k = _fitting(columns, desc.taps * desc.channels), min(known.k, 32)
            else:
                n, k = _fitting(CHANNELS_TF32 if tf32 else known.n, desc.channels), known.k
                stages = 2 if n == CHANNELS_TF32 and tf32 else stages  # with 3, fewer programs are resident
            # wgmma takes tf32 along what is summed alone: elements would be transposed one by one.
            return Tile(_fitting(FILTERS_TF32 if tf32 else known.m, desc.filters), n, k, stages)
        n, k = _fitting(known.n, _features(desc)), self._depth(desc) or min(known.k, 32)
        m, beside = known.m, -(-_features(desc) // n) * desc.groups * (math.prod(desc.stride) if _strided(desc) else 1)
        few = FEW_SUMS.get(desc.multiplicands, m * n)
        if not by_fma(desc) or along_features(desc):
            # No bits depend on m. Where weights lie otherwise, each of a thread's pixels saves reads that conflict.
            while m > 16 and m * n > few and -(-_rows(desc) // m) * beside < card.SMS:
                m //= 2
        return Tile(m, n, k, stages)

    def _tiles(self, desc: Conv2dProblem) -> tuple[int, int]:
        """Tiles along the rows and columns of the product, of one group (and tap)."""
        tile = self.tile_of(desc)
        if shared.of_weight(desc):
            columns = desc.channels * (desc.taps if self._flat(desc) else 1)
            return -(-desc.filters // tile.m), -(-columns // tile.n)
        return -(-_rows(desc) // tile.m), -(-_features(desc) // tile.n)

    def _products(self, desc: Conv2dProblem) -> int:
        """Tiles of all products; without the parts of what they sum."""
        m, n = self._tiles(desc)
        if shared.of_weight(desc):
            return m * n * desc.groups * (1 if self._flat(desc) else desc.taps)
        return m * n * desc.groups * (math.prod(desc.stride) if _strided(desc) else 1)

    def _parts(self, desc: Conv2dProblem) -> tuple[int, int]:
        """Parts of the pixels that the gradient of weight sums, and the pixels of each."""
        block = self.tile_of(desc).k
        blocks, most = -(-shared.pixels(desc) // block), MOST_PARTS
        if self.small and blocks <= WHOLE:
            most = 1
        parts, each = shared.parts_of(blocks, self._products(desc), BUSY_PROGRAMS, most)
        return parts, each * block

    def programs(self, desc: Conv2dProblem) -> int:
        """Programs of the main launch."""
        return self._products(desc) * (self._parts(desc)[0] if shared.of_weight(desc) else 1)

    def supports(self, desc: Conv2dProblem, target: Target) -> Support:
        return shared.counted(desc, self.programs(desc))

    def rank(self, desc: Conv2dProblem, target: Target) -> float:
        """Estimated microseconds, with what tiles multiply beside the operands."""
        tile = self.tile_of(desc)
        launches = 2 if self.workspace(desc, target) else 1
        nbytes = shared.moved(desc) + 2 * self.workspace(desc, target)
        beside = launches * card.OVERLAPPED_LAUNCH_US + nbytes / card.BYTES_PER_US
        if shared.of_weight(desc):
            terms = -(-shared.pixels(desc) // tile.k) * tile.k
        else:
            taps = -(-desc.taps // math.prod(desc.stride)) if _strided(desc) else desc.taps
            terms = -(-taps * _reduced(desc) // tile.k) if self._flat(desc) else taps * -(-_reduced(desc) // tile.k)
            terms *= tile.k
        if self.small:
            parts = self._parts(desc)[0] if shared.of_weight(desc) else 1
            steps, each = terms // tile.k, self._step_us(desc, target)
            waves = max(self.programs(desc) / (RESIDENT * target.sm_count), 1.0)
            begun = SPREAD_US * self._busy(desc, target) + (REMAINDER_US if _strided(desc) else 0.0)
            return beside + (begun + each * max(steps / parts, 1.0)) * waves
        products = self._products(desc) * tile.m * tile.n * terms
        rate = TERAFLOPS[desc.multiplicands].get(target.arch, 1.0)
        if by_fma(desc):
            # Narrow tiles have few sums a thread.
            rate = min(rate, FMA_TERAFLOPS[along_features(desc)] * min(tile.n / 64, 1.0))
        elif target.arch is ArchSku.SM90A and desc.multiplicands is not MathPrecision.F64:
            # wgmma takes 64 rows; fewer are multiplied as on older cards
            rate *= min(tile.m, 64) / 64
            if shared.of_weight(desc) and desc.multiplicands is MathPrecision.TF32:
                rate *= TURNED_RATE * (WIDE_RATE if tile.n == CHANNELS_TF32 else 1.0)
        work = 2.0 * products / (rate * card.TERA_PER_US)
        apart = [o.name for o in shared.channels_apart(desc) if not o.is_written]
        if apart and not (apart == ["weight"] and by_fma(desc) and along_features(desc)):
            work *= (SCATTERED_SUMS if shared.of_weight(desc) else SCATTERED)[desc.element.itemsize]
        steps, launched = products // (tile.m * tile.n * tile.k), max(self.programs(desc), 1)
        # FMAs of a program do not hide what it waits for.
        chain = (work * target.sm_count + steps * STEP_US[False]) / launched if by_fma(desc) else 0.0
        rates = RAGGED_SUMS_PER_US if shared.of_weight(desc) else RAGGED_PER_US
        ragged = self._ragged(desc) / rates[desc.element.itemsize]
        one_factor = self._ragged(desc) <= tile.k * max(tile.m, tile.n)
        if shared.of_weight(desc) and desc.element.itemsize == 2 and tile.m == tile.n == 128 and one_factor:
            ragged = self._ragged(desc) / RAGGED_FACTOR_PER_US
        one_tap = shared.of_weight(desc) and not self._flat(desc)
        alone = self._ragged(desc) / (ALONE_PER_US[one_tap] * tile.warps)
        work = max(work, steps * ragged / target.sm_count)
        written = next(o for o in desc.operands() if o.is_written)
        loose = not shared.of_weight(desc) and not _whole(written)
        stored = tile.m * tile.n / WRITTEN_PER_US if loose else 0.0
        if desc.element.itemsize == 2 and not shared.of_weight(desc):
            read = NARROW_US + 2 * (tile.m + tile.n) * tile.k / READ_PER_US
            masked = MASKED if _reduced(desc) % tile.k else 1.0
            work = max(work, steps * read * masked / target.sm_count)
        if self._flat(desc):
            each = FLAT_US[desc.element.itemsize] * (tile.m + tile.n)
            if shared.of_weight(desc):
                each = FLAT_SUMS_US[0] * tile.n + FLAT_SUMS_US[1] * tile.m
            work = max(work, steps * each * tile.k / target.sm_count)
        waiting = max(steps / launched * max(STEP_US[shared.of_weight(desc)], alone), chain)
        work = max(work * max(target.sm_count / launched, 1.0), waiting)
        # A program that multiplies tiles waits for what it reads first, and others do not make up for all of it.
        stored = stored * max(launched / target.sm_count, 1.0)
        begun = RESULT_US * tile.m * tile.n + (REMAINDER_US if _strided(desc) else 0.0)
        return beside + work + stored + begun * max(launched / (2 * target.sm_count), 1.0)

    def _busy(self, desc: Conv2dProblem, target: Target) -> float:
        """The part of the multiprocessors that have a program."""
        return min(self.programs(desc) / target.sm_count, 1.0)

    def _step_us(self, desc: Conv2dProblem, target: Target) -> float:
        """Of a step of small tiles, which waits for what it reads: loads of vectors, or of elements."""
        tile, flat, apart = self.tile_of(desc), self._flat(desc), shared.channels_apart(desc)
        found, busy = WAIT_US, self._busy(desc, target)
        load_us = LOAD_US * (LONE + (1.0 - LONE) * busy)
        for o in desc.operands():
            if o.is_written or len(o.shape) != 4:
                continue
            vector = VECTOR * 2 // o.element.itemsize
            whole = _whole(o) and not (flat and (not shared.of_weight(desc) or o.name == "x"))
            scattered = shared.of_weight(desc) and (flat or o in apart)
            each = 1.5 / vector if whole else 1.5 if scattered else 1.0
            found += load_us * each * tile.k * tile.m / (32 * tile.warps)
        if desc.multiplicands in (MathPrecision.F32, MathPrecision.F64):
            found += PRODUCT_US * max(busy, SOLO) * tile.k * tile.m * tile.n / (32 * tile.warps)
        return found

    def _ragged(self, desc: Conv2dProblem) -> int:
        """Elements, or short vectors of halves, that a step reads one by one: channels are last, but not in vectors."""
        tile = self.tile_of(desc)
        sides = {"x": tile.n if shared.of_weight(desc) else tile.m, "dout": tile.m, "weight": tile.n}
        apart = shared.channels_apart(desc)
        read = (
            o for o in desc.operands() if o.name in sides and o.shape[1] > 1 and not (o.layout.packed or o in apart)
        )
        whole = desc.operand("weight") if by_fma(desc) and along_features(desc) else None
        found = (o for o in read if not (shared.in_vectors(o) or o == whole))
        return sum(tile.k * sides[o.name] // _at_once(desc, o) for o in found)

    def guarantee(self, desc: Conv2dProblem) -> Mapping[str, PrecisionGuarantee]:
        if shared.of_weight(desc):
            return shared.guaranteed(desc, desc.multiplicands, shared.pixels(desc), self._parts(desc)[0])
        return shared.guaranteed(desc, desc.multiplicands, _reduced(desc) * desc.taps, 1)

    def numerics(self, desc: Conv2dProblem) -> str | None:
        if shared.of_weight(desc):
            return None
        tile = self.tile_of(desc)
        shape = f"{_reduced(desc)}.{'x'.join(map(str, desc.kernel))}.{tile.n}x{tile.k}{self._flat(desc) * 'f'}"
        return f"{desc.op}.{self.name}.{desc.element}.{desc.multiplicands}.{shape}.v1"

    def workspace(self, desc: Conv2dProblem, target: Target) -> int:
        return shared.parts_bytes(desc, self._parts(desc)[0]) if shared.of_weight(desc) else 0

    def _flat(self, desc: Conv2dProblem) -> bool:
        """Whether a step takes channels of several taps: where those of one would leave much of it empty."""
        return self._depth(desc) is None

    def _shared(self, desc: Conv2dProblem) -> dict[str, Arg]:
        m, n = self._tiles(desc)
        sizes = {"taps": Int(desc.taps), "tiles_m": Int(m), "tiles_n": Int(n), "channels": count(_reduced(desc))}
        return {**sizes, **shared.geometry(desc)}

    def _launch(
        self, desc: Conv2dProblem, target: Target, which: Any, args: Mapping[str, Arg], **constants: object
    ) -> Launch:
        """The main launch."""
        tile, programs = self.tile_of(desc), self.programs(desc)
        constants |= {
            "BLOCK_M": tile.m,
            "BLOCK_N": tile.n,
            "BLOCK_K": tile.k,
            "PRECISION": "tf32" if desc.multiplicands is MathPrecision.TF32 else "ieee",
            "FLAT": self._flat(desc),
            "ACC": TL[desc.element.compute],
        }
        # ptxas would spill a few registers, for one more program.
        spills = desc.element.itemsize == 8 and not self.small
        return Launch(
            which,
            programs,
            args,
            constants,
            num_warps=tile.warps,
            num_stages=tile.stages,
            overlaps=shared.begins_early(programs, target),
            max_registers=card.MAX_THREAD_REGISTERS if spills else None,
        )

    def build(self, desc: Conv2dProblem, target: Target) -> list[Launch]:
        """The result, or the gradient of x."""
        if self.programs(desc) == 0:
            return []
        periods, reduced = ("period_rows", "period_columns"), _reduced(desc)
        divides = self._flat(desc) and reduced % 2 == 1
        args: dict[str, Arg] = {
            **shared.of_pixels(desc),
            "pixels": Int(shared.pixels(desc)),
            "features": count(_features(desc)),
            "own_weights": count(desc.filters),
            **{name: Int(n) if _strided(desc) else None for name, n in zip(periods, _periods(desc), strict=True)},
            **self._shared(desc),
            **shared.divided(*((desc.height, desc.width) if shared.of_input(desc) else desc.out_extents)),
            "channels": (count(reduced), *(divisor(reduced, wide=False)[1:] if divides else (None, None))),
        }
        return [self._launch(desc, target, kernels.conv2d_tiles_kernel, args, TRANSPOSED=shared.of_input(desc))]

    def build_weight(self, desc: Conv2dProblem, target: Target) -> list[Launch]:
        """The gradient of weight: each part of the pixels, then the sum of the parts."""
        parts, each = self._parts(desc)
        if self.programs(desc) == 0:
            return []
        args: dict[str, Arg] = {
            **shared.of_parts(desc, parts, each),
            "pixels": Int(shared.pixels(desc)),
            "filters": count(desc.filters),
            "groups": Int(desc.groups),
            **self._shared(desc),
            **shared.divided(*desc.out_extents),
        }
        return [self._launch(desc, target, kernels.conv2d_weight_kernel, args), *shared.fold(desc, parts, target)]

    def register(self, priority: int, **weight: object) -> None:
        """The entry of these tiles; ``weight``: in what that of the gradient of weight differs."""
        shared.register(
            self.build,
            self.build_weight,
            name=self.name,
            supports=self.supports,
            rank=self.rank,
            workspace=self.workspace,
            guarantee=self.guarantee,
            numerics=self.numerics,
            priority=priority,
            weight=weight,
        )


TILED = Tiles("tiles")
TILED.register(priority=1, version=4)  # after depthwise, whose bits are others
