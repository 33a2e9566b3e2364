"""Operands of attention as kernel arguments, tiles of the kernels that read through pointers, and costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from triplan.backends.runtime.launch import Arg, Float, Int, Ptr, Scalar, Stride
from triplan.backends.triton.common import card
from triplan.backends.triton.common.offsets import TL, ceil_power
from triplan.backends.triton.common.tiles import fits_grid
from triplan.descriptors import Operand, packed_strides
from triplan.descriptors.attention import AttendingDescriptor
from triplan.sku import ArchSku, ElementKind, MathPrecision, Support, Target

D = TypeVar("D", bound=AttendingDescriptor)
#: Elements of the kernels that read through pointers.
ELEMENTS = ("f16", "bf16", "f32", "f64")
#: The widest head that they hold in registers and shared memory.
MOST_WIDTH = 256
#: The longest sequence, exclusive: a sum of three positions must fit in 32 bits.
MOST_LENGTH = 2**29
#: TFLOP/s by ``arithmetic`` and architecture.
Rates = Mapping[str, Mapping[ArchSku, float]]
#: Operations per microsecond in 1 TFLOP/s.
TERA_PER_US = 10**6
#: Matrix products of the forward and the backward op: the latter computes q @ k.T and dout @ v.T twice.
PRODUCTS, BACKWARD_PRODUCTS = 2, 7
#: Factor on the time of kernels by pointers, by products, where 2-byte elements are loaded one by one. From problems of
#: 128 to 1024 queries with and without alignment on an H100.
ELEMENTWISE = {PRODUCTS: 2.4, BACKWARD_PRODUCTS: 1.6}
#: Columns of a head that take as long as its scores there, by products. From bench/results/anywhere-attention-seed8-*
#: and -seed3-*: heads of 21, 32 and 43 elements.
ELEMENTWISE_COLUMNS = {PRODUCTS: 16, BACKWARD_PRODUCTS: 0}
#: log2(e): scores are in base-2 logarithms.
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries and keys of a step, how a program computes them, and columns of a head that it loads at a time."""

    queries: int
    keys: int
    warps: int
    stages: int
    columns: int = MOST_WIDTH


def arithmetic(desc: AttendingDescriptor) -> str:
    """What multiplies: tensor cores in 16 bits (``half``), in ``tf32``, or in bf16 the ``parts`` of f32; or ``scalar``
    multiply-adds of f64."""
    if desc.element.itemsize == 2:
        return "half"
    if desc.element is ElementKind.F64:
        return "scalar"
    return "tf32" if desc.multiplicands is MathPrecision.TF32 else "parts"


def padded_width(desc: AttendingDescriptor) -> int:
    """The power of two, at least 64, that is as wide as the wider of a key and a value."""
    return max(64, ceil_power(max(desc.head_dim, desc.values)))


#: A tile of each of a kernel's launches, by ``arithmetic`` and ``padded_width``.
Tiles = Mapping[tuple[str, int], tuple[Tile, ...]]


@dataclass(frozen=True, slots=True)
class Choice:
    """The tiles of a kernel: the usual ones, and others where these would spill registers.

    With dropout, the words of Philox take registers: usual tiles have 8 warps then. sm80 has no wgmma, which reads
    factors from shared memory, and less of that. ``usual`` may name tiles of width 32 too: for heads of up to 32 f32
    elements, but not on sm80, where these tiles would spill.
    """

    usual: Tiles
    dropout: Tiles
    sm80: Tiles

    def of(self, desc: AttendingDescriptor, target: Target | None = None) -> tuple[Tile, ...]:
        known = arithmetic(desc), padded_width(desc)
        if desc.dropout:
            return self.dropout.get(known) or tuple(replace(tile, warps=8) for tile in self.usual[known])
        if target is not None and target.arch is ArchSku.SM80:
            return self.sm80.get(known, self.usual[known])
        if known == ("parts", 64) and max(desc.head_dim, desc.values) <= 32:
            return self.usual.get(("parts", 32), self.usual[known])
        return self.usual[known]


