"""The maths of elementwise ops: one jit function per op, named like it, of values in the compute element.

That element is f32, or f64 for f64.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

#: Roundings in the compute element that the result of each op goes through.
ROUNDINGS = {"relu_squared": 1, "relu_squared_backward": 1}


@triton.jit
def relu_squared(x):
    """max(x, 0)**2.

    x: floats of any shape. The comparison keeps NaN, which max.f32 would drop.
    """
    kept = tl.where(x < 0, 0.0, x)
    return kept * kept


@triton.jit
def relu_squared_backward(dout, x):
    """2 * dout * x where x > 0, else 0.

    dout, x: floats of one shape. The doubling is exact; as it comes last, it overflows only where the result does.
    """
    return tl.where(x <= 0, 0.0, (dout * x) * 2)
