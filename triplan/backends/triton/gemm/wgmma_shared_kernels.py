"""What the Hopper kernels share: activations, the order of tiles, the ring's slots, bias and output (Gluon)."""

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
def tile_of(tile, tiles_m, tiles_n, group_m):
    """The (row, column) of a tile: ``group_m`` rows of tiles at a time, column by column, for the L2 cache."""
    in_group = group_m * tiles_n
    group = tile // in_group
    first = group * group_m
    height = gl.minimum(tiles_m - first, group_m)
    within = tile % in_group
    return first + within % height, within // height


@gluon.jit
def triangle_tile(tile):
    """The (row, column) of a tile of a lower triangle, counted row by row."""
    # The root is near enough for triangles of millions of tiles, and then made exact.
    row = ((gl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(gl.int32)
    row = gl.where(row * (row + 1) // 2 > tile, row - 1, row)
    row = gl.where((row + 1) * (row + 2) // 2 <= tile, row + 1, row)
    return row, tile - row * (row + 1) // 2


@gluon.jit
def tiles_in(extent, SYMMETRIC: gl.constexpr):
    """How many tiles are computed of ``extent``, which is (batch, tiles along m, tiles along n, ...)."""
    batch, tiles_m, tiles_n, _, _ = extent
    if SYMMETRIC:
        each = tiles_m * (tiles_m + 1) // 2
    else:
        each = tiles_m * tiles_n
    return batch * each


@gluon.jit
def place_of(tile, extent, SYMMETRIC: gl.constexpr):
    """(product, row, column) of the tile of that number. SYMMETRIC: tiles of the lower triangle alone."""
    batch, tiles_m, tiles_n, _, group_m = extent
    each = tiles_in(extent, SYMMETRIC) // batch
    within = tile % each
    if SYMMETRIC:
        row, column = triangle_tile(within)
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
def next_slot(slot, phase, STAGES: gl.constexpr):
    """The slot after ``slot``, and the phase of its barriers, which flips when the ring wraps."""
    slot += 1
    wraps = slot == STAGES
    return gl.where(wraps, 0, slot), gl.where(wraps, phase ^ 1, phase)


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
def load_added(added, product, row, column, n, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """beta * c0 of the block at (row, column), f32; ``added``: see ``write_tile``."""
    c0, beta, stride, batch_stride, m = added
    x = row + gl.arange(0, SHAPE[0], layout=gl.SliceLayout(1, LAYOUT))
    y = column + gl.arange(0, SHAPE[1], layout=gl.SliceLayout(0, LAYOUT))
    rows = c0 + product * batch_stride + x.to(gl.int64) * stride
    # With beta = 0 the load is masked off: NaN in c0 must not reach the result.
    inside = (x < m)[:, None] & ((y < n) & (beta != 0))[None, :]
    return gl.load(rows[:, None] + y[None, :], mask=inside, other=0.0).to(gl.float32) * beta


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
    SYMMETRIC: gl.constexpr = False,
):
    """C[row:, column:] = act(alpha * acc + beta * c0 + bias), rounded once, by TMA.

    ``acc`` (rows, columns) f32; ``held`` is what ``load_bias`` returned; ``result`` is (c, bias, alpha, n). Blocks of
    columns go round-robin through BUFFERS staging ``buffers``, from FIRST on. ``product`` and SHARED: the index in the
    batch and the layout of a block as a matrix; SHARED is None without a batch. ``added`` is (c0, beta, stride of its
    rows, stride of its batch, m), if HAS_C0: c0 is read by pointers, its columns are contiguous. SYMMETRIC: square
    blocks below the diagonal are also written mirrored, and those above it not at all.
    """
    c, _, alpha, n = result
    COLUMNS: gl.constexpr = acc.shape[1]
    WIDTH: gl.constexpr = buffers.shape[len(buffers.shape) - 1]
    value = acc * alpha
    if HAS_BIAS:
        value += gl.convert_layout(held, gl.SliceLayout(0, layout)).to(gl.float32)[None, :]
    parts = column_blocks(value, COLUMNS // WIDTH)
    BLOCK_LAYOUT: gl.constexpr = parts[0].type.layout
    for i in gl.static_range(COLUMNS // WIDTH):
        buffer = buffers.index(FIRST + i % BUFFERS)
        store_wait(BUFFERS - 1)  # TMA has read what these threads last put into this buffer
        thread_barrier()
        part = parts[i]
        if HAS_C0:
            # Block by block: all at once would spill.
            part += load_added(added, product, row, column + i * WIDTH, n, part.shape, BLOCK_LAYOUT)
        part = ACTIVATION(part).to(c.dtype)
        x, y = row, column + i * WIDTH
        if SYMMETRIC:
            if x >= y:
                as_matrix(buffer, SHARED).store(part)
                store_block(c, product, x, y, buffer, SHARED)
            if x > y:
                store_wait(0)
                thread_barrier()
                as_matrix(buffer, SHARED).permute((1, 0)).store(part)
                store_block(c, product, y, x, buffer, SHARED)
        else:
            as_matrix(buffer, SHARED).store(part)
            store_block(c, product, x, y, buffer, SHARED)


@gluon.jit
def store_block(c, product, x, y, buffer, SHARED: gl.constexpr):
    """The block of C at (x, y) = ``buffer``, which these threads have filled, by TMA."""
    fence_async_shared()
    thread_barrier()
    if SHARED is None:
        store_tile(c, [x, y], buffer)
    else:
        store_tile(c, [product, x, y], buffer)
