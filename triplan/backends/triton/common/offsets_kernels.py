"""The offset of an element from its row-major number and the strides."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl


@triton.jit
def unravel(point, sizes, strides):
    """sum(i[d] * strides[d]), where i are the coordinates of ``point``, numbered row-major over ``sizes``.

    ``point``: integers of any shape; ``sizes`` and ``strides``: tuples, innermost dimension first. The offset has the
    wider of the types of points and strides: the host chooses 64 bits where operands need it.
    """
    offset = (point * 0).to(strides[0].dtype)
    for d in tl.static_range(len(sizes)):
        offset += (point % sizes[d]) * strides[d]
        point = point // sizes[d]
    return offset
