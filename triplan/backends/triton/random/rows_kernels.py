"""Kernel of ``rows``: random numbers of any strides, and of blocks of larger tensors, in tiles of rows and columns."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.offsets_kernels import load_tile, quotient, steps, store_tile, unravel
from triplan.backends.triton.common.philox_kernels import as_i64, keep, state_of
from triplan.backends.triton.random.shared_kernels import elements_of, pairs


@jit
def _along(position, stride):
    """position * stride, where a stride of None is 1. Negative positions, which are masked, give any number."""
    return position if stride is None else steps(position, stride)


@jit
def _start(outer, row, sizes, strides, TURNED):
    """Offset of the first element of each row. strides: (along ``sizes``, along the rows of a tile if TURNED)."""
    at = unravel(outer, sizes, strides[0])
    if TURNED:
        at = at + _along(row, strides[1])
    return at


@jit
def _write(
    out, x, parameters, state, out_start, x_start, out_strides, x_strides, counter, column, live, NUMBER, PAIRED, WIDE,
    TURNED,
):  # fmt: skip
    """out[r, c] = NUMBER(words of ``counter``, x[r, c], parameters) where ``live``, [rows, columns] as ``column``.

    counter: [rows, columns / words of a counter], whose words stand side by side; out_start, x_start: [rows].
    """
    seed, offset = state_of(state)
    a, b = pairs(seed, offset, counter, WIDE)
    given = None
    if x is not None:
        at = x + (x_start[:, None] + _along(column, x_strides[2]))
        given = load_tile(at, live, None, x_strides[2] is None or (TURNED and x_strides[1] is None))
    if PAIRED:
        first, second = NUMBER(a, b, parameters)
        found = tl.join(first, second).reshape(live.shape)
    else:
        found = NUMBER(tl.join(a, b).reshape(live.shape), given, parameters, out.dtype.element_ty)
    to = out + (out_start[:, None] + _along(column, out_strides[2]))
    store_tile(to, found.to(out.dtype.element_ty), live, out_strides[2] is None or (TURNED and out_strides[1] is None))


@jit
def _write_shifted(
    out, x, parameters, state, out_start, x_start, out_strides, x_strides, counter, skipped, column, live, NUMBER,
    PAIRED, WIDE,
):  # fmt: skip
    """As ``_write``, where the first counter of row r begins with ``skipped``[r] elements of what precedes.

    Those are dropped by a gather, which is also the exchange between threads: rows then have equal columns at equal
    positions of the tile, so that neighbouring rows are neighbours in memory. The last columns are not ``live``.
    """
    seed, offset = state_of(state)
    a, b = pairs(seed, offset, counter, WIDE)
    if PAIRED:
        first, second = NUMBER(a, b, parameters)
        found = tl.join(first, second).reshape(live.shape).to(out.dtype.element_ty)
    elif x is None:
        found = NUMBER(tl.join(a, b).reshape(live.shape), None, parameters, out.dtype.element_ty)
        found = found.to(out.dtype.element_ty)
    else:
        found = tl.join(a, b).reshape(live.shape)
    own = tl.arange(0, live.shape[1])[None, :]
    found = tl.gather(found, tl.minimum(own + skipped[:, None], live.shape[1] - 1), 1)
    if x is not None:
        at = x + (x_start[:, None] + _along(column, x_strides[2]))
        given = load_tile(at, live, None, x_strides[2] is None or x_strides[1] is None)
        found = NUMBER(found, given, parameters, out.dtype.element_ty).to(out.dtype.element_ty)
    to = out + (out_start[:, None] + _along(column, out_strides[2]))
    store_tile(to, found, live, out_strides[2] is None or out_strides[1] is None)


@jit
def rows_kernel(
    out,
    x,
    parameters,
    state,
    first,
    sizes,
    rows,
    columns,
    index_strides,
    out_strides,
    x_strides,
    NUMBER: tl.constexpr,
    SCALARS: tl.constexpr,
    PAIRED: tl.constexpr,
    WIDE: tl.constexpr,
    TURNED: tl.constexpr,
    SHIFTED: tl.constexpr,
    ALIGNED: tl.constexpr,
    POINT_TYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """out[r, c] = NUMBER(word(first + index(r) + c), x[r, c], parameters) for c < columns, index(r) = sum(r * strides).

    r: the points of ``sizes``, and if TURNED also of ``rows`` further positions, along which out or x is contiguous: a
    tile is then exchanged between threads, so that both sides access consecutive elements. Strides: (those along
    ``sizes``, innermost dimension first; that along ``rows``; that along the columns); None is 1.

    A thread evaluates Philox once for the elements of a counter. Each row begins with the counter of its first element:
    ``skipped`` elements of that belong to what precedes. ALIGNED: index(r) is a multiple of a counter's elements.
    SHIFTED: these are dropped by ``_write_shifted``, and tiles overlap by the elements of one counter.
    """
    keep(state)
    if SCALARS is not None:
        parameters = SCALARS(parameters, out.dtype.element_ty)
    SHARED: tl.constexpr = 2 if WIDE else 4
    ALL: tl.constexpr = 2**63 - 1 if WIDE else 2**62 - 1
    STEP: tl.constexpr = BLOCK_COLUMNS - SHARED if SHIFTED else BLOCK_COLUMNS
    blocks = tl.cdiv(columns if SHIFTED else columns + SHARED - 1, STEP)
    line, block = tl.program_id(0) // blocks, (tl.program_id(0) % blocks).to(POINT_TYPE)
    if TURNED:
        across = tl.cdiv(rows, BLOCK_ROWS)
        outer = (line // across).to(POINT_TYPE)
        row = (line % across).to(POINT_TYPE) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    else:
        row = line.to(POINT_TYPE) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        outer = row
    first = as_i64(first)
    index = first + _start(outer, row, sizes, index_strides, TURNED)
    out_start, x_start = _start(outer, row, sizes, out_strides, TURNED), None
    if x is not None:
        x_start = _start(outer, row, sizes, x_strides, TURNED)
    group = block.to(tl.int64) * (STEP // SHARED) + tl.arange(0, BLOCK_COLUMNS // SHARED)
    counter = ((index >> (1 if WIDE else 2))[:, None] + group[None, :]) & ALL
    place = tl.arange(0, BLOCK_COLUMNS)[None, :]
    column = block * STEP + place
    in_rows = (row < rows)[:, None]
    if SHIFTED:
        skipped = (index & (SHARED - 1)).to(tl.int32)
        _write_shifted(
            out, x, parameters, state, out_start, x_start, out_strides, x_strides, counter, skipped, column,
            in_rows & (column < columns) & (place < STEP), NUMBER, PAIRED, WIDE,
        )  # fmt: skip
    elif ALIGNED and (first & (SHARED - 1)) == 0:
        # (If the last counter is whole, there may be one block too many.)
        if block * BLOCK_COLUMNS < columns:
            _write(
                out, x, parameters, state, out_start, x_start, out_strides, x_strides, counter, column,
                in_rows & (column < columns), NUMBER, PAIRED, WIDE, TURNED,
            )  # fmt: skip
    else:
        own = column - (index & (SHARED - 1)).to(POINT_TYPE)[:, None]
        _write(
            out, x, parameters, state, out_start, x_start, out_strides, x_strides, counter, own,
            in_rows & (own >= 0) & (own < columns), NUMBER, PAIRED, WIDE, TURNED,
        )  # fmt: skip


#: Counters of an iteration: of two, moves between registers and instructions of the loop itself are half as many.
UNROLL = tl.constexpr(2)


@jit
def _later(own, following, skipped, WIDE: tl.constexpr):
    """Of the elements of two counters, as tuples, as many as one has, from the one numbered ``skipped`` on."""
    odd = (skipped & 1) != 0
    if WIDE:
        found = (tl.where(odd, own[1], own[0]), tl.where(odd, following[0], own[1]))
    else:
        far = (skipped & 2) != 0
        a, b, c = tl.where(odd, own[1], own[0]), tl.where(odd, own[2], own[1]), tl.where(odd, own[3], own[2])
        d, e = tl.where(odd, following[0], own[3]), tl.where(odd, following[1], following[0])
        f = tl.where(odd, following[2], following[1])
        found = (tl.where(far, c, a), tl.where(far, d, b), tl.where(far, e, c), tl.where(far, f, d))
    return found


@jit
def _write_beside(
    out, x, parameters, state, out_at, x_at, out_step, x_step, counter, skipped, column, columns, NUMBER, PAIRED, WIDE,
    GROUPS, SKIPS, WHOLE,
):  # fmt: skip
    """Write out[r, c] of GROUPS counters from ``column`` on; SKIPS: the first begins with ``skipped`` other elements.

    out_at, x_at: addresses of the first element. WHOLE: threads have all of these columns or none, and compare once.
    """
    SHARED: tl.constexpr = 2 if WIDE else 4
    ALL: tl.constexpr = 2**63 - 1 if WIDE else 2**62 - 1
    seed, offset = state_of(state)
    own = elements_of(seed, offset, counter & ALL, parameters, NUMBER, PAIRED, WIDE)
    LOOPS: tl.constexpr = (x is None) and (SKIPS or not WIDE)
    left = columns - column
    if LOOPS:
        # Not unrolled entirely: the compiler would compute all numbers before it stores one, which takes so many
        # registers that few programs are resident. (Of two elements a counter the loop would take longer.)
        for _ in tl.range(GROUPS, loop_unroll_factor=UNROLL):
            if SKIPS:
                counter += 1
                following = elements_of(seed, offset, counter & ALL, parameters, NUMBER, PAIRED, WIDE)
                found = _later(own, following, skipped, WIDE)
                own = following
            else:
                found = elements_of(seed, offset, counter & ALL, parameters, NUMBER, PAIRED, WIDE)
                counter += 1
            for i in tl.static_range(SHARED):
                value = found[i] if PAIRED else NUMBER(found[i], None, parameters, out.dtype.element_ty)
                tl.store(out_at, value.to(out.dtype.element_ty), mask=left > (0 if WHOLE else i))
                out_at += out_step
            if not WHOLE:
                left -= SHARED
    else:
        given = ()  # all of x before the first store, behind which no load may be moved
        if x is not None:
            for i in tl.static_range(GROUPS * SHARED):
                given = given + (tl.load(x_at, mask=column + (0 if WHOLE else i) < columns),)
                x_at += x_step
        for group in tl.static_range(GROUPS):
            found = own
            if SKIPS or group + 1 < GROUPS:
                following = elements_of(seed, offset, (counter + (group + 1)) & ALL, parameters, NUMBER, PAIRED, WIDE)
                if SKIPS:
                    found = _later(own, following, skipped, WIDE)
                own = following
            for i in tl.static_range(SHARED):
                value = found[i]
                if not PAIRED:
                    x_value = None if x is None else given[group * SHARED + i]
                    value = NUMBER(value, x_value, parameters, out.dtype.element_ty)
                live = column + (0 if WHOLE else group * SHARED + i) < columns
                tl.store(out_at, value.to(out.dtype.element_ty), mask=live)
                out_at += out_step


@jit
def beside_kernel(
    out,
    x,
    parameters,
    state,
    first,
    sizes,
    rows,
    parts,
    threads,
    columns,
    index_strides,
    out_strides,
    x_strides,
    NUMBER: tl.constexpr,
    SCALARS: tl.constexpr,
    PAIRED: tl.constexpr,
    WIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    POINT_TYPE: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[r, c] as ``rows_kernel`` has it if TURNED, where out is contiguous along ``rows``, and so is x if there is
    one, or its rows are short.

    A thread has a part of a row: the columns of GROUPS counters, which it evaluates; and one more if its row begins
    within a counter, as elements then come from two. Neighbouring threads have neighbouring rows, so that they write
    neighbouring elements. rows, parts: see ``quotient``; there are ``threads``, BLOCK of them in a program. WHOLE: all
    parts have as many columns.
    """
    keep(state)
    if SCALARS is not None:
        parameters = SCALARS(parameters, out.dtype.element_ty)
    SHARED: tl.constexpr = 2 if WIDE else 4
    thread = tl.program_id(0).to(POINT_TYPE) * BLOCK + tl.arange(0, BLOCK)
    line = quotient(thread, rows)
    outer = quotient(line, parts)
    row, part = thread - line * rows[0], line - outer * parts[0]
    column = part * (GROUPS * SHARED)
    first = as_i64(first)
    index = first + _start(outer, row, sizes, index_strides, True)
    counter = (index >> (1 if WIDE else 2)) + part.to(tl.int64) * GROUPS
    skipped, count = (index & (SHARED - 1)).to(tl.int32), tl.where(thread < threads, columns, 0)
    out_step = tl.full((), 1 if out_strides[2] is None else out_strides[2], tl.int64)
    out_at, x_at, x_step = out + (_start(outer, row, sizes, out_strides, True) + column * out_step), None, None
    if x is not None:
        x_step = tl.full((), 1 if x_strides[2] is None else x_strides[2], tl.int64)
        x_at = x + (_start(outer, row, sizes, x_strides, True) + column * x_step)
    if ALIGNED and (first & (SHARED - 1)) == 0:
        _write_beside(
            out, x, parameters, state, out_at, x_at, out_step, x_step, counter, skipped, column, count, NUMBER, PAIRED,
            WIDE, GROUPS, False, WHOLE,
        )  # fmt: skip
    else:
        _write_beside(
            out, x, parameters, state, out_at, x_at, out_step, x_step, counter, skipped, column, count, NUMBER, PAIRED,
            WIDE, GROUPS, True, WHOLE,
        )  # fmt: skip
