"""Kernel of ``tiles``: a program loads or computes the angles of a few tokens once, and rotates their heads by them.

With a cache, other programs copy heads of values to it.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import math

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.indices_kernels import report, resolve
from triplan.backends.triton.common.rows_kernels import axis_offset

#: f32 angles up to here are reduced by multiples, up to 2**30, of pi / 2 as the sum of its first 33 bits and the next
#: 53 (as in "fdlibm", e_rem_pio2.c). What is left of such an angle is never below 2**-28, and right to 2**-28 of it.
FAR = tl.constexpr(2.0**30)
HALF_PI = tl.constexpr(float.fromhex("0x1.921fb544p0"))
HALF_PI_REST = tl.constexpr(float.fromhex("0x1.0b4611a626331p-34"))
TWO_OVER_PI = tl.constexpr(2 / math.pi)
#: pi / 2 in units of 2**-62.
TURN = tl.constexpr(math.pi / 2 / 2**62)
#: Doubles around this are integers, which their last bits say.
SHIFT = tl.constexpr(1.5 * 2.0**52)


@jit
def rotary_kernel(
    q,
    k,
    v,
    slots,
    owners,
    cos,
    sin,
    inv_freq,
    positions,
    status,
    tokens,
    sequence,
    half,
    rest,
    table_rows,
    slot_count,
    page_size,
    v_dim,
    blocks,
    groups,
    q_groups,
    turned,
    step,
    sign,
    scale,
    eps,
    COMPUTE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CLAMP: tl.constexpr,
    GROUPS_FIRST: tl.constexpr,
    KEYS: tl.constexpr,
    TABLE: tl.constexpr,
    POSITIONS: tl.constexpr,
    NORM: tl.constexpr,
    CACHE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out = (x * cos - y * sin, y * cos + x * sin) for each pair (x, y) of each head; sin is multiplied by ``sign``.

    q, and k with KEYS, are tuples (heads, x, out), with NORM (heads, x, out, weight, rstd). x, out: (batch, sequence,
    heads, head_dim) of f16, bf16, f32 or f64, of which 2 * ``half`` elements are rotated and ``rest`` are copied;
    weight: (head_dim,); rstd: (batch, sequence, heads), which CACHE does not write. With TABLE, cos, sin: (batch,
    table_rows, half), else inv_freq: (half,). With POSITIONS, positions: (batch, sequence). Each tensor is (address,
    strides); a stride of None is 1.

    With CACHE, out of k is a cache (pages, ``page_size``, heads, head_dim), and v is (heads, x, out), of heads of
    ``v_dim`` elements that are copied to such a cache, COLUMNS at a time. Token (b, s) is row ``slots[b, s]`` of
    ``slot_count`` of each; a row outside is not written, nor with ``owners`` (slot_count,) any of another token.

    There are ``blocks`` of TOKENS tokens, over all sequences, and ``groups`` of HEADS heads: ``q_groups``
    of q, then those of k, ``turned`` together, then those of v. With GROUPS_FIRST, neighbouring programs take the
    groups of one block, otherwise the blocks of one group. ``step`` is HEADS, but not known when this is compiled: else
    some heads of odd rows would begin at more aligned places than others, and have other layouts.
    """
    pid = tl.program_id(0)
    if GROUPS_FIRST:
        block = pid // groups
        group = pid % groups
    else:
        block = pid % blocks
        group = pid // blocks
    token = block.to(tokens.dtype) * TOKENS + tl.arange(0, TOKENS)
    live = token < tokens
    b = token // sequence
    s = token % sequence
    if CACHE:
        slot = tl.load(slots[0] + _offset(slots[1], b, s), mask=live & (group >= q_groups), other=0)
        if group >= turned:
            at = _place(slot, owners, token, live, slot_count, page_size)
            _copy_tile(v, (group - turned) * step, b, s, live, at, v_dim, HEADS, COLUMNS)
            return
    position = s
    if POSITIONS:
        position = tl.load(positions[0] + _offset(positions[1], b, s), mask=live, other=0)
    # One path for q and k. Their heads are loaded before anything waits for a load.
    heads = q
    head = group * step
    if KEYS:
        heads = _heads_of(group < q_groups, q, k, NORM, CACHE)
        head = tl.where(group < q_groups, group, group - q_groups) * step
    loaded = _load(heads, head, b, s, live, half, rest, HEADS, BLOCK, REST, INTERLEAVED)
    pair = tl.arange(0, BLOCK)
    used = pair < half
    if TABLE:
        row, inside = resolve(position, table_rows, live, False, CLAMP)
        known = inside[:, None] & used[None, :]
        c = tl.load(cos[0] + _offset(cos[1], b, row, pair), mask=known, other=0).to(COMPUTE)
        d = tl.load(sin[0] + _offset(sin[1], b, row, pair), mask=known, other=0).to(COMPUTE)
        if POSITIONS and status is not None:
            if group == 0:
                bad = live & (inside == 0)
                if CACHE:
                    report(status, bad, token + tokens)  # behind the tokens of bad slots
                else:
                    report(status, bad, token)
    else:
        # (As a tile, though its rows are equal, frequencies come to the threads that rotate by them.)
        at = inv_freq[0] + axis_offset(pair, inv_freq[1][0])[None, :] + tl.zeros((TOKENS, 1), tl.int32)
        frequency = tl.load(at, mask=used[None, :] & live[:, None], other=0)
        c, d = _cos_and_sin(position.to(COMPUTE)[:, None] * frequency)
        c *= scale
        d *= scale
    d *= sign
    at = (b, s, live)
    if CACHE:
        if status is not None:
            if group == 0:
                first = tl.load(slots[0] + _offset(slots[1], b, s), mask=live, other=0)
                report(status, live & (first >= slot_count), token)
        if group >= q_groups:
            at = _place(slot, owners, token, live, slot_count, page_size)
    _rotate(heads, loaded, head, b, s, live, at, c, d, half, rest, eps, HEADS, BLOCK, REST, INTERLEAVED, NORM, CACHE)


