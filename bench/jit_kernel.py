"""The simplest Triton index_select, launched by Triton's own launcher: the baseline of a plan's host time."""

# mypy: ignore-errors
# (Triton's language is not typed; the body is compiled, not executed as Python.)

import triton
import triton.language as tl


@triton.jit
def index_select_kernel(src, index, out, extent, width, COLS: tl.constexpr):
    """out[j, :] = src[index[j], :], or 0 if index[j] is out of bounds.

    src (extent, width), index (rows,) and out (rows, width) are packed. One program per row.
    """
    row = tl.program_id(0)
    at = tl.load(index + row)
    col = tl.arange(0, COLS)
    inside = (at >= 0) & (at < extent) & (col < width)
    tl.store(out + row * width + col, tl.load(src + at * width + col, mask=inside, other=0), mask=col < width)


def jit_index_select(src, index, out):
    rows, width = out.shape
    index_select_kernel[(rows,)](src, index, out, src.shape[0], width, COLS=triton.next_power_of_2(width))
