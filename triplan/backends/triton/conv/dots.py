"""Kernel ``dots``: the gradient of weight of small problems, whose pixels one program sums without tensor cores.

A program has one filter and a few pairs of a tap and a channel; its threads share the pixels. Where ``tiles`` has few
programs, or a second launch that adds parts, the time is what these wait for. Here it is one launch and few loads.
"""

from __future__ import annotations

from collections.abc import Mapping

from triplan.backends.runtime.launch import Arg, Int, Launch
from triplan.backends.table import kernel
from triplan.backends.triton.common import card
from triplan.backends.triton.common.offsets import TL
from triplan.backends.triton.common.strides import count
from triplan.backends.triton.conv import shared
from triplan.backends.triton.conv.dots_kernels import conv2d_weight_dots_kernel
from triplan.descriptors import Conv2dBackwardWeightDescriptor
from triplan.descriptors.conv import Conv2dProblem
from triplan.sku import ArchSku, MathPrecision, PrecisionGuarantee, Support, Target
from triplan.sku.facts import fact

#: Pairs of a tap and a channel of a program, and pixels of a step: 16 products for each thread at most.
DIVISIONS = tuple((terms, pixels) for terms in (1, 2, 4, 8) for pixels in (128, 256, 512) if terms * pixels <= 2048)
WARPS = 4
#: Microseconds of a step, which waits for loads, and of each of a thread's loads. On an H100, of 1 to 1337 steps.
WAIT_US, LOAD_US = 0.5, 0.03
#: Microseconds of each further program of a multiprocessor beside its steps, and the share of these that it takes if
#: many run; how many times as long steps of f64 take. From drawn problems on an H200.
BEGIN_US, SHARED, F64 = 0.6, 0.35, 1.25


def _pairs(desc: Conv2dProblem) -> int:
    return desc.taps * desc.channels


def _programs(desc: Conv2dProblem, terms: int) -> int:
    return desc.out_channels * -(-_pairs(desc) // terms)


def _steps_us(desc: Conv2dProblem, terms: int, pixels: int) -> float:
    """Estimated microseconds of a program's steps."""
    steps, loads = -(-shared.pixels(desc) // pixels), pixels * (1 + terms) / (32 * WARPS)
    return steps * (WAIT_US + LOAD_US * loads)


def _alone_us(desc: Conv2dProblem, terms: int, pixels: int) -> float:
    """Estimated microseconds of a division whose programs do not share multiprocessors."""
    waves = max(-(-_programs(desc, terms) // card.SMS), 1)
    return (card.OVERLAPPED_LAUNCH_US + _steps_us(desc, terms, pixels)) * waves


@fact
def _division(desc: Conv2dProblem) -> tuple[int, int]:
    """Pairs of a program, and pixels of a step: of equal estimates the fewest."""
    return min(DIVISIONS, key=lambda d: (_alone_us(desc, *d), d))


def programs(desc: Conv2dProblem) -> int:
    return _programs(desc, _division(desc)[0])


def supports(desc: Conv2dProblem, target: Target) -> Support:
    return shared.counted(desc, programs(desc))


def rank(desc: Conv2dProblem, target: Target) -> float:
    """Estimated microseconds: programs of a multiprocessor begin one after another, and hide each other's waits, but
    not what the L2 cache gives them."""
    waves = programs(desc) / target.sm_count
    steps = _steps_us(desc, *_division(desc)) * (F64 if desc.element.itemsize == 8 else 1.0)
    waits = BEGIN_US * max(waves - 1, 0.0) + steps * max(SHARED * waves, 1.0)
    return card.OVERLAPPED_LAUNCH_US + max(waits, _sector_bytes(desc) / card.L2_BYTES_PER_US)


def _sector_bytes(desc: Conv2dProblem) -> float:
    """Bytes of the sectors that programs read: of a pixel each has one channel of dout, and adjacent ones of x."""
    terms, _ = _division(desc)
    channels = max(min(terms, desc.channels), 1)
    read = {"dout": (1, 1), "x": (channels, -(-terms // channels))}
    found = 0.0
    for name, (adjacent, taps) in read.items():
        o = desc.operand(name)
        nbytes = adjacent * o.element.itemsize
        last = not o.layout.packed and o.layout.unit_axis == 1
        found += taps * (-(-nbytes // card.SECTOR) * card.SECTOR if last else nbytes)
    return found * programs(desc) * shared.pixels(desc)


def guarantee(desc: Conv2dProblem) -> Mapping[str, PrecisionGuarantee]:
    """Products are of the element's precision: without tensor cores nothing is rounded to tf32."""
    return shared.guaranteed(desc, MathPrecision(desc.element.value), shared.pixels(desc), 1)


def build(desc: Conv2dProblem, target: Target) -> list[Launch]:
    if programs(desc) == 0:
        return []
    found = shared.of_parts(desc, 1, shared.pixels(desc))
    del found["part_stride"], found["each"]
    args: dict[str, Arg] = {
        **found,
        **shared.geometry(desc),
        **shared.divided(*desc.out_extents),
        "pixels": Int(shared.pixels(desc)),
        "filters": Int(desc.filters),
        "channels": count(desc.channels),
        "taps": Int(desc.taps),
    }
    terms, pixels = _division(desc)
    constants = {"TERMS": terms, "PIXELS": pixels, "ACC": TL[desc.element.compute]}
    overlaps = shared.begins_early(programs(desc), target)
    # Left alone, ptxas spills two registers of bf16 on sm80, to raise occupancy.
    most = card.MAX_THREAD_REGISTERS if target.arch is ArchSku.SM80 else None
    kernel = conv2d_weight_dots_kernel
    return [Launch(kernel, programs(desc), args, constants, num_warps=WARPS, overlaps=overlaps, max_registers=most)]


kernel(
    op=Conv2dBackwardWeightDescriptor.ops()[0],
    name="dots",
    elements=shared.ELEMENTS,
    layout=shared.layout,
    supports=supports,
    rank=rank,
    guarantee=guarantee,
    priority=4,
)(build)
