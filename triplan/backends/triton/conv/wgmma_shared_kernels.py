"""What the convolutions for Hopper share (Gluon): boxes of pixels, what lies under a tap, waits for products."""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import (
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    warpgroup_mma_wait,
)
from triplan.backends.triton.common.rings_kernels import next_slot

#: Channels of a block of the gradient of weight: of 128 bytes.
CHANNELS = gl.constexpr(64)


@gluon.jit
def box_of(box, boxes_high, boxes_wide):
    """(image, row, column) of a box, counted in boxes."""
    return box // (boxes_high * boxes_wide), box // boxes_wide % boxes_high, box % boxes_wide


@gluon.jit
def after_product(running, empty, last, slot, phase, first, STAGES: gl.constexpr):
    """Wait for all products but ``running``, that of ``slot``: the one before, of slot ``last``, has read its operands,
    so that these may be overwritten. There is none if ``running`` is the ``first`` of its tile.

    Returns (sums, ``slot``, the next slot, the phase of its barriers).
    """
    sums = warpgroup_mma_wait(num_outstanding=1, deps=(running,))
    mbarrier.arrive(empty.index(last), count=1, pred=not first)
    following, phase = next_slot(slot, phase, STAGES)
    return sums, slot, following, phase


@gluon.jit
def column_blocks(x, PARTS: gl.constexpr):
    """``x`` (rows, columns) cut into a tuple of PARTS (a power of two) blocks of columns."""
    if PARTS == 1:
        return (x,)
    else:  # noqa: RET505 - Gluon also compiles what follows a return
        left, right = x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()
        return column_blocks(left, PARTS // 2) + column_blocks(right, PARTS // 2)


@gluon.jit
def rounded(x):
    """``x``, of 2 bytes, as it is.

    The compiler cannot round later what ``x`` was made of: if it did so while wgmma adds to the same registers, ptxas
    would let no two wgmma run at once (its remark C7514).
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, is_pure=False, pack=2)


@gluon.jit
def load_under(
    maps,
    which,
    box,
    down,
    along,
    channel,
    ready,
    buffer,
    STRIDE_ROWS: gl.constexpr,
    STRIDE_COLUMNS: gl.constexpr,
    MAPS: gl.constexpr,
):
    """buffer = pixels (image, row * STRIDE_ROWS + down, column * STRIDE_COLUMNS + along) from ``channel`` on.

    ``box`` is the first (image, row, column). ``maps[which]`` has every STRIDE_ROWS-th row and STRIDE_COLUMNS-th
    column, from the remainders of ``down`` and ``along`` on, which may be negative. Strides are 1 or 2.
    """
    image, row, column = box
    row += down >> (STRIDE_ROWS - 1)
    column += along >> (STRIDE_COLUMNS - 1)
    if MAPS == 1:
        load_tile(maps[0], [image, row, column, channel], ready, buffer)
    else:
        for i in gl.static_range(MAPS):
            load_tile(maps[i], [image, row, column, channel], ready, buffer, pred=which == i)


@gluon.jit
def remainder_of(down, along, STRIDE_ROWS: gl.constexpr, STRIDE_COLUMNS: gl.constexpr):
    """Which of the maps has the rows and columns of these remainders."""
    return (down & (STRIDE_ROWS - 1)) * STRIDE_COLUMNS + (along & (STRIDE_COLUMNS - 1))


@gluon.jit
def times(index, stride):
    """index * stride in 64 bits; a stride of None is 1."""
    if stride is None:
        return index.to(gl.int64)
    else:  # noqa: RET505 - as above
        return index.to(gl.int64) * stride


@gluon.jit
def start_ring(full, empty, STAGES: gl.constexpr):
    """Make the barriers of a ring that two warpgroups read."""
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    # TMA arrives at these barriers: the async proxy must see them initialised (CUDA programming guide, TMA).
    fence_async_shared()
