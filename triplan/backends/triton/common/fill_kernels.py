"""Filling a buffer with a constant, and rounding a buffer of sums into an operand."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.offsets_kernels import unravel


@jit
def fill_kernel(
    out, numel, sizes, strides, VALUE: tl.constexpr, POINT_TYPE: tl.constexpr, FLAT: tl.constexpr, BLOCK: tl.constexpr
):
    """out = VALUE.

    out: numel elements of any type, packed if FLAT, else of ``sizes`` and ``strides``, innermost dimension first. Only
    the last packed elements are masked: a mask that ends anywhere would keep all stores from being vectors.
    """
    first = tl.program_id(0).to(POINT_TYPE) * BLOCK
    point = first + tl.arange(0, BLOCK)
    value = tl.full((BLOCK,), VALUE, out.dtype.element_ty)
    if FLAT:
        if numel - first >= BLOCK:
            tl.store(out + point, value)
        else:
            tl.store(out + point, value, mask=point < numel)
    else:
        tl.store(out + unravel(point, sizes, strides), value, mask=point < numel)


@jit
def fold_kernel(
    sums,
    out,
    numel,
    sizes,
    strides,
    KEEP: tl.constexpr,
    POINT_TYPE: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = sums; with KEEP, out += sums.

    sums: numel elements, packed; out: as many of the same or a narrower element, packed if FLAT, else of ``sizes`` and
    ``strides``, innermost dimension first. The sums are rounded here, once.
    """
    point = tl.program_id(0).to(POINT_TYPE) * BLOCK + tl.arange(0, BLOCK)
    live = point < numel
    value = tl.load(sums + point, mask=live, other=0)
    if FLAT:
        at = out + point
    else:
        at = out + unravel(point, sizes, strides)
    if KEEP:
        value += tl.load(at, mask=live, other=0).to(value.dtype)
    tl.store(at, value.to(out.dtype.element_ty), mask=live)
