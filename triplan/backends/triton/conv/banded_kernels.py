"""Kernel of ``banded``: the gradient of weight of depthwise convolutions on tensor cores (Gluon).

The gradient of one tap of a channel is sum(dout[image, row, column] * x[image, row, column + tap]). A product of
matrices that sums images, of columns of dout and columns of x, has all pairs of these columns, and the taps of a row
are diagonals of it: a band of it is used.
"""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import (
    copies_committed,
    copies_wait,
    copy_block,
    gl,
    gluon,
    mma,
    next_may_begin,
    previous_wait,
    several_by_asm,
    thread_barrier,
)

#: Images of a product, columns of x and of dout: the block of one instruction. Channels of an i64.
IMAGES = gl.constexpr(16)
COLUMNS = gl.constexpr(8)
RESULTS = gl.constexpr(16)
PACKED = gl.constexpr(4)


@gluon.jit
def unpacked(words, element: gl.constexpr):
    """The PACKED channels of i64 ``words``: a tuple of blocks. Shifts and conversions would take three times as many
    instructions."""
    asm: gl.constexpr = """{
        .reg .b32 a<2>, b<2>;
        mov.b64 {a0, a1}, $4;
        mov.b64 {b0, b1}, $5;
        prmt.b32 $0, a0, b0, 0x5410;
        prmt.b32 $1, a0, b0, 0x7632;
        prmt.b32 $2, a1, b1, 0x5410;
        prmt.b32 $3, a1, b1, 0x7632;
    }"""
    return several_by_asm(asm, "=r,=r,=r,=r,l,l", (words,), (element,) * PACKED, 2)


