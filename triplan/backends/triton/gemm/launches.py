"""From a matrix product to launches: tiles, strides, and what is known of them when planning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import triton.language as tl

from triplan.backends.runtime.launch import Arg, Int, Launch, Ptr, Scalar, Stride
from triplan.backends.triton.gemm import tiles_kernels as kernels
from triplan.backends.triton.gemm.costs import BYTES_PER_US as BYTES_PER_US
from triplan.backends.triton.gemm.costs import LAUNCH_US as LAUNCH_US
from triplan.backends.triton.gemm.costs import pointers_us
from triplan.descriptors import MatrixProductDescriptor, Operand
from triplan.sku import ElementKind, MathPrecision, Target

ACTIVATIONS = {
    "identity": kernels.identity,
    "relu": kernels.relu,
    "gelu": kernels.gelu,
    "silu": kernels.silu,
}
#: Rows of tiles whose programs run together: with 128 rows a tile, 8 by 16 of them fill a card and share its L2 cache.
GROUP_M = 8
#: What is less is counted in 31 bits: a counter passes its bound by up to a step.
COUNTED = 2**31 - 2**9


@dataclass(frozen=True, slots=True)
class Tile:
    """Block extents, warps a program, and how many steps of k are on their way at a time."""

    m: int
    n: int
    k: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k} w{self.warps} s{self.stages}"

    @property
    def accumulators(self) -> int:
        """Of one thread."""
        return self.m * self.n // (32 * self.warps)

    def shared_bytes(self, itemsize: int) -> int:
        return (self.m + self.n) * self.k * itemsize * self.stages


#: By what is multiplied and where. The largest are what the tensor cores' feed from shared memory asks for; the others
#: fill the card with smaller problems; those of 16 rows are for a few rows of A, where B streams through once.
_SMALL = (
    Tile(64, 64, 64, 4, 4),
    Tile(64, 64, 128, 4, 4),
    Tile(32, 64, 128, 4, 4),
    Tile(16, 64, 128, 4, 4),
    Tile(16, 32, 128, 4, 4),
    Tile(16, 32, 256, 4, 4),
)
NARROW = {
    "sm80": (Tile(128, 128, 32, 8, 4), Tile(64, 128, 32, 4, 4), *_SMALL),
    "sm90a": (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 3), Tile(64, 128, 64, 4, 4), *_SMALL),
    "cpu": (Tile(64, 128, 64, 4, 4), *_SMALL),
}
TF32 = (Tile(128, 128, 32, 8, 3), Tile(64, 64, 32, 4, 4), Tile(16, 64, 32, 4, 4))
BYTES = (Tile(128, 128, 64, 8, 3), Tile(64, 64, 64, 4, 4), Tile(16, 64, 128, 4, 4))
#: Without tensor cores an operand's registers bound the tile.
F32 = (Tile(64, 64, 16, 4, 3), Tile(32, 32, 32, 4, 3), Tile(16, 32, 32, 4, 3))
F64 = (Tile(64, 64, 16, 8, 3), Tile(32, 32, 16, 2, 3))
#: Where elements are read or written one by one, each has an address of its own, of two registers.
SCATTERED = (Tile(64, 64, 32, 4, 3), Tile(16, 64, 64, 4, 3))
#: Accumulators a thread beside which the temporaries of an error function, or as many elements of C0 or addresses of a
#: second result, do not spill; and beside such addresses.
CROWDED_ACCUMULATORS, SCATTERED_ACCUMULATORS = 64, 32


def scattered(desc: MatrixProductDescriptor) -> bool:
    """Whether any matrix is promised no unit stride."""
    return any(leading(o)[0] is None for o in desc.operands() if len(o.shape) > 1)


def by_elements(o: Operand) -> bool:
    """Whether a matrix is read element by element: too little is promised, or its lines end within a vector."""
    unit, multiple = leading(o)
    width = vector(o.element.itemsize)
    return unit is None or o.alignment < 16 or bool(multiple % width or o.shape[unit - 2] % width)


def reads_apart(desc: MatrixProductDescriptor) -> bool:
    """Whether elements have addresses of their own: of any matrix of no unit stride, and of factors read one by one."""
    return scattered(desc) or any(by_elements(desc.operand(name)) for name in "ab")


def most_accumulators(desc: MatrixProductDescriptor, apart: bool) -> int:
    """Of a thread, beside which nothing spills; ``apart``: elements have addresses of their own."""
    if apart:
        return SCATTERED_ACCUMULATORS
    return CROWDED_ACCUMULATORS if desc.activation == "gelu" or desc.reads_c0 or desc.saves_pre else 128


def tiles_of(desc: MatrixProductDescriptor, target: Target) -> tuple[Tile, ...]:
    """The tiles that suit ``desc``, and fit ``target``."""
    return tiles_for(desc, target, reads_apart(desc))


def tiles_for(desc: MatrixProductDescriptor, target: Target, apart: bool) -> tuple[Tile, ...]:
    """Those for the element, the multiplicands and ``most_accumulators`` of ``desc``."""
    size = desc.element.itemsize
    found: tuple[Tile, ...]
    if apart and size <= 2:
        found = SCATTERED
    elif size == 2:
        found = NARROW[str(target.arch)]
    elif size == 1:
        found = BYTES
    elif desc.multiplicands is MathPrecision.TF32X3:
        found = TF32[1:]  # both parts of each operand lie in registers
    elif desc.multiplicands is MathPrecision.TF32:
        found = TF32
    else:
        found = F32 if desc.element is ElementKind.F32 else F64
    most = most_accumulators(desc, apart)
    return tuple(
        t
        for t in found
        if t.accumulators <= most and (not target.is_gpu or t.shared_bytes(size) <= target.shared_memory)
    )


# --- what a tile costs ---


def programs_of(desc: MatrixProductDescriptor, tile: Tile) -> int:
    """One a tile of each product."""
    return math.prod(desc.lead) * -(-desc.m // tile.m) * -(-desc.n // tile.n)


def tile_us(desc: MatrixProductDescriptor, tile: Tile, target: Target, pieces: int = 1) -> float:
    """Estimated microseconds of one kernel by pointers, with k in so many pieces."""
    return pointers_us(desc, tile, leading(desc.operand("b"))[0] == 1, target, pieces)


@lru_cache(maxsize=4096)
def chosen_tile(desc: MatrixProductDescriptor, target: Target) -> Tile:
    """The cheapest tile."""
    return min(tiles_of(desc, target), key=lambda t: (tile_us(desc, t, target), t.m * t.n))


# --- arguments ---


def vector(itemsize: int) -> int:
    """Elements of a 16-byte load."""
    return max(16 // itemsize, 1)


def extent(value: int, itemsize: int) -> Int:
    """``value`` with what vector loads under a mask need to know of it, in three degrees: few binaries."""
    known = next(d for d in (16, vector(itemsize), 1) if value % d == 0)
    return Int(value, wide=value >= COUNTED, divisibility=known)


def pointer(o: Operand) -> Ptr:
    return Ptr(o.name, o.element, 16 if o.alignment >= 16 else o.element.itemsize)


def leading(o: Operand) -> tuple[int | None, int]:
    """(the axis of unit stride, 0 for rows and 1 for columns, or None; what the other stride is known to be a multiple
    of) of a matrix, or of each in a batch."""
    columns = o.shape[-1]
    if o.layout.packed:
        return 1, columns & -columns if columns else 16
    first = len(o.shape) - 2
    unit = o.layout.unit_axis
    return None if unit is None or unit < first else unit - first, o.layout.stride_multiple


def strides(o: Operand | None, names: Sequence[str]) -> tuple[dict[str, Arg], dict[str, int]]:
    """Arguments and constexprs of a matrix's strides (``names``: rows, columns, batch). Unit stride is compiled in."""
    if o is None:
        return dict.fromkeys(names), {}
    unit, multiple = leading(o)
    first = len(o.shape) - 2
    divisibility = 16 // o.element.itemsize if multiple % vector(o.element.itemsize) == 0 else 1
    args: dict[str, Arg] = {}
    constants: dict[str, int] = {}
    for axis, name in zip((first, first + 1, 0), names, strict=True):
        if name == names[2] and first == 0:
            args[name] = None
        elif axis == (None if unit is None else unit + first):
            constants[name] = 1
        elif axis in o.layout.zero_axes:
            constants[name] = 0
        elif o.layout.packed:
            stride = math.prod(o.shape[axis + 1 :])
            args[name] = Int(stride, wide=True, divisibility=divisibility)
        else:
            args[name] = Stride(o.name, axis, divisibility=divisibility)
    return args, constants


