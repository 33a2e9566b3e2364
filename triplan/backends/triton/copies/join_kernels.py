"""Kernel of ``join``: tensors side by side."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.offsets_kernels import quotient
from triplan.backends.triton.copies.moves_kernels import as_words


@jit
def join_kernel(
    inputs,
    widths,
    strides,
    out,
    out_stride,
    rows,
    POINT_TYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """out[r, widths[0] + ... + widths[i - 1] + c] = inputs[i][r, c].

    inputs: [rows, widths[i]] of any element, whose rows are ``strides[i]`` apart; out: [rows, sum(widths)]. A program
    moves a tile of one input; the tiles of the same rows follow each other.
    """
    across = 0
    for i in tl.static_range(len(inputs)):
        across += tl.cdiv(widths[i], BLOCK_COLUMNS).to(tl.int32)
    row = (tl.program_id(0) // across).to(POINT_TYPE) * BLOCK_ROWS
    tile = tl.program_id(0) % across
    # The input that the tile is of, the first tile of that input, and where its columns begin in out.
    x, width, stride = inputs[0], widths[0], strides[0]
    first, begin = 0, widths[0] * 0
    next_tile, next_column = tl.cdiv(widths[0], BLOCK_COLUMNS).to(tl.int32), widths[0]
    for i in tl.static_range(1, len(inputs)):
        is_here = tile >= next_tile
        x, width = tl.where(is_here, inputs[i], x), tl.where(is_here, widths[i], width)
        stride = tl.where(is_here, strides[i], stride)
        first, begin = tl.where(is_here, next_tile, first), tl.where(is_here, next_column, begin)
        next_tile += tl.cdiv(widths[i], BLOCK_COLUMNS).to(tl.int32)
        next_column += widths[i]
    start = (tile - first).to(POINT_TYPE) * BLOCK_COLUMNS
    # Only the last tiles are masked: a mask whose length is not a multiple of 16 bytes narrows loads and stores.
    whole = (row + BLOCK_ROWS <= rows) & (start + BLOCK_COLUMNS <= width)
    row = (row + tl.arange(0, BLOCK_ROWS))[:, None]
    column = (start + tl.arange(0, BLOCK_COLUMNS))[None, :]
    x_at = x + (row * stride + column)
    out_at = out + (row * out_stride + (begin + column))
    if whole:
        tl.store(out_at, tl.load(x_at))
    else:
        live = (row < rows) & (column < width)
        tl.store(out_at, tl.load(x_at, mask=live), mask=live)


@jit
def join_columns_kernel(
    inputs,
    widths,
    strides,
    out,
    out_stride,
    rows,
    columns,
    POINT_TYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """out[r, widths[0] + ... + widths[i - 1] + c] = inputs[i][r, c].

    Operands as in ``join_kernel``; columns: sum(widths). For narrow inputs: a program moves a tile of out whose columns
    may come from several inputs. Each column finds its input once for all rows of the tile. Pointers and widths are
    passed without divisors, so that every access has one element.
    """
    across = tl.cdiv(columns, BLOCK_COLUMNS)
    row = (tl.program_id(0) // across).to(POINT_TYPE) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = (tl.program_id(0) % across).to(POINT_TYPE) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    x, stride, begin = inputs[0] + column, strides[0], widths[0]
    for i in tl.static_range(1, len(inputs)):
        is_here = column >= begin
        x = tl.where(is_here, inputs[i] + (column - begin), x)
        stride = tl.where(is_here, strides[i], stride)
        begin += widths[i]
    live = (row < rows)[:, None] & (column < columns)[None, :]
    # True but where an input ends. It makes neighbouring columns those of neighbouring threads.
    x_at = tl.max_contiguous(x[None, :] + row[:, None] * (stride + column * 0)[None, :], (1, BLOCK_COLUMNS))
    out_at = out + (row[:, None] * out_stride + column[None, :])
    tl.store(out_at, tl.load(x_at, mask=live), mask=live)


@jit
def join_flat_kernel(
    inputs,
    widths,
    strides,
    out,
    columns,
    numel,
    WORD: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[r, widths[0] + ... + widths[i - 1] + c] = inputs[i][r, c], of a packed result with ``numel`` elements.

    Operands as in ``join_kernel``, in elements of the integer type WORD; columns: sum(widths), see ``quotient``.
    strides: one for all inputs if they are equal. For narrow inputs and odd rows: elements are numbered regardless of
    rows, and each finds its input. So loads have one element, but stores are vectors.

    WIDE: a program whose elements are all of one row of one input copies them as words of 4 bytes, see ``_shifted``.
    out then begins at such a word.
    """
    start = tl.program_id(0) * BLOCK
    if WIDE:
        row = quotient(start, columns)
        column = start - row * columns[0]
        x, stride, begin, end = as_words(inputs[0], WORD), strides[0], widths[0] * 0, widths[0]
        for i in tl.static_range(1, len(inputs)):
            is_here = column >= end
            x, begin = tl.where(is_here, as_words(inputs[i], WORD), x), tl.where(is_here, end, begin)
            if len(strides) > 1:
                stride = tl.where(is_here, strides[i], stride)
            end = tl.where(is_here, end + widths[i], end)
        if column + BLOCK <= end:
            size: tl.constexpr = BLOCK * WORD.primitive_bitwidth // 32
            to = (as_words(out, WORD) + start).to(tl.pointer_type(tl.uint32)) + tl.arange(0, size)
            tl.store(to, _shifted(x + (row * stride + (column - begin)), size))
        else:
            _join_flat(inputs, widths, strides, out, columns, numel, start, WORD, BLOCK)
    else:
        _join_flat(inputs, widths, strides, out, columns, numel, start, WORD, BLOCK)


