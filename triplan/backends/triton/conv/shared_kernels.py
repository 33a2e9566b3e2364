"""What the kernels of convolution share: where a tap reads, and the sum of parts."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl


@triton.jit
def offset(index, stride):
    """``index * stride`` in i64; a ``stride`` of None is 1."""
    return tl.cast(index, tl.int64) if stride is None else tl.cast(index, tl.int64) * stride


@triton.jit
def first(index, stride, padding):
    """The row (or column) of x that tap 0 reads for a result; a ``stride`` of None is 1."""
    return (index if stride is None else index * stride) - padding


@triton.jit
def within(index, extent):
    """Whether 0 <= ``index`` < ``extent``, of i32: below 0 it is unsigned larger than any extent."""
    return index.to(tl.uint32) < tl.cast(extent, tl.uint32)


@triton.jit
def position(at, tap, dilation, stride, extent, TRANSPOSED: tl.constexpr):
    """The row (or column) that a tap of the filters reads, and whether there is one.

    ``at`` is that of tap 0; TRANSPOSED: what the gradient of x reads, times ``stride``, of which None is 1.
    """
    if TRANSPOSED:
        up = at - tap * dilation
        found = up if stride is None else up // stride
        inside = (up >= 0) & (found < extent)
        if stride is not None:
            inside = inside & (up % stride == 0)
    else:
        found = at + tap * dilation
        inside = (found >= 0) & (found < extent)
    return found, inside


@triton.jit
def conv2d_fold_kernel(
    parts,
    out,
    out_strides,
    elements,
    count,
    channels,
    kept,
    kernel_rows,
    kernel_columns,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = the sum of ``count`` ``parts``: BLOCK of ``elements``; every PARTS-th in their order, then these sums.

    ``parts`` (part, filter, tap row, tap column, channel), packed, in the accumulator; ``out`` (filter, channel, tap
    row, tap column), which has the first ``kept`` channels (None: all). PARTS loads wait together.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    lane = tl.arange(0, PARTS)
    of_lane = parts + lane.to(tl.int64)[:, None] * elements + at[None, :]
    sums = tl.zeros((PARTS, BLOCK), parts.dtype.element_ty)
    for part in range(0, count, PARTS):
        here = (part + lane < count)[:, None] & inside[None, :]
        sums += tl.load(of_lane + part * elements.to(tl.int64), mask=here, other=0.0)
    acc = tl.sum(sums, 0)
    channel, rest = at % channels, at // channels
    column, rest = rest % kernel_columns, rest // kernel_columns
    row, rest = rest % kernel_rows, rest // kernel_rows
    place = offset(rest, out_strides[0]) + offset(channel, out_strides[1])
    place += offset(row, out_strides[2]) + offset(column, out_strides[3])
    if kept is not None:
        inside = inside & (channel < kept)
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside)
