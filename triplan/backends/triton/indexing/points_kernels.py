"""Point functions: what a traversal does at one point, passed to it as a constexpr.

``POINT(table, at, dense, hit, live, alpha, COMPUTE)``, of tensors of one shape: ``table`` is an address (or a tuple of
addresses of equal layout) and ``at`` the offset into it, ``dense`` the address of the dense element, ``live`` whether
the point exists, ``hit`` whether its index is also usable.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.indexing.steps_kernels import max_step, min_step, multiply_step
from triplan.sku import interpreting

INTERPRETED = tl.constexpr(interpreting())


@jit
def gather_point(table, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """dense = table[at], or 0 where the index is out of bounds, so that no stale memory survives.

    Both of one integer type as wide as the element: bits are moved, not values.
    """
    tl.store(dense, tl.load(table + at, mask=hit, other=0), mask=live)


@jit
def store_point(table, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """table[at] = dense. Where indices repeat, any one of the writes wins.

    Both of one integer type as wide as the element: bits are moved, not values.
    """
    tl.store(table + at, tl.load(dense, mask=hit), mask=hit)


@jit
def mark_last_point(table, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """last[place] = the largest position of those with this place; ``table``: (address, place, last, position)."""
    tl.atomic_max(table[2] + table[1], table[3].to(table[2].dtype.element_ty), mask=hit, sem="relaxed")


@jit
def store_last_point(table, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """table[at] = dense where the position is that in ``last``; ``table``: as in ``mark_last_point``.

    ``dense`` and the table of one integer type as wide as the element: bits are moved, not values.
    """
    hit = hit & (tl.load(table[2] + table[1], mask=hit, other=-1) == table[3])
    tl.store(table[0] + at, tl.load(dense, mask=hit), mask=hit)


@jit
def no_point(table, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """Nothing: the traversal only records bad indices."""


@jit
def scaled(x, alpha, COMPUTE: tl.constexpr):
    """alpha * x in COMPUTE; ``alpha`` None is 1."""
    x = x.to(COMPUTE)
    if alpha is not None:
        x = x * alpha
        x = x.to(COMPUTE)
    return x


@jit
def apart(table, at):
    """The address table + at, without what would let the compiler give a thread adjacent elements.

    It does so for vectors. But of elements that the hardware adds one by one a warp takes one of each thread at a time:
    those would lie in two or four times as many sectors.
    """
    return tl.multiple_of(table + at, [1] * len(at.shape))


@jit
def _contribution(table, dense, hit, alpha, COMPUTE: tl.constexpr):
    """alpha * dense, computed in COMPUTE and rounded to the element at ``table``, in which additions are done."""
    return scaled(tl.load(dense, mask=hit, other=0), alpha, COMPUTE).to(table.dtype.element_ty)


@jit
def _add(table, at, x, hit):
    """table[at] += x, in whatever order the hardware chooses."""
    if x.dtype.is_floating() and x.dtype.primitive_bitwidth <= 32:
        own = table + at
    else:
        own = apart(table, at)
    # Relaxed: additions commute and nothing else is published through them.
    tl.atomic_add(own, x, mask=hit, sem="relaxed")


@jit
def _add_pair(table, at, place, run, x, hit):
    """table[at] += x, as an atomic addition to the aligned pair of elements that holds ``at``.

    The hardware adds 16-bit floats only in aligned pairs; a lone one becomes a compare-and-swap loop. The other element
    of the pair receives -0.0, which changes no value. ``place`` is the element's position in a run of ``run`` adjacent
    elements of the table: where its neighbour lies outside the run, it is added alone. ``run`` None: every pair lies
    inside the table.
    """
    own = table + at
    address = own.to(tl.int64)
    odd = (address >> 1) & 1
    if run is not None:
        neighbour = place + 1 - 2 * odd
        paired = (neighbour >= 0) & (neighbour < run)
        tl.atomic_add(own, x, mask=hit & (paired == 0), sem="relaxed")
        hit = hit & paired
    pair = tl.multiple_of((address - odd * 2).to(own.dtype), [4] * len(own.shape))
    side = tl.arange(0, 2)
    for _ in tl.static_range(len(own.shape)):
        side = tl.expand_dims(side, 0)
    odd, x, pair, hit = (
        tl.expand_dims(odd, -1),
        tl.expand_dims(x, -1),
        tl.expand_dims(pair, -1),
        tl.expand_dims(hit, -1),
    )
    both = tl.where(side == odd, x, -0.0).to(own.dtype.element_ty)
    tl.atomic_add(pair + side, both, mask=hit & (side >= 0), sem="relaxed")


@jit
def atomic_point(table, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """table[at] += alpha * dense; ``dense`` of the op's element."""
    _add(table, at, _contribution(table, dense, hit, alpha, COMPUTE), hit)


