"""Stable sort of contributions by the table slot that their indices select.

The key of a contribution is the number of its slot, or ``slots`` where the contribution is dropped: those sort last.
Few keys are ranked in one launch (``rank_kernel``). More go through a radix sort, lowest digit first, with three
launches per digit: ``keys_kernel`` or ``digits_kernel`` counts the digits of each tile, ``scan_kernel`` turns counts
into offsets, ``scatter_kernel`` moves. Every destination is computed from integers, so the result is deterministic.

Within a block, Triton's bitonic sort orders keys by their digit. It costs the same whatever the radix, so wide digits,
and with them few passes and launches, are cheap. (Measured: 2.5 times as fast as the best of ranks by comparing all
pairs, by one-hot products and by packed prefix sums.)
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.indices_kernels import report, resolve
from triplan.backends.triton.common.offsets_kernels import unravel


@jit
def slot_keys(
    indices,
    position,
    live,
    sizes,
    index_strides,
    lane_strides,
    extents,
    key_strides,
    padding,
    slots,
    WRAP: tl.constexpr,
    CLAMP: tl.constexpr,
):
    """key = sum_k indices[k] * key_strides[k], or ``slots`` if dropped; and whether all indices are inside the table.

    ``position`` i32, any shape; the keys are i32 of that shape. ``lane_strides`` is None where one index serves a whole
    slice; else the key of an element also counts which lane it is in.
    """
    inside = live
    hit = live
    key = position * 0
    if lane_strides is not None:
        key += unravel(position, sizes, lane_strides).to(tl.int32)
    for k in tl.static_range(len(indices)):
        given = tl.load(indices[k] + unravel(position, sizes, index_strides[k]), mask=live, other=0)
        at, valid = resolve(given, extents[k], live, WRAP, CLAMP)
        inside = inside & valid
        if padding is not None:
            valid = valid & (at != padding)
        hit = hit & valid
        key += at.to(tl.int32) * key_strides[k]  # overflows only where the contribution is dropped
    return tl.where(hit, key, slots), inside


@jit
def rank_kernel(
    indices,
    status,
    padding,
    keys,
    order,
    count,
    slots,
    sizes,
    index_strides,
    lane_strides,
    position_strides,
    extents,
    key_strides,
    REPORT: tl.constexpr,
    WRAP: tl.constexpr,
    CLAMP: tl.constexpr,
    OWN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """keys, order = the sorted keys, and their positions: rank[i] = number of keys that sort before key i.

    ``keys`` and ``order`` (count,), i32. A program ranks OWN positions, each by comparison with all others.
    """
    i = tl.program_id(0) * OWN + tl.arange(0, OWN)
    live = i < count
    own, inside = slot_keys(
            indices, i, live, sizes, index_strides, lane_strides, extents, key_strides, padding, slots, WRAP, CLAMP
        )  # fmt: skip
    if REPORT:
        report(status, live & (inside == 0), unravel(i, sizes, position_strides))
    rank = tl.zeros((OWN,), tl.int32)
    for start in range(0, count, BLOCK):
        j = start + tl.arange(0, BLOCK)
        # Positions past the end have the largest key and come last, so they precede no contribution.
        other, _ = slot_keys(
            indices, j, j < count, sizes, index_strides, lane_strides, extents, key_strides, padding, slots, WRAP, CLAMP
        )  # fmt: skip
        before = other[None, :] < own[:, None] + (j[None, :] < i[:, None]).to(tl.int32)
        rank += tl.sum(before.to(tl.int32), axis=1)
    tl.store(keys + rank, own, mask=live)
    tl.store(order + rank, i, mask=live)


@jit
def digit_of(key, live, shift, RADIX: tl.constexpr):
    """The digit of ``key`` at bit ``shift``; RADIX - 1 for positions past the end, which then come after all others."""
    return tl.where(live, (key >> shift) & (RADIX - 1), RADIX - 1)


@jit
def keys_kernel(
    indices,
    status,
    padding,
    keys,
    counts,
    count,
    slots,
    blocks,
    sizes,
    index_strides,
    lane_strides,
    position_strides,
    extents,
    key_strides,
    REPORT: tl.constexpr,
    WRAP: tl.constexpr,
    CLAMP: tl.constexpr,
    RADIX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """keys[i] = key of contribution i, and counts[tile, digit] = occurrences of their lowest digits.

    ``keys`` (count,) and ``counts`` (tiles, RADIX), i32. A program takes one tile: ``blocks`` blocks of BLOCK keys.
    """
    tile = tl.program_id(0)
    found = tl.zeros((RADIX,), tl.int32)
    for block in range(blocks):
        i = (tile * blocks + block) * BLOCK + tl.arange(0, BLOCK)
        live = i < count
        key, inside = slot_keys(
            indices, i, live, sizes, index_strides, lane_strides, extents, key_strides, padding, slots, WRAP, CLAMP
        )  # fmt: skip
        if REPORT:
            report(status, live & (inside == 0), unravel(i, sizes, position_strides))
        tl.store(keys + i, key, mask=live)
        found += tl.histogram(digit_of(key, live, 0, RADIX), RADIX)
    tl.store(counts + tile * RADIX + tl.arange(0, RADIX), found)


@jit
def digits_kernel(keys, counts, count, blocks, shift, RADIX: tl.constexpr, BLOCK: tl.constexpr):
    """counts[tile, digit] = occurrences of the digits at bit ``shift`` in each tile.

    ``keys`` (count,) and ``counts`` (tiles, RADIX), i32. A program takes one tile: ``blocks`` blocks of BLOCK keys.
    """
    tile = tl.program_id(0)
    found = tl.zeros((RADIX,), tl.int32)
    for block in range(blocks):
        i = (tile * blocks + block) * BLOCK + tl.arange(0, BLOCK)
        live = i < count
        key = tl.load(keys + i, mask=live, other=0)
        found += tl.histogram(digit_of(key, live, shift, RADIX), RADIX)
    tl.store(counts + tile * RADIX + tl.arange(0, RADIX), found)


@jit
def scan_kernel(counts, totals, tiles, RADIX: tl.constexpr, TILES: tl.constexpr, DIGITS: tl.constexpr):
    """counts[tile, digit] = sum of counts[earlier tiles, digit]; totals[digit] = sum over all tiles.

    ``counts`` (tiles, RADIX) and ``totals`` (RADIX,), i32. A program takes DIGITS digits, TILES tiles at a time.
    """
    digit = tl.program_id(0) * DIGITS + tl.arange(0, DIGITS)
    before = tl.zeros((DIGITS,), tl.int32)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        at = counts + tile[:, None] * RADIX + digit[None, :]
        live = (tile < tiles)[:, None] & (digit >= 0)[None, :]
        found = tl.load(at, mask=live, other=0)
        tl.store(at, tl.cumsum(found, axis=0) - found + before[None, :], mask=live)
        before += tl.sum(found, axis=0)
    tl.store(totals + digit, before)


@jit
def scatter_kernel(
    keys,
    order,
    counts,
    totals,
    sorted_keys,
    sorted_order,
    count,
    blocks,
    shift,
    RADIX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """sorted_keys, sorted_order = keys and positions, stably sorted by the digits at bit ``shift``.

    All (count,), i32; ``counts`` (tiles, RADIX) and ``totals`` (RADIX,) from ``scan_kernel``. ``order`` is None in the
    first pass, where positions are still ascending.
    """
    tile = tl.program_id(0)
    digits = tl.arange(0, RADIX)
    total = tl.load(totals + digits)
    base = tl.cumsum(total, axis=0) - total + tl.load(counts + tile * RADIX + digits)
    lane = tl.arange(0, BLOCK)
    for block in range(blocks):
        first = (tile * blocks + block) * BLOCK
        live = first + lane < count
        key = tl.load(keys + first + lane, mask=live, other=0)
        digit = digit_of(key, live, shift, RADIX)
        here = tl.histogram(digit, RADIX)
        # Distinct, and ascending in (digit, lane): sorting them is stable, and says which key goes where.
        ticket = tl.sort(digit * BLOCK + lane)
        source = first + ticket % BLOCK
        live = source < count
        to = tl.gather(base - (tl.cumsum(here, axis=0) - here), ticket // BLOCK, 0) + lane
        tl.store(sorted_keys + to, tl.load(keys + source, mask=live, other=0), mask=live)
        if order is None:
            position = source
        else:
            position = tl.load(order + source, mask=live, other=0)
        tl.store(sorted_order + to, position, mask=live)
        base += here


@jit
def lower_bound(keys, wanted, low, high, steps):
    """min{i in [low, high): keys[i] >= wanted}, or ``high`` if there is none.

    ``keys`` sorted i32; ``wanted``, ``low`` and ``high`` of one shape. ``steps`` bisections: at least the bit length of
    high - low.
    """
    for _ in range(steps):
        open = low < high
        middle = low + ((high - low) >> 1)  # low + high may pass 2**31
        right = open & (tl.load(keys + middle, mask=open, other=0) < wanted)
        low = tl.where(right, middle + 1, low)
        high = tl.where(open & (right == 0), middle, high)
    return low


@jit
def starts_kernel(keys, starts, count, numel, steps, BLOCK: tl.constexpr):
    """starts[slot] = min{i: keys[i] >= slot}, or ``count``.

    ``keys`` (count,) sorted, ``starts`` (numel,), i32.
    """
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start = lower_bound(keys, slot, slot * 0, slot * 0 + count, steps)
    tl.store(starts + slot, start, mask=slot < numel)
