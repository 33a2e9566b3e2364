"""Kernel ``looped`` of topk and kthvalue: a program for each row, which reads it once for each digit of a key."""

from __future__ import annotations

from triplan.backends.runtime.launch import Int, Launch, Scratch, power_of_two_in
from triplan.backends.triton.common.card import LAUNCH_US, SM_BYTES_PER_US, SM_WARPS, SMS
from triplan.backends.triton.common.offsets import ceil_power, padded_bytes
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.sorting import looped_kernels as kernels, turned
from triplan.backends.triton.sorting.shared import MOST, Selection, key_constants, key_element, row_args, sorting_kernel
from triplan.descriptors import KthValueDescriptor, TopKDescriptor
from triplan.sku import ElementKind, Support, Target

#: Elements of a block at most, in 8 warps. Untuned.
BLOCK = 2048
#: Rows of which programs of 8 warps fill an H200: of more, blocks are smaller if they leave fewer lanes behind the end.
ROWS = SMS * SM_WARPS // 8
#: The most elements that are ranked by comparing all pairs. Untuned.
MOST_TAKEN = 1024
#: Elements that are ranked at a time, by comparison with so many others at a time. Untuned.
OWN, OTHERS = 32, 128
#: Registers of a thread that ranks nothing, at most. Left alone, ptxas takes 64 for 8 bytes, and spills two.
REGISTERS = 80
#: Bits of the exponent.
EXPONENTS = {ElementKind.F16: 5, ElementKind.BF16: 8, ElementKind.F32: 8, ElementKind.F64: 11}
# Fitted to ``bench anywhere sorting``, seeds 1, 2, 3, 13 and 51, and one more whose results are not kept, on an H200,
# by a script that is not published:
#: Microseconds that a pass takes alone, besides reading and counting: it waits for reads, sums and a scan. Set by hand,
#: so that select agrees with the measured times.
PASS_US = 0.7
#: Keys whose digits one multiprocessor counts in a microsecond: a histogram compiles to about 100 instructions a key.
#: What topk takes is scanned twice, for which a key takes about as many.
SM_DIGITS_PER_US = 1300
#: Microseconds of a multiprocessor with many programs for each one of topk, besides keys and pairs.
SM_TAKEN_US = 0.18
#: Microseconds for each pair of elements that are ranked: of a multiprocessor with many programs, and of one alone.
PAIR_US, PAIR_ALONE_US = 1.05e-4, 3.1e-4


def supports(desc: Selection, target: Target) -> Support:
    if desc.n > MOST:
        return Support.no(f"rows of {desc.n} elements; positions are i32, up to {MOST}")
    if isinstance(desc, TopKDescriptor) and desc.k > MOST_TAKEN:
        return Support.no(f"k = {desc.k}: at most {MOST_TAKEN} are ranked; sort the rows instead")
    return fits_grid(desc.rows)


def rank(desc: Selection, target: Target) -> float:
    """Each pass but the last counts the digits of the row's blocks, also in lanes behind its end; or one program's
    latency is the limit. The last pass of kthvalue only compares."""
    digits, size, block = digits_of(desc), desc.element.itemsize, block_of(desc)[0]
    counted_us, each, pairs = digits * -(-desc.n // block) * block / SM_DIGITS_PER_US, 0.0, 0
    if isinstance(desc, TopKDescriptor):
        pairs = desc.k**2
        counted_us += counted_us / digits
        each = SM_TAKEN_US + pairs * PAIR_US
    each += counted_us
    alone = (digits + 1) * (PASS_US + desc.n * size / SM_BYTES_PER_US) + counted_us + pairs * PAIR_ALONE_US
    return LAUNCH_US + max(alone, -(-desc.rows // target.sm_count) * each) + turned.across_us(desc, reads_of(desc))


def reads_of(desc: Selection) -> int:
    """How often x is read: for each digit, and for what is taken."""
    return digits_of(desc) + 1


def digits_of(desc: Selection) -> int:
    """Digits that tell the keys of a row from each other: all of integers, which may be few numbers; of floats as many
    as have the sign, the exponent, and a bit of the mantissa for each bit of n."""
    known = EXPONENTS.get(desc.element)
    bits = 8 * desc.element.itemsize if known is None else 1 + known + max(desc.n - 1, 1).bit_length()
    return min(-(-bits // 8), desc.element.itemsize)


def block_of(desc: Selection) -> tuple[int, int]:
    """(elements of a block, warps)."""
    block = min(max(ceil_power(desc.n), 128), BLOCK)
    if desc.rows > ROWS:
        smaller = (b for b in (block, block // 2, block // 4) if b >= 128)
        block = min(smaller, key=lambda b: -(-desc.n // b) * b)
    return block, max(block // 256, 1)


def _copied_bytes(desc: Selection, target: Target) -> int:
    return turned.nbytes(desc, reads_of(desc))


@sorting_kernel(op="kthvalue", name="looped", supports=supports, rank=rank, workspace=_copied_bytes)
def kthvalue(desc: KthValueDescriptor, target: Target) -> list[Launch]:
    return turned.launches(desc, _kthvalue, 0, reads_of(desc)) if desc.rows else []


def _kthvalue(desc: KthValueDescriptor) -> list[Launch]:
    block, warps = block_of(desc)
    args = {
        **row_args(desc),
        "n": Int(desc.n, divisibility=power_of_two_in(desc.n)),
        "k": Int(desc.k),
    }
    constants = {**key_constants(desc), "BLOCK": block}
    return [Launch(kernels.kth_kernel, desc.rows, args, constants, num_warps=warps, max_registers=REGISTERS)]


def _taken_bytes(desc: TopKDescriptor) -> int:
    taken = desc.rows * desc.k
    return padded_bytes(taken * key_element(desc).itemsize) + padded_bytes(4 * taken)


def workspace(desc: TopKDescriptor, target: Target) -> int:
    return _taken_bytes(desc) + _copied_bytes(desc, target) if desc.rows * desc.k else 0


@sorting_kernel(op="topk", name="looped", supports=supports, rank=rank, workspace=workspace)
def topk(desc: TopKDescriptor, target: Target) -> list[Launch]:
    return turned.launches(desc, _topk, _taken_bytes(desc), reads_of(desc)) if desc.rows * desc.k else []


def _topk(desc: TopKDescriptor) -> list[Launch]:
    block, warps = block_of(desc)
    args = {
        **row_args(desc),
        "keys": Scratch(0, key_element(desc)),
        "places": Scratch(padded_bytes(desc.rows * desc.k * key_element(desc).itemsize), ElementKind.I32),
        "n": Int(desc.n, divisibility=power_of_two_in(desc.n)),
        "k": Int(desc.k),
    }
    constants = {**key_constants(desc), "DESCENDING": desc.largest, "BLOCK": block, "OWN": OWN, "OTHERS": OTHERS}
    return [Launch(kernels.topk_kernel, desc.rows, args, constants, num_warps=warps)]
