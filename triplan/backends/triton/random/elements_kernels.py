"""Kernel of ``elements``: random numbers in blocks of larger tensors, of any strides; each element evaluates Philox."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.offsets_kernels import unravel
from triplan.backends.triton.common.philox_kernels import as_i64, keep
from triplan.backends.triton.random.shared_kernels import pairs


@triton.jit
def elements_kernel(
    out,
    x,
    parameters,
    state,
    first,
    numel,
    sizes,
    out_strides,
    x_strides,
    index_strides,
    NUMBER: tl.constexpr,
    PAIRED: tl.constexpr,
    WIDE: tl.constexpr,
    POINT_TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[i] = NUMBER(word(first + sum(i * index_strides)), x[i], parameters) for i over the ``numel`` points of sizes.

    Sizes and strides: innermost dimension first. The other arguments are those of ``groups_kernel``.
    """
    keep(state)
    point = tl.program_id(0).to(POINT_TYPE) * BLOCK + tl.arange(0, BLOCK)
    live = point < numel
    index = unravel(point, sizes, index_strides) + as_i64(first)
    if WIDE:
        a, b = pairs(state, (index >> 1) & (2**63 - 1), WIDE)
    else:
        both_a, both_b = pairs(state, (index >> 2) & (2**62 - 1), WIDE)
        a0, a1 = tl.split(both_a)
        b0, b1 = tl.split(both_b)
        later = (index & 2) != 0
        a, b = tl.where(later, a1, a0), tl.where(later, b1, b0)
    is_second = (index & 1) != 0
    if PAIRED:
        found, other = NUMBER(a, b, parameters)
        found = tl.where(is_second, other, found)
    else:
        given = None
        if x is not None:
            given = tl.load(x + unravel(point, sizes, x_strides), mask=live)
        found = NUMBER(tl.where(is_second, b, a), given, parameters, out.dtype.element_ty)
    tl.store(out + unravel(point, sizes, out_strides), found.to(out.dtype.element_ty), mask=live)
