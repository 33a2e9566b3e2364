"""Kernel of ``fill``: results that are computed from numbers alone."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.offsets_kernels import unravel


@triton.jit
def numbers_kernel(
    start,
    step,
    out,
    numel,
    sizes,
    strides,
    NUMBER_TYPE: tl.constexpr,
    CAST: tl.constexpr,
    POINT_TYPE: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[i] = start + i * step; out[i] = start if ``step`` is None.

    start, step: scalars of NUMBER_TYPE; out: ``numel`` elements of any type (bool as i8), packed if FLAT, else with
    ``sizes`` and ``strides``, innermost dimension first. CAST: see ``moves_kernels.converted``.
    """
    first = tl.program_id(0).to(POINT_TYPE) * BLOCK
    point = first + tl.arange(0, BLOCK)
    value = tl.full((BLOCK,), start, NUMBER_TYPE)
    if step is not None:
        value += point.to(NUMBER_TYPE) * tl.full((BLOCK,), step, NUMBER_TYPE)
    if CAST == "bool":
        value = value != 0
    elif CAST == "f32":
        value = value.to(tl.float32)
    value = value.to(out.dtype.element_ty)
    at = out + point if FLAT else out + unravel(point, sizes, strides)
    # Only the last block is masked: a mask whose length is not a multiple of 16 bytes would narrow all stores.
    if first + BLOCK <= numel:
        tl.store(at, value)
    else:
        tl.store(at, value, mask=point < numel)