@gluon.jit
def words_at(base, strides, image, column):
    """Addresses of the first channels, as i64, of columns of the first row."""
    words = base.to(gl.pointer_type(gl.int64), bitcast=True)
    return words + (image.to(gl.int64) * (strides[0] // PACKED) + column.to(gl.int64) * (strides[3] // PACKED))


@gluon.jit
def start_copies(ring, slot, step, x_at, dout_at, x_in, dout_in, x_rows, dout_rows, ends, ROWS: gl.constexpr):
    """Starts to copy what ``step`` reads: a row of x, and the row of dout that meets it with the last row of taps.

    Returns the addresses of the next step.
    """
    x, dout = ring
    copy_block(x.index(slot), x_at, mask=x_in & (step >= ends[0]) & (step < ends[1]))
    copy_block(dout.index(slot), dout_at, mask=dout_in & (step >= ROWS - 1) & (step < ends[2]))
    copies_committed()
    return x_at + x_rows, dout_at + dout_rows


@gluon.jit
def next_step(ring, step, slot, x_at, dout_at, x_in, dout_in, x_rows, dout_rows, ends, ROWS: gl.constexpr):
    """Waits for what ``step`` reads, in ``slot``, and starts the copies of a later one into the slot before."""
    STAGES: gl.constexpr = ring[0].shape[0]
    copies_wait(STAGES - 2)
    thread_barrier()  # the copies of all threads have come, and all have read the slot before
    before = gl.where(slot == 0, STAGES, slot) - 1
    ahead = step + (STAGES - 1)
    return start_copies(ring, before, ahead, x_at, dout_at, x_in, dout_in, x_rows, dout_rows, ends, ROWS)


@gluon.jit
def add_products(acc, a, held):
    """acc plus the products of a row of dout with the rows of x that it meets."""
    found = ()
    for i in gl.static_range(len(held)):
        found = found + (mma(a[i % PACKED], held[i], acc[i]),)
    return found


@gluon.jit
def conv2d_weight_banded_kernel(
    x,
    dout,
    out,
    x_strides,
    dout_strides,
    part_stride,
    images,
    rows,
    columns,
    height,
    width,
    above,
    left,
    each,
    blocks,
    tiles,
    pieces,
    ROWS: gl.constexpr,
    TAPS: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAPS: gl.constexpr,
):
    """out[part, channel, tap] = sum over the pixels of a part of dout[pixel, channel] * x[pixel at tap, channel].

    ``x`` (image, channel, row, column) and ``dout``, of f16 or bf16, with adjacent channels; strides are multiples of 8
    elements. ``out``: f32 (part, channel, tap row, tap column), packed, ``part_stride`` elements a part. A program has
    32 channels (``blocks`` of these), 8 columns of x (``tiles``), which meet TAPS + 7 columns of dout, 16 images, and
    ``each`` rows of dout (``pieces``). A warp has four channels, and writes a part for each column of x: to add the
    diagonals of its products is left to the sum of the parts.

    A warp keeps ROWS rows of x in registers. Columns of dout that do not exist are zeros, whose products with
    infinities are NaN: 0 is written for these. Images that do not exist are zeros in both factors.
    """
    if OVERLAPS:
        next_may_begin()
        previous_wait()
    WARPS: gl.constexpr = 8
    element: gl.constexpr = x.dtype.element_ty
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8])
    of_dout: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    of_x: gl.constexpr = gl.DotOperandLayout(1, sums, 2)
    # Four adjacent threads copy 64 adjacent bytes of a pixel, 16 each: copies of 8 bytes, and of 32 bytes of a pixel,
    # were slower on an H200. The images that a warp reads at once are swizzled apart.
    copied: gl.constexpr = gl.BlockedLayout([2, 1, 1], [4, 1, 8], [1, 4, 2], [0, 2, 1])
    shared: gl.constexpr = gl.SwizzledSharedLayout(2, 2, 4, [0, 2, 1])
    program = gl.program_id(0)
    block = program % blocks
    program = program // blocks
    tile = program % tiles
    program = program // tiles
    piece = program % pieces
    first_image = program // pieces * IMAGES
    first_row = piece * each
    count = gl.minimum(each, rows - first_row)
    lane = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, copied)))[:, None, None]
    image = gl.arange(0, IMAGES, gl.SliceLayout(0, gl.SliceLayout(1, copied)))[None, None, :] + first_image
    in_block: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, copied))
    start = tile * COLUMNS
    at = start + gl.arange(0, COLUMNS, in_block)[None, :, None] - left
    x_in = (at >= 0) & (at < width) & (image < images)
    x_at = words_at(x, x_strides, image, at) + (block * WARPS + lane)
    at = start + gl.arange(0, RESULTS, in_block)[None, :, None] - (TAPS - 1)
    dout_in = (at >= 0) & (at < columns) & (image < images)
    dout_at = words_at(dout, dout_strides, image, at) + (block * WARPS + lane)
    x_rows, dout_rows = x_strides[2] // PACKED, dout_strides[2] // PACKED
    x_ring = gl.allocate_shared_memory(gl.int64, [STAGES, WARPS, COLUMNS, IMAGES], shared)
    dout_ring = gl.allocate_shared_memory(gl.int64, [STAGES, WARPS, RESULTS, IMAGES], shared)
    ring = (x_ring, dout_ring)
    x_at += (first_row - above).to(gl.int64) * x_rows
    dout_at += (first_row - (ROWS - 1)).to(gl.int64) * dout_rows
    # The steps whose row of x exists, and after the last.
    ends = (above - first_row, gl.minimum(height + above - first_row, count + (ROWS - 1)), count + (ROWS - 1))
    for early in gl.static_range(STAGES - 1):
        x_at, dout_at = start_copies(ring, early, early, x_at, dout_at, x_in, dout_in, x_rows, dout_rows, ends, ROWS)
    zero = gl.zeros([WARPS, RESULTS, COLUMNS], gl.float32, sums)
    acc = (zero,) * (ROWS * PACKED)
    held = (gl.zeros([WARPS, IMAGES, COLUMNS], element, of_x),) * PACKED
    held = held * (ROWS - 1)
    slot = gl.to_tensor(0)
    # Rows of x that are read before the first row of dout.
    for early in gl.static_range(ROWS - 1):
        x_at, dout_at = next_step(ring, early, slot, x_at, dout_at, x_in, dout_in, x_rows, dout_rows, ends, ROWS)
        held = held[PACKED:] + unpacked(x_ring.index(slot).permute((0, 2, 1)).load(of_x), element)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    for step in range(ROWS - 1, count + (ROWS - 1)):
        x_at, dout_at = next_step(ring, step, slot, x_at, dout_at, x_in, dout_in, x_rows, dout_rows, ends, ROWS)
        held = held + unpacked(x_ring.index(slot).permute((0, 2, 1)).load(of_x), element)
        acc = add_products(acc, unpacked(dout_ring.index(slot).load(of_dout), element), held)
        held = held[PACKED:]
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    copies_wait(0)
    lane = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, sums)))[:, None, None]
    i = gl.arange(0, RESULTS, gl.SliceLayout(0, gl.SliceLayout(2, sums)))[None, :, None]
    j = gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(1, sums)))[None, None, :]
    tap = j - i + (TAPS - 1)
    at = tile * COLUMNS + i - (TAPS - 1)
    written, exists = (tap >= 0) & (tap < TAPS), (at >= 0) & (at < columns)
    part = ((program * tiles + tile) * COLUMNS + j).to(gl.int64)
    to = out + part * part_stride + ((block * WARPS + lane) * PACKED * (ROWS * TAPS) + tap)
    for k in gl.static_range(ROWS * PACKED):
        gl.store(to + (k % PACKED * ROWS + k // PACKED) * TAPS, gl.where(exists, acc[k], 0.0), mask=written)
