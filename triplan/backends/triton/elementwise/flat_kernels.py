"""Kernel of ``flat``: functions of packed operands; one block of consecutive elements per program."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit

#: What lanes without an element compute with. A divisor of 0 would send a whole program to the slow path of ``fmod``.
OTHER = tl.constexpr(1)


@jit
def _block(inputs, scalars, outputs, point, live, FUNCTION, STRIDES):
    values = ()
    for i in tl.static_range(len(inputs)):
        if STRIDES[i] == 0:
            values = values + (tl.load(inputs[i]),)
        elif live is None:
            values = values + (tl.load(inputs[i] + point),)
        else:
            values = values + (tl.load(inputs[i] + point, mask=live, other=OTHER),)
    results = FUNCTION(values, scalars)
    for i in tl.static_range(len(outputs)):
        tl.store(outputs[i] + point, results[i], mask=live)


@jit
def flat_kernel(
    inputs,
    scalars,
    outputs,
    numel,
    FUNCTION: tl.constexpr,
    STRIDES: tl.constexpr,
    POINT_TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """outputs[i] = FUNCTION(inputs[i * STRIDES], scalars) for i < numel.

    inputs, outputs: packed elements of any types; a single element where STRIDES is 0. Only the last block is masked: a
    mask whose length is not a multiple of 16 bytes would narrow all loads.
    """
    start = tl.program_id(0).to(POINT_TYPE) * BLOCK
    point = start + tl.arange(0, BLOCK)
    if start + BLOCK <= numel:
        _block(inputs, scalars, outputs, point, None, FUNCTION, STRIDES)
    else:
        _block(inputs, scalars, outputs, point, point < numel, FUNCTION, STRIDES)
