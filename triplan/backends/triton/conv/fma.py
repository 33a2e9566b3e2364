"""Kernel ``fma``: convolutions of f32 by FMAs on Hopper, in larger tiles per thread than Triton's own layout has.

Features that fill no tile have a launch of narrower ones. Operands that are not read in vectors along the channels (of
the weight: features) are copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from triplan.backends.runtime.launch import Arg, Int, Launch
from triplan.backends.table import kernel
from triplan.backends.triton.common import card
from triplan.backends.triton.common.strides import axis_strides, count
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.conv import copies, shared
from triplan.backends.triton.conv.copies import Padded
from triplan.backends.triton.conv.fma_kernels import conv2d_fma_kernel
from triplan.backends.triton.conv.tile_shapes import features, reduced
from triplan.descriptors import Conv2dBackwardInputDescriptor, Conv2dDescriptor, Operand
from triplan.descriptors.conv import Conv2dProblem
from triplan.sku import ArchSku, MathPrecision, PrecisionGuarantee, Support, Target
from triplan.sku.facts import fact

#: Elements of a vector, of 16 bytes.
VECTOR = 4
#: Channels of a step, by which fewer are left empty; of equally many the first.
DEPTHS = (16, 8)
STAGES = 3
#: Programs' warps that a multiprocessor holds: 255 registers a thread leave no more.
RESIDENT_WARPS = 8
#: Microseconds outside the steps. Untuned.
FIXED_US = 4.0
#: Microseconds of 1e6 floating-point operations on one multiprocessor, which are those of a product of matrices, and
#: how many times as long features of a tile take. Untuned.
MFLOP_US = 2.8


@dataclass(frozen=True, slots=True)
class Tile:
    """Pixels and features of 8 by 16 for each thread; ``slower``: how many times as long an FMA takes."""

    m: int
    n: int
    warps: int
    slower: float


#: Narrow tiles read more of the source for each FMA. Untuned.
TILES = (Tile(64, 128, 2, 1.0), Tile(128, 64, 2, 1.03), Tile(256, 32, 2, 1.1), Tile(256, 16, 2, 1.4))


@dataclass(frozen=True, slots=True)
class Piece:
    """So many features from ``first`` on, in tiles of one size: a launch."""

    first: int
    count: int
    tile: Tile

    def programs(self, desc: Conv2dProblem) -> int:
        return -(-shared.pixels(desc) // self.tile.m) * -(-self.count // self.tile.n)


def _source(desc: Conv2dProblem) -> Operand:
    return desc.operand("dout" if shared.of_input(desc) else "x")


def _out(desc: Conv2dProblem) -> Operand:
    return desc.operand("dx" if shared.of_input(desc) else "out")


def _features_axis(desc: Conv2dProblem) -> int:
    """That of the weight."""
    return 1 if shared.of_input(desc) else 0


def _read_in_vectors(o: Operand, axis: int) -> bool:
    """Whether ``axis`` lies in whole vectors."""
    whole = not o.layout.packed and o.layout.unit_axis == axis and o.shape[axis] % VECTOR == 0
    return whole and o.layout.stride_multiple % VECTOR == 0 and o.alignment >= 16


@fact
def copied(desc: Conv2dProblem) -> tuple[Padded, ...]:
    """What is not read in vectors, and a result whose channels lie apart."""
    weight, axis = desc.operand("weight"), _features_axis(desc)
    wanted = {} if _read_in_vectors(_source(desc), 1) else {_source(desc): 1}
    wanted |= {} if _read_in_vectors(weight, axis) else {weight: axis}
    wanted |= {o: 1 for o in shared.channels_apart(desc) if o.is_written}
    return copies.plain(wanted)


@fact
def read(desc: Conv2dProblem) -> Conv2dProblem:
    """``desc`` with the layouts of the copies."""
    return desc.replace(layouts={**dict(desc.layouts), **{c.operand.name: c.layout for c in copied(desc)}})


def _depth(desc: Conv2dProblem) -> int:
    return min(DEPTHS, key=lambda k: -(-reduced(desc) // k) * k)


def _pieces_of(n: int) -> Iterator[tuple[Piece, ...]]:
    """The ways to divide ``n`` features: tiles of one size, and what is left over in narrower ones."""
    for i, tile in enumerate(TILES):
        yield (Piece(0, n, tile),)
        whole = n // tile.n * tile.n
        if 0 < whole < n:
            yield from ((Piece(0, whole, tile), Piece(whole, n - whole, narrow)) for narrow in TILES[i + 1 :])


def _piece_us(desc: Conv2dProblem, piece: Piece, target: Target) -> float:
    """Estimated microseconds: the last programs of several for each place find half of the multiprocessor idle."""
    tile, resident, k = piece.tile, RESIDENT_WARPS // piece.tile.warps, _depth(desc)
    flops = 2e-6 * tile.m * tile.n * desc.taps * -(-reduced(desc) // k) * k
    waves = piece.programs(desc) / (target.sm_count * resident)
    return FIXED_US + resident * flops * MFLOP_US * tile.slower * (max(waves, 0.5) + 0.5 * (waves > 1))


@fact
def pieces(desc: Conv2dProblem, target: Target) -> tuple[Piece, ...]:
    """No bits depend on them."""
    return min(_pieces_of(features(desc)), key=lambda p: sum(_piece_us(desc, x, target) for x in p))


def supports(desc: Conv2dProblem, target: Target) -> Support:
    if target.arch is not ArchSku.SM90A or target.interpret:
        return Support.no("runs on sm90a, not in the interpreter")
    if desc.multiplicands is not MathPrecision.F32:
        return Support.no(f"multiplies as {desc.multiplicands}, not as f32")
    if desc.groups > 1:
        return Support.no(f"{desc.groups} groups; it takes 1")
    if shared.of_input(desc) and desc.stride != (1, 1):
        return Support.no("the gradient of x has strides; it takes 1")
    if 0 in (features(desc), reduced(desc), desc.taps):
        return Support.no("there is nothing to multiply")
    programs = max(piece.programs(desc) for piece in pieces(desc, target))
    return shared.counted(desc, programs) and fits_grid(programs) and copies.counted(copied(desc))


def rank(desc: Conv2dProblem, target: Target) -> float:
    """Estimated microseconds."""
    return sum(_piece_us(desc, p, target) for p in pieces(desc, target)) + copies.rank(copied(desc))


def workspace(desc: Conv2dProblem, target: Target) -> int:
    return copied(desc)[-1].end if copied(desc) else 0


def guarantee(desc: Conv2dProblem) -> Mapping[str, PrecisionGuarantee]:
    return shared.guaranteed(desc, desc.multiplicands, reduced(desc) * desc.taps, 1)


def numerics(desc: Conv2dProblem) -> str:
    return f"{desc.op}.fma.{reduced(desc)}.{'x'.join(map(str, desc.kernel))}.v1"


def _launch(desc: Conv2dProblem, piece: Piece, target: Target) -> Launch:
    back, lies = shared.of_input(desc), read(desc)
    wide = {c.operand.name: c.channels for c in copied(desc)}
    source, weight, out = _source(lies), lies.operand("weight"), _out(lies)
    first, second, *places = axis_strides(weight)
    geometry = shared.geometry(desc)
    del geometry["dilation_rows"], geometry["dilation_columns"], geometry["kernel_columns"]
    # Taps of the gradient of x go back from a pixel, which lies as far behind.
    if back:
        geometry |= {"above": Int(-desc.padding[0]), "left": Int(-desc.padding[2])}
    down, along = (-d if back else d for d in desc.dilation)
    tile = piece.tile
    args: dict[str, Arg] = {
        **shared.of_pixels(lies),
        **geometry,
        "weight_strides": (second, first, *places) if back else (first, second, *places),
        "pixels": Int(shared.pixels(desc)),
        "source_channels": count(wide.get(source.name, reduced(desc))),
        "channels": Int(reduced(desc)),
        "own_features": count(wide.get("weight", features(desc))),
        "features": count(features(desc)),
        "first_feature": count(piece.first) if piece.first else None,
        "tiles_n": Int(-(-piece.count // tile.n)),
        "taps": Int(desc.taps),
        "tap_columns": Int(desc.kernel[1]),
        "down": Int(down),
        "along": Int(along),
    }
    constants: dict[str, Any] = {
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": _depth(desc),
        "STAGES": STAGES,
        "WARPS": tile.warps,
        "OUT_VECTOR": VECTOR if _read_in_vectors(out, 1) else 1,
    }
    return Launch(
        conv2d_fma_kernel,
        piece.programs(desc),
        args,
        constants,
        num_warps=tile.warps,
        overlaps=True,
        max_registers=card.MAX_THREAD_REGISTERS,
    )


def build(desc: Conv2dProblem, target: Target) -> list[Launch]:
    if shared.pixels(desc) == 0:
        return []
    found = copied(desc)
    launches = [_launch(desc, piece, target) for piece in pieces(desc, target)]
    return copies.around(found, launches, {c.operand.name: c.tensor for c in found}, workspace(desc, target))


for _descriptor in (Conv2dDescriptor, Conv2dBackwardInputDescriptor):
    kernel(
        op=_descriptor.ops()[0],
        name="fma",
        elements=("f32",),
        archs=(ArchSku.SM90A,),
        features=("gluon",),
        interpretable=False,
        layout=shared.layout,
        supports=supports,
        rank=rank,
        workspace=workspace,
        guarantee=guarantee,
        numerics=numerics,
        priority=5,
    )(build)
