"""Sorted rows, entry ``onesweep`` (Gluon): a radix sort by digits of 8 bits, which reads and writes a row once a digit.

One read counts the digits of all passes. In each pass a program orders a tile by the digit (``ranking_kernels``) and
moves its elements. Where those of a digit go depends on the counts of all earlier tiles. So each program publishes the
counts of its tile as soon as it knows them, and later those up to and with its tile; to learn the latter it looks back,
tile by tile, until it finds a count of that kind (decoupled look-back; source: see ``ranking_kernels``). Programs take
their tile's number from a counter, so that they wait only for programs that already run. Counts are integers: the
result does not depend on which kind was found.

Elements of up to 4 bytes travel with their position in one word of 64 bits, others beside it.
"""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.gluon import gl, gluon, thread_barrier
from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.rows_kernels import axis_offset
from triplan.backends.triton.sorting.ranking_kernels import (
    COUNTERS,
    allocate_shared,
    digit_layout,
    exchanged,
    lanes_of,
    load_shared,
    ranked,
    store_shared,
)
from triplan.backends.triton.sorting.shared_kernels import DIGITS, digit_of, kept_of, key_of, load_keys

#: What a published count says, in its two highest bits: nothing yet is 0.
OF_TILE = gl.constexpr(1 << 30)
UP_TO_TILE = gl.constexpr(-(1 << 31))
#: The sum of a digit's counts: in the tile at address $1 and in the tiles before it, up to one that says UP_TO_TILE.
#: It waits for counts that are not there yet. The counts of neighbouring tiles are 4 * DIGITS bytes apart.
LOOK_BACK = gl.constexpr("""{
    .reg .pred p;
    .reg .b32 count, kind;
    .reg .b64 at;
    mov.b64 at, $1;
    mov.b32 $0, 0;
LOOK:
    ld.relaxed.gpu.global.b32 count, [at];
    shr.u32 kind, count, 30;
    setp.eq.u32 p, kind, 0;
    @p bra LOOK;
    and.b32 count, count, 0x3fffffff;
    add.u32 $0, $0, count;
    sub.s64 at, at, 1024;
    setp.eq.u32 p, kind, 1;
    @p bra LOOK;
}""")


@gluon.jit
def publish(at, count):
    """Store ``count`` at ``at``, for programs that look back. One word says all, so that no fence is needed."""
    gl.inline_asm_elementwise(
        "st.relaxed.gpu.global.b32 [$1], $2; mov.u32 $0, 0;", "=r,l,r", [at, count], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def count_kernel(
    x,
    counts,
    x_strides,
    n,
    chunks,
    steps,
    BITS: gl.constexpr,
    INFINITY: gl.constexpr,
    DESCENDING: gl.constexpr,
    WARPS: gl.constexpr,
    ITEMS: gl.constexpr,
):
    """counts[r, p, d] += occurrences of d as digit p of x[r]. A program takes ``steps`` blocks of a row.

    x: [rows, n], as integers of their width; counts: [rows, BITS // 8, DIGITS] of i32.
    """
    BLOCK: gl.constexpr = 32 * WARPS * ITEMS
    row = (gl.program_id(0) // chunks).to(gl.int64)
    chunk = gl.program_id(0) % chunks
    PASSES: gl.constexpr = BITS // 8
    digit = gl.arange(0, DIGITS, layout=digit_layout(WARPS))
    counters = allocate_shared(PASSES * COUNTERS)
    for PASS in gl.static_range(PASSES):
        store_shared(counters + PASS * COUNTERS + digit * 4, digit * 0)
    thread_barrier()
    lane = gl.arange(0, BLOCK, layout=gl.BlockedLayout([ITEMS], [32], [WARPS], [0]))
    for step in range(steps):
        col = (chunk * steps + step) * BLOCK + lane
        key = load_keys(x + row * x_strides[0], x_strides[1], col, col < n, BITS, INFINITY, DESCENDING)
        for PASS in gl.static_range(PASSES):
            at = counters + PASS * COUNTERS + digit_of(key, 8 * PASS, BITS) * 4
            gl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p red.shared.add.u32 [$1], 1; mov.u32 $0, 0; }",
                "=r,r,r",
                [at, (col < n).to(gl.int32)],
                gl.int32,
                is_pure=False,
                pack=1,
            )
    thread_barrier()
    for PASS in gl.static_range(PASSES):
        found = load_shared(counters + PASS * COUNTERS + digit * 4)
        gl.atomic_add(counts + (row * PASSES + PASS) * DIGITS + digit, found, mask=found > 0, sem="relaxed")