@jit
def atomic_pair_point(table, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """table[at] += alpha * dense by pairs; ``table``: (address, place, run); ``dense`` and it of a 16-bit float."""
    _add_pair(table[0], at, table[1], table[2], _contribution(table[0], dense, hit, alpha, COMPUTE), hit)


@jit
def joined_point(table, points, run, alpha, COMPUTE: tl.constexpr, PAIRS: tl.constexpr):
    """table[at] += alpha * dense, for each of ``points``: JOINED tuples (at, place, dense, hit, ...) of blocks
    [BLOCK // JOINED]; those of one thread follow each other.

    Those that meet are added up first: then sorted indices leave few additions.
    """
    xs = ()
    for k in tl.static_range(len(points)):
        xs = xs + (_contribution(table, points[k][2], points[k][3], alpha, COMPUTE),)
    x = xs[0]
    for k in tl.static_range(len(points)):
        at, place, _, hit, _, _ = points[k]
        if k + 1 < len(points):
            meets = hit & points[k + 1][3] & (at == points[k + 1][0])
            hit = hit & (meets == 0)
        if PAIRS:
            _add_pair(table, at, place, run, x, hit)
        else:
            _add(table, at, x, hit)
        if k + 1 < len(points):
            x = tl.where(meets, x + xs[k + 1], xs[k + 1])


@jit
def _swap(own, old, new, left):
    """The elements at ``own``, integers, of which those that are ``old`` become ``new``, where ``left``.

    Triton's compare-and-swap has no mask: lanes without work would contend with the others.
    """
    if INTERPRETED:
        return tl.atomic_cas(own, tl.where(left, old, new), new, sem="relaxed")
    bits: tl.constexpr = old.dtype.primitive_bitwidth
    kind: tl.constexpr = "h" if bits == 16 else "r" if bits == 32 else "l"
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $4, 0; "
        + f"mov.b{bits} $0, $2; @p atom.relaxed.gpu.global.cas.b{bits} $0, [$1], $2, $3; }}",
        f"=&{kind},l,{kind},{kind},r",
        [own.to(tl.int64), old, new, left.to(tl.int32)],
        dtype=old.dtype,
        is_pure=False,
        pack=1,
    )


@jit
def _step(old, x, hit, ELEMENT: tl.constexpr, COMPUTE: tl.constexpr, STEP: tl.constexpr):
    """STEP(old, x) as ``old`` is given: an integer with the bits of ELEMENT. ``x`` in COMPUTE."""
    new, _ = STEP(old.to(ELEMENT, bitcast=True).to(COMPUTE), hit, x, hit)
    return new.to(ELEMENT).to(old.dtype, bitcast=True)


@jit
def _swapped(table, at, dense, hit, COMPUTE: tl.constexpr, STEP: tl.constexpr):
    """table[at] = STEP(table[at], dense) by compare-and-swap, in whatever order the hardware chooses.

    ``table`` addresses integers as wide as the element of ``dense``. All NaN have the same bits, so that their order
    leaves no trace.
    """
    x = tl.load(dense, mask=hit, other=0).to(COMPUTE)
    if COMPUTE.is_floating():
        x = tl.where(x == x, x, float("nan"))
    own = table + tl.where(hit, at, 0)
    _repeat(own, tl.load(own, mask=hit, other=0), x, hit, dense.dtype.element_ty, COMPUTE, STEP)


@jit
def _repeat(own, old, x, hit, element: tl.constexpr, COMPUTE: tl.constexpr, STEP: tl.constexpr):
    """STEP(what is at ``own``, x) there, by compare-and-swap; ``old`` was read there.

    What STEP would not change is not written: since STEP is associative, commutative and, once it has changed nothing,
    changes nothing later, an old value read from a cache does no harm.
    """
    new = _step(old, x, hit, element, COMPUTE, STEP)
    left = hit & (new != old)
    while tl.max(left.to(tl.int32)) > 0:
        seen = _swap(own, old, new, left)
        left = left & (seen != old)
        old = seen
        new = _step(old, x, hit, element, COMPUTE, STEP)
        left = left & (new != old)


