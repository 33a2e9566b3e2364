"""Kernel ``rows``: operands with contiguous or broadcast rows, such as row and column vectors, padded rows, masks."""

from __future__ import annotations

from triplan.backends.runtime.launch import Int, Launch, power_of_two_in
from triplan.backends.triton.common.accuracy import EXACT
from triplan.backends.triton.common.offsets import divisor, extents
from triplan.backends.triton.common.strides import Along, row_tile
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.elementwise import geometry, rows_kernels as kernels
from triplan.backends.triton.elementwise.entries import elementwise
from triplan.descriptors.elementwise.problems import ElementwiseDescriptor
from triplan.sku import Support, Target

#: Threads of a program where rows are whole 16-byte vectors, and where they are not: the best on an H200 of 128 and 256
#: threads with 1, 2 or 4 loads, for a row vector added to 16384 x 16384 and to 16384 x 10007 bf16.
THREADS, ODD_THREADS = 128, 256
#: Elements from which on a thread has two loads: the better there for cos, sin, tanh, hypot and pow, by a run on an
#: H200 that is not published. From 2**15 to 2**21 padded elements one is the best.
LARGE = 1 << 22
#: Functions of few instructions. Where a tree has no others, one load is the better: by the same run for add, mul, neg.
FAST = EXACT - {"fmod"} | {"add", "sub", "mul"}
#: Time relative to ``flat``, in these cases, and that of a masked-off lane relative to one that moves elements. Of odd
#: rows as on an H100, of problems that ``bench anywhere`` draws: 1.1 to 1.4, and up to 1.7 with idle lanes.
SLOWDOWN, IDLE = 1.01, 0.3
ODD_SLOWDOWN, ODD_IDLE = 1.28, 1.0
#: Microseconds by which odd rows of few elements take longer than ``strided``. (From drawn problems on an H200.)
ODD_US = 0.05
#: The same of large matrices whose rows are read as consecutive elements. Untuned.
WRAPPED_SLOWDOWN = 1.1
#: Columns from which on those are: vectors then wrap around at most once, and seldom. Untuned.
WRAPPED_COLUMNS = 256


def _dims(desc: ElementwiseDescriptor) -> tuple[geometry.Dim, ...]:
    return geometry.dims(desc) or (geometry.blank(desc),)


def _are_vectors(desc: ElementwiseDescriptor) -> bool:
    """Whether the promised layouts imply that every row of every operand starts at a multiple of 16 bytes."""
    found = _dims(desc)
    for i, o in enumerate(geometry.tensors(desc)):
        if found[-1].strides[i] == 0:
            continue
        for dim in found[:-1]:
            s = dim.strides[i]
            if (o.layout.stride_multiple if isinstance(s, Along) else s) * o.element.itemsize % 16:
                return False
    return True


def _threads(desc: ElementwiseDescriptor) -> int:
    return THREADS if _are_vectors(desc) else ODD_THREADS


def _loads(desc: ElementwiseDescriptor) -> int:
    """16-byte vectors that a thread loads of each operand."""
    functions = {str(node[0]) for node in desc.tree.nodes} - {"operand", "number"}
    return 1 if desc.operands()[-1].numel < LARGE or functions <= FAST else 2


def tile(desc: ElementwiseDescriptor) -> tuple[int, int]:
    """(rows, columns) of a program's tile: the widest one among those with the fewest masked-off lanes."""
    columns = _dims(desc)[-1].size
    rows = desc.operands()[-1].numel // max(columns, 1)
    return row_tile(_threads(desc) * geometry.lanes(desc, _loads(desc)), rows, columns)


def _wraps(desc: ElementwiseDescriptor) -> bool:
    """Whether packed matrices whose rows begin anywhere meet row or column vectors, in a large problem."""
    if len(_dims(desc)) != 2 or desc.operands()[-1].numel < LARGE or _are_vectors(desc):
        return False
    outer, inner = _dims(desc)
    item = min(o.element.itemsize for o in geometry.tensors(desc))
    # (Loads of several elements are wide enough: f16 of 8596 columns beside a column vector took longer, on an H200.)
    if inner.size < WRAPPED_COLUMNS or (item < 4 and inner.size * item % 8 == 0):
        return False
    vectors, matrix = ((0, 0), (0, 1), (1, 0)), (inner.size, 1)
    return all(
        (s == matrix or (s in vectors and not o.is_written))
        for s, o in zip(zip(outer.strides, inner.strides, strict=True), geometry.tensors(desc), strict=True)
    )


def _wrapped_block(desc: ElementwiseDescriptor) -> int:
    """Elements per program of those: one vector per thread."""
    return THREADS * geometry.lanes(desc)


def _programs(desc: ElementwiseDescriptor) -> int:
    if _wraps(desc):
        return -(-desc.operands()[-1].numel // _wrapped_block(desc))
    height, width = tile(desc)
    columns = _dims(desc)[-1].size
    return -(-(desc.operands()[-1].numel // max(columns, 1)) // height) * -(-columns // width)


def applies(desc: ElementwiseDescriptor, target: Target) -> Support:
    found = _dims(desc)
    written = [o.is_written for o in geometry.tensors(desc)]
    if 0 in desc.shape:
        return Support.no("the result is empty: there is no row")
    for stride, writes in zip(found[-1].strides, written, strict=True):
        if stride != 1 and ((writes and found[-1].size > 1) or stride != 0):
            return Support.no("a row is not promised contiguous or broadcast")
    return fits_grid(_programs(desc))


def rank(desc: ElementwiseDescriptor, target: Target) -> float:
    if _wraps(desc):
        return geometry.bytes_us(desc, WRAPPED_SLOWDOWN)
    height, width = tile(desc)
    idle = _programs(desc) * height * width / desc.operands()[-1].numel - 1
    if _are_vectors(desc):
        return geometry.bytes_us(desc, SLOWDOWN * (1 + IDLE * idle))
    return ODD_US + geometry.bytes_us(desc, ODD_SLOWDOWN * (1 + ODD_IDLE * idle))


@elementwise("rows", applies, rank)
def rows(desc: ElementwiseDescriptor, target: Target) -> list[Launch]:
    *outer, inner = _dims(desc)
    wide = geometry.is_wide(desc)
    height, width = tile(desc)
    count = desc.operands()[-1].numel // inner.size
    varying = {
        "ROWS_VARY": tuple(any(d.strides[i] != 0 for d in outer) for i in range(len(inner.strides))),
        "COLUMNS_VARY": tuple(s == 1 for s in inner.strides),
    }
    if _wraps(desc):
        args = {
            **geometry.base_args(desc),
            "numel": Int(desc.operands()[-1].numel, wide),
            "by": divisor(inner.size, wide),
        }
        shape = {"VECTOR": geometry.lanes(desc), "BLOCK": _wrapped_block(desc)}
        constants = {**geometry.constants(desc), **varying, **shape}
        grid = _programs(desc)
        return [Launch(kernels.wrapped_kernel, grid, args, constants, num_warps=THREADS // 32, fuses=False)]
    args = {
        **geometry.base_args(desc),
        "strides": geometry.stride_args(desc, outer),
        "sizes": extents((d.size for d in outer), wide),
        "rows": Int(count, wide),
        "columns": Int(inner.size, wide, power_of_two_in(inner.size)),
    }
    constants = {
        **geometry.constants(desc),
        **varying,
        "BLOCK_ROWS": height,
        "BLOCK_COLUMNS": width,
    }
    return [Launch(kernels.rows_kernel, _programs(desc), args, constants, num_warps=_threads(desc) // 32, fuses=False)]
