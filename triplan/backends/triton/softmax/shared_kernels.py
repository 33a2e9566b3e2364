"""The formulas of softmax, log_softmax and their backward, which the kernels of all entries share.

Elements are in the compute element: f32, or f64 for operands of f64.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.rows_kernels import exponential


@jit
def softmax_of(v, top, total, LOG: tl.constexpr):
    """exp(v - top) / total; with LOG, v - top - log(total).

    ``v``: elements; ``top`` and ``total``: their row's maximum and sum of exp(x - top).
    """
    v = v - top
    return v - tl.log(total) if LOG else exponential(v) * (1.0 / total)


@jit
def gradient_term(dy, y, LOG: tl.constexpr):
    """dy * y; with LOG, dy: the terms of the row's sum in ``gradient_of``."""
    return dy if LOG else dy * y


@jit
def gradient_of(dy, y, total, LOG: tl.constexpr):
    """y * (dy - total); with LOG, dy - exp(y) * total.

    ``dy`` and ``y``: gradients of the output, and the output; ``total``: the row's sum of ``gradient_term``.
    """
    return dy - exponential(y) * total if LOG else y * (dy - total)