@jit
def _shifted(x, SIZE: tl.constexpr):
    """SIZE words of 4 bytes that begin at the address ``x``, which need not be a multiple of 4: each is taken from the
    two words of memory that have its bytes. No word is read that has none of them."""
    behind = (x.to(tl.int64) % 4).to(tl.int32)
    words = (x.to(tl.pointer_type(tl.int8)) - behind).to(tl.pointer_type(tl.uint32)) + tl.arange(0, SIZE)
    low = tl.load(words)
    high = tl.load(words + 1, mask=words.to(tl.int64) * 0 + behind > 0, other=0)
    bits = (8 * behind).to(tl.uint32)
    return (low >> bits) | (high << (31 - bits) << 1)  # (a shift by 32 bits is not defined)


@jit
def _join_flat(inputs, widths, strides, out, columns, numel, start, WORD: tl.constexpr, BLOCK: tl.constexpr):
    """The elements of ``join_flat_kernel`` from ``start`` on."""
    point = start + tl.arange(0, BLOCK)
    row = quotient(point, columns)
    column = point - row * columns[0]
    # Addresses as if each input began where out does.
    x, stride, begin = as_words(inputs[0], WORD) + point * 0, strides[0], widths[0]
    for i in tl.static_range(1, len(inputs)):
        is_here = column >= begin
        x = tl.where(is_here, as_words(inputs[i], WORD) - begin, x)
        if len(strides) > 1:
            stride = tl.where(is_here, strides[i], stride)
        begin += widths[i]
    x_at, out_at = x + (row * stride + column), as_words(out, WORD) + point
    if start + BLOCK <= numel:
        tl.store(out_at, tl.load(x_at))
    else:
        tl.store(out_at, tl.load(x_at, mask=point < numel), mask=point < numel)


@jit
def interleave_kernel(inputs, out, count, WORD: tl.constexpr, BLOCK: tl.constexpr):
    """out[i, j] = inputs[j][i], for i < count: packed inputs of the integer type WORD, of which there are 2, 4 or 8.

    Vectors of all inputs are interleaved in registers: a thread loads as many bytes of each as make a vector of out.
    """
    start = tl.program_id(0) * BLOCK
    at = start + tl.arange(0, BLOCK)
    n: tl.constexpr = len(inputs)
    out_at = as_words(out, WORD) + start * n + tl.arange(0, n * BLOCK)
    if start + BLOCK <= count:
        tl.store(out_at, _interleaved(inputs, at, None, WORD))
    else:
        found = _interleaved(inputs, at, at < count, WORD)
        tl.store(out_at, found, mask=start * n + tl.arange(0, n * BLOCK) < count * n)


@jit
def _interleaved(inputs, at, mask, WORD: tl.constexpr):
    """The values of ``inputs`` at ``at``, [i, j] as one axis. ``tl.join`` appends an axis: halves are joined last."""
    n: tl.constexpr = len(inputs)
    if n == 2:
        left = tl.load(as_words(inputs[0], WORD) + at, mask=mask)
        found = tl.join(left, tl.load(as_words(inputs[1], WORD) + at, mask=mask))
    elif n == 4:
        even = _interleaved((inputs[0], inputs[2]), at, mask, WORD)
        found = tl.join(even, _interleaved((inputs[1], inputs[3]), at, mask, WORD))
    else:
        even = _interleaved((inputs[0], inputs[2], inputs[4], inputs[6]), at, mask, WORD)
        found = tl.join(even, _interleaved((inputs[1], inputs[3], inputs[5], inputs[7]), at, mask, WORD))
    return found.reshape(n * at.shape[0])