@jit
def multiply_point(table, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """table[at] *= dense, both of integers."""
    _swapped(table, at, dense, hit, COMPUTE, multiply_step)


@jit
def multiply_joined_point(table, points, run, alpha, COMPUTE: tl.constexpr, PAIRS: tl.constexpr):
    """table[at] *= dense, both of integers, for each of ``points``: tuples as in ``joined_point``.

    Those of a thread that meet are multiplied first, wherever they stand among its points: of the swaps that meet in an
    element one succeeds at a time. The remaining ones of a thread are swapped together, not one after the other.
    """
    rest = ()
    for k in tl.static_range(len(points)):
        at, _, dense, hit, _, _ = points[k]
        # What is not hit has the offset -1. That such points meet too does no harm.
        rest = rest + ((tl.where(hit, at, -1), tl.load(dense, mask=hit, other=0).to(COMPUTE)),)
    places, factors, olds = (), (), ()
    for _ in tl.static_range(len(points)):
        at, x = rest[0]
        others = ()
        for i in tl.static_range(1, len(rest)):
            meets = at == rest[i][0]
            x = tl.where(meets, x * rest[i][1], x)
            others = others + ((tl.where(meets, -1, rest[i][0]), rest[i][1]),)
        rest = others
        places, factors = places + (at,), factors + (x,)
        olds = olds + (tl.load(table + at, mask=at >= 0, other=0),)
    at = _stacked(places)
    own = table + tl.where(at >= 0, at, 0)
    element: tl.constexpr = points[0][2].dtype.element_ty
    _repeat(own, _stacked(olds), _stacked(factors), at >= 0, element, COMPUTE, multiply_step)


@jit
def _stacked(blocks):
    """``blocks``, of which there is a power of two, as one: each thread keeps what it has."""
    for _ in tl.static_range(len(blocks)):
        if len(blocks) > 1:
            pairs = ()
            for k in tl.static_range(len(blocks) // 2):
                pairs = pairs + (tl.join(blocks[2 * k], blocks[2 * k + 1]),)
            blocks = pairs
    return blocks[0]


@jit
def _extreme(table, at, dense, hit, MAX: tl.constexpr):
    """table[at] = the larger (MAX) or smaller of table[at] and dense, by atomics of integers; NaN wins.

    ``table`` addresses integers as wide as the element of ``dense``. Of floats, those without a sign are ordered as
    signed integers are, those with a sign in reverse, as unsigned ones: one atomic for each kind of contribution. The
    NaN that is written wins against all others in its atomic; a NaN that the table held is kept. An old value read from
    a cache does no harm: it only moves towards the result.
    """
    x = tl.load(dense, mask=hit, other=0)
    own = table + at
    old = tl.load(own, mask=hit, other=0)
    if x.dtype.is_floating():
        held = old.to(x.dtype, bitcast=True)
        x = x + 0  # of zeros 0
        further = x > held if MAX else x < held
        hit = hit & (held == held) & (further | (x != x))
        bits = x.to(old.dtype, bitcast=True)
        every: tl.constexpr = (1 << old.dtype.primitive_bitwidth - 1) - 1 if MAX else -1  # a NaN
        bits = tl.where(x == x, bits, every)
        signed = bits < 0
        plain: tl.constexpr = tl.uint32 if old.dtype.primitive_bitwidth == 32 else tl.uint64
        place = own.to(tl.pointer_type(plain), bitcast=True)
        reversed = bits.to(plain, bitcast=True)
        if MAX:
            tl.atomic_max(own, bits, mask=hit & (signed == 0), sem="relaxed")
            tl.atomic_min(place, reversed, mask=hit & signed, sem="relaxed")
        else:
            tl.atomic_min(own, bits, mask=hit & (signed == 0), sem="relaxed")
            tl.atomic_max(place, reversed, mask=hit & signed, sem="relaxed")
    elif MAX:
        tl.atomic_max(own, x, mask=hit & (x > old), sem="relaxed")
    else:
        tl.atomic_min(own, x, mask=hit & (x < old), sem="relaxed")


@jit
def max_point(table, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """table[at] = max(table[at], dense); ``table`` addresses the bits of elements."""
    if dense.dtype.element_ty.primitive_bitwidth == 16:
        _swapped(table, at, dense, hit, COMPUTE, max_step)
    else:
        _extreme(table, at, dense, hit, True)


@jit
def min_point(table, at, dense, hit, live, alpha, COMPUTE: tl.constexpr):
    """table[at] = min(table[at], dense); ``table`` addresses the bits of elements."""
    if dense.dtype.element_ty.primitive_bitwidth == 16:
        _swapped(table, at, dense, hit, COMPUTE, min_step)
    else:
        _extreme(table, at, dense, hit, False)
