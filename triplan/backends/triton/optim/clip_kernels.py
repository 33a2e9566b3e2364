"""Kernel of ``clip``: the tensors of a list are scaled by their total norm, or clamped, in place."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.tables_kernels import (
    address_of,
    chunk_of,
    half_of,
    load_stream,
    shift_of,
    shifted,
    shifted_count,
    store_stream,
)


@jit
def _clipped(x, coefficient, limit, BY_NORM: tl.constexpr):
    """The product in f64: no coefficient is subnormal, so that one rounding to f32 remains. NaN stays NaN."""
    if BY_NORM:
        x = (x.to(tl.float64) * coefficient).to(tl.float32)
    else:
        limit = tl.full((), limit, tl.float64).to(tl.float32)  # rounding is monotonic: no result differs
        x = tl.where(x < -limit, -limit, x)
        x = tl.where(x > limit, limit, x)
    return x


@jit
def clip_kernel(
    chunks,
    starts,
    sizes,
    addresses,
    norm,
    limit,
    columns,
    TYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x *= min(1, limit / (norm + 1e-6)); without a norm, x = min(max(x, -limit), limit); a part of a chunk.

    addresses: i64 [1, columns], of tensors of TYPE; norm: f64 [1] or None; limit: f64.
    """
    coefficient = 1.0
    if norm is not None:
        coefficient = limit / (tl.load(norm) + 1e-6)
        coefficient = tl.where(coefficient > 1.0, 1.0, coefficient)
        # Nothing changes: half of the traffic and all writes are saved in most steps of a training.
        if coefficient == 1.0:
            return
    _, column, first, rest = chunk_of(chunks, starts, sizes, columns, CHUNK, PARTS)
    x = address_of(addresses, 0, column, columns)  # before a branch, so that it is not loaded after ``rest``
    if PARTS > 1:
        if rest <= 0:
            return
    shift = shift_of(x, TYPE)
    x, count = shifted(x, shift, TYPE), shifted_count(rest, shift, CHUNK // PARTS)
    for i in range(0, count, BLOCK):
        if (first + i >= shift) & (i + BLOCK <= count):
            whole = first + i + tl.arange(0, BLOCK)
            clipped = _clipped(load_stream(x, whole, None, TYPE, True), coefficient, limit, norm is not None)
            store_stream(x, whole, clipped, None, TYPE, True)
        else:
            for half in tl.static_range(2):  # see ``half_of``
                offset, mask = half_of(half, first, i, shift, count, BLOCK)
                own = _clipped(load_stream(x, offset, mask, TYPE, False), coefficient, limit, norm is not None)
                store_stream(x, offset, own, mask, TYPE, False)