@jit
def _heads_of(first, q, k, NORM: tl.constexpr, CACHE: tl.constexpr):
    """q if ``first``, else k."""
    count = tl.where(first, q[0], k[0])
    heads = (count, _either(first, q[1], k[1], 4), _either(first, q[2], k[2], 4))
    if NORM:
        heads = heads + (_either(first, q[3], k[3], 1),)
        if not CACHE:
            heads = heads + (_either(first, q[4], k[4], 3),)
    return heads


@jit
def _either(first, a, b, RANK: tl.constexpr):
    """The (address, strides) ``a`` if ``first``, else ``b``."""
    strides = ()
    for i in tl.static_range(RANK):
        if a[1][i] is None and b[1][i] is None:
            strides = strides + (1,)
        elif a[1][i] is None:
            strides = strides + (tl.where(first, 1, b[1][i]),)
        elif b[1][i] is None:
            strides = strides + (tl.where(first, a[1][i], 1),)
        else:
            strides = strides + (tl.where(first, a[1][i], b[1][i]),)
    return tl.where(first, a[0], b[0]), strides


@jit
def _cos_and_sin(angle):
    """cos and sin of ``angle`` [TOKENS, BLOCK], which are within 2 units in the last place if it is f32.

    libdevice reduces the angle for each of them, and beyond 10^5 in a loop over memory. One reduction in f64 serves
    both.
    """
    if angle.dtype == tl.float64:
        c = tl.cos(angle)
        d = tl.sin(angle)
    else:
        if tl.max(tl.abs(angle)) > FAR:
            # (Each angle by itself, as bits must not depend on which angles share a tile.)
            far = tl.abs(angle) > FAR
            r, quarter = _reduced(tl.where(far, 0, angle))
            far_r, far_quarter = _reduced_far(angle)
            r = tl.where(far, far_r, r)
            quarter = tl.where(far, far_quarter, quarter)
        else:
            r, quarter = _reduced(angle)
        # The polynomials of "Cephes" (sinf.c) up to pi / 4.
        square = r * r
        even = tl.fma(square, 2.443315711809948e-5, -1.388731625493765e-3)
        even = tl.fma(square, tl.fma(square, even, 4.166664568298827e-2), -0.5)
        even = tl.fma(square, even, 1.0)
        odd = tl.fma(square, -1.9515295891e-4, 8.3321608736e-3)
        odd = tl.fma(square, odd, -1.6666654611e-1)
        odd = tl.fma(square * r, odd, r)
        swapped = (quarter & 1) != 0
        c = tl.where(swapped, odd, even)
        d = tl.where(swapped, even, odd)
        c = tl.where(((quarter + 1) & 2) != 0, -c, c)
        d = tl.where((quarter & 2) != 0, -d, d)
    return c, d


@jit
def _reduced(angle):
    """(r, n), where ``angle`` is r + n * pi / 2, of f32 angles up to FAR."""
    wide = angle.to(tl.float64)
    shifted = tl.fma(wide, _f64(TWO_OVER_PI), _f64(SHIFT))
    turns = shifted - SHIFT
    wide = tl.fma(turns, _f64(-HALF_PI), wide)
    r = tl.fma(turns, _f64(-HALF_PI_REST), wide).to(tl.float32)
    return r, shifted.to(tl.int64, bitcast=True).to(tl.int32)


