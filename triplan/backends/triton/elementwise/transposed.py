"""Kernel ``transposed``: some operands are contiguous along another axis than the result."""

from __future__ import annotations

import math

from triplan.backends.runtime.launch import Int, Launch, power_of_two_in
from triplan.backends.triton.common.offsets import ceil_power, extents
from triplan.backends.triton.common.strides import Along
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.elementwise import geometry, transposed_kernels as kernels
from triplan.backends.triton.elementwise.entries import elementwise
from triplan.descriptors.elementwise.problems import ElementwiseDescriptor
from triplan.sku import Support, Target

#: (elements of a problem at most, sides of a tile, threads), and the same of more elements. The best, or within 5 % of
#: it, on an H200, of tanh, relu and its gradient, f16 to f64, of 181 x 181 to 6000 x 6000. Tiles of 128 x 128 are the
#: best only of functions that need few registers, and others spill.
TILES, LARGE_TILE = ((1 << 16, 16, 64), (1 << 20, 32, 128)), (64, 256)
#: The same of many elements of 8 bytes, chosen on an H200: in a large tile they take so many registers that one program
#: is resident.
WIDE_TILE = (32, 256)
#: The same of up to BROAD_OPERANDS tensors of 2 bytes or less in vectors, functions of LIGHT nodes, which need few
#: registers, and LARGE bytes of the result or more, if that takes at most WIDER times as many lanes: its rows are
#: longer in memory. (From x + x.t() of 16384 x 16384 bf16 on an H200.)
BROAD_TILE, BROAD_OPERANDS, LARGE, WIDER = (128, 512), 3, 1 << 26, 1.04
LIGHT = {"operand", "number", "add", "sub", "mul", "neg", "abs", "maximum", "minimum"}
#: Elements of a tile's side at most, where the other side is short. Untuned.
LONGEST = 512
#: Microseconds in which threads exchange elements, elements of the result a microsecond, of which narrow ones take
#: longer than their bytes, and the time of these relative to ``flat``. Fitted to drawn problems on an H200, as IDLE.
EXCHANGE_US, ELEMENTS_PER_US, SLOWDOWN = 0.13, 1.4e6, 0.8
#: Time of a masked-off lane, relative to one that moves elements: in warps that mostly have no others, and where the
#: tile's side is short, so that it shares a warp with lanes that move elements. (From drawn problems on an H200.)
IDLE, SHORT_IDLE = 0.25, 0.65
#: Elements of a short side at most. Untuned.
SHORT = 16


