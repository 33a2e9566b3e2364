"""Operands of attention as kernel arguments, and tiles of the kernels that read through pointers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from triplan.backends.runtime.launch import Arg, Float, Int, Ptr, Scalar, Stride
from triplan.backends.triton.attention.parts_kernels import columns_at
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
#: log2(e): scores are in base-2 logarithms.
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries and keys of a step, how a program computes them, and columns of a head that it multiplies at a time.

    Chunks of 64 columns take fewer registers than whole heads, and the last one of a head is no wider than it must be.
    ``lean``: of dq, that values and keys take turns in shared memory.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    columns: int = 64
    lean: bool = False


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
    factors from shared memory, and less of that. ``usual`` may name tiles of other widths than ``padded_width``'s, for
    heads that are no wider; but not on sm80, whose registers or shared memory would not hold them.
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
        least = max(desc.head_dim, desc.values)
        return self.usual[known[0], min(w for kind, w in self.usual if kind == known[0] and w >= least)]


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


def blocks_of(desc: AttendingDescriptor, tile: Tile, alike: bool) -> tuple[int, int]:
    """Columns of a block of keys and of values. ``alike``: see ``constants``."""
    widths = desc.head_dim, desc.values
    key, value = (min(max(ceil_power(max(widths) if alike else n), 16), tile.columns) for n in widths)
    return key, value


def columns_of(desc: AttendingDescriptor, tile: Tile, alike: bool = False) -> tuple[int, int]:
    """Columns of a key and of a value that count in costs: those which multiply; but of halves in heads of up to 128,
    whose paces were measured without chunks, powers of two."""
    if desc.element.itemsize == 2 and padded_width(desc) <= 128:
        tile = replace(tile, columns=MOST_WIDTH)
    of_keys, of_values = blocks_of(desc, tile, alike)
    return _columns(desc.head_dim, of_keys), _columns(desc.values, of_values)


def _columns(width: int, block: int) -> int:
    """Columns of all chunks of a head."""
    return sum(columns_at(first, width, block) for first in range(0, width, block))


def constants(desc: AttendingDescriptor, tile: Tile, alike: bool = False) -> dict[str, object]:
    """The constexprs that the kernels share. ``alike``: blocks of values are as wide as those of keys."""
    compute = desc.element.compute
    block_d, block_v = blocks_of(desc, tile, alike)
    return {
        "HEAD": desc.head_dim,
        "VALUE": desc.values,
        "BLOCK_Q": tile.queries,
        "BLOCK_K": tile.keys,
        "BLOCK_D": block_d,
        "BLOCK_V": block_v,
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


def is_elementwise(o: Operand) -> bool:
    """Whether rows must be read element by element: promises are too weak for 16-byte loads, or one reaches beyond the
    head, whose elements have masks of their own then."""
    vector = max(16 // o.element.itemsize, 1)
    step = 0 if o.layout.packed else o.layout.stride_multiple
    unit = o.layout.packed or o.layout.unit_axis == len(o.shape) - 1
    return not unit or o.alignment < 16 or o.shape[-1] % vector != 0 or step % vector != 0
