"""What the kernels of convolution have in common: sizes, arguments, guarantees, and sums that are made in parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch
from triplan.backends.table import kernel
from triplan.backends.triton.common import bounds, card
from triplan.backends.triton.common.offsets import ceil_power, divisor, values
from triplan.backends.triton.common.strides import axis_strides, count
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.conv import shared_kernels as kernels
from triplan.descriptors import (
    Conv2dBackwardInputDescriptor,
    Conv2dBackwardWeightDescriptor,
    Conv2dDescriptor,
    Operand,
)
from triplan.descriptors.conv import Conv2dProblem
from triplan.sku import MathPrecision, PrecisionGuarantee, Support, Target
from triplan.sku.facts import fact

ELEMENTS = ("f16", "bf16", "f32", "f64")
#: Rows, columns and positions are counted in 32 bits, and a sum of a few of them must fit.
MOST = 2**29
#: Blocks of pixels of a part at least. Untuned.
LEAST_BLOCKS = 2
#: Elements that a program of the fold reads at once, and parts of them at most, if there are so many programs; more,
#: but no more than the last, if the elements are few. Untuned.
FOLD_AREA, FOLD_PARTS, FOLD_BUSY, MOST_FOLD_PARTS = 2048, 16, 132, 512


def of_weight(desc: Conv2dProblem) -> bool:
    return isinstance(desc, Conv2dBackwardWeightDescriptor)


def of_input(desc: Conv2dProblem) -> bool:
    return isinstance(desc, Conv2dBackwardInputDescriptor)


def pixels(desc: Conv2dProblem) -> int:
    """Pixels of the result; of dout for the gradient of weight, which sums them."""
    extents = (desc.height, desc.width) if of_input(desc) else desc.out_extents
    return desc.batch * math.prod(extents)


def counted(desc: Conv2dProblem, programs: int) -> Support:
    """Whether 32 bits count what a kernel counts."""
    weights = desc.out_channels * desc.channels * desc.taps
    sizes = (pixels(desc), weights, desc.in_channels, desc.out_channels)
    reach = (*desc.padding, *(d * k for d, k in zip(desc.dilation, desc.kernel, strict=True)), *desc.stride)
    if max(*sizes, desc.height * desc.stride[0], desc.width * desc.stride[1], *reach) >= MOST:
        return Support.no(f"{max(*sizes, *reach)} pixels, weights or taps; it counts fewer than {MOST}")
    return fits_grid(programs)


def moved(desc: Conv2dProblem) -> float:
    """Bytes of the operands, without rows and columns of x that no tap meets."""
    found = float(sum(o.nbytes for o in desc.operands() if o.is_tensor))
    if of_input(desc):
        return found
    x = desc.operand("x")
    met = [min(k / s, 1.0) for k, s in zip(desc.kernel, desc.stride, strict=True)]
    if x.layout.unit_axis != 1 or x.shape[1] * x.element.itemsize < card.SECTOR:
        met.pop()  # a sector has several columns
    return found - (1.0 - math.prod(met)) * x.nbytes


def guaranteed(
    desc: Conv2dProblem, precision: MathPrecision, terms: int, roundings: int
) -> Mapping[str, PrecisionGuarantee]:
    """Of ``terms`` products accumulated in a fixed order, and ``roundings`` more.

    A pixel is accumulated in one order, wherever it lies in its tile: images do not change each other's bits. The
    gradient of weight is a sum over all images.
    """
    compute = desc.element.compute
    tolerance = bounds.tolerance(
        desc.element,
        compute,
        per_term=bounds.product_error(desc.element, precision, terms, roundings),
        lost=((terms + roundings) * bounds.flushed(compute),),
    )
    found = bounds.guarantee(compute, tolerance, math_precision=precision, batch=not of_weight(desc))
    return bounds.of_outputs(desc, found)


def layout(desc: Conv2dProblem) -> str:
    return "packed" if all(o.layout.packed for o in desc.operands()) else "strided"


def register(
    build: Callable[[Any, Target], list[Launch]],
    build_weight: Callable[[Any, Target], list[Launch]],
    weight: Mapping[str, Any] | None = None,
    **entry: Any,
) -> None:
    """The entries of a kernel: ``build`` for the result and the gradient of x, ``build_weight`` for that of weight.

    ``weight``: in what the entry of the latter differs.
    """
    entry = {"elements": ELEMENTS, "layout": layout, **entry}
    for cls in (Conv2dDescriptor, Conv2dBackwardInputDescriptor, Conv2dBackwardWeightDescriptor):
        last = cls is Conv2dBackwardWeightDescriptor
        for op in cls.ops():
            kernel(op=op, **{**entry, **((weight or {}) if last else {})})(build_weight if last else build)


# --- arguments ---


def channels_apart(desc: Conv2dProblem) -> tuple[Operand, ...]:
    """Operands of several channels and pixels (or taps) whose channels are not promised to be adjacent."""
    tensors = (o for o in desc.operands() if len(o.shape) == 4 and o.shape[1] > 1 and math.prod(o.shape[2:]) > 1)
    return tuple(o for o in tensors if o.layout.packed or o.layout.unit_axis != 1)


def in_vectors(o: Operand) -> bool:
    """Whether channels are adjacent and read in vectors of 16 bytes."""
    adjacent = not o.layout.packed and o.layout.unit_axis == 1
    return adjacent and o.layout.stride_multiple * o.element.itemsize >= 16 and o.alignment >= 16


@fact
def is_matrix(desc: Conv2dProblem) -> bool:
    """Whether the pixels of all images are rows of a matrix, in memory too: one tap, channels last without gaps."""
    if (desc.kernel, desc.stride, desc.padding) != ((1, 1), (1, 1), (0, 0, 0, 0)):
        return False
    return all(_in_one_piece(o) for o in desc.operands() if o.name in ("x", "out", "dout", "dx"))


def _in_one_piece(o: Operand) -> bool:
    """Whether pixels lie one after another, with all channels of each."""
    if o.layout.packed:
        return o.shape[2] == o.shape[3] == 1
    last = tuple(axis for axis in (0, 2, 3, 1) if o.shape[axis] > 1)
    return o.layout.order != () and tuple(axis for axis in o.layout.order if o.shape[axis] > 1) == last


def geometry(desc: Conv2dProblem) -> dict[str, Arg]:
    """Where the taps of a filter lie; strides of 1 are None."""
    steps = (None, None) if desc.stride == (1, 1) else desc.stride
    return {
        "kernel_columns": Int(desc.kernel[1]),
        "stride_rows": None if steps[0] is None else Int(steps[0]),
        "stride_columns": None if steps[1] is None else Int(steps[1]),
        "above": Int(desc.padding[0]),
        "left": Int(desc.padding[2]),
        "dilation_rows": Int(desc.dilation[0]),
        "dilation_columns": Int(desc.dilation[1]),
    }


def divided(rows: int, columns: int) -> dict[str, Arg]:
    """``rows`` and ``columns`` as ``place_of`` takes them."""
    return {"rows": divisor(rows, wide=False), "columns": divisor(columns, wide=False)}


def of_pixels(desc: Conv2dProblem) -> dict[str, Arg]:
    """Operands and extents of what writes pixels: the result, or the gradient of x."""
    back = of_input(desc)
    source, out = (desc.operand(name) for name in (("dout", "dx") if back else ("x", "out")))
    weight = desc.operand("weight")
    bias = next((o for o in desc.operands() if o.name == "bias"), None)
    return {
        "source": values(source),
        "weight": values(weight),
        "bias": None if bias is None else values(bias),
        "out": values(out),
        "source_strides": axis_strides(source),
        "weight_strides": axis_strides(weight),
        "bias_stride": None if bias is None else axis_strides(bias)[0],
        "out_strides": axis_strides(out),
        "rows": Int(out.shape[2]),
        "columns": Int(out.shape[3]),
        "source_rows": Int(source.shape[2]),
        "source_columns": Int(source.shape[3]),
    }


# --- sums over pixels, in parts ---


def parts_of(blocks: int, programs: int, busy: int, most: int) -> tuple[int, int]:
    """Parts of so many blocks of pixels, and the blocks of each.

    So many that ``programs`` for each become ``busy``, but ``most`` at most. The same for all targets: bits depend on
    it.
    """
    parts = max(min(-(-busy // max(programs, 1)), blocks // LEAST_BLOCKS, most), 1)
    each = max(-(-blocks // parts), 1)
    return max(-(-blocks // each), 1), each


def parts_bytes(desc: Conv2dProblem, parts: int) -> int:
    """Bytes of the parts' sums, if there are several."""
    return parts * desc.operand("dweight").numel * desc.element.compute.itemsize if parts > 1 else 0


