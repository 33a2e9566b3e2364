"""The dimensions of a copy, merged as far as maps and layouts allow, and its operands as kernel arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import triton.language as tl

from triplan.backends.runtime.launch import Arg, Int, Ptr, Scalar, power_of_two_in
from triplan.backends.table import kernel
from triplan.backends.triton.common import bounds
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.offsets import I32_LIMIT, TL, divisor, ranked
from triplan.backends.triton.common.strides import Along, continues, in_memory, known_strides, stride_arg
from triplan.backends.triton.copies.moves_kernels import FLIP, PAD, ROLL
from triplan.descriptors import CopyDescriptor, PadDescriptor
from triplan.descriptors.copies import MoveDescriptor
from triplan.sku import ElementKind, PrecisionGuarantee, Support, Target
from triplan.sku.facts import fact

BOOL, I8, F32, F64 = ElementKind.BOOL, ElementKind.I8, ElementKind.F32, ElementKind.F64
ELEMENTS = tuple(e for e in ElementKind if not e.value.startswith("fp8"))
OPS = (*CopyDescriptor.ops(), *PadDescriptor.ops())
#: Elements that Triton's language does not name in ``offsets.TL``.
TYPES = {**TL, ElementKind.F16: tl.float16, ElementKind.BF16: tl.bfloat16, ElementKind.U8: tl.uint8, BOOL: tl.int1}
#: The kernels' number for each map of positions.
MAPS = {"flip": FLIP.value, "roll": ROLL.value, "pad": PAD.value}


class Dim(NamedTuple):
    """A dimension of the result.

    Attributes:
        size: its extent.
        map: how the op maps positions along it: a value of MAPS, or 0 for the identity.
        amount: the map's parameter (shift of a roll, elements before x of a pad).
        extent: extent of x along it.
        x, out: strides of x and out along it; 0 where x is broadcast.
    """

    size: int
    map: int
    amount: int
    extent: int
    x: int | Along
    out: int | Along


@fact
def dims(desc: MoveDescriptor) -> tuple[Dim, ...]:
    """The dimensions, innermost last. Adjacent ones without a map are merged where both tensors' strides allow it.

    They are in the order of out's memory, as far as it is known: where it has unit stride is innermost. tril and triu
    keep rows and columns separate; where out is contiguous along its rows' numbers, the two exchange their roles (see
    ``is_exchanged``).
    """
    x, out = desc.operand("x"), desc.operand("out")
    rank, triangle = len(x.shape), desc.op in ("tril", "triu")
    found = []
    for a, (n, s, t) in enumerate(zip(out.shape, known_strides(x, rank), known_strides(out, rank), strict=True)):
        extent, amount, map_ = x.shape[a], 0, 0
        if desc.op == "pad" and any(desc.by_axis[2 * a : 2 * a + 2]):
            map_, amount = MAPS["pad"], desc.by_axis[2 * a]
        elif desc.op in ("flip", "roll") and extent > 1 and desc.by_axis[a] % extent:
            map_, amount = MAPS[desc.op], desc.by_axis[a] % extent
        if n != 1 or map_ or (triangle and a >= rank - 2):
            found.append(Dim(n, map_, amount, extent, s, t))
    if triangle:
        outer, matrix = found[:-2], found[-2:]
        return (*_merged(outer), *(matrix[::-1] if is_exchanged(desc) else matrix))
    found.sort(key=lambda d: in_memory(d.out))
    return _merged(found)


def is_exchanged(desc: MoveDescriptor) -> bool:
    """Whether tril or triu is computed of the transposed matrices: ``c - r <= d`` is ``r - c >= -d``."""
    out = desc.operand("out")
    rank = len(out.shape)
    return desc.op in ("tril", "triu") and known_strides(out, rank)[rank - 2] == 1 != known_strides(out, rank)[rank - 1]


def _merged(found: Sequence[Dim]) -> tuple[Dim, ...]:
    merged: list[Dim] = []
    for d in found:
        outer = merged[-1] if merged else d
        plain = bool(merged) and not outer.map and not d.map
        if plain and continues((outer.x, outer.out), (d.x, d.out), d.size):
            merged[-1] = Dim(outer.size * d.size, 0, 0, outer.size * d.size, d.x, d.out)
        else:
            merged.append(d)
    return tuple(merged)


BLANK = Dim(1, 0, 0, 1, 0, 0)


def inner(desc: MoveDescriptor) -> Dim:
    """The innermost dimension."""
    return (dims(desc) or (BLANK,))[-1]


def is_wide(desc: MoveDescriptor) -> bool:
    """Whether points need 64-bit numbers."""
    return max(desc.operand("x").numel, desc.operand("out").numel) >= I32_LIMIT


def dim_arg(desc: MoveDescriptor, d: Dim, size: Arg | None = None, wide_strides: bool = True) -> tuple[Arg, ...]:
    """A dimension as the tuple that the kernels take; known strides have 64 bits if ``wide_strides``."""
    wide = is_wide(desc)
    return (
        size or Int(d.size, wide, power_of_two_in(d.size)),
        Int(d.amount, wide, power_of_two_in(d.amount)),
        Int(d.extent, wide, power_of_two_in(d.extent)),
        stride_arg(desc.operand("x"), d.x, wide_strides),
        stride_arg(desc.operand("out"), d.out, wide_strides),
    )


def flat_arg(desc: MoveDescriptor, d: Dim) -> tuple[Arg, ...]:
    """A dimension as ``flat_kernel`` takes it: offsets have 32 bits where strides are known."""
    size, amount, extent, *_ = dim_arg(desc, d, divisor(d.size, False))
    return size, amount, extent, stride_arg(desc.operand("x"), d.x, False)


def outer_args(desc: MoveDescriptor, outer: Sequence[Dim]) -> tuple[Arg, tuple[int, ...]]:
    """The kernels' arguments (``dims``, ``MAPS``), innermost first; None without dimensions: each argument that a
    launch passes takes the host time."""
    found = ranked(outer, BLANK)
    dims = tuple(dim_arg(desc, d, divisor(d.size, is_wide(desc))) for d in found)
    return dims if outer else None, tuple(d.map for d in found)


def converts(desc: MoveDescriptor) -> str:
    """The kernels' constant CAST."""
    if desc.result is desc.element:
        return "none"
    if desc.result is BOOL:
        return "bool"
    return "f32" if desc.result.compute is not desc.result and desc.element is not F32 else "direct"


