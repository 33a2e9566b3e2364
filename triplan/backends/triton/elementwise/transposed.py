"""Kernel ``transposed``: some operands are contiguous along another axis than the result."""

from __future__ import annotations

from triplan.backends.runtime.launch import Int, Launch, power_of_two_in
from triplan.backends.triton.common.offsets import extents
from triplan.backends.triton.elementwise import geometry, transposed_kernels as kernels
from triplan.backends.triton.elementwise.entries import elementwise
from triplan.descriptors.elementwise.problems import ElementwiseDescriptor
from triplan.sku import SUPPORTED, Support, Target

#: (rows and columns of a tile, threads). The wide tile is for few and narrow operands, whose values fit into registers.
#: On an H200, x + x.t() of 16384 x 16384 bf16 takes 375 us with it, 386 with the other, and 441 with 32 x 32.
TILE, WIDE_TILE = (64, 128), (128, 256)
#: The same where there are few elements, so that there are more programs.
SMALL_TILE = (32, 128)
#: Elements from which on there is a wide tile for each multiprocessor.
WIDE_FROM = 1 << 21
#: Time relative to ``flat`` in that measurement.
SLOWDOWN = 1.04
#: Time of a masked-off lane, relative to one that moves elements. Untuned.
IDLE = 0.3


def _tile(desc: ElementwiseDescriptor) -> tuple[int, int]:
    operands, numel = geometry.tensors(desc), desc.operands()[-1].numel
    if numel <= geometry.FEW:
        return SMALL_TILE
    narrow = len(operands) <= 3 and all(o.element.itemsize <= 2 for o in operands)
    return WIDE_TILE if narrow and numel >= WIDE_FROM else TILE


def _are_turned(desc: ElementwiseDescriptor, at: int) -> tuple[bool, ...]:
    """For each tensor, whether it is contiguous along dimension ``at`` instead of the innermost one."""
    found = geometry.dims(desc)
    return tuple(
        s == 1 and inner not in (0, 1) and not o.is_written
        for s, inner, o in zip(found[at].strides, found[-1].strides, geometry.tensors(desc), strict=True)
    )


def _turned(desc: ElementwiseDescriptor) -> int | None:
    """The last dimension along which some input is contiguous that is not contiguous along the innermost one."""
    return next((at for at in reversed(range(len(geometry.dims(desc)) - 1)) if any(_are_turned(desc, at))), None)


def _is_promised(desc: ElementwiseDescriptor) -> bool:
    """Whether some input is promised contiguous along another axis, which has extent 1 here, but not along the rows."""
    inner = geometry.dims(desc)[-1].strides if geometry.dims(desc) else ()
    found = zip(geometry.tensors(desc), inner, strict=False)
    return any(not o.is_written and o.layout.unit_axis is not None and s not in (0, 1) for o, s in found)


def _programs(desc: ElementwiseDescriptor, turned: int | None) -> int:
    count, (block, _) = 1, _tile(desc)
    for at, dim in enumerate(geometry.dims(desc)):
        count *= -(-dim.size // block) if at == turned or at == len(geometry.dims(desc)) - 1 else dim.size
    return count


def applies(desc: ElementwiseDescriptor, target: Target) -> Support:
    turned = _turned(desc)
    if 0 in desc.shape or (turned is None and not _is_promised(desc)):
        return Support.no("no input is promised contiguous along another axis than the result")
    programs = _programs(desc, turned)
    return SUPPORTED if programs < 2**31 else Support.no(f"needs {programs} programs; a grid holds fewer than 2**31")


def rank(desc: ElementwiseDescriptor, target: Target) -> float:
    turned = _turned(desc)
    block, _ = _tile(desc)
    full = _programs(desc, turned) * block * block / desc.operands()[-1].numel
    return geometry.bytes_us(desc, SLOWDOWN * (1 + IDLE * (full - 1)))


@elementwise("transposed", applies, rank)
def transposed(desc: ElementwiseDescriptor, target: Target) -> list[Launch]:
    found, turned, wide = geometry.dims(desc), _turned(desc), geometry.is_wide(desc)
    block, threads = _tile(desc)
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
        "TURNED": (False,) * len(row.strides) if turned is None else _are_turned(desc, turned),
        "BLOCK_ROWS": block,
        "BLOCK_COLUMNS": block,
    }
    launch = Launch(
        kernels.transposed_kernel, _programs(desc, turned), args, constants, num_warps=threads // 32, fuses=False
    )
    return [launch]
