"""What the kernels of scans share: functions that combine two neighbouring runs of elements, and scans of tiles.

``tl.cumsum`` and ``tl.cumprod`` are used where possible: Triton's interpreter runs other scans element by element.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.rows_kernels import axis_offset


@jit
def combine(a, b, PRODUCT: tl.constexpr):
    """a * b with PRODUCT, else a + b."""
    return a * b if PRODUCT else a + b


@jit
def grouped_pointers(start, offset, GROUP: tl.constexpr):
    """The addresses ``start + offset`` [ROWS, BLOCK], which each thread accesses GROUP neighbours of, one by one.

    A thread scans its neighbours without the others; of rows that begin between two vectors the compiler would give it
    every 32nd element. So we promise an alignment that these lack. It decides which thread loads what, and no more:
    masks by an ``n`` that no number is known to divide leave no vector whole. (The promise is one about the sum: of an
    argument it would be lost.)
    """
    at = start + offset
    if GROUP > 1:
        at = tl.multiple_of(at, (1, GROUP * at.dtype.element_ty.primitive_bitwidth // 8))
    return at


@jit
def or_identity(v, live, PRODUCT: tl.constexpr):
    """``v``, which was loaded with 0 where not ``live``; for a PRODUCT, 1 there.

    (Not by ``other=1`` of the load: for bf16, Triton 3.6's interpreter takes the bits of the integer.)
    """
    return tl.where(live, v, 1) if PRODUCT else v


@jit
def scan(v, PRODUCT: tl.constexpr, REVERSE: tl.constexpr, AXIS: tl.constexpr = 1):
    """Cumulative sums (with PRODUCT, products) of ``v`` along an axis, rows by default; with REVERSE, from its end."""
    if v.shape[AXIS] == 1:
        y = v  # the compiler would exchange it between threads all the same
    elif PRODUCT:
        y = tl.cumprod(v, AXIS, reverse=REVERSE)
    else:
        y = tl.cumsum(v, AXIS, reverse=REVERSE)
    return y


@jit
def _follow_sum(through, before, next_through, next_before):
    return through + next_through, through + next_before


@jit
def _follow_product(through, before, next_through, next_before):
    return through * next_through, through * next_before


@jit
def scan_before(v, PRODUCT: tl.constexpr):
    """(cumulative sums or products of ``v`` along axis 1, those of the elements before each one)."""
    found = (v, tl.full(v.shape, PRODUCT, v.dtype))
    if PRODUCT:
        found = tl.associative_scan(found, 1, _follow_product)
    else:
        found = tl.associative_scan(found, 1, _follow_sum)
    return found


@jit
def compose(a, b, later_a, later_b):
    """(later_a * a, later_b + later_a * b): the composition of the maps s -> b + a * s and s -> later_b + later_a * s.

    A run of the recurrence s[k] = b[k] + a[k] * s[k - 1] is such a map, applied to the s before the run.
    """
    return later_a * a, later_b + later_a * b


@jit
def maps(dout_at, x_at, dout_strides, x_strides, col, n, inside, COMPUTE: tl.constexpr):
    """(a, b) [ROWS, BLOCK] of the elements ``col`` of rows that are ``inside``: s[k] = b[k] + a[k] * s, where s is that
    of the element behind the last column, and s[k] = dout[k] + x[k + 1] * s[k + 1]."""
    live = inside & (col < n)
    b = tl.load(dout_at + axis_offset(col, dout_strides[2]), mask=live, other=0).to(COMPUTE)
    a = tl.load(x_at + axis_offset(col + 1, x_strides[2]), mask=inside & (col + 1 < n), other=0).to(COMPUTE)
    return tl.associative_scan((a, b), 1, compose, reverse=True)


@jit
def store_gradients(out_at, to, out_strides, dx_strides, col, n, inside, s):
    """dx[k] = out[k - 1] * s[k] for the elements ``col`` of rows that are ``inside``; ``s``: [ROWS, BLOCK]."""
    live = inside & (col < n)
    y = tl.load(out_at + axis_offset(col - 1, out_strides[2]), mask=live & (col > 0), other=0).to(s.dtype)
    y = or_identity(y, col > 0, True)
    tl.store(to + axis_offset(col, dx_strides[2]), (y * s).to(to.dtype.element_ty), mask=live)


@jit
def edge(y, SIZE: tl.constexpr, FIRST: tl.constexpr, AXIS: tl.constexpr = 1):
    """The first or last of SIZE elements along an axis of ``y``, which stays: summed with zeros, which is exact."""
    at: tl.constexpr = 0 if FIRST else SIZE - 1
    place = tl.arange(0, SIZE)[None, :]
    if AXIS == 2:
        place = tl.expand_dims(place, 0)
    elif len(y.shape) == 3:
        place = tl.expand_dims(place, 2)
    return tl.sum(tl.where(place == at, y, 0), AXIS, keep_dims=True)