def vector_stride(o: Operand | None, name: str) -> tuple[dict[str, Arg], dict[str, int]]:
    """The same for a vector."""
    if o is None:
        return {name: None}, {}
    if o.layout.packed or o.layout.unit_axis == 0:
        return {}, {name: 1}
    return ({}, {name: 0}) if o.layout.zero_axes else ({name: Stride(o.name, 0)}, {})


def epilogue_arguments(desc: MatrixProductDescriptor) -> tuple[dict[str, Arg], dict[str, Any]]:
    """What every kernel's epilogue takes: arguments and constexprs."""
    o = {operand.name: operand for operand in desc.operands()}
    compute = desc.sums
    one = 1.0 if compute.is_floating_point else 1
    c, c_known = strides(o["c"], ("cm", "cn", "c_batch"))
    c0, c0_known = strides(o.get("c0"), ("c0m", "c0n", "c0_batch"))
    pre, pre_known = strides(o.get("pre"), ("prem", "pren", "pre_batch"))
    along, along_known = vector_stride(o.get("bias"), "bias_n")
    args: dict[str, Arg] = {
        "c0": pointer(o["c0"]) if "c0" in o else None,
        "bias": pointer(o["bias"]) if "bias" in o else None,
        "alpha": Scalar("alpha", compute, one),
        "beta": Scalar("beta", compute, one) if "c0" in o else None,
        **c,
        "pre": pointer(o["pre"]) if "pre" in o else None,
        **c0,
        **pre,
        **along,
    }
    return args, {**c_known, **c0_known, **pre_known, **along_known, "ACTIVATION": ACTIVATIONS[desc.activation]}


