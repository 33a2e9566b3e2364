"""Point functions: what a traversal does at one point, passed to it as a constexpr.

``POINT(table, at, dense, hit, live, alpha, COMPUTE)``, of tensors of one shape: ``table`` is an address (or a tuple of
addresses of equal layout) and ``at`` the offset into it, ``dense`` the address of the dense element, ``live`` whether
the point exists, ``hit`` whether its index is also usable.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.indexing.steps_kernels import max_step, min_step, multiply_step


@triton.jit
def gather_point(table, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """dense = table[at], or 0 where the index is out of bounds, so that no stale memory survives.

    Both of one integer type as wide as the element: bits are moved, not values.
    """
    tl.store(dense, tl.load(table + at, mask=hit, other=0), mask=live)


@triton.jit
def store_point(table, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """table[at] = dense. Where indices repeat, any one of the writes wins.

    Both of one integer type as wide as the element: bits are moved, not values.
    """
    tl.store(table + at, tl.load(dense, mask=hit), mask=hit)


@triton.jit
def no_point(table, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """Nothing: the traversal only records bad indices."""


@triton.jit
def scaled(x, alpha, COMPUTE: tl.constexpr):
    """alpha * x in COMPUTE; ``alpha`` None is 1."""
    x = x.to(COMPUTE)
    if alpha is not None:
        x = x * alpha
        x = x.to(COMPUTE)
    return x


@triton.jit
def atomic_point(table, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """table[at] += alpha * dense, in whatever order the hardware chooses.

    ``dense`` of the op's element; the product is computed in COMPUTE and rounded to the table's element, in which the
    addition is done.
    """
    x = scaled(tl.load(dense, mask=hit, other=0), alpha, COMPUTE)
    # Relaxed: additions commute and nothing else is published through them.
    tl.atomic_add(table + at, x.to(table.dtype.element_ty), mask=hit, sem="relaxed")


@triton.jit
def atomic_pair_point(table, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """table[at] += alpha * dense, as an atomic addition to the aligned pair of elements that holds ``at``.

    ``dense`` and ``table`` of a 16-bit float; the caller vouches that every pair lies inside the table. The hardware
    adds 16-bit floats only in aligned pairs; a lone one becomes a compare-and-swap loop. The other element of the pair
    receives -0.0, which changes no value.
    """
    x = scaled(tl.load(dense, mask=hit, other=0), alpha, COMPUTE).to(table.dtype.element_ty)
    table = table + at
    address = table.to(tl.int64)
    odd = (address >> 1) & 1
    pair = tl.multiple_of((address - odd * 2).to(table.dtype), [4] * len(table.shape))
    side = tl.arange(0, 2)
    for _ in tl.static_range(len(table.shape)):
        side = tl.expand_dims(side, 0)
    odd, x, pair, hit = (
        tl.expand_dims(odd, -1),
        tl.expand_dims(x, -1),
        tl.expand_dims(pair, -1),
        tl.expand_dims(hit, -1),
    )
    both = tl.where(side == odd, x, -0.0).to(table.dtype.element_ty)
    tl.atomic_add(pair + side, both, mask=hit & (side >= 0), sem="relaxed")


@triton.jit
def _step(old, x, hit, ELEMENT: tl.constexpr, COMPUTE: tl.constexpr, STEP: tl.constexpr):
    """STEP(old, x) as ``old`` is given: an integer with the bits of ELEMENT. ``x`` in COMPUTE."""
    new, _ = STEP(old.to(ELEMENT, bitcast=True).to(COMPUTE), hit, x, hit)
    return new.to(ELEMENT).to(old.dtype, bitcast=True)


@triton.jit
def _combine(table, at, dense, hit, COMPUTE: tl.constexpr, STEP: tl.constexpr):
    """table[at] = STEP(table[at], dense) by compare-and-swap, in whatever order the hardware chooses.

    ``table`` addresses integers as wide as the element of ``dense``. What STEP would not change is not written: since
    STEP is associative, commutative and, once it has changed nothing, changes nothing later, an old value read from a
    cache does no harm. All NaN have the same bits, so that their order leaves no trace.
    """
    element: tl.constexpr = dense.dtype.element_ty
    x = tl.load(dense, mask=hit, other=0).to(COMPUTE)
    if COMPUTE.is_floating():
        x = tl.where(x == x, x, float("nan"))
    own = table + tl.where(hit, at, 0)
    old = tl.load(own, mask=hit, other=0)
    new = _step(old, x, hit, element, COMPUTE, STEP)
    left = hit & (new != old)
    while tl.max(left.to(tl.int32)) > 0:
        # Lanes that are done exchange a value for itself: the instruction has no mask.
        seen = tl.atomic_cas(own, tl.where(left, old, new), new, sem="relaxed")
        left = left & (seen != old)
        old = seen
        new = _step(old, x, hit, element, COMPUTE, STEP)
        left = left & (new != old)


@triton.jit
def multiply_point(table, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """table[at] *= dense, both of integers."""
    _combine(table, at, dense, hit, COMPUTE, multiply_step)


@triton.jit
def max_point(table, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """table[at] = max(table[at], dense); ``table`` addresses the bits of elements."""
    _combine(table, at, dense, hit, COMPUTE, max_step)


@triton.jit
def min_point(table, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """table[at] = min(table[at], dense); ``table`` addresses the bits of elements."""
    _combine(table, at, dense, hit, COMPUTE, min_step)