@jit
def _reduced_far(angle):
    """(r, n), where ``angle`` is r + n * pi / 2 but for multiples of 2 * pi, of f32 angles beyond FAR.

    By Payne and Hanek ("Radian reduction for trigonometric functions", 1983): an angle is an integer of 24 bits times
    2**e. Of that power times 2 / pi, multiples of 4 do not matter, and the next 96 bits suffice.
    """
    bits = angle.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x800000).to(tl.uint64)
    first = tl.maximum(((bits >> 23) & 255) - 152, 0)
    a = _bits_of_two_over_pi(first >> 5)
    b = _bits_of_two_over_pi((first >> 5) + 1)
    c = _bits_of_two_over_pi((first >> 5) + 2)
    d = _bits_of_two_over_pi((first >> 5) + 3)
    shift = (first & 31).to(tl.uint64)
    product = (mantissa * ((((a << 32) | b) << shift) >> 32)) << 32
    product += mantissa * ((((b << 32) | c) << shift) >> 32)
    product += (mantissa * ((((c << 32) | d) << shift) >> 32)) >> 32
    turns = (product + (1 << 61)) >> 62
    r = ((product - (turns << 62)).to(tl.int64, bitcast=True).to(tl.float64) * TURN).to(tl.float32)
    turns = turns.to(tl.int32)
    r = tl.where(angle < 0, -r, r) + (angle - angle)  # NaN of infinity and of NaN
    return r, tl.where(angle < 0, -turns, turns)


@jit
def _bits_of_two_over_pi(word):
    """Bits 32 * ``word`` to 32 * ``word`` + 31 behind the point of 2 / pi."""
    found = tl.full(word.shape, 0xA2F9836E, tl.uint64)
    found = tl.where(word == 1, 0x4E441529, found)
    found = tl.where(word == 2, 0xFC2757D1, found)
    found = tl.where(word == 3, 0xF534DDC0, found)
    found = tl.where(word == 4, 0xDB629599, found)
    found = tl.where(word == 5, 0x3C439041, found)
    return tl.where(word == 6, 0xFE5163AB, found)


@jit
def _f64(value: tl.constexpr):
    return tl.full((1, 1), value, tl.float64)


