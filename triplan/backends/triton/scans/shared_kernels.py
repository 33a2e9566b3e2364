"""What the kernels of scans share: functions of two neighbouring runs, and how their results are carried on.

``tl.cumsum`` and ``tl.cumprod`` are what Triton's interpreter computes at once; other scans it walks through.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl


@triton.jit
def combine(a, b, PRODUCT: tl.constexpr):
    """a * b with PRODUCT, else a + b"""
    return a * b if PRODUCT else a + b


@triton.jit
def or_identity(v, live, PRODUCT: tl.constexpr):
    """``v``, loaded with zeros where not ``live``, with ones there for a product.

    (Triton 3.6's interpreter takes the bits of an integer for a masked load of bf16.)
    """
    return tl.where(live, v, 1) if PRODUCT else v


@triton.jit
def scan(v, PRODUCT: tl.constexpr, REVERSE: tl.constexpr):
    """Cumulative sums of ``v`` [ROWS, BLOCK] along its rows, or products; with REVERSE, from their ends."""
    if PRODUCT:
        y = tl.cumprod(v, 1, reverse=REVERSE)
    else:
        y = tl.cumsum(v, 1, reverse=REVERSE)
    return y


@triton.jit
def compose(a, b, later_a, later_b):
    """(later_a * a, later_b + later_a * b): the map s -> b + a * s, and then another.

    A run of the recurrence s[k] = b[k] + a[k] * s[k - 1] is such a map of the s before it.
    """
    return later_a * a, later_b + later_a * b


@triton.jit
def edge(y, BLOCK: tl.constexpr, FIRST: tl.constexpr):
    """The first or last column of ``y`` [ROWS, BLOCK], as [ROWS, 1]: a sum of it and zeros, which is exact."""
    at: tl.constexpr = 0 if FIRST else BLOCK - 1
    return tl.sum(tl.where(tl.arange(0, BLOCK)[None, :] == at, y, 0), 1, keep_dims=True)
