"""Kernel ``tiles``: each program rotates a tile of heads of neighbouring tokens, of q or of k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from triplan.backends.runtime.launch import Arg, Float, Int, Launch, Ptr, Scalar, Stride, power_of_two_in
from triplan.backends.table import kernel
from triplan.backends.triton.common import bounds
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.fill import fill_launch
from triplan.backends.triton.common.offsets import I32_LIMIT, TL, ceil_power, values
from triplan.backends.triton.rotary import tiles_kernels as kernels
from triplan.descriptors import Operand, RotaryDescriptor, packed_strides
from triplan.descriptors.fields import NO_BAD_INDEX
from triplan.sku import SUPPORTED, ElementKind, PrecisionGuarantee, Support, Target

#: Bytes of a head's rotated elements in a program, and its most heads. Untuned.
TILE_BYTES = 8192
MOST_HEADS = 8
#: Bytes of the first elements of pairs that a thread holds, as they are computed. Untuned.
THREAD_BYTES = 64
#: Elements of a head at most: one program holds all of them.
MOST_ELEMENTS = 4096
#: Roundings of a product of a sum: CUDA's cosf and sinf are within 2 units in the last place ("CUDA C++ Programming
#: Guide", mathematical functions), which are 4 roundings; then scale, the product and the sum.
ROUNDINGS = {False: 2, True: 4 + 3}
TENSORS = ("q", "q_out", "k", "k_out", "cos", "sin", "inv_freq", "positions")


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program rotates: ``tokens`` x ``heads``, in ``warps`` warps."""

    tokens: int
    heads: int
    warps: int


def guarantee(desc: RotaryDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """Each result depends on one pair alone, so neither batch nor order changes its bits."""
    compute = desc.element.compute
    roundings = ROUNDINGS[desc.table_rows is None]
    if compute is ElementKind.F64:
        roundings += ROUNDINGS[True]  # the float64 oracle's own roundings
    return bounds.of_outputs(desc, bounds.rounded(desc.element, compute, 0, roundings, batch=True, order=True))


def applies(desc: RotaryDescriptor, target: Target) -> Support:
    if desc.q_shape[3] > MOST_ELEMENTS:
        return Support.no(f"heads of {desc.q_shape[3]} elements; takes {MOST_ELEMENTS} or fewer")
    programs = sum(_counts(desc, _tile(desc))[1:]) * _counts(desc, _tile(desc))[0]
    return SUPPORTED if programs < 2**31 else Support.no(f"needs {programs} programs; a grid holds fewer than 2**31")


def rank(desc: RotaryDescriptor, target: Target) -> float:
    return LAUNCH_US + sum(o.nbytes for o in desc.operands() if o.name in TENSORS[:4]) / BYTES_PER_US


def numerics(desc: RotaryDescriptor) -> str:
    return f"rotary.{desc.element}.{'angles' if desc.table_rows is None else 'table'}.v1"


def layout(desc: RotaryDescriptor) -> str:
    return "packed" if all(o.layout.packed for o in desc.operands()) else "strided"


def _tile(desc: RotaryDescriptor) -> Tile:
    pairs = max(ceil_power(desc.half), ceil_power(desc.q_shape[3] - 2 * desc.half) // 2)
    rows = max(TILE_BYTES // (2 * desc.element.itemsize * pairs), 1)
    heads = min(ceil_power(max(desc.q_shape[2], desc.k_heads or 0)), MOST_HEADS, rows)
    warps = rows * pairs * desc.element.compute.itemsize // (32 * THREAD_BYTES)
    return Tile(rows // heads, heads, min(max(warps, 1), 16))


def _counts(desc: RotaryDescriptor, tile: Tile) -> tuple[int, int, int]:
    """(blocks of tokens, groups of q's heads, of k's)."""
    batch, sequence, q_heads, _ = desc.q_shape
    return -(-batch * sequence // tile.tokens), -(-q_heads // tile.heads), -(-(desc.k_heads or 0) // tile.heads)


def _groups_first(desc: RotaryDescriptor) -> bool:
    """Whether neighbouring programs are to work on other heads of the same tokens, which then lie side by side."""
    return desc.operand("q").layout.packed


def _strides(o: Operand | None) -> tuple[Arg, ...] | None:
    """The strides along all axes; None for a last one that is 1."""
    if o is None:
        return None
    last, known = len(o.shape) - 1, packed_strides(o.shape)

    def along(axis: int) -> Arg:
        if o.layout.packed:
            return None if axis == last else Int(known[axis], True, power_of_two_in(known[axis]))
        if axis in o.layout.zero_axes:
            return Int(0, True, 16)
        if axis == o.layout.unit_axis:
            return None
        return Stride(o.name, axis, divisibility=o.layout.stride_multiple)

    return tuple(along(axis) for axis in range(last + 1))


@kernel(
    op="rotary",
    name="tiles",
    elements=("f16", "bf16", "f32", "f64"),
    index_elements=("i32", "i64"),
    guarantee=guarantee,
    supports=applies,
    rank=rank,
    numerics=numerics,
    layout=layout,
)
def tiles(desc: RotaryDescriptor, target: Target) -> list[Launch]:
    status = Ptr("status", ElementKind.I64, 8) if desc.out_of_bounds == "error" else None
    before = [] if status is None else [fill_launch(status, 1, NO_BAD_INDEX)]
    batch, sequence, q_heads, length = desc.q_shape
    tile = _tile(desc)
    blocks, of_q, of_k = _counts(desc, tile)
    if status is not None:
        of_q = max(of_q, 1)  # somebody must look at the positions
    if not blocks * (of_q + of_k):
        return before
    operands = {o.name: o for o in desc.operands()}
    tokens, rest = batch * sequence, length - 2 * desc.half
    wide = tokens >= I32_LIMIT
    args: dict[str, Arg] = {}
    for name in TENSORS:
        args[name] = values(operands[name]) if name in operands else None
        args[f"{name}_strides"] = _strides(operands.get(name))
    args |= {
        "status": status,
        "tokens": Int(tokens, wide),
        "sequence": Int(sequence, wide),
        "q_heads": Int(q_heads, q_heads >= I32_LIMIT),
        "k_heads": Int(desc.k_heads or 0, (desc.k_heads or 0) >= I32_LIMIT),
        "half": Int(desc.half, False, power_of_two_in(desc.half)),
        "rest": Int(rest, False, power_of_two_in(rest)),
        "table_rows": Int(desc.table_rows or 0, (desc.table_rows or 0) >= 2**31),
        "blocks": Int(blocks),
        "q_groups": Int(of_q),
        "groups": Int(of_q + of_k),
        "sign": Float(-1.0 if desc.inverse else 1.0, desc.element.compute),
        "scale": Scalar("scale", desc.element.compute, 1) if "scale" in operands else None,
    }
    constants = {
        "COMPUTE": TL[desc.element.compute],
        "TOKENS": tile.tokens,
        "HEADS": tile.heads,
        "BLOCK": ceil_power(desc.half),
        "REST": ceil_power(rest) if rest else 0,
        "INTERLEAVED": desc.pairs == "interleaved",
        "CLAMP": desc.out_of_bounds == "clamp",
        "GROUPS_FIRST": _groups_first(desc),
    }
    return [*before, Launch(kernels.rotary_kernel, blocks * (of_q + of_k), args, constants, num_warps=tile.warps)]
