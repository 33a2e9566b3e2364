"""What the elementwise kernels share: load a tile of every operand, store a tile of every result."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl


@triton.jit
def loaded(pointers, offsets, live):
    """The tuple of the values at ``offsets`` of each of ``pointers``; ``live`` masks all, or is None."""
    values = ()
    for i in tl.static_range(len(pointers)):
        values = values + (tl.load(pointers[i] + offsets[i], mask=live),)
    return values


@triton.jit
def store_all(pointers, offsets, results, live):
    """Store ``results[i]``, broadcast, at ``offsets[i]`` of ``pointers[i]``."""
    for i in tl.static_range(len(pointers)):
        tl.store(pointers[i] + offsets[i], results[i], mask=live)
