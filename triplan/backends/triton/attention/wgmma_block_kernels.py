"""What ``wgmma_kernels`` computes with a block of keys: products chunk by chunk, softmax, and a tile's results."""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import (
    fence_async_shared,
    gl,
    gluon,
    several_by_asm,
    store_tile,
    store_wait,
    thread_barrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triplan.backends.triton.attention.wgmma_shared_kernels import LN_2, ROWS, opaque
from triplan.backends.triton.common.rings_kernels import matrix

#: Accumulator columns from which on bases lag (see ``exponentials``). A step's vote and branch, across which ptxas
#: moves no instructions, cost the same for any width; the multiplications that they spare are one for each column.
LAGGING_COLUMNS = gl.constexpr(128)
#: The most that a row's maximum may exceed its lagging base, as a base-2 logarithm: an exponential, of at most 2**8, is
#: far from f16's largest number.
MOST_GROWTH = gl.constexpr(8.0)


@gluon.jit
def halved(x):
    """Elementwise maxima of the left and the right half of the columns, repeated until 8 columns are left."""
    if x.shape[1] > 8:
        left, right = x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()
        x = halved(gl.maximum(left, right))
    return x


@gluon.jit
def row_max(s, TREE: gl.constexpr):
    """The maximum of each row. TREE: by halves, because gl.max is a chain of dependent instructions in each thread."""
    if TREE:
        found = gl.convert_layout(gl.max(halved(s), 1), gl.SliceLayout(1, s.type.layout))
    else:
        found = gl.max(s, 1)
    return found


@gluon.jit
def row_sum(x):
    """A partial sum of each row per thread, so that threads exchange nothing until ``whole``."""
    return gl.sum(gl.sum(x.reshape((x.shape[0], x.shape[1] // 8, 4, 2)), 3), 1)


@gluon.jit
def rescaled(total, factor):
    """total * factor for each row; ``total`` as from ``row_sum``."""
    return total * gl.convert_layout(factor, gl.SliceLayout(1, total.type.layout))[:, None]


@gluon.jit
def whole(total, S: gl.constexpr):
    """The sum of each row, from ``row_sum``."""
    return gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, S))


@gluon.jit
def positive(sq, which, scale, L: gl.constexpr, WIDTH: gl.constexpr, CHUNKS: gl.constexpr):
    """Q (ROWS, CHUNKS * WIDTH) in slot ``which``, times the sign of ``scale``: then abs(scale) scales its scores."""
    if scale < 0:
        for c in gl.static_range(CHUNKS):
            qs = matrix(sq.index(which * CHUNKS + c), ROWS, WIDTH)
            qs.store(-qs.load(L))
        fence_async_shared()
        thread_barrier()


@gluon.jit
def scores(sq, sk, which, slot, S: gl.constexpr, WIDTH: gl.constexpr, CHUNKS: gl.constexpr, BLOCK: gl.constexpr):
    """Begin q @ k.T (ROWS, BLOCK), of q (ROWS, CHUNKS * WIDTH) in slot ``which`` and k (BLOCK, CHUNKS * WIDTH)."""
    s = gl.zeros((ROWS, BLOCK), gl.float32, S)
    for c in gl.static_range(CHUNKS):
        qs = matrix(sq.index(which * CHUNKS + c), ROWS, WIDTH)
        ks = matrix(sk.index(slot * CHUNKS + c), BLOCK, WIDTH)
        s = warpgroup_mma(qs, ks.permute((1, 0)), s, use_acc=c > 0, is_async=True)
    return s


@gluon.jit
def added(acc, p, sv, slot, WIDTH: gl.constexpr, VALUES: gl.constexpr, BLOCK: gl.constexpr):
    """Begin acc + p @ v (ROWS, VALUES * WIDTH), in chunks of WIDTH columns, of p (ROWS, BLOCK) and v in ``slot``."""
    found = ()
    for c in gl.static_range(VALUES):
        vs = matrix(sv.index(slot * VALUES + c), BLOCK, WIDTH)
        found = found + (warpgroup_mma(p, vs, acc[c], is_async=True),)
    return found


@gluon.jit
def finished(acc, x, VALUES: gl.constexpr):
    """The VALUES chunks (ROWS, WIDTH) of ``acc`` when all products are over, and ``x``, computed before they are."""
    found = warpgroup_mma_wait(0, deps=acc + (x,))
    return found[:VALUES], found[VALUES]


@gluon.constexpr_function
def scaling_asm(n, chunks):
    """Multiply the n elements that a thread has of each chunk by n factors, unless all factors of the warp are 1.

    Of wgmma's results a thread has two rows, in turns two elements of each: the first and the third factor are all.
    """
    first = 2 * n * chunks
    vote = f"setp.neu.f32 p, ${first}, 1.0; setp.neu.or.f32 p, ${first + 2}, 1.0, p; vote.sync.any.pred p, p, -1;"
    products = " ".join(f"mul.f32 ${i}, ${i}, ${first + i % n};" for i in range(n * chunks))
    return "{ .reg .pred p; " + vote + " @!p bra KEPT; " + products + " KEPT: }"


@gluon.constexpr_function
def scaling_constraints(n, chunks):
    return ",".join(["=f"] * (n * chunks) + [str(i) for i in range(n * chunks)] + ["f"] * n)


@gluon.jit
def scaled_seldom(acc, factor, L: gl.constexpr, VALUES: gl.constexpr):
    """``scaled``, but warps whose factors are all 1 skip the products."""
    factor = gl.convert_layout(factor, gl.SliceLayout(1, L))[:, None]
    _, factors = gl.broadcast(acc[0], factor)
    N: gl.constexpr = ROWS * acc[0].shape[1] // 128
    asm: gl.constexpr = scaling_asm(N, VALUES)
    return several_by_asm(asm, scaling_constraints(N, VALUES), acc + (factors,), (gl.float32,) * VALUES, N)


@gluon.jit
def scaled(acc, factor, L: gl.constexpr, VALUES: gl.constexpr):
    """The chunks (ROWS, WIDTH) of ``acc`` times ``factor`` (ROWS,)."""
    factor = gl.convert_layout(factor, gl.SliceLayout(1, L))[:, None]
    found = ()
    for c in gl.static_range(VALUES):
        found = found + (acc[c] * factor,)
    return found


@gluon.jit
def exponentials(s, top, highest, scale, LAGGING: gl.constexpr):
    """(new base, exponentials, factor) of ``s`` (ROWS, BLOCK), scores whose scaled maxima are ``highest``.

    ``top`` is the base of each row so far, as a base-2 logarithm: exponentials are 2 ** (s * scale - base), and sums of
    earlier ones are to be multiplied by the factor. The base is the running maximum. LAGGING: it remains an earlier
    maximum until the running one exceeds it by more than MOST_GROWTH, and most factors are 1 (conditional rescaling, as
    published for FlashAttention-4). Any base cancels in the quotient of the sums; this one is a score that the row has
    met, so the sum of exponentials is at least 1.

    A row may be all -inf so far, if its scores overflowed: -inf - -inf would be NaN.
    """
    if LAGGING:
        grows = highest - top > MOST_GROWTH  # also from -inf; not where both are -inf, as NaN is not greater
        new = gl.where(grows, highest, top)
        base = gl.where(new == float("-inf"), 0.0, new)
        x = gl.exp2(s * scale - base[:, None])
        factor = gl.where(grows, gl.exp2(top - base), 1.0)
    else:
        new = gl.maximum(top, highest)
        base = gl.where(new == float("-inf"), 0.0, new)
        x = gl.exp2(s * scale - base[:, None])
        factor = gl.exp2(top - base)
    return new, x, factor


@gluon.jit
def zeros(L: gl.constexpr, WIDTH: gl.constexpr, VALUES: gl.constexpr):
    """An accumulator (ROWS, WIDTH) for each of VALUES chunks."""
    found = ()
    for _ in gl.static_range(VALUES):
        found = found + (gl.zeros((ROWS, WIDTH), gl.float32, L),)
    return found


@gluon.jit
def first_softmax(
    s, row, n, sizes, scale, S: gl.constexpr, BLOCK: gl.constexpr, CAUSAL: gl.constexpr, TREE: gl.constexpr
):
    """(maxima, exponentials, sums) of ``s`` (ROWS, BLOCK), the scores of a tile's last block of keys, visited first.

    Scores are masked beyond the keys and, if CAUSAL, beyond the diagonal. A row that sees no key has the maximum -inf
    and the sum 0.
    """
    _, _, _, _, _, keys, shift, _ = sizes
    # Without a causal mask all tiles have the same mask, which the compiler would hoist out of the loop, and spill.
    column = opaque((n - 1) * BLOCK)
    limit = gl.full([ROWS], 0, gl.int32, layout=gl.SliceLayout(1, S)) + (keys - column)
    if CAUSAL:
        limit = gl.minimum(limit, gl.arange(0, ROWS, layout=gl.SliceLayout(1, S)) + (row + shift - column + 1))
    columns = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, S))
    s = gl.where(columns[None, :] < limit[:, None], s * scale, float("-inf"))
    top = row_max(s, TREE)
    x = gl.exp2(s - gl.where(top == float("-inf"), 0.0, top)[:, None])
    return top, x, row_sum(x)


@gluon.jit
def write(
    acc,
    top,
    total,
    out,
    lse,
    buffer,
    head,
    of_sequence,
    row,
    S: gl.constexpr,
    L: gl.constexpr,
    WIDTH: gl.constexpr,
    VALUES: gl.constexpr,
):
    """Store a warpgroup's rows of ``out`` and ``lse``; 0 and -inf for a row that sees no key."""
    total = whole(total, S)
    # Scores that overflowed to +inf have the sum 0, too; they become NaN.
    none = (total == 0.0) & (top == float("-inf"))
    logarithm = gl.where(none, float("-inf"), (top + gl.log2(total)) * LN_2)
    inverse = gl.where(none, 0.0, 1.0 / total)
    result = scaled(acc, inverse, L, VALUES)
    for c in gl.static_range(VALUES):
        store_wait(0)
        thread_barrier()
        matrix(buffer, ROWS, WIDTH).store(result[c].to(out.dtype))
        fence_async_shared()
        thread_barrier()
        store_tile(out, [head // of_sequence, row, head % of_sequence, c * WIDTH], buffer)
    length = out.shape[1]
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
    gl.store(lse + head.to(gl.int64) * length + rows, logarithm, mask=rows < length)