@jit
def _load(
    heads,
    first_head,
    b,
    s,
    live,
    half,
    rest,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """HEADS tuples: the first and the second halves of a head of the tokens (``b``, ``s``), [TOKENS, BLOCK] (with
    INTERLEAVED the pairs in one tensor, [TOKENS, 2 * BLOCK]); with REST also what is not rotated, [TOKENS, REST].

    All heads are loaded before any is used or stored. Tiles of heads as one tensor have other layouts than those of
    angles, so that Triton would move angles through shared memory.
    """
    count, x = heads[0], heads[1]
    loaded = ()
    for i in tl.static_range(HEADS):
        head = first_head + i
        rows = (live & (head < count))[:, None]
        source = x[0] + _head(x[1], head, b, s)
        if INTERLEAVED:
            both = tl.arange(0, 2 * BLOCK)[None, :]
            parts = (tl.load(source + axis_offset(both, x[1][3]), mask=rows & (both < 2 * half), other=0),)
        else:
            pair = tl.arange(0, BLOCK)[None, :]
            v = tl.load(source + axis_offset(pair, x[1][3]), mask=rows & (pair < half), other=0)
            w = tl.load(source + axis_offset(pair + half, x[1][3]), mask=rows & (pair < half), other=0)
            parts = (v, w)
        if REST:
            other = tl.arange(0, REST)[None, :]
            kept = tl.load(source + axis_offset(other + 2 * half, x[1][3]), mask=rows & (other < rest), other=0)
            parts = parts + (kept,)
        loaded = loaded + (parts,)
    return loaded


@jit
def _rotate(
    heads,
    loaded,
    first_head,
    b,
    s,
    live,
    at,
    c,
    d,
    half,
    rest,
    eps,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Rotate HEADS ``loaded`` heads of the tokens (``b``, ``s``) [TOKENS] by cos ``c`` and sin ``d`` [TOKENS, BLOCK].

    ``at``: where they are written along the first two axes of the result, and whether they are.

    Each result, and each sum of a square from the first half and one from the second, is a rounded product and an
    explicit FMA, so that ptxas has no choice of which product to contract.
    """
    count, out = heads[0], heads[2]
    pair = tl.arange(0, BLOCK)[None, :]
    both = tl.arange(0, 2 * BLOCK)[None, :]
    other = tl.arange(0, REST if REST else 1)[None, :]
    if NORM:
        weight = heads[3]
        if INTERLEAVED:
            v_weight = tl.load(weight[0] + axis_offset(both, weight[1][0]), mask=both < 2 * half, other=0)
        else:
            v_weight = tl.load(weight[0] + axis_offset(pair, weight[1][0]), mask=pair < half, other=0)
            w_weight = tl.load(weight[0] + axis_offset(pair + half, weight[1][0]), mask=pair < half, other=0)
        if REST:
            kept_weight = tl.load(weight[0] + axis_offset(other + 2 * half, weight[1][0]), mask=other < rest, other=0)
        scales = ()
        for i in tl.static_range(HEADS):
            v = loaded[i][0].to(c.dtype)
            squares = v * v
            if not INTERLEAVED:
                w = loaded[i][1].to(c.dtype)
                squares = tl.fma(w, w, squares)
            squares = tl.sum(squares, 1)
            if REST:
                kept = loaded[i][1 if INTERLEAVED else 2].to(c.dtype)
                squares += tl.sum(kept * kept, 1)
            scales = scales + (tl.rsqrt(squares / (2 * half + rest) + eps)[:, None],)
    for i in tl.static_range(HEADS):
        head = first_head + i
        parts = loaded[i]
        v = parts[0].to(c.dtype)
        if not INTERLEAVED:
            w = parts[1].to(c.dtype)
        if REST:
            kept = parts[1 if INTERLEAVED else 2]
        if NORM:
            scale = scales[i]
            if REST:
                kept = kept.to(c.dtype)
            v *= scale * v_weight
            if not INTERLEAVED:
                w *= scale * w_weight
            if REST:
                kept *= scale * kept_weight
        if INTERLEAVED:
            v, w = tl.split(v.reshape(v.shape[0], BLOCK, 2))
        written = (at[2] & (head < count))[:, None]
        target = out[0] + _head(out[1], head, at[0], at[1])
        turned = tl.fma(v, c, -(w * d)).to(out[0].dtype.element_ty)
        turned_too = tl.fma(w, c, v * d).to(out[0].dtype.element_ty)
        if INTERLEAVED:
            turned = tl.join(turned, turned_too).reshape(turned.shape[0], 2 * BLOCK)
            tl.store(target + axis_offset(both, out[1][3]), turned, mask=written & (both < 2 * half))
        else:
            tl.store(target + axis_offset(pair, out[1][3]), turned, mask=written & (pair < half))
            tl.store(target + axis_offset(pair + half, out[1][3]), turned_too, mask=written & (pair < half))
        if REST:
            kept = kept.to(out[0].dtype.element_ty)
            tl.store(target + axis_offset(other + 2 * half, out[1][3]), kept, mask=written & (other < rest))
    if NORM and not CACHE:
        # (Last: rstd passes through shared memory, for which the warps of a program wait for each other.)
        column = tl.arange(0, HEADS)[None, :]
        stored = tl.zeros((c.shape[0], HEADS), c.dtype)
        for i in tl.static_range(HEADS):
            stored = tl.where(column == i, scales[i], stored)
        rstd, strides = heads[4]
        offset = axis_offset(first_head + column, strides[2]) + _offset(strides, b, s)[:, None]
        tl.store(rstd + offset, stored, mask=live[:, None] & (first_head + column < count))


@jit
def _copy_tile(heads, first_head, b, s, live, at, length, HEADS: tl.constexpr, COLUMNS: tl.constexpr):
    """Copy HEADS heads of the tokens (``b``, ``s``) [TOKENS], of ``length`` elements, to where ``at`` says."""
    count, x, out = heads
    for start in range(0, length, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        loaded = ()
        for i in tl.static_range(HEADS):
            source = x[0] + _head(x[1], first_head + i, b, s) + axis_offset(column, x[1][3])
            mask = (live & (first_head + i < count))[:, None] & (column < length)
            loaded = loaded + (tl.load(source, mask=mask),)
        for i in tl.static_range(HEADS):
            target = out[0] + _head(out[1], first_head + i, at[0], at[1]) + axis_offset(column, out[1][3])
            mask = (at[2] & (first_head + i < count))[:, None] & (column < length)
            tl.store(target, loaded[i], mask=mask)


@jit
def _place(slot, owners, token, live, count, page_size):
    """Rows ``slot`` [TOKENS] of the caches: their page, their place in it, and whether they are written: if within
    ``count``."""
    slot, written = resolve(slot, count, live, False, False)
    slot = tl.where(written, slot, 0).to(count.dtype)
    if owners is not None:
        written &= tl.load(owners + slot, mask=written, other=-1) == token
    return slot // page_size, slot % page_size, written


@jit
def _offset(strides, b, s, column=None):
    """Offsets of tokens (b, s) [TOKENS], or of their elements (b, s, column) [TOKENS, BLOCK]."""
    offset = axis_offset(b, strides[0]) + axis_offset(s, strides[1])
    if column is not None:
        offset = offset[:, None] + axis_offset(column, strides[2])[None, :]
    return offset


@jit
def _head(strides, head, b, s):
    """Offsets of a head of tokens (b, s), [TOKENS, 1]."""
    return (axis_offset(head, strides[2]) + _offset(strides, b, s))[:, None]
