"""From the number of an element to its offset under given strides."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl


@triton.jit
def unravel(point, sizes, strides):
    """The offset of ``point``, numbered row-major over ``sizes``, under ``strides``."""
    offset = (point * 0).to(strides[0].dtype)
    for d in tl.static_range(len(sizes)):
        offset += (point % sizes[d]) * strides[d]
        point = point // sizes[d]
    return offset
