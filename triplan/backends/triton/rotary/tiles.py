"""Kernel ``tiles``: each program rotates a tile of heads of neighbouring tokens, of q or of k, or copies one of v."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from triplan.backends.runtime.launch import Arg, Float, Int, Launch, Ptr, Scalar, Stride, power_of_two_in
from triplan.backends.table import kernel
from triplan.backends.triton.common import bounds
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US, MAX_THREAD_REGISTERS
from triplan.backends.triton.common.fill import fill_launch
from triplan.backends.triton.common.offsets import I32_LIMIT, TL, bits, ceil_power, layout, values
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.rotary import tiles_kernels as kernels
from triplan.descriptors import (
    CachedRotaryDescriptor,
    NormedRotaryDescriptor,
    Operand,
    RotaryDescriptor,
    packed_strides,
)
from triplan.descriptors.fields import NO_BAD_INDEX
from triplan.descriptors.rotary import AnyRotaryDescriptor
from triplan.sku import Duplicates, ElementKind, PrecisionGuarantee, Support, Target

#: Heads of a tile, at most. (A program has WARPS warps, unless heads are long.) On an H200, of programs with tables,
#: those of one such tile were the fastest, almost as fast as a copy; of 1 or 2 heads, or of several tiles, slower. Half
#: of f64, which take twice the registers.
HEADS = 4
WARPS = 4
#: The longest head, in elements: a program holds whole heads.
MOST_ELEMENTS = 4096
#: Roundings of each of the two products of a result, by whether the kernel computes the angles. False (tables): the
#: product and the sum. True: also the scale, and 4 for cos or sin, which are within 2 units in the last place: those of
#: f64 by "CUDA C++ Programming Guide", mathematical functions; of f32 by the errors of reduction and polynomials.
ROUNDINGS = {False: 2, True: 4 + 3}
#: The operands that are tensors of heads, and are rotated.
TENSORS = ("q", "q_out", "k", "k_out", "k_cache")


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program rotates: ``tokens`` x ``heads``, in ``warps`` warps."""

    tokens: int
    heads: int
    warps: int


