"""Positions in sorted rows: a bisection for each element."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.rows_kernels import axis_offset


@jit
def comparable(v):
    """``v`` in a type that is compared alike everywhere: f16 and bf16 in f32, narrow integers in i32."""
    if v.dtype.is_floating():
        found = v if v.dtype.primitive_bitwidth >= 32 else v.to(tl.float32)
    else:
        found = v if v.dtype.primitive_bitwidth >= 32 else v.to(tl.int32)
    return found


@jit
def searchsorted_kernel(
    sequence,
    sorter,
    x,
    out,
    sequence_strides,
    sorter_strides,
    x_strides,
    out_strides,
    n,
    m,
    blocks,
    steps,
    RIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[r, j] = how many elements of sequence[r] are less than x[r, j]; with RIGHT, less or equal.

    sequence: [rows, n]; sorter: None, or [rows, n] of i64; x: [rows, m] of the same type; out: [rows, m] of i32 or i64.
    A program takes BLOCK elements of a row. ``steps``: at least the bit length of n.
    """
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = (tl.program_id(0) % blocks).to(m.dtype) * BLOCK + tl.arange(0, BLOCK)
    known = col < m
    v = comparable(tl.load(x + row * x_strides[0] + axis_offset(col, x_strides[1]), mask=known, other=0))
    sequence += row * sequence_strides[0]
    low = tl.zeros((BLOCK,), n.dtype)
    high = low + n
    for _ in range(steps):
        is_open = known & (low < high)
        middle = low + ((high - low) >> 1)
        place = middle
        if sorter is not None:
            at = sorter + row * sorter_strides[0] + axis_offset(middle, sorter_strides[1])
            place = tl.minimum(tl.maximum(tl.load(at, mask=is_open, other=0), 0), n - 1)
        s = comparable(tl.load(sequence + axis_offset(place, sequence_strides[1]), mask=is_open, other=0))
        # Written as torch has it: a comparison with NaN is false.
        is_above = s > v if RIGHT else s >= v
        low = tl.where(is_open & (is_above == 0), middle + 1, low)
        high = tl.where(is_open & is_above, middle, high)
    to = out + row * out_strides[0] + axis_offset(col, out_strides[1])
    tl.store(to, low.to(out.dtype.element_ty), mask=known)
