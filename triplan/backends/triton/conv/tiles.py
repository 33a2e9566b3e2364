"""Kernel ``tiles``: convolution and its gradients as matrix products of tiles, read through pointers; no atomics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from triplan.backends.runtime.launch import Arg, Int, Launch
from triplan.backends.triton.common import card
from triplan.backends.triton.common.offsets import TL, ceil_power
from triplan.backends.triton.common.strides import count
from triplan.backends.triton.conv import shared, tiles_kernels as kernels
from triplan.backends.triton.conv.copies import VECTOR
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
#: How many times as long products take whose factors are read element by element. Untuned.
SCATTERED = 8.0
#: Microseconds of one multiprocessor for a step of pairs of a tap and a channel, which are read one by one; also of the
#: gradient of weight. On an H200: of 7 x 7 taps and 3 channels, or 384 groups of one.
FLAT_STEP_US = {False: 2.7, True: 0.75}
#: Elements that a multiprocessor reads in a microsecond one by one, as strides are no multiples of a vector, where they
#: have 2 bytes: no copy runs while tiles are multiplied. On an H100.
RAGGED_PER_US = 1000
#: Microseconds of a step in which a program waits for what it reads. On an H200, of elements of 2 bytes.
STEP_US = 0.7
#: Operations per microsecond in 1 TFLOP/s.
TERA_PER_US = 10**6
#: Programs that keep any card busy, and parts of the gradient of weight at most. Untuned.
BUSY_PROGRAMS = 528
MOST_PARTS = 128
#: Pairs of a tap and a channel of a tile at most. Untuned.
FLAT_COLUMNS = 64
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
    "tf32": Tile(64, 64, 32, 3),
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
    known, stages = _known(desc), _known(desc).stages
    if _flat(desc) and desc.multiplicands is MathPrecision("f32" if shared.of_weight(desc) else "tf32"):
        stages = 2  # with 3, registers spill
    if shared.of_weight(desc):
        if _flat(desc):
            wide, most = _fitting(FLAT_COLUMNS, desc.taps * desc.channels), min(known.k, 32)
            return Tile(_fitting(known.m, desc.filters), wide, most, stages)
        m, n = (2 * known.m, 2 * known.n) if _transposed(desc) else (known.m, known.n)
        return Tile(_fitting(m, desc.filters), _fitting(n, desc.channels), known.k, stages)
    return Tile(known.m, _fitting(known.n, _features(desc)), _depth(desc) or min(known.k, 32), stages)


def _transposed(desc: Conv2dProblem) -> bool:
    """Whether both factors are transposed on the way to shared memory, as wgmma takes tf32: large tiles repay it."""
    return desc.multiplicands is MathPrecision.TF32 and min(desc.filters, desc.channels) >= 96


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


def _tiles(desc: Conv2dProblem) -> tuple[int, int]:
    """Tiles along the rows and columns of the product, of one group (and tap)."""
    tile = tile_of(desc)
    if shared.of_weight(desc):
        columns = desc.channels * (desc.taps if _flat(desc) else 1)
        return -(-desc.filters // tile.m), -(-columns // tile.n)
    return -(-_rows(desc) // tile.m), -(-_features(desc) // tile.n)


def _products(desc: Conv2dProblem) -> int:
    """Tiles of all products; without the parts of what they sum."""
    m, n = _tiles(desc)
    if shared.of_weight(desc):
        return m * n * desc.groups * (1 if _flat(desc) else desc.taps)
    return m * n * desc.groups * (math.prod(desc.stride) if _strided(desc) else 1)


def _parts(desc: Conv2dProblem) -> tuple[int, int]:
    """Parts of the pixels that the gradient of weight sums, and the pixels of each."""
    block = tile_of(desc).k
    parts, each = shared.parts_of(-(-shared.pixels(desc) // block), _products(desc), BUSY_PROGRAMS, MOST_PARTS)
    return parts, each * block


def programs(desc: Conv2dProblem) -> int:
    """Programs of the main launch."""
    return _products(desc) * (_parts(desc)[0] if shared.of_weight(desc) else 1)


def supports(desc: Conv2dProblem, target: Target) -> Support:
    return shared.counted(desc, programs(desc))


def rank(desc: Conv2dProblem, target: Target) -> float:
    """Estimated microseconds, with what tiles multiply beside the operands."""
    tile = tile_of(desc)
    if shared.of_weight(desc):
        terms = -(-shared.pixels(desc) // tile.k) * tile.k
    else:
        taps = -(-desc.taps // math.prod(desc.stride)) if _strided(desc) else desc.taps
        terms = -(-taps * _reduced(desc) // tile.k) if _flat(desc) else taps * -(-_reduced(desc) // tile.k)
        terms *= tile.k
    products = _products(desc) * tile.m * tile.n * terms
    rate = TERAFLOPS[desc.multiplicands].get(target.arch, 1.0) * TERA_PER_US
    if target.arch is ArchSku.SM90A:  # wgmma takes 64 rows; fewer are multiplied as on older cards
        rate *= min(tile.m, 64) / 64
    work = 2.0 * products / rate
    if any(not o.is_written for o in shared.channels_apart(desc)):
        work *= SCATTERED
    steps, launched = products // (tile.m * tile.n * tile.k), max(programs(desc), 1)
    work = max(work, steps * _ragged(desc) / RAGGED_PER_US / target.sm_count)
    if _flat(desc):
        work = max(work, steps * FLAT_STEP_US[shared.of_weight(desc)] / target.sm_count)
    work = max(work * max(target.sm_count / launched, 1.0), steps / launched * STEP_US)
    nbytes = sum(o.nbytes for o in desc.operands()) + 2 * workspace(desc, target)
    launches = 2 if workspace(desc, target) else 1
    # A program that multiplies tiles waits for what it reads first, and others do not make up for all of it.
    return launches * card.LAUNCH_US + work + nbytes / card.BYTES_PER_US


def _ragged(desc: Conv2dProblem) -> int:
    """Elements of 2 bytes that a step reads one by one: channels are adjacent, but not in vectors."""
    if desc.element.itemsize > 2:
        return 0
    tile = tile_of(desc)
    sides = {"x": tile.n if shared.of_weight(desc) else tile.m, "dout": tile.m, "weight": tile.n}
    read = (o for o in desc.operands() if o.name in sides and o.shape[1] > 1 and o.layout.unit_axis == 1)
    return sum(tile.k * sides[o.name] for o in read if o.layout.stride_multiple < VECTOR or o.alignment < 16)


def guarantee(desc: Conv2dProblem) -> Mapping[str, PrecisionGuarantee]:
    if shared.of_weight(desc):
        return shared.guaranteed(desc, desc.multiplicands, shared.pixels(desc), _parts(desc)[0])
    return shared.guaranteed(desc, desc.multiplicands, _reduced(desc) * desc.taps, 1)


def numerics(desc: Conv2dProblem) -> str | None:
    if shared.of_weight(desc):
        return None
    tile = tile_of(desc)
    shape = f"{_reduced(desc)}.{'x'.join(map(str, desc.kernel))}.{tile.n}x{tile.k}{_flat(desc) * 'f'}"
    return f"{desc.op}.tiles.{desc.element}.{desc.multiplicands}.{shape}.v1"


def workspace(desc: Conv2dProblem, target: Target) -> int:
    return shared.parts_bytes(desc, _parts(desc)[0]) if shared.of_weight(desc) else 0


def _flat(desc: Conv2dProblem) -> bool:
    """Whether a step takes channels of several taps: where those of one would leave much of it empty."""
    return _depth(desc) is None


def _shared(desc: Conv2dProblem) -> dict[str, Arg]:
    m, n = _tiles(desc)
    sizes = {"taps": Int(desc.taps), "tiles_m": Int(m), "tiles_n": Int(n), "channels": count(_reduced(desc))}
    return {**sizes, **shared.geometry(desc)}


def _constants(desc: Conv2dProblem) -> dict[str, object]:
    tile = tile_of(desc)
    precision = "tf32" if desc.multiplicands is MathPrecision.TF32 else "ieee"
    return {
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "PRECISION": precision,
        "FLAT": _flat(desc),
        "ACC": TL[desc.element.compute],
    }


def build(desc: Conv2dProblem, target: Target) -> list[Launch]:
    """The result, or the gradient of x."""
    tile, back = tile_of(desc), shared.of_input(desc)
    if programs(desc) == 0:
        return []
    periods = ("period_rows", "period_columns")
    args: dict[str, Arg] = {
        **shared.of_pixels(desc),
        "pixels": Int(shared.pixels(desc)),
        "features": count(_features(desc)),
        "own_weights": Int(desc.filters),
        **{name: Int(n) if _strided(desc) else None for name, n in zip(periods, _periods(desc), strict=True)},
        **_shared(desc),
    }
    constants = {**_constants(desc), "TRANSPOSED": back}
    which = kernels.conv2d_tiles_kernel
    return [Launch(which, programs(desc), args, constants, num_warps=tile.warps, num_stages=tile.stages)]


def build_weight(desc: Conv2dProblem, target: Target) -> list[Launch]:
    """The gradient of weight: each part of the pixels, then the sum of the parts."""
    tile, (parts, each) = tile_of(desc), _parts(desc)
    if programs(desc) == 0:
        return []
    args: dict[str, Arg] = {
        **shared.of_parts(desc, parts, each),
        "filters": count(desc.filters),
        "groups": Int(desc.groups),
        **_shared(desc),
    }
    which, constants = kernels.conv2d_weight_kernel, _constants(desc)
    main = Launch(which, programs(desc), args, constants, num_warps=tile.warps, num_stages=tile.stages)
    return [main, *shared.fold(desc, parts)]


shared.register(
    build,
    build_weight,
    name="tiles",
    supports=supports,
    rank=rank,
    workspace=workspace,
    guarantee=guarantee,
    numerics=numerics,
    priority=1,  # after depthwise, whose bits are others
)