def product_arguments(desc: MatrixProductDescriptor, tile: Tile) -> tuple[dict[str, Arg], dict[str, Any]]:
    """What every kernel that multiplies by pointers takes: arguments and constexprs."""
    a, b = desc.operand("a"), desc.operand("b")
    of_a, a_known = strides(a, ("am", "ak", "a_batch"))
    of_b, b_known = strides(b, ("bk", "bn", "b_batch"))
    tf32 = desc.multiplicands in (MathPrecision.TF32, MathPrecision.TF32X3)
    size = desc.element.itemsize
    args: dict[str, Arg] = {
        "a": pointer(a),
        "b": pointer(b),
        "m": extent(desc.m, size),
        "n": extent(desc.n, size),
        "k": extent(desc.k, size),
        **of_a,
        **of_b,
    }
    return args, {
        **a_known,
        **b_known,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "GROUP_M": GROUP_M,
        "WHOLE_K": desc.k % tile.k == 0,
        "PRECISION": str(desc.multiplicands) if tf32 else "ieee",
        "ACC": accumulator(desc),
    }


#: As many as there are. Where shared memory bounds how many programs a multiprocessor holds, fewer are of no use; and
#: ptxas gives these multiplicands too few by itself.
MAX_REGISTERS = 255
UNHURRIED = (MathPrecision.EXACT, MathPrecision.TF32X3)
#: Bytes of shared memory that any multiprocessor has at most.
SHARED = 227 << 10


def roomy(desc: MatrixProductDescriptor, tile: Tile) -> bool:
    """Whether two programs of four warps are all that shared memory has room for: then registers never bound them."""
    return tile.warps == 4 and 3 * tile.shared_bytes(desc.element.itemsize) > SHARED


def crowded(desc: MatrixProductDescriptor) -> bool:
    """Whether ptxas spills a few registers, under one Triton or another, to fit a second program of eight warps."""
    return desc.multiplicands is MathPrecision.F32 and leading(desc.operand("b"))[0] == 0


def accumulator(desc: MatrixProductDescriptor) -> Any:
    return {ElementKind.F64: tl.float64, ElementKind.I32: tl.int32}.get(desc.sums, tl.float32)


def tiles_launch(desc: MatrixProductDescriptor, tile: Tile) -> list[Launch]:
    """``tiles_kernel`` with tiles of one kind; nothing for an empty C."""
    if desc.operand("c").numel == 0:
        return []
    args, constants = product_arguments(desc, tile)
    of_c, c_known = epilogue_arguments(desc)
    unhurried = desc.multiplicands in UNHURRIED or crowded(desc) or reads_apart(desc)
    return [
        Launch(
            kernels.tiles_kernel,
            programs_of(desc, tile),
            {"c": pointer(desc.operand("c")), **args, **of_c},
            {**constants, **c_known},
            num_warps=tile.warps,
            num_stages=tile.stages,
            max_registers=MAX_REGISTERS if unhurried or roomy(desc, tile) else None,
        )
    ]