def of_parts(desc: Conv2dProblem, parts: int, each: int) -> dict[str, Arg]:
    """Operands and extents of what sums pixels. Several parts are written (part, filter, tap, channel)."""
    x, dout, out = (desc.operand(name) for name in ("x", "dout", "dweight"))
    packed = count(desc.taps * desc.channels), None, count(desc.kernel[1] * desc.channels), count(desc.channels)
    return {
        "x": values(x),
        "dout": values(dout),
        "out": Scratch(0, desc.element.compute) if parts > 1 else values(out),
        "x_strides": axis_strides(x),
        "dout_strides": axis_strides(dout),
        "out_strides": packed if parts > 1 else axis_strides(out),
        "part_stride": count(out.numel),
        "each": count(each),
        "rows": Int(desc.out_extents[0]),
        "columns": Int(desc.out_extents[1]),
        "height": Int(desc.height),
        "width": Int(desc.width),
    }


def begins_early(programs: int, target: Target) -> bool:
    """Whether a launch may begin while the previous one ends: on an H100 one of more programs than multiprocessors
    took up to 1.4 times as long if it did."""
    return programs <= target.sm_count


def launch_us(programs: int, target: Target) -> float:
    """Microseconds of a launch of ``programs`` beside what they compute."""
    return card.OVERLAPPED_LAUNCH_US if begins_early(programs, target) else card.LAUNCH_US


def launches_us(launches: int) -> float:
    """Microseconds of a sequence of ``launches`` beside what they compute; each but the first begins early."""
    return card.LAUNCH_US + (launches - 1) * card.OVERLAPPED_LAUNCH_US


def fold(desc: Conv2dProblem, parts: int, target: Target, least: int = FOLD_PARTS) -> list[Launch]:
    """The launch that adds several parts in their order; a program reads ``least`` of them at once, or more."""
    if parts == 1:
        return []
    out = desc.operand("dweight")
    args: dict[str, Arg] = {
        "parts": Scratch(0, desc.element.compute),
        "out": values(out),
        "out_strides": axis_strides(out),
        "elements": count(out.numel),
        "count": Int(parts),
        "channels": count(desc.channels),
        "kernel_rows": Int(desc.kernel[0]),
        "kernel_columns": Int(desc.kernel[1]),
    }
    busy = ceil_power(FOLD_BUSY * FOLD_AREA // max(out.numel, 1))
    at_once = min(ceil_power(parts), max(least, min(busy, MOST_FOLD_PARTS)))
    block = FOLD_AREA // at_once
    constants = {"PARTS": at_once, "BLOCK": block}
    programs = -(-out.numel // block)
    overlaps = begins_early(programs, target)
    return [Launch(kernels.conv2d_fold_kernel, programs, args, constants, num_warps=4, overlaps=overlaps)]
