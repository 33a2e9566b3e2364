"""The formulas of softmax, log_softmax and their backward, one element at a time."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.rows_kernels import exponential


@triton.jit
def finished(v, top, total, LOG: tl.constexpr):
    """The result from an element, its row's maximum and its row's sum of exponentials."""
    v = v - top
    return v - tl.log(total) if LOG else exponential(v) * (1.0 / total)


@triton.jit
def term(dy, y, LOG: tl.constexpr):
    """What a row's sum is made of."""
    return dy if LOG else dy * y


@triton.jit
def derived(dy, y, total, LOG: tl.constexpr):
    """The gradient of an element from its row's sum."""
    return dy - exponential(y) * total if LOG else y * (dy - total)