def _is_broad(desc: ElementwiseDescriptor, turned: int | None) -> bool:
    """Whether tiles are BROAD_TILE."""
    found, operands = geometry.dims(desc), geometry.tensors(desc)
    if turned is None or len(operands) > BROAD_OPERANDS or desc.operands()[-1].nbytes < LARGE:
        return False
    if any(o.element.itemsize > 2 for o in operands) or not LIGHT.issuperset(node[0] for node in desc.tree.nodes):
        return False
    if _accesses(desc, turned) > 0:  # (Where threads do not move vectors, addresses take registers, which spill.)
        return False
    sizes = found[turned].size, found[-1].size
    lanes, broad = (math.prod(-(-n // side) * side for n in sizes) for side in (LARGE_TILE[0], BROAD_TILE[0]))
    return broad <= WIDER * lanes


def _tile(desc: ElementwiseDescriptor, turned: int | None) -> tuple[int, int, int]:
    """(rows, columns, threads) of a program's tile. Where one side is short, the other one is longer, but not as much
    as to need all threads: each has as many elements as in a square tile."""
    found, numel = geometry.dims(desc), desc.operands()[-1].numel
    is_wide = any(o.element.itemsize == 8 and o.numel == numel for o in geometry.tensors(desc))
    large = WIDE_TILE if is_wide else BROAD_TILE if _is_broad(desc, turned) else LARGE_TILE
    side, threads = next((tile for most, *tile in TILES if numel <= most), large)
    most = [1 if at is None else ceil_power(found[at].size) for at in (turned, len(found) - 1 if found else None)]
    rows, columns = (min(side, n) for n in most)
    if rows < side:
        columns = min(side * side // rows, most[1], LONGEST)
    elif columns < side:
        rows = min(side * side // columns, most[0], LONGEST)
    return rows, columns, max(threads * rows * columns // (side * side), 32)


def _is_promised(desc: ElementwiseDescriptor) -> bool:
    """Whether some input is promised contiguous along another axis, which has extent 1 here, but not along the rows."""
    inner = geometry.dims(desc)[-1].strides if geometry.dims(desc) else ()
    found = zip(geometry.tensors(desc), inner, strict=False)
    return any(not o.is_written and o.layout.unit_axis is not None and s not in (0, 1) for o, s in found)


def _programs(desc: ElementwiseDescriptor, turned: int | None) -> int:
    found, (rows, columns, _) = geometry.dims(desc), _tile(desc, turned)
    sides = {turned: rows, len(found) - 1: columns}
    return math.prod(-(-dim.size // sides.get(at, 1)) for at, dim in enumerate(found))


def applies(desc: ElementwiseDescriptor, target: Target) -> Support:
    turned = geometry.turned(desc)
    if 0 in desc.shape or (turned is None and not _is_promised(desc)):
        return Support.no("no input is promised contiguous along another axis than the result")
    return fits_grid(_programs(desc, turned))


def rank(desc: ElementwiseDescriptor, target: Target) -> float:
    turned = geometry.turned(desc)
    rows, columns, _ = _tile(desc, turned)
    full = _programs(desc, turned) * rows * columns / desc.operands()[-1].numel
    short = 1.0 if turned is None else _short_side(geometry.dims(desc)[turned].size, geometry.dims(desc)[-1].size)
    slowdown = SLOWDOWN * (1 + IDLE * (full / short - 1) + SHORT_IDLE * (short - 1))
    return EXCHANGE_US + geometry.bytes_us(desc, slowdown) + desc.operands()[-1].numel / ELEMENTS_PER_US


def _short_side(*extents: int) -> float:
    """Lanes along the shorter side of a tile, for each element there; 1 unless the side is short."""
    n = min(extents)
    return ceil_power(n) / n if n <= SHORT else 1.0


def _accesses(desc: ElementwiseDescriptor, turned: int | None) -> float:
    """Accesses of threads beyond those by 16-byte vectors, which rows of other lengths or distances do not allow."""
    found, count = geometry.dims(desc), 0.0
    for i, o in enumerate(geometry.tensors(desc)):
        along = turned if turned is not None and geometry.are_turned(desc, turned)[i] else len(found) - 1
        others = [d.strides[i] for at, d in enumerate(found) if at != along]
        apart = [o.layout.stride_multiple if isinstance(s, Along) else s for s in others]
        vector = math.gcd(o.alignment, 16, *(n * o.element.itemsize for n in (found[along].size, *apart)))
        vector = vector if found[along].strides[i] in (0, 1) else o.element.itemsize
        count += o.numel * o.element.itemsize * (1 / vector - 1 / 16)
    return count


@elementwise("transposed", applies, rank)
def transposed(desc: ElementwiseDescriptor, target: Target) -> list[Launch]:
    found, turned, wide = geometry.dims(desc), geometry.turned(desc), geometry.is_wide(desc)
    height, width, threads = _tile(desc, turned)
    row, column = geometry.blank(desc) if turned is None else found[turned], found[-1]
    outer = [d for at, d in enumerate(found) if at not in (turned, len(found) - 1)]
    known = [tuple(s if s in (0, 1) else None for s in d.strides) for d in (row, column)]
    args = {
        **geometry.base_args(desc),
        "strides": geometry.stride_args(desc, outer),
        "across": tuple(s[0] for s in geometry.stride_args(desc, [row])),
        "along": tuple(s[0] for s in geometry.stride_args(desc, [column])),
        "sizes": extents((d.size for d in outer), wide),
        "rows": Int(row.size, wide, power_of_two_in(row.size)),
        "columns": Int(column.size, wide, power_of_two_in(column.size)),
    }
    constants = {
        **geometry.constants(desc),
        "ROW_STRIDES": known[0],
        "COLUMN_STRIDES": known[1],
        "TURNED": (False,) * len(row.strides) if turned is None else geometry.are_turned(desc, turned),
        "BLOCK_ROWS": height,
        "BLOCK_COLUMNS": width,
    }
    launch = Launch(
        kernels.transposed_kernel, _programs(desc, turned), args, constants, num_warps=threads // 32, fuses=False
    )
    return [launch]
