"""What planning knows of a matrix: its unit-stride axis, its leading dimension, and whether vector loads can read it.

Everything here follows from the layout that the descriptor promises, so it holds for every call of a plan.
"""

from __future__ import annotations

from collections.abc import Iterable

from triplan.backends.triton.common.card import LINE_BYTES
from triplan.descriptors import GemmBackwardDescriptor, Operand
from triplan.descriptors.gemm import MatrixProductDescriptor
from triplan.sku.facts import fact

#: Extents from here on are passed as i64: an i32 loop counter passes its bound by up to one step, at most 512.
I32_COUNTER_LIMIT = 2**31 - 2**9
#: Letters of a SKU's layout, as BLAS names matrices: row-major, column-major, any strides.
_BLAS_LETTERS = {1: "n", 0: "t", None: "x"}


def vector_elements(itemsize: int) -> int:
    """Elements of a 16-byte load."""
    return max(16 // itemsize, 1)


def unit_axis(o: Operand) -> int | None:
    """The unit-stride axis of a matrix, or of each matrix of a batch: 1 if row-major, 0 if column-major, else None."""
    if o.layout.packed:
        return 1
    first = len(o.shape) - 2
    unit = o.layout.unit_axis
    return None if unit is None or unit < first else unit - first


def lies_across_lines(o: Operand) -> bool:
    """Whether rows of a matrix, or its columns if these are contiguous, begin between lines of the L2 cache.

    What a layout promises beyond 16 bytes is taken for lines, as copies in the workspace have them; rows of others to
    be as far apart as they are long.
    """
    axis, itemsize = unit_axis(o), o.element.itemsize
    beyond = o.layout.stride_multiple > vector_elements(itemsize)
    return not beyond and o.shape[-1 if axis is None else len(o.shape) - 2 + axis] * itemsize % LINE_BYTES != 0


def is_row_major(o: Operand) -> bool:
    """Whether the rows of a matrix are contiguous."""
    return unit_axis(o) == 1


def stride_multiple(o: Operand) -> int:
    """The largest power of two that is known to divide a matrix's leading dimension."""
    if o.layout.packed:
        columns = o.shape[-1]
        return columns & -columns if columns else 16
    return o.layout.stride_multiple


def is_contiguous(vector: Operand) -> bool:
    """Whether an operand of one axis has unit stride."""
    return vector.layout.packed or vector.layout.unit_axis == 0


def is_elementwise(o: Operand) -> bool:
    """Whether a matrix must be read element by element: its promises are too weak for 16-byte loads, or the extent of
    its unit-stride axis is not a multiple of one."""
    unit, width = unit_axis(o), vector_elements(o.element.itemsize)
    return unit is None or o.alignment < 16 or bool(stride_multiple(o) % width or o.shape[unit - 2] % width)


def elements_per_load(o: Operand) -> float:
    """Elements per load where a matrix ``is_elementwise``: 2 halves if they make a word of 4 bytes, else 1. Half of one
    without unit stride, as half of what is loaded, or more, is not wanted."""
    unit = unit_axis(o)
    if unit is None:
        return 0.5
    words = o.element.itemsize == 2 and o.alignment >= 16 and stride_multiple(o) % 2 == 0 and o.shape[unit - 2] % 2 == 0
    return 2.0 if words else 1.0


@fact  # asked of each tile
def loads_single_halves(desc: MatrixProductDescriptor) -> bool:
    """Whether elements of two bytes are loaded one by one."""
    factors = (desc.operand("a"), desc.operand("b"))
    return desc.element.itemsize == 2 and any(is_elementwise(o) and elements_per_load(o) <= 1 for o in factors)


def lacks_unit_stride(desc: MatrixProductDescriptor) -> bool:
    """Whether any matrix, read or written, is promised no unit stride."""
    return any(unit_axis(o) is None for o in desc.operands() if len(o.shape) > 1)


def has_elementwise_access(desc: MatrixProductDescriptor) -> bool:
    """Whether a thread holds one address per element: for any matrix without unit stride, and for factors that are read
    element by element."""
    return lacks_unit_stride(desc) or any(is_elementwise(desc.operand(name)) for name in "ab")


def _blas_letters(matrices: Iterable[Operand]) -> str:
    return "".join(_BLAS_LETTERS[unit_axis(o)] for o in matrices)


def layout(desc: MatrixProductDescriptor) -> str:
    """The SKU's layout: letters of A and B."""
    return _blas_letters((desc.operand("a"), desc.operand("b")))


def backward_layout(desc: GemmBackwardDescriptor) -> str:
    """The SKU's layout: letters of dc and of the factors that are read."""
    return _blas_letters(o for o in desc.operands() if o.name in ("dc", "a", "b"))
