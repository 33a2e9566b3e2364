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
):
    """C[row:, column:] = act(alpha * acc + bias), rounded once, by TMA.

    ``acc`` (rows, columns) f32; ``held`` is what ``load_bias`` returned; ``result`` is (c, bias, alpha, n). Blocks of
    columns go round-robin through BUFFERS staging ``buffers``, from FIRST on. ``product`` and SHARED: the index in the
    batch and the layout of a block as a matrix; SHARED is None without a batch.
    """
    c, _, alpha, _ = result
    COLUMNS: gl.constexpr = acc.shape[1]
    WIDTH: gl.constexpr = buffers.shape[len(buffers.shape) - 1]
    value = acc * alpha
    if HAS_BIAS:
        value += gl.convert_layout(held, gl.SliceLayout(0, layout)).to(gl.float32)[None, :]
    parts = column_blocks(value, COLUMNS // WIDTH)
    for i in gl.static_range(COLUMNS // WIDTH):
        buffer = buffers.index(FIRST + i % BUFFERS)
        store_wait(BUFFERS - 1)  # TMA has read what these threads last put into this buffer
        thread_barrier()
        as_matrix(buffer, SHARED).store(ACTIVATION(parts[i]).to(c.dtype))
        fence_async_shared()
        thread_barrier()
        if SHARED is None:
            store_tile(c, [row, column + i * WIDTH], buffer)
        else:
            store_tile(c, [product, row, column + i * WIDTH], buffer)