def base_args(desc: MoveDescriptor) -> dict[str, Arg]:
    """The arguments ``x``, ``value``, ``out`` and ``diagonal``. Without a conversion, elements are moved as integers of
    their width, so that elements of one width share binaries."""

    def pointer(name: str) -> Ptr:
        o = desc.operand(name)
        element = o.element.bits if converts(desc) == "none" else I8 if o.element is BOOL else o.element
        return Ptr(name, element, o.alignment)

    value = next((o for o in desc.operands() if o.name == "value"), None)
    diagonal = None
    if desc.op in ("tril", "triu"):  # beyond the numbers of points nothing changes
        wide, sign = is_wide(desc), -1 if is_exchanged(desc) else 1
        most = 2 ** (63 if wide else 31) - 1
        diagonal = Int(sign * min(max(desc.by_axis[0], -most), most), wide)
    return {
        "x": pointer("x"),
        "value": None if value is None else Scalar("value", value.element, 0),
        "out": pointer("out"),
        "diagonal": diagonal,
    }


def constants(desc: MoveDescriptor) -> dict[str, Any]:
    return {
        "TRIANGLE": {"tril": 1, "triu": -1}.get(desc.op, 0) * (-1 if is_exchanged(desc) else 1),
        "VALUE_TYPE": TYPES[desc.element] if desc.op == "pad" else None,
        "CAST": converts(desc),
        "POINT_TYPE": tl.int64 if is_wide(desc) else tl.int32,
    }


def bytes_us(desc: MoveDescriptor, slowdown: float) -> float:
    """Estimated microseconds of a copy, ``slowdown`` times as slow as that of packed operands."""
    out = desc.operand("out")
    moved = out.nbytes + min(desc.operand("x").numel, out.numel) * desc.element.itemsize
    return LAUNCH_US + slowdown * moved / BYTES_PER_US


@fact
def guarantee(desc: MoveDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """Exact where bits are moved. A conversion rounds each element separately, at most twice: to f32, then to out."""
    element, out = desc.element, desc.result
    if out is element or not out.is_floating_point:
        return {"out": PrecisionGuarantee.exact(out)}
    roundings = F32.unit_roundoff if converts(desc) == "f32" else 0.0
    tolerance = bounds.tolerance(out, F64, relative=roundings)
    return {"out": bounds.guarantee(out.compute, tolerance, batch=True, order=True)}


def numerics(desc: MoveDescriptor) -> str:
    """The numerics id, the same for all kernels: all move the same bits and convert in the same way."""
    return f"copies.{desc.op}.{desc.element}.{desc.result}.v1"


def layout(desc: MoveDescriptor) -> str:
    return "packed" if all(o.layout.packed for o in desc.operands() if o.is_tensor) else "strided"


def copies(
    name: str, supports: Callable[[Any, Target], Support], rank: Callable[[Any, Target], float]
) -> Callable[[Any], Any]:
    """Register the decorated function, which builds the launches, as the entry ``name`` of every copy op."""

    def register(build: Any) -> Any:
        for op in OPS:
            how: dict[str, Any] = {"guarantee": guarantee, "numerics": numerics, "layout": layout}
            kernel(op=op, name=name, elements=ELEMENTS, supports=supports, rank=rank, **how)(build)
        return build

    return register
