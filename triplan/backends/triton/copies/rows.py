"""Kernel ``rows``: tiles of rows along which both operands are contiguous; a packed copy is a single row."""

from __future__ import annotations

from dataclasses import replace

from triplan.backends.runtime.launch import Arg, Int, Launch, Ptr, power_of_two_in
from triplan.backends.triton.common.offsets import ceil_power, divisor
from triplan.backends.triton.common.strides import Along, row_tile
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.copies import geometry, rows_kernels as kernels
from triplan.descriptors import Operand
from triplan.descriptors.copies import MoveDescriptor
from triplan.sku import Support, Target

#: Threads of a program, and bytes of the narrower operand per thread: as elementwise's ``rows``, measured on an H200.
#: A thread that converts to another width has fewer: 16384 x 16384 bf16 to f32, and back, take less time so (H200).
THREADS, BYTES, CONVERTED = 128, 32, 16
#: As many below SMALL bytes of the result, so that every multiprocessor has work: on an H200 2**20 packed i8 take 1.5
#: us, with 8 bytes 1.6, with 4 bytes 2.2.
FEW_BYTES, SMALL = 16, 1 << 21
#: Programs among which even tiny problems are divided, if threads have an element: those of an H200's multiprocessors.
PROGRAMS = 132
#: Time relative to a packed copy: for rows that are not whole 16-byte vectors, and for elements that a stride or a map
#: separates. Those of elementwise's ``rows`` and ``strided``.
ODD_SLOWDOWN, SINGLE_SLOWDOWN = 1.25, 2.3
#: Time of results whose elements are numbered regardless of rows: see ``is_flat``. Images of 3 channels take less than
#: ``transposed``, of 4 more (H200).
FLAT_SLOWDOWN = 1.1
#: Axes of so many elements along which x is not contiguous count as such where its next axis is: a warp then loads few
#: rows. (Untuned.) Not if each position there has whole vectors of so many bytes in out: ``transposed`` stores them.
FEW_ROWS, SHORT_VECTOR = 8, 8
#: Bytes of elements that a warp moves by whole cache lines without vectors.
WORD = 4
#: Bytes that a thread stores at once there: with more, each load of a warp would touch more cache lines. With 4 or 16,
#: pads, flips, rolls and slices take about as long (H200).
STORED = 8
#: Elements of a thread there at most: each takes registers for an address. With 4, narrow ones take longer in each of
#: these, with 16 in pads (H200).
EACH = 8
#: Rows of bytes of so many elements are faster by themselves, unless flipped: 4095 of 4100, 16384 rolled and 256 padded
#: to 262 are, 112 padded to 118 is not (H200).
LONG = 256
#: Time of a masked-off lane, relative to one that moves elements. Untuned.
IDLE = 0.3
#: As many such lanes, relative to the others, with which elements of a packed result are numbered through. Untuned.
FLAT_IDLE = 0.2


def tile(desc: MoveDescriptor) -> tuple[int, int]:
    """(rows, columns) of a program's tile."""
    item, wider = sorted((desc.element.itemsize, desc.result.itemsize))
    size = elements(desc.operand("out"), item, BYTES if item == wider else CONVERTED)
    return row_tile(size, _rows(desc), geometry.inner(desc).size)


