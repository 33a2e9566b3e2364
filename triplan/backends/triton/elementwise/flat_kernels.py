"""Elementwise ops over packed operands: one block of consecutive elements per program."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl


@triton.jit
def flat_kernel(
    first,
    second,
    out,
    numel,
    FUNCTION: tl.constexpr,
    COMPUTE: tl.constexpr,
    POINT_TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[i] = FUNCTION(first[i]) or FUNCTION(first[i], second[i]).

    first, second, out: ``numel`` packed elements of one type; ``second`` is None for functions of one argument. Values
    are converted to COMPUTE; only the store rounds.
    """
    point = tl.program_id(0).to(POINT_TYPE) * BLOCK + tl.arange(0, BLOCK)
    live = point < numel
    value = tl.load(first + point, mask=live, other=0).to(COMPUTE)
    if second is None:
        result = FUNCTION(value)
    else:
        result = FUNCTION(value, tl.load(second + point, mask=live, other=0).to(COMPUTE))
    tl.store(out + point, result.to(out.dtype.element_ty), mask=live)
