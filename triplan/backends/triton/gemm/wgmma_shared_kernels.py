"""What the Hopper kernels share: activations, triangles of tiles, bias and output (Gluon)."""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import (
    fence_async_shared,
    gl,
    gluon,
    reinterpret,
    store_tile,
    store_wait,
    thread_barrier,
)
from triplan.backends.triton.common.rings_kernels import tile_of

#: Half the rows of a tile: one warpgroup's share, where two share a tile.
HALF = gl.constexpr(64)


@gluon.jit
def identity(x):
    """x."""
    return x


@gluon.jit
def relu(x):
    """max(x, 0)."""
    return gl.where(x < 0, 0.0, x)  # NaN stays NaN: comparisons with it are false


@gluon.jit
def gelu(x):
    """x * Phi(x), with Phi the normal distribution function, by erf."""
    return x * 0.5 * (1 + gl.erf(x * 0.7071067811865476))


@gluon.jit
def silu(x):
    """x / (1 + exp(-x))."""
    return x / (1 + gl.exp(-x))


@gluon.jit
def triangle_tile(tile):
    """The (row, column) of a tile of a lower triangle, counted row by row."""
    # The root is near enough for triangles of millions of tiles, and then made exact.
    row = (gl.sqrt(8.0 * tile + 1.0).to(gl.int32) - 1) // 2
    row = gl.where(row * (row + 1) // 2 > tile, row - 1, row)
    row = gl.where((row + 1) * (row + 2) // 2 <= tile, row + 1, row)
    return row, tile - row * (row + 1) // 2


@gluon.jit
def lower_tiles(rows, RATIO: gl.constexpr):
    """How many tiles, RATIO times as wide as high, of ``rows`` rows of tiles reach the lower triangle."""
    strips = rows // RATIO
    return RATIO * strips * (strips + 1) // 2 + rows % RATIO * (strips + 1)


@gluon.jit
def lower_tile(tile, rows, RATIO: gl.constexpr):
    """The (row, column) of a tile of ``lower_tiles``: RATIO rows, which have equally many, at a time, by columns."""
    strip, column = triangle_tile(tile // RATIO)
    row = strip * RATIO + tile % RATIO
    if RATIO > 1:
        strips = rows // RATIO
        rest = tile - RATIO * strips * (strips + 1) // 2  # in the last strip, of fewer rows
        height = gl.maximum(rows % RATIO, 1)
        row = gl.where(rest < 0, row, strips * RATIO + rest % height)
        column = gl.where(rest < 0, column, rest // height)
    return row, column


@gluon.jit
def tiles_in(extent, LOWER: gl.constexpr):
    """How many tiles are computed of ``extent``, which is (batch, tiles along m, tiles along n, ...).

    LOWER: 0, or the ratio of ``lower_tiles`` where only the lower triangle is computed.
    """
    batch, tiles_m, tiles_n, _, _ = extent
    if LOWER:
        each = lower_tiles(tiles_m, LOWER)
    else:
        each = tiles_m * tiles_n
    return batch * each


@gluon.jit
def place_of(tile, extent, LOWER: gl.constexpr):
    """(product, row, column) of the tile of that number; LOWER: see ``tiles_in``."""
    batch, tiles_m, tiles_n, _, group_m = extent
    each = tiles_in(extent, LOWER) // batch
    within = tile % each
    if LOWER:
        row, column = lower_tile(within, tiles_m, LOWER)
    else:
        row, column = tile_of(within, tiles_m, tiles_n, group_m)
    return tile // each, row, column


@gluon.jit
def as_matrix(buffer, shared: gl.constexpr):
    """``buffer``, as ``load_block`` filled it, as a matrix of layout ``shared``; unchanged without a batch (None)."""
    if shared is None:
        return buffer
    else:  # noqa: RET505 - Gluon also compiles what follows a return
        return reinterpret(buffer, buffer.dtype, [buffer.shape[1], buffer.shape[2]], shared)


@gluon.jit
def load_bias(result, column, COLUMNS: gl.constexpr, WARPS: gl.constexpr, HAS_BIAS: gl.constexpr):
    """bias[column : column + COLUMNS], spread over all threads to take the fewest registers; without a bias, alpha.

    It is loaded before the product, which hides the latency, and used after it. ``result`` is (c, bias, alpha, n).
    """
    _, bias, _, n = result
    if HAS_BIAS:
        layout: gl.constexpr = gl.BlockedLayout([max(COLUMNS // (32 * WARPS), 1)], [32], [WARPS], [0])
        at = column + gl.arange(0, COLUMNS, layout=layout)
        return gl.load(bias + at, mask=at < n, other=0.0)
    else:  # noqa: RET505 - as above
        return bias


@gluon.jit
def column_blocks(x, PARTS: gl.constexpr):
    """``x`` (rows, columns) cut into a tuple of PARTS (a power of two) blocks of columns."""
    if PARTS == 1:
        return (x,)
    else:  # noqa: RET505 - as above
        left, right = x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()
        return column_blocks(left, PARTS // 2) + column_blocks(right, PARTS // 2)


@gluon.jit
def load_c0(added, product, row, column, n, SHAPE: gl.constexpr, LAYOUT: gl.constexpr, EACH: gl.constexpr):
    """The block of C0 at (row, column), 0 outside C0; ``added``: see ``write_tile``.

    EACH: neighbours from a multiple of EACH on are all outside or all inside, and one load may take them.
    """
    c0, beta, stride, batch_stride, m = added
    x = row + gl.arange(0, SHAPE[0], layout=gl.SliceLayout(1, LAYOUT))
    y = column + gl.arange(0, SHAPE[1], layout=gl.SliceLayout(0, LAYOUT))
    rows = c0 + product * batch_stride + x.to(gl.int64) * stride
    # With beta = 0 the load is masked off: NaN in c0 must not reach the result.
    inside = gl.max_constancy((x < m)[:, None] & ((y < n) & (beta != 0))[None, :], [1, EACH])
    at = rows[:, None] + y[None, :]
    at = gl.max_contiguous(gl.multiple_of(at, [1, EACH * c0.dtype.element_ty.primitive_bitwidth // 8]), [1, EACH])
    return gl.load(at, mask=inside, other=0.0)


@gluon.jit
def first_of_c0(acc, WIDTH: gl.constexpr, added, product, row, column, n, EACH: gl.constexpr):
    """The first block of C0 that ``acc``, which is written in blocks of WIDTH columns, needs.

    It is loaded before the product, which hides the latency.
    """
    part = column_blocks(acc, acc.shape[1] // WIDTH)[0]
    LAYOUT: gl.constexpr = part.type.layout
    return load_c0(added, product, row, column, n, part.shape, LAYOUT, EACH)


@gluon.constexpr_function
def by_rows(columns, dtype, warps):
    """The layout in which ``warps`` load a block of so many columns of ``dtype``: 16 bytes a thread, along rows."""
    each = 128 // dtype.primitive_bitwidth
    along = min(columns // each, 32)
    return gl.BlockedLayout([1, each], [32 // along, along], [warps, 1], [1, 0])


@gluon.jit
def plus_c0(part, block, added):
    """part + beta * block, with one rounding; ``added``: see ``write_tile``.

    It is explicit: ptxas may otherwise fuse alpha * acc instead, and tiles of other sizes would give other bits.
    """
    beta = gl.full(part.shape, added[1], gl.float32, part.type.layout)
    return gl.fma(block.to(gl.float32), beta, part)


@gluon.jit
def write_tile(
    acc,
    held,
    result,
    buffers,
    product,
    row,
    column,
    layout: gl.constexpr,
    SHARED: gl.constexpr,
    FIRST: gl.constexpr,
    BUFFERS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    added=None,
    HAS_C0: gl.constexpr = False,
    ahead=0,
    EARLY: gl.constexpr = False,
    EACH: gl.constexpr = 1,
    WARPS: gl.constexpr = 4,
):
    """C[row:, column:] = act(alpha * acc + beta * c0 + bias), rounded once, by TMA.

    ``acc`` (rows, columns) f32; ``held`` is what ``load_bias`` returned; ``result`` is (c, bias, alpha, n). Blocks of
    columns go round-robin through BUFFERS staging ``buffers``, from FIRST on. ``product`` and SHARED: the index in the
    batch and the layout of a block as a matrix; SHARED is None without a batch. ``added`` is (c0, beta, stride of its
    rows, stride of its batch, m), if HAS_C0: c0 is read by pointers, its columns are contiguous. EACH: see ``load_c0``;
    WARPS: how many write.
    """
    c, _, alpha, n = result
    COLUMNS: gl.constexpr = acc.shape[1]
    WIDTH: gl.constexpr = buffers.shape[len(buffers.shape) - 1]
    value = acc * alpha
    if HAS_BIAS:
        value += gl.convert_layout(held, gl.SliceLayout(0, layout)).to(gl.float32)[None, :]
    parts = column_blocks(value, COLUMNS // WIDTH)
    BLOCK_LAYOUT: gl.constexpr = parts[0].type.layout
    # In the accumulator's layout a thread has pairs of neighbours. By 16 bytes, the loads of a block are so few that
    # all are on their way at once. It changes its layout in the buffer that it will leave through.
    BY_ROWS: gl.constexpr = HAS_C0 and not EARLY and EACH * c.dtype.primitive_bitwidth == 128
    for i in gl.static_range(COLUMNS // WIDTH):
        buffer = buffers.index(FIRST + i % BUFFERS)
        part = parts[i]
        if HAS_C0:
            # Block by block: all at once would spill.
            y = column + i * WIDTH
            if EARLY:
                part = plus_c0(part, ahead, added)
                if (i + 1) * WIDTH < COLUMNS:
                    ahead = load_c0(added, product, row, y + WIDTH, n, part.shape, BLOCK_LAYOUT, EACH)
            elif not BY_ROWS:
                part = plus_c0(part, load_c0(added, product, row, y, n, part.shape, BLOCK_LAYOUT, EACH), added)
            else:
                ahead = load_c0(added, product, row, y, n, part.shape, by_rows(WIDTH, c.dtype, WARPS), EACH)
        store_wait(BUFFERS - 1)  # TMA has read what these threads last put into this buffer
        thread_barrier()
        if BY_ROWS:
            as_matrix(buffer, SHARED).store(ahead)
            thread_barrier()
            part = plus_c0(part, as_matrix(buffer, SHARED).load(BLOCK_LAYOUT), added)
        part = ACTIVATION(part).to(c.dtype)
        as_matrix(buffer, SHARED).store(part)
        store_block(c, product, row, column + i * WIDTH, buffer, SHARED)


@gluon.jit
def write_lower(
    acc,
    result,
    buffers,
    product,
    row,
    column,
    SHARED: gl.constexpr,
    FIRST: gl.constexpr,
    added,
    HAS_C0: gl.constexpr,
    ahead,
    EACH: gl.constexpr,
):
    """C = alpha * acc + beta * C0 at (row, column) and mirrored, of a symmetric C of elements of two bytes.

    ``acc`` has 64 rows. Of blocks of 64 by 64 those below the diagonal are written twice, those on it once, and those
    above it not at all: they are mirrored ones. Through two of ``buffers``, from FIRST on. ``ahead``: what
    ``first_of_c0`` loaded; the rest: see ``write_tile``.
    """
    c, _, alpha, n = result
    own = buffers.index(FIRST)
    mirrored = buffers.index(FIRST + 1)
    parts = column_blocks(acc * alpha, acc.shape[1] // HALF)
    BLOCK_LAYOUT: gl.constexpr = parts[0].type.layout
    for i in gl.static_range(acc.shape[1] // HALF):
        y = column + i * HALF
        part = parts[i]
        if HAS_C0:
            part = plus_c0(part, ahead, added)
        part = part.to(c.dtype)
        if row > y:
            if HAS_C0 and (i + 1) * HALF < acc.shape[1]:
                ahead = load_c0(added, product, row, y + HALF, n, part.shape, BLOCK_LAYOUT, EACH)
            store_wait(1)  # at most the last store, which was from ``mirrored``, still reads
            thread_barrier()
            as_matrix(own, SHARED).store(part)
            store_block(c, product, row, y, own, SHARED)
            store_wait(1)
            thread_barrier()
            as_matrix(mirrored, SHARED).permute((1, 0)).store(part)
            store_block(c, product, y, row, mirrored, SHARED)
        elif row == y:
            store_wait(0)
            thread_barrier()
            as_matrix(mirrored, SHARED).store(part)
            store_block(c, product, row, y, mirrored, SHARED)


@gluon.jit
def store_block(c, product, x, y, buffer, SHARED: gl.constexpr):
    """The block of C at (x, y) = ``buffer``, which these threads have filled, by TMA."""
    fence_async_shared()
    thread_barrier()
    if SHARED is None:
        store_tile(c, [x, y], buffer)
    else:
        store_tile(c, [product, x, y], buffer)