def elements(out: Operand, item: int, most: int = BYTES) -> int:
    """Those that a program moves, of ``item`` bytes, or several as one of so many; ``most``: bytes of a thread."""
    each = (most if out.nbytes >= SMALL else FEW_BYTES) // item
    count = out.nbytes // max(item, out.element.itemsize)  # (fewer than out's if several are moved as one)
    return THREADS * min(each, ceil_power(-(-count // (THREADS * PROGRAMS))))


def flat_block(out: Operand, item: int) -> int:
    """Elements of ``item`` bytes that a program moves where they are numbered regardless of rows."""
    return min(elements(out, item), EACH * THREADS)


def _is_flat_triangle(desc: MoveDescriptor) -> bool:
    """Whether elements of a triangle are numbered regardless of rows: short ones would leave lanes idle."""
    packed = all(desc.operand(name).layout.packed for name in ("x", "out"))
    return desc.op in ("tril", "triu") and packed and _idle(desc) > FLAT_IDLE


def is_flat(desc: MoveDescriptor) -> bool:
    """Whether elements of a packed result, which is no triangle, are numbered regardless of rows.

    They are if vectors cannot be loaded or stored along rows, and one of these holds: rows are whole words of 4 bytes;
    elements are narrow (of one byte only in flips and short rows); rows leave lanes idle; x is not contiguous along
    them.
    """
    if desc.op in ("tril", "triu"):
        return False
    size = 1
    for dim in reversed(geometry.dims(desc)):
        if dim.size > 1 and dim.out != size:
            return False
        size *= dim.size
    if geometry.is_wide(desc) or _slowdown(desc) == 1 or not _is_near(desc):
        return False
    item, inner = max(desc.element.itemsize, desc.result.itemsize), geometry.inner(desc)
    if inner.x not in (0, 1) or _word(desc) > 1:
        return True
    if item == 1 and inner.map != geometry.MAPS["flip"] and inner.size >= LONG:
        return False
    return item < WORD or _idle(desc) > FLAT_IDLE


def _word(desc: MoveDescriptor) -> int:
    """Elements of the 32-bit words by which rows are moved; 1 if each element is moved by itself."""
    each = WORD // desc.element.itemsize
    *outer, inner = geometry.dims(desc) or (geometry.BLANK,)
    if each <= 1 or inner.x != 1 or geometry.converts(desc) != "none":
        return 1
    whole = all(isinstance(n, int) and n % each == 0 for n in (inner.size, inner.extent, *(d.x for d in outer)))
    aligned = all(desc.operand(name).alignment >= WORD for name in ("x", "out"))
    return each if whole and aligned else 1


def _idle(desc: MoveDescriptor) -> float:
    """Lanes without an element, relative to those with one."""
    height, width = tile(desc)
    return _programs(desc) * height * width / max(desc.operand("out").numel, 1) - 1


def _rows(desc: MoveDescriptor) -> int:
    return desc.operand("out").numel // max(geometry.inner(desc).size, 1)


def _programs(desc: MoveDescriptor) -> int:
    height, width = tile(desc)
    return -(-_rows(desc) // height) * -(-geometry.inner(desc).size // width)


def _slowdown(desc: MoveDescriptor) -> float:
    found = geometry.dims(desc) or (geometry.BLANK,)
    if found[-1].map or found[-1].out != 1 or found[-1].x not in (0, 1):
        return SINGLE_SLOWDOWN
    for name in ("x", "out"):
        o = desc.operand(name)
        for dim in found[:-1]:
            s = dim.x if name == "x" else dim.out
            if (o.layout.stride_multiple if isinstance(s, Along) else s) * o.element.itemsize % 16:
                return ODD_SLOWDOWN
    return 1.0


def applies(desc: MoveDescriptor, target: Target) -> Support:
    return fits_grid(_programs(desc))


def rank(desc: MoveDescriptor, target: Target) -> float:
    slowdown = _slowdown(desc) * (1 + IDLE * max(_idle(desc), 0))
    if is_flat(desc):
        slowdown = FLAT_SLOWDOWN
    return geometry.bytes_us(desc, slowdown)


def _is_near(desc: MoveDescriptor) -> bool:
    """Whether what threads beside each other load lies in few rows of x."""
    found = geometry.dims(desc) or (geometry.BLANK,)
    few = len(found) > 1 and found[-2].x in (0, 1) and found[-1].size <= FEW_ROWS
    return found[-1].x in (0, 1) or (few and found[-1].size * desc.result.itemsize % SHORT_VECTOR != 0)


@geometry.copies("rows", applies, rank)
def rows(desc: MoveDescriptor, target: Target) -> list[Launch]:
    if desc.operand("out").numel == 0:
        return []
    *outer, inner = geometry.dims(desc) or (geometry.BLANK,)
    if is_flat(desc):
        return [_flat(desc)]
    if _is_flat_triangle(desc):
        wide, out = geometry.is_wide(desc), desc.operand("out")
        block = elements(out, out.element.itemsize)
        args = {name: arg for name, arg in geometry.base_args(desc).items() if name != "value"}
        args |= {"rows": divisor(outer[-1].size, wide), "columns": divisor(inner.size, wide)}
        args["numel"] = Int(out.numel, wide, power_of_two_in(out.numel))
        constants = geometry.constants(desc)
        constants = {name: constants[name] for name in ("TRIANGLE", "POINT_TYPE")} | {"BLOCK": block}
        return [Launch(kernels.triangle_kernel, -(-out.numel // block), args, constants, num_warps=THREADS // 32)]
    dims, maps = geometry.outer_args(desc, outer)
    height, width = tile(desc)
    args = {
        **geometry.base_args(desc),
        "dims": dims,
        "along": geometry.dim_arg(desc, inner),
        "rows": Int(_rows(desc), geometry.is_wide(desc)) if _rows(desc) > 1 else None,
    }
    constants = {
        **geometry.constants(desc),
        "MAPS": maps,
        "MAP": inner.map,
        "X_UNIT": inner.x == 1,
        "OUT_UNIT": inner.out == 1,
        "BLOCK_ROWS": height,
        "BLOCK_COLUMNS": width,
    }
    return [Launch(kernels.rows_kernel, _programs(desc), args, constants, num_warps=THREADS // 32)]


def _flat(desc: MoveDescriptor) -> Launch:
    out, each = desc.operand("out"), _word(desc)
    bits = 8 * out.element.itemsize
    block = flat_block(out, each * min(desc.element.itemsize, desc.result.itemsize))
    # Dimensions of one position are left out: each takes a division of every point. (One with a map may be padding.)
    *outer, inner = [d for d in geometry.dims(desc) if d.size > 1 or d.map] or [geometry.BLANK]
    shift = 0 if inner.map == geometry.MAPS["flip"] else inner.amount % each * bits
    if each > 1:
        outer = [d._replace(x=d.x // each) for d in outer if isinstance(d.x, int)]
        inner = inner._replace(size=inner.size // each, amount=inner.amount // each, extent=inner.extent // each)
    numel = out.numel // each
    args: dict[str, Arg] = {name: arg for name, arg in geometry.base_args(desc).items() if name != "diagonal"}
    assert isinstance(args["out"], Ptr)
    args["out"] = replace(args["out"], alignment=min(out.alignment, max(STORED, out.element.itemsize)))
    args["dims"] = tuple(geometry.flat_arg(desc, d) for d in reversed(outer)) or None
    args["along"] = geometry.flat_arg(desc, inner)
    args["numel"] = Int(numel, False, power_of_two_in(numel))
    constants = {n: c for n, c in geometry.constants(desc).items() if n != "TRIANGLE"}
    constants |= {"MAPS": tuple(d.map for d in reversed(outer)), "MAP": inner.map, "BLOCK": block}
    constants |= {"WORDS": bits if each > 1 else 0, "SHIFT": shift}
    return Launch(kernels.flat_kernel, -(-numel // block), args, constants, num_warps=THREADS // 32)