@jit
def starts_kernel(counts, lines, DIGITS: tl.constexpr, GROUP: tl.constexpr):
    """counts[l, d] = sum of counts[l, earlier digits]. counts: [lines, DIGITS] of i32. A program takes GROUP lines."""
    line = tl.program_id(0) * GROUP + tl.arange(0, GROUP)[:, None]
    at = counts + line.to(tl.int64) * DIGITS + tl.arange(0, DIGITS)[None, :]
    found = tl.load(at, mask=line < lines, other=0)
    tl.store(at, tl.cumsum(found, 1) - found, mask=line < lines)


@gluon.jit
def onesweep_kernel(
    x,
    source,
    order,
    values,
    indices,
    x_strides,
    values_strides,
    indices_strides,
    starts,
    published,
    ticket,
    n,
    tiles,
    shift,
    begin,
    kept,
    BITS: gl.constexpr,
    INFINITY: gl.constexpr,
    DESCENDING: gl.constexpr,
    LAST: gl.constexpr,
    WARPS: gl.constexpr,
    ITEMS: gl.constexpr,
):
    """values[r], indices[r] = elements and positions of row r, stably sorted by the digit at bit ``shift``.

    A program takes a tile. The first pass reads x, [rows, n], as integers of their width. Later passes read ``source``,
    [rows, n] of i64: words of an element and its position; or elements of 64 bits, whose positions are in ``order``,
    [rows, n] of i32. The last pass writes values, [rows, kept] or None, and indices, [rows, kept] of i64: ``kept``
    elements from ``begin`` on, or all if that is None. The others write what the next one reads. starts: [rows, BITS //
    8, DIGITS], where the first element of each digit goes; published: [rows, tiles, DIGITS]; ticket: [1], how many
    tiles have been taken. All of i32; the latter two are 0 at first.
    """
    TILE: gl.constexpr = 32 * WARPS * ITEMS
    PACKED: gl.constexpr = BITS <= 32
    counters = allocate_shared(WARPS * COUNTERS + TILE * 8)
    buffer = counters + WARPS * COUNTERS
    number = gl.atomic_add(ticket, 1, sem="relaxed")
    row = (number // tiles).to(gl.int64)
    tile = number % tiles
    warp, place = lanes_of(WARPS, ITEMS)
    col = tile * TILE + place
    live = col < n
    if source is None:
        bits = gl.load(x + row * x_strides[0] + axis_offset(col, x_strides[1]), mask=live, other=0)
        position = col
    elif PACKED:
        word = gl.load(source + row * n + col, mask=live, other=0)
        bits = word.to(gl.int32).to(x.dtype.element_ty)
        position = (word >> 32).to(gl.int32)
    else:
        bits = gl.load(source + row * n + col, mask=live, other=0)
        position = gl.load(order + row * n + col, mask=live, other=0)

    # Elements behind the end of the row have the last digit. Nobody adds their number: no tile of the row comes later.
    digit = gl.where(live, digit_of(key_of(bits, BITS, INFINITY, DESCENDING), shift, BITS), DIGITS - 1)
    rank, first, total = ranked(digit, warp, counters, WARPS)
    own = gl.arange(0, DIGITS, layout=digit_layout(WARPS))
    at = published + number.to(gl.int64) * DIGITS + own
    start = gl.load(starts + (row * (BITS // 8) + shift // 8) * DIGITS + own)
    if tile > 0:
        publish(at, total | OF_TILE)
    if PACKED:
        word = (position.to(gl.int64) << 32) | (bits.to(gl.int64) & 0xFFFFFFFF)
        word = exchanged(word, rank, place, buffer)
        bits = word.to(gl.int32).to(x.dtype.element_ty)
        position = (word >> 32).to(gl.int32)
    else:
        bits = exchanged(bits, rank, place, buffer)
        thread_barrier()  # all have read
        position = exchanged(position, rank, place, buffer)
    before = start
    if tile > 0:
        # (What the first tile of a row publishes begins with the start.)
        before = gl.inline_asm_elementwise(LOOK_BACK, "=&r,l", [at - DIGITS], gl.int32, is_pure=False, pack=1)
    publish(at, (before + total) | UP_TO_TILE)
    store_shared(counters + own * 4, before - first)
    thread_barrier()
    digit = digit_of(key_of(bits, BITS, INFINITY, DESCENDING), shift, BITS)
    to = load_shared(counters + digit * 4) + place
    if LAST:
        to, live = kept_of(to, live, begin, kept)
        if values is not None:
            gl.store(values + row * values_strides[0] + axis_offset(to, values_strides[1]), bits, mask=live)
        gl.store(
            indices + row * indices_strides[0] + axis_offset(to, indices_strides[1]), position.to(gl.int64), mask=live
        )
    elif PACKED:
        gl.store(values + row * n + to, word, mask=live)
    else:
        gl.store(values + row * n + to, bits, mask=live)
        gl.store(indices + row * n + to, position, mask=live)