def pointer(o: Operand) -> Ptr:
    """The operand's address, known to be aligned to 16 bytes or to its element. Booleans are read as bytes."""
    element = o.element.bits if o.element is ElementKind.BOOL else o.element
    return Ptr(o.name, element, 16 if o.alignment >= 16 else o.element.itemsize)


def strides(o: Operand) -> tuple[Arg, ...]:
    """Strides of (batch, head, row, element), the last None for 1; of (batch, head, row), which lse has.

    Those of a packed operand are known.
    """
    width = max(16 // o.element.itemsize, 1)
    axes = {"lse": (0, 1, 2), "mask": (0, 1, 2, 3)}.get(o.name, (0, 2, 1, 3))
    unit = o.layout.packed or o.layout.unit_axis == 3
    multiple = o.shape[-1] if o.layout.packed else o.layout.stride_multiple
    known = width if len(axes) == 4 and multiple % width == 0 else 1
    found: list[Arg] = []
    for axis in axes:
        if axis == 3 and unit:
            found.append(None)
        elif o.layout.packed:
            found.append(Int(packed_strides(o.shape)[axis], wide=True, divisibility=known))
        else:
            found.append(Stride(o.name, axis, divisibility=known if unit else 1))
    return tuple(found)


def arguments(desc: AttendingDescriptor, kernel: Any) -> dict[str, Arg]:
    """All arguments of ``kernel`` except constexprs: numbers, and operands with their strides; None for absent ones."""
    whole = desc.queries + desc.keys
    args: dict[str, Arg] = {
        "scale": Scalar("scale", desc.element.compute, desc.head_dim**-0.5),
        "dropout_p": Scalar("dropout_p", ElementKind.F64, 0.0) if desc.dropout else None,
        "softcap": Float(desc.softcap, desc.element.compute),
        "queries": Int(desc.queries),
        "keys": Int(desc.keys),
        "heads": Int(desc.heads),
        "group": Int(desc.group),
        "sequences": None if desc.sequences is None else Int(desc.sequences),
        "shift": None if desc.sequences is not None else Int(desc.shift),
        "left": Int(min(desc.window_left or 0, whole)),
        "right": Int(min(desc.right or 0, whole)),
    }
    operands = {o.name: o for o in desc.operands()}
    for name in kernel.arg_names:
        if name.isupper() or name in args:
            continue
        o = operands.get(name.removesuffix("_strides").removesuffix("_stride"))
        if name.endswith("_stride"):  # of one axis, usually packed
            args[name] = Stride(o.name, 0) if o is not None and not o.layout.packed else None
        else:
            args[name] = None if o is None else strides(o) if name.endswith("_strides") else pointer(o)
    return args


def constants(desc: AttendingDescriptor, tile: Tile, alike: bool = False) -> dict[str, object]:
    """The constexprs that the kernels share. ``alike``: blocks of values are as wide as those of keys."""
    compute = desc.element.compute
    widest = max(desc.head_dim, desc.values)

    def block(width: int) -> int:
        return min(max(ceil_power(width), 16), tile.columns)

    return {
        "HEAD": desc.head_dim,
        "VALUE": desc.values,
        "BLOCK_Q": tile.queries,
        "BLOCK_K": tile.keys,
        "BLOCK_D": block(widest if alike else desc.head_dim),
        "BLOCK_V": block(widest if alike else desc.values),
        "CAPPED": desc.softcap > 0,
        "MASK": None if desc.mask is None else "bool" if desc.mask is ElementKind.BOOL else "float",
        "LEFT": desc.window_left is not None,
        "RIGHT": desc.right is not None,
        "PACKED": None if desc.sequences is None else desc.align,
        "UNIT": 1.0 if compute is ElementKind.F64 else LOG2_E,
        "PARTS": 3 if arithmetic(desc) == "parts" else 1,
        "PRECISION": kind if (kind := arithmetic(desc)).startswith("tf32") else "ieee",
        "ACC": TL[compute],
    }


def tiles_of_rows(desc: AttendingDescriptor, rows: int, tile: int) -> int:
    """Tiles of one head; of packed sequences as ``packed_tiles`` of the kernels counts them."""
    return math.ceil(rows / tile) if desc.sequences is None else rows // tile + desc.sequences + 2


def has_edge(desc: AttendingDescriptor, tile: Tile) -> bool:
    """Whether a tile of keys may end beyond the keys."""
    return desc.sequences is not None or desc.keys % tile.keys > 0


def supports(desc: D, programs_of: Callable[[D], int]) -> Support:
    """Whether 32 bits count positions and programs, and registers hold a head's width."""
    if max(desc.head_dim, desc.values) > MOST_WIDTH:
        return Support.no(f"heads of {desc.head_dim} and {desc.values} elements; it holds up to {MOST_WIDTH}")
    narrow = (ElementKind.BOOL, ElementKind.F32) if desc.dropout else (ElementKind.BOOL,)
    if desc.element is ElementKind.F64 and desc.mask in narrow:
        return Support.no("takes a mask of f64 for f64: Triton's compiler fails where a bool decides an operand of f64")
    if max(desc.queries, desc.keys) >= MOST_LENGTH:
        return Support.no(f"{desc.queries} queries and {desc.keys} keys; it counts fewer than {MOST_LENGTH}")
    if (desc.sequences or 0) >= MOST_LENGTH:
        return Support.no(f"{desc.sequences} sequences; it counts fewer than {MOST_LENGTH}")
    return fits_grid(programs_of(desc))


def pairs(desc: AttendingDescriptor, edge: int) -> float:
    """Pairs of a query and a key that a kernel multiplies, of one head of a batch's entry, without the mask.

    ``edge``: pairs of a row that are multiplied in vain, where blocks end beyond what it sees. Packed sequences are
    taken to be of one length.
    """
    every = desc.queries * desc.keys / max(desc.sequences or 1, 1)
    if desc.right is None and desc.window_left is None:
        return every
    # Bounded on one side: about half of all pairs. With few keys most queries may see all of them.
    if desc.window_left is None or desc.right is None:
        seen = max(every / 2, 1.0) if desc.queries <= 2 * desc.keys else every
    else:
        seen = desc.queries * (desc.window_left + desc.right + 1.0)
    return min(every, seen + desc.queries * edge)


def is_elementwise(o: Operand) -> bool:
    """Whether rows must be read element by element: promises are too weak for 16-byte loads."""
    vector = max(16 // o.element.itemsize, 1)
    multiple = o.shape[-1] if o.layout.packed else o.layout.stride_multiple
    unit = o.layout.packed or o.layout.unit_axis == len(o.shape) - 1
    return not unit or o.alignment < 16 or multiple % vector != 0


def cost_us(desc: AttendingDescriptor, target: Target, products: int, rate: float, tile: int, width: float) -> float:
    """Estimated microseconds of ``products`` matrix products of the problem at ``rate`` TFLOP/s of a whole card.

    ``tile``: queries of a program; fewer programs than multiprocessors leave some idle. ``width``: elements of a head
    with those that pad it, the mean of a key's and a value's.
    """
    work = 2.0 * products * desc.batch * desc.heads * pairs(desc, tile // 2) * width / (rate * TERA_PER_US)
    programs = desc.batch * desc.heads * max(math.ceil(desc.queries / tile), 1)
    sms = target.sm_count
    nbytes = sum(o.nbytes for o in desc.operands() if o.is_tensor and o.name != "mask")
    idle = max(sms / max(programs, 1), 1.0)
    return card.LAUNCH_US + max(work * idle, nbytes / card.BYTES_PER_US)


def reads_elements(desc: AttendingDescriptor) -> bool:
    """Whether kernels by pointers load 2-byte elements one by one."""
    return desc.element.itemsize == 2 and any(is_elementwise(desc.operand(name)) for name in "qkv")


def tiles_cost_us(desc: AttendingDescriptor, target: Target, products: int, rates: Rates, tile: int) -> float:
    """``cost_us`` of the kernels that read through pointers."""
    width = max((ceil_power(desc.head_dim) + ceil_power(desc.values)) / 2, 16.0)
    rate = rates[arithmetic(desc)].get(target.arch, 1.0)
    if reads_elements(desc):
        rate /= ELEMENTWISE[products]
        width += ELEMENTWISE_COLUMNS[products]
    return cost_us(desc, target, products, rate, tile, width)
