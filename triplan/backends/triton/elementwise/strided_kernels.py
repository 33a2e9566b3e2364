"""Elementwise ops over operands of any strides: each element's offset is computed from its number."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.offsets_kernels import unravel


@triton.jit
def strided_kernel(
    first,
    second,
    out,
    first_strides,
    second_strides,
    out_strides,
    sizes,
    numel,
    FUNCTION: tl.constexpr,
    COMPUTE: tl.constexpr,
    POINT_TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[i] = FUNCTION(first[i]) or FUNCTION(first[i], second[i]), i over the points of ``sizes``.

    Operands have one element type and ``numel`` points; sizes and strides run from the innermost dimension outwards.
    Values are converted to COMPUTE; only the store rounds.
    """
    point = tl.program_id(0).to(POINT_TYPE) * BLOCK + tl.arange(0, BLOCK)
    live = point < numel
    value = tl.load(first + unravel(point, sizes, first_strides), mask=live, other=0).to(COMPUTE)
    if second is None:
        result = FUNCTION(value)
    else:
        other = tl.load(second + unravel(point, sizes, second_strides), mask=live, other=0).to(COMPUTE)
        result = FUNCTION(value, other)
    tl.store(out + unravel(point, sizes, out_strides), result.to(out.dtype.element_ty), mask=live)
