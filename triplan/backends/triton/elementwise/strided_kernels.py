"""Kernel of ``strided``: functions of operands of any strides; each element's offset is computed from its number."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.offsets_kernels import unravel
from triplan.backends.triton.elementwise.flat_kernels import OTHER


@jit
def strided_kernel(
    inputs,
    scalars,
    outputs,
    strides,
    sizes,
    numel,
    FUNCTION: tl.constexpr,
    POINT_TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """outputs[i] = FUNCTION(inputs[i], scalars) for i over the ``numel`` points of ``sizes``.

    inputs, outputs: any elements. sizes, and strides of each input and output: innermost dimension first.
    """
    point = tl.program_id(0).to(POINT_TYPE) * BLOCK + tl.arange(0, BLOCK)
    live = point < numel
    values = ()
    for i in tl.static_range(len(inputs)):
        values = values + (tl.load(inputs[i] + unravel(point, sizes, strides[i]), mask=live, other=OTHER),)
    results = FUNCTION(values, scalars)
    for i in tl.static_range(len(outputs)):
        tl.store(outputs[i] + unravel(point, sizes, strides[len(inputs) + i]), results[i], mask=live)