def guarantee(desc: AnyRotaryDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """A rotation depends on one pair alone, so neither batch nor order changes its bits. A norm sums over its head, in
    an order that the tile and the promised layouts determine.

    A norm adds roundings: at most one each for the product and the sum of squares, and those of mean and eps, all of
    which the root halves; 4 for the root (2 units in the last place), and the products with rstd and weight.

    Of tokens with the same slot, any one may stay in a cache.
    """
    return promised(desc, numerics(desc) is not None, Duplicates.ANY)


def promised(desc: AnyRotaryDescriptor, batch: bool, duplicates: Duplicates) -> Mapping[str, PrecisionGuarantee]:
    """The guarantee, given whether it is ``batch`` invariant, and which of the ``duplicates`` of a slot stays."""
    compute, wide = desc.element.compute, desc.element.compute is ElementKind.F64
    normed, length = desc.normed, desc.q_shape[3]
    rotated = ROUNDINGS[desc.table_rows is None] + (ROUNDINGS[True] if wide else 0)  # f64: the oracle's roundings too
    rstd = ((length + 3) // 2 + 4) * (2 if wide else 1)
    order = not (normed or isinstance(desc, CachedRotaryDescriptor))
    found = {}
    for o in desc.operands():
        if o.name == "status":
            found[o.name] = PrecisionGuarantee.exact(ElementKind.I64)
        elif o.name == "v_cache":
            found[o.name] = bounds.stored(o.element, duplicates)
        elif o.is_written:
            relative, per_term = (rstd, 0) if o.name.endswith("_rstd") else (0, rotated + (rstd + 4) * normed)
            which = duplicates if o.name == "k_cache" else None
            found[o.name] = bounds.rounded(
                o.element, compute, relative, per_term, batch=batch, order=order, duplicates=which
            )
    return found


def applies(desc: AnyRotaryDescriptor, target: Target) -> Support:
    if desc.q_shape[3] > MOST_ELEMENTS:
        return Support.no(f"heads of {desc.q_shape[3]} elements; it takes up to {MOST_ELEMENTS}")
    v_dim = _columns(desc)
    if v_dim > MOST_ELEMENTS:
        return Support.no(f"values of {v_dim} elements; it takes up to {MOST_ELEMENTS}")
    tensors = 3 if v_dim else 2
    heads = desc.q_shape[2] + (tensors - 1) * (desc.k_heads or 0)
    return fits_grid(_blocks(desc, _tile(desc)) * (heads // _tile(desc).heads + tensors))


def rank(desc: AnyRotaryDescriptor, target: Target) -> float:
    """What is read is written, of caches as much as of k and v."""
    moved = 2 * sum(o.nbytes for o in desc.operands() if o.name in ("q", "k", "v"))
    return LAUNCH_US + moved / BYTES_PER_US


def _columns(desc: AnyRotaryDescriptor) -> int:
    """Elements of a head of v; 0 without a cache."""
    return desc.operand("v").shape[3] if isinstance(desc, CachedRotaryDescriptor) else 0


def numerics(desc: AnyRotaryDescriptor) -> str | None:
    """None with a cache, as no two plans need agree on which of several writes stays."""
    return None if isinstance(desc, CachedRotaryDescriptor) else numerics_of(desc)


def numerics_of(desc: AnyRotaryDescriptor) -> str:
    """What the bits of a head depend on, if it is the only one that is written where it is."""
    name = f"{desc.op}.{desc.element}.{'angles.v2' if desc.table_rows is None else 'table.v1'}"
    if not isinstance(desc, NormedRotaryDescriptor):
        return name
    # The order of a sum depends on which elements a thread loads together, and so on the promised layouts.
    promises = [
        f"{o.alignment}x{o.layout.stride_multiple}{'' if o.layout.unit_axis is None else o.layout.unit_axis}"
        if not o.layout.packed
        else f"packed{o.alignment}"
        for o in desc.operands()
        if o.name in TENSORS
    ]
    tile = _tile(desc)
    return f"{name}.norm.v2.{desc.pairs}.{tile.tokens}x{tile.heads}w{tile.warps}.{','.join(promises)}"


def _tile(desc: AnyRotaryDescriptor) -> Tile:
    """A thread holds 16 bytes of each half of a head, so that no two threads compute the same angles; or one pair, if
    the elements of a head are not contiguous."""
    pairs = ceil_power(ceil_power(desc.half) + ceil_power(desc.q_shape[3] - 2 * desc.half) // 2)
    unit = all(o.layout.packed or o.layout.unit_axis == 3 for o in desc.operands() if o.name in TENSORS)
    threads = max(pairs * desc.element.itemsize // 16 if unit else pairs, 1)
    warps = min(max(threads // 32, WARPS), 16)
    heads = HEADS // 2 if desc.element is ElementKind.F64 else HEADS
    if not desc.normed:  # (a norm's bits depend on the tile, and may not on the number of heads)
        heads = min(heads, ceil_power(max(desc.q_shape[2], desc.k_heads or 0, 1)))
    return Tile(max(32 * warps // threads, 1), heads, warps)


def _blocks(desc: AnyRotaryDescriptor, tile: Tile) -> int:
    return -(-desc.q_shape[0] * desc.q_shape[1] // tile.tokens)


def tensor(o: Operand | None) -> Arg:
    """(address, strides), with None for a stride that is 1. Values are only moved, as integers of their width."""
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

    address = bits(o) if o.name in ("v", "v_cache") else values(o)
    return (address, tuple(along(axis) for axis in range(last + 1)))


def tiles(desc: AnyRotaryDescriptor, target: Target, owners: Arg = None) -> list[Launch]:
    """``owners``: for each slot the token that is written, if another may have the same slot."""
    status = Ptr("status", ElementKind.I64, 8) if desc.out_of_bounds == "error" else None
    before = [] if status is None else [fill_launch(status, 1, NO_BAD_INDEX)]
    batch, sequence, q_heads, length = desc.q_shape
    tile = _tile(desc)
    blocks = _blocks(desc, tile)
    q_groups, k_groups = -(-q_heads // tile.heads), -(-(desc.k_heads or 0) // tile.heads)
    turned = max(q_groups + k_groups, 1)  # (status needs no heads, only positions)
    groups = turned + (k_groups if _columns(desc) else 0)
    if not blocks or (status is None and not (q_heads or desc.k_heads)):
        return before
    tensors = {o.name: tensor(o) for o in desc.operands() if o.is_tensor}
    tokens, rest, compute = batch * sequence, length - 2 * desc.half, desc.element.compute
    cache = desc if isinstance(desc, CachedRotaryDescriptor) else None
    # Places in q and in a cache have one type, as they are a program's by one condition.
    wide = max(tokens, 0 if cache is None else cache.slots) >= I32_LIMIT
    keys, v_dim = "k_out" if cache is None else "k_cache", _columns(desc)

    def heads(count: int, *names: str) -> Arg:
        return (Int(count, count >= I32_LIMIT), *map(tensors.get, names))

    args: dict[str, Arg] = {
        "q": heads(q_heads, "q", "q_out", "q_weight", "q_rstd"),
        "k": None if desc.k_heads is None else heads(desc.k_heads, "k", keys, "k_weight", "k_rstd"),
        "v": None if cache is None else heads(cache.k_heads, "v", "v_cache"),
        **{name: tensors.get(name) for name in ("slots", "cos", "sin", "inv_freq", "positions")},
        "owners": owners,
        "status": status,
        "tokens": Int(tokens, wide),
        "sequence": Int(sequence, wide),
        "half": Int(desc.half, False, power_of_two_in(desc.half)),
        "rest": Int(rest, False, power_of_two_in(rest)),
        "table_rows": Int(desc.table_rows or 0, (desc.table_rows or 0) >= 2**31),
        "slot_count": None if cache is None else Int(cache.slots, wide),
        "page_size": None if cache is None else Int(max(cache.page_size, 1), wide),
        "v_dim": None if cache is None else Int(v_dim, False, power_of_two_in(v_dim)),
        "blocks": Int(blocks),
        "groups": Int(groups),
        "q_groups": Int(q_groups),
        "turned": None if cache is None else Int(turned),
        "step": Int(tile.heads, max(q_heads, desc.k_heads or 0) >= I32_LIMIT),
        "sign": Float(-1.0 if getattr(desc, "inverse", False) else 1.0, compute),
        "scale": Scalar("scale", compute, 1) if desc.table_rows is None else None,
        "eps": None if isinstance(desc, RotaryDescriptor) or desc.eps is None else Float(desc.eps, compute),
    }
    constants = {
        "COMPUTE": TL[compute],
        "TOKENS": tile.tokens,
        "HEADS": tile.heads,
        "BLOCK": ceil_power(desc.half),
        "REST": ceil_power(rest) if rest else 0,
        "INTERLEAVED": desc.pairs == "interleaved",
        "CLAMP": desc.out_of_bounds == "clamp",
        # If the heads of a token are adjacent in memory. (On an H200 3% faster then, and 4% slower otherwise.)
        "GROUPS_FIRST": desc.operand("q").layout.packed,
        # (Triton cannot compare nested tuples with None.)
        "KEYS": desc.k_heads is not None,
        "TABLE": desc.table_rows is not None,
        "POSITIONS": desc.positions,
        "NORM": desc.normed,
        "CACHE": cache is not None,
        # As many as of a head of q, for which the tile is chosen.
        "COLUMNS": 0 if cache is None else min(ceil_power(v_dim), ceil_power(length)),
    }
    # By itself ptxas uses fewer registers, to fit one more program on a multiprocessor: heads load later, or spill.
    # On an H200 that was slower, except where heads are normalised; of those, it spills where elements are copied.
    most = None if desc.normed and not rest else MAX_THREAD_REGISTERS
    grid = blocks * groups
    return [*before, Launch(kernels.rotary_kernel, grid, args, constants, num_warps=tile.warps, max_registers=most)]


for _op, _version in (("rotary", 2), ("normed_rotary", 3), ("cached_rotary", 3)):
    kernel(
        op=_op,
        name="tiles",
        version=_version,
        elements=("f16", "bf16", "f32", "f64"),
        index_elements=("i32", "i64"),
        guarantee=guarantee,
        supports=applies,
        rank=rank,
        numerics=numerics,
        layout=layout,
    )(tiles)
