"""Kernel ``pixels``: resizing and its gradients. Each element of the result is computed separately, without atomics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from triplan.backends.runtime.launch import Arg, Float, Int, Launch
from triplan.backends.table import kernel
from triplan.backends.triton.common import bounds, card
from triplan.backends.triton.common.offsets import TL, layout
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.pooling import pixels_kernels as kernels
from triplan.backends.triton.pooling.windows import (
    ELEMENTS,
    MOST,
    RESULTS,
    SM_ELEMENTS_PER_US,
    Tile,
    geometry,
    image,
    programs,
    swept,
    taken,
    tile,
    unrolled,
)
from triplan.descriptors import (
    UpsampleBilinear2dBackwardDescriptor,
    UpsampleBilinear2dDescriptor,
    UpsampleNearest2dBackwardDescriptor,
    UpsampleNearest2dDescriptor,
)
from triplan.descriptors.pooling import BilinearProblem, NearestProblem, ResizeProblem
from triplan.sku import ArchSku, ElementKind, PrecisionGuarantee, Support, Target
from triplan.sku.facts import fact

#: Extents below this are exact in f32, so that no two positions are one.
MOST_EXTENT = 2**24
#: Roundings of a term: two weights, two products and two additions.
BETWEEN = 6


def is_backward(desc: ResizeProblem) -> bool:
    return isinstance(desc, (UpsampleNearest2dBackwardDescriptor, UpsampleBilinear2dBackwardDescriptor))


def linear(desc: ResizeProblem) -> tuple[bool, bool]:
    """Whether it interpolates along rows, and along columns."""
    return desc.resized if isinstance(desc, BilinearProblem) else (False, False)


def centers(desc: ResizeProblem) -> bool:
    """Whether pixels have their centers at 0.5."""
    return desc.exact if isinstance(desc, NearestProblem) else not getattr(desc, "align_corners", False)


@dataclass(frozen=True)
class Readers:
    """How a pixel of a gradient finds the results that read it, along an axis.

    Attributes:
        reach: most of them for one pixel.
        inverse: an estimate of results for one pixel.
        lead: by how many the estimate of the first is too large, at most.
        corrections: by how many it is too small, at most, after ``lead`` is subtracted.
    """

    reach: int
    inverse: float
    lead: int
    corrections: int


@fact
def readers(extent: int, results: int, step: float, position: ElementKind, linear: bool, centers: bool) -> Readers:
    """Computed as the kernels do it, for every position and every pixel."""
    dtype = position.torch
    s = torch.arange(results).to(dtype)
    s = (s + 0.5 if centers else s) * step
    s = (s - 0.5).clamp(min=0) if linear and centers else s
    i = s.floor().clamp(max=extent - 1).long()
    at = torch.arange(extent)
    low = at - 1 if linear else at
    first = torch.searchsorted(i, low)
    end = torch.searchsorted(i, at, right=True)
    inverse = float(torch.tensor(1 / step if step else 0.0, dtype=dtype))
    guess = low.to(dtype)
    guess = (guess + 0.5 if linear and centers else guess) * inverse
    guess = (guess - 0.5 if centers else guess).floor().clamp(0, results).long()
    lead = max(int((guess - first).max()), 0)
    corrections = max(int((first - (guess - lead).clamp(min=0)).max()), 0)
    return Readers(int((end - first).max()), inverse, lead, corrections)


def _along(desc: ResizeProblem) -> tuple[Readers, Readers]:
    rows, columns = (
        readers(n, m, step, desc.position, between, centers(desc))
        for n, m, step, between in zip((desc.height, desc.width), desc.out_size, desc.steps, linear(desc), strict=True)
    )
    return rows, columns


def _steps(desc: ResizeProblem) -> int:
    """Elements that are read for one element of the result, at most."""
    if is_backward(desc):
        return math.prod(found.reach for found in _along(desc))
    return math.prod(1 + between for between in linear(desc))


def _pixels(desc: ResizeProblem) -> int:
    extents = (desc.height, desc.width) if is_backward(desc) else desc.out_size
    return desc.batch * math.prod(extents)


def tile_of(desc: ResizeProblem) -> Tile:
    """The tile of ``windows``; of a gradient of neighbouring results with channels last maybe one that sweeps."""
    found = tile(desc)
    sweeps = swept(desc, _steps(desc), _pixels(desc)) if is_backward(desc) else None
    return sweeps if sweeps and found == Tile(RESULTS[1], 1, True) else found


def _programs(desc: ResizeProblem) -> int:
    return programs(desc, tile_of(desc), _pixels(desc))


def supports(desc: ResizeProblem, target: Target) -> Support:
    longest = max(desc.height, desc.width, *desc.out_size)
    if longest >= MOST_EXTENT:
        return Support.no(f"an axis of {longest} pixels; it takes fewer than 2**24, which f32 tells apart")
    largest = max(_pixels(desc), desc.height * desc.width, math.prod(desc.out_size), desc.channels)
    if largest >= MOST:
        return Support.no(f"{largest} pixels or channels; it counts fewer than {MOST}")
    return fits_grid(_programs(desc))


def rank(desc: ResizeProblem, target: Target) -> float:
    """Estimated microseconds."""
    work = _pixels(desc) * desc.channels * _steps(desc)
    busy = min(target.sm_count, max(_programs(desc), 1))
    nbytes = sum(o.nbytes for o in desc.operands())
    return card.LAUNCH_US + max(work / (SM_ELEMENTS_PER_US * busy), nbytes / card.BYTES_PER_US)


def guarantee(desc: ResizeProblem) -> Mapping[str, PrecisionGuarantee]:
    """Terms in a fixed order, the same for every image; positions are as the descriptor defines them."""
    if isinstance(desc, UpsampleNearest2dDescriptor):
        return {"out": PrecisionGuarantee.exact(desc.element)}
    back = is_backward(desc)
    per_term = BETWEEN + (_steps(desc) if back else 0)
    found = bounds.rounded(desc.element, desc.element.compute, 0, per_term, batch=True, order=not back)
    return bounds.of_outputs(desc, found)


def numerics(desc: ResizeProblem) -> str:
    """The numerics id: sums are in row-major order, whatever the tile."""
    return f"{desc.op}.pixels.{desc.element}.v1"


def build(desc: ResizeProblem, target: Target) -> list[Launch]:
    if _programs(desc) == 0:
        return []
    back = is_backward(desc)
    found = tile_of(desc)
    names = ("dout", "dx") if back else ("x", "out")
    args: dict[str, Arg] = {
        **geometry(desc, found, back),
        **image(desc, names[0]),
        **image(desc, names[1]),
    }
    for axis, step in zip(("rows", "columns"), desc.steps, strict=True):
        args[f"step_{axis}"] = Float(step, desc.position)
    if back:
        for axis, along in zip(("rows", "columns"), _along(desc), strict=True):
            args[f"inverse_{axis}"] = Float(along.inverse, desc.position)
            for name in ("reach", "lead", "corrections"):
                args[f"{name}_{axis}"] = Int(getattr(along, name))
    constants = {
        "BETWEEN_ROWS": linear(desc)[0],
        "BETWEEN_COLUMNS": linear(desc)[1],
        "CENTERS": centers(desc),
        "LAST": found.last,
        "BLOCK_P": found.pixels,
        "BLOCK_C": found.channels,
        "POSITION": TL[desc.position],
        "ACC": TL[desc.element.compute] if desc.element.is_floating_point else TL[ElementKind.F32],
    }
    if back:
        rows, columns = (along.reach for along in _along(desc))
        constants |= unrolled(desc, found, rows, columns)
        if columns <= constants["COLUMNS"]:
            args["reach_columns"] = None
    which = kernels.resize_backward_kernel if back else kernels.resize_kernel
    if found.sweeps:
        which = kernels.resize_swept_kernel
        args, constants = taken(which, args), taken(which, constants)
    # Left alone, ptxas spills registers of gradients on sm_80, to raise occupancy; of few programs, whose occupancy is
    # low, it lets loads wait for each other.
    alone = back and (target.arch is ArchSku.SM80 or found.pixels == RESULTS[0])
    most = card.MAX_THREAD_REGISTERS if alone else None
    return [Launch(which, _programs(desc), args, constants, num_warps=found.warps, max_registers=most, fuses=False)]


for _cls in (
    UpsampleNearest2dDescriptor,
    UpsampleNearest2dBackwardDescriptor,
    UpsampleBilinear2dDescriptor,
    UpsampleBilinear2dBackwardDescriptor,
):
    for _op in _cls.ops():
        kernel(
            op=_op,
            name="pixels",
            elements=(*ELEMENTS, "u8") if _cls is UpsampleNearest2dDescriptor else ELEMENTS,
            supports=supports,
            rank=rank,
            guarantee=guarantee,
            numerics=numerics,
            layout=layout,
        )(build)
