"""Kernel of ``columns``: the gradient of weight as products of copies whose columns are adjacent."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.conv.shared_kernels import first, offset, within


@jit
def conv2d_weight_columns_kernel(
    x,
    dout,
    out,
    out_strides,
    part_stride,
    pixels,
    each,
    rows,
    wide,
    height,
    filters,
    terms,
    channels,
    groups,
    kernel_rows,
    stride_rows,
    above,
    dilation_rows,
    tiles_m,
    tiles_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out[part, filter, channel, r, s] = sum over ``each`` pixels (n, p, q) of dout[n, p, filter, q] * x[n, p *
    stride_rows + r * dilation_rows - above, (s, channel), q]: BLOCK_M filters by BLOCK_N ``terms`` (s, channel), one
    row r of taps and one part. ``filters``, ``terms`` and ``channels`` are those of one of ``groups`` (None: 1).

    ``dout`` (image, row, filter, column) and ``x`` (image, row, term, column), packed, of f32, with the filters and
    terms of all groups; both have ``wide`` columns, and 0 in those that were added. ``out`` (part, filter, channel, tap
    row, tap column), of f32, its parts ``part_stride`` apart; strides in this order, None for 1. So both factors are
    read in vectors of the pixels that are summed, side by side, as wgmma takes tf32.
    """
    program = tl.program_id(0)
    term = program % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    program = program // tiles_n
    own = program % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    program = program // tiles_m
    in_filters, in_terms = own < filters, term < terms
    channel, tap_column = term % channels, term // channels
    if groups is not None:
        group, program = program % groups, program // groups
        own += group * filters
        term = (tap_column * groups + group) * channels + channel
        filters, terms = filters * groups, terms * groups
    tap_row, part = program % kernel_rows, program // kernel_rows
    dout += offset(own, wide)[None, :]
    x += offset(term, wide)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    last = tl.minimum((part + 1) * each, pixels)
    for start in range(part * each, last, BLOCK_K):
        pixel = start + tl.arange(0, BLOCK_K)
        line, column = pixel // wide, pixel % wide
        image, row = line // rows, line % rows
        inside = pixel < pixels  # parts are whole blocks
        at = offset(line, wide) * filters + column
        a = tl.load(dout + at[:, None], mask=inside[:, None] & in_filters[None, :], other=0.0)
        y = first(row, stride_rows, above) + tap_row * dilation_rows
        found = inside & within(y, height)
        at = offset(image * height + y, wide) * terms + column
        b = tl.load(x + at[:, None], mask=found[:, None] & in_terms[None, :], other=0.0)
        acc = tl.dot(tl.trans(a), b, acc, input_precision=PRECISION)
    at = out + part.to(tl.int64) * part_stride + offset(tap_row, out_strides[2])
    at = at + offset(own, out_strides[0])[:, None]
    at = at + (offset(channel, out_strides[1]) + offset(tap_column, out_strides[3]))[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=in_filters[:, None] & in_terms[None, :])
