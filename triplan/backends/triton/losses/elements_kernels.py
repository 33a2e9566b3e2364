"""scale_gradient, entry ``elements``: packed operands, element by element."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit


@jit
def scaled_tiles(tiles, factor, IN_PLACE: tl.constexpr):
    """``tiles``; 0 with IN_PLACE and a ``factor`` of 1, which change nothing."""
    last = tiles
    if IN_PLACE:
        if factor == 1.0:
            last = tiles * 0
    return last


@jit
def scale_gradient_kernel(
    dloss, unscaled, dx, numel, tiles, IN_PLACE: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr
):
    """dx = dloss * unscaled.

    unscaled, dx: [numel] of f16, bf16, f32 or f64; dloss: [1]. A program walks over ``tiles`` blocks of BLOCK elements.

    With IN_PLACE (dx is unscaled) and a factor of 1 there is nothing to do. There are few programs of many blocks each,
    because few programs then end sooner than many. Whole blocks have no mask: one would end between two vectors.
    """
    factor = tl.load(dloss).to(COMPUTE)
    for tile in range(tl.program_id(0), scaled_tiles(tiles, factor, IN_PLACE), tl.num_programs(0)):
        start = (tl.zeros((), tl.int64) + tile) * BLOCK
        at = start + tl.arange(0, BLOCK)
        if start + BLOCK <= numel:
            v = tl.load(unscaled + at).to(COMPUTE)
            tl.store(dx + at, (v * factor).to(dx.dtype.element_ty))
        else:
            v = tl.load(unscaled + at, mask=at < numel, other=0.0).to(COMPUTE)
            tl.store(dx + at, (v * factor).to(dx.dtype.element_ty), mask=at < numel)
