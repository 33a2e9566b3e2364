"""Kernel of ``tiles``: a program loads or computes the angles of a few tokens once, and rotates their heads by them.

With a cache, other programs copy heads of values to it.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.indices_kernels import report, resolve
from triplan.backends.triton.common.rows_kernels import axis_offset


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
    tiles,
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

    There are ``blocks`` of TOKENS tokens, over all sequences, and ``groups`` of ``tiles`` * HEADS heads: ``q_groups``
    of q, then those of k, ``turned`` together, then those of v. With GROUPS_FIRST, neighbouring programs take the
    groups of one block, otherwise the blocks of one group.
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
        if group >= turned:
            slot, written = _slot(slots, owners, token, b, s, live, slot_count)
            page = slot // page_size
            for i in range(tiles):
                head = ((group - turned) * tiles + i) * HEADS
                _copy_tile(v, head, b, s, page, slot % page_size, written, v_dim, HEADS, COLUMNS)
            return
    pair = tl.arange(0, BLOCK)
    used = pair < half
    position = s
    if POSITIONS:
        position = tl.load(positions[0] + _offset(positions[1], b, s), mask=live, other=0)
    if TABLE:
        row, inside = resolve(position, table_rows, live, False, CLAMP)
        if POSITIONS and status is not None:
            if group == 0:
                bad = live & (inside == 0)
                if CACHE:
                    report(status, bad, token + tokens)  # behind the tokens of bad slots
                else:
                    report(status, bad, token)
        # (With all axes of heads, Triton loads them to the threads that rotate by them, not through shared memory.)
        known = (inside[:, None] & used[None, :])[None]
        c = tl.load(cos[0] + _offset(cos[1], b, row, pair)[None], mask=known, other=0).to(COMPUTE)
        d = tl.load(sin[0] + _offset(sin[1], b, row, pair)[None], mask=known, other=0).to(COMPUTE)
    else:
        frequency = tl.load(inv_freq[0] + axis_offset(pair, inv_freq[1][0]), mask=used, other=0)
        angle = (position.to(COMPUTE)[:, None] * frequency[None, :])[None]
        c = tl.cos(angle) * scale
        d = tl.sin(angle) * scale
    d *= sign
    if CACHE:
        if status is not None:
            if group == 0:
                slot = tl.load(slots[0] + _offset(slots[1], b, s), mask=live, other=0)
                report(status, live & (slot >= slot_count), token)
    if group < q_groups:
        at = (b, s, live)
        _rotate(
            q,
            group,
            tiles,
            b,
            s,
            live,
            at,
            c,
            d,
            half,
            rest,
            eps,
            not TABLE,
            HEADS,
            BLOCK,
            REST,
            INTERLEAVED,
            NORM,
            CACHE,
        )
    elif KEYS:
        at = (b, s, live)
        if CACHE:
            slot, written = _slot(slots, owners, token, b, s, live, slot_count)
            at = (slot // page_size, slot % page_size, written)
        _rotate(
            k,
            group - q_groups,
            tiles,
            b,
            s,
            live,
            at,
            c,
            d,
            half,
            rest,
            eps,
            not TABLE,
            HEADS,
            BLOCK,
            REST,
            INTERLEAVED,
            NORM,
            CACHE,
        )


@jit
def _rotate(
    heads,
    group,
    tiles,
    b,
    s,
    live,
    at,
    c,
    d,
    half,
    rest,
    eps,
    LOOPS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Rotate the ``tiles`` tiles of a group of heads; without LOOPS there is one tile, which takes fewer registers."""
    if LOOPS:
        for i in range(tiles):
            head = (group * tiles + i) * HEADS
            _rotate_tile(
                heads, head, b, s, live, at, c, d, half, rest, eps, HEADS, BLOCK, REST, INTERLEAVED, NORM, CACHE
            )
    else:
        head = group * HEADS
        _rotate_tile(heads, head, b, s, live, at, c, d, half, rest, eps, HEADS, BLOCK, REST, INTERLEAVED, NORM, CACHE)


@jit
def _rotate_tile(
    heads,
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
    """Rotate HEADS heads of the tokens (``b``, ``s``) [TOKENS] by cos ``c`` and sin ``d`` [1, TOKENS, BLOCK].

    ``at``: where they are written along the first two axes of the result, and whether they are.

    Each result is a rounded product and an explicit FMA, so that ptxas has no choice of which product to contract.
    """
    count, x, out, weight, rstd = heads
    pair = tl.arange(0, BLOCK)[None, None, :]
    both = tl.arange(0, 2 * BLOCK)[None, None, :]
    other = tl.arange(0, REST if REST else 1)[None, None, :]
    head = first_head + tl.arange(0, HEADS)
    rows = (head < count)[:, None, None] & live[None, :, None]
    source = x[0] + _heads(x[1], head, b, s)
    target = out[0] + _heads(out[1], head, at[0], at[1])
    written = (head < count)[:, None, None] & at[2][None, :, None]
    if INTERLEAVED:
        v = tl.load(source + axis_offset(both, x[1][3]), mask=rows & (both < 2 * half), other=0).to(c.dtype)
    else:
        v = tl.load(source + axis_offset(pair, x[1][3]), mask=rows & (pair < half), other=0).to(c.dtype)
        w = tl.load(source + axis_offset(pair + half, x[1][3]), mask=rows & (pair < half), other=0).to(c.dtype)
    if REST:
        kept = tl.load(source + axis_offset(other + 2 * half, x[1][3]), mask=rows & (other < rest), other=0)
    if NORM:
        squares = tl.sum(v * v, 2)
        if not INTERLEAVED:
            squares += tl.sum(w * w, 2)
        if REST:
            kept = kept.to(c.dtype)
            squares += tl.sum(kept * kept, 2)
        scale = tl.rsqrt(squares / (2 * half + rest) + eps)[:, :, None]
        if not CACHE:
            tl.store(rstd[0] + _heads(rstd[1], head, b, s), scale, mask=rows)
        if INTERLEAVED:
            v *= scale * tl.load(weight[0] + axis_offset(both, weight[1][0]), mask=both < 2 * half, other=0)
        else:
            v *= scale * tl.load(weight[0] + axis_offset(pair, weight[1][0]), mask=pair < half, other=0)
            w *= scale * tl.load(weight[0] + axis_offset(pair + half, weight[1][0]), mask=pair < half, other=0)
        if REST:
            kept *= scale * tl.load(weight[0] + axis_offset(other + 2 * half, weight[1][0]), mask=other < rest, other=0)
    if INTERLEAVED:
        v, w = tl.split(v.reshape(v.shape[0], v.shape[1], BLOCK, 2))
    turned = tl.fma(v, c, -(w * d)).to(out[0].dtype.element_ty)
    turned_too = tl.fma(w, c, v * d).to(out[0].dtype.element_ty)
    if INTERLEAVED:
        turned = tl.join(turned, turned_too).reshape(HEADS, turned.shape[1], 2 * BLOCK)
        tl.store(target + axis_offset(both, out[1][3]), turned, mask=written & (both < 2 * half))
    else:
        tl.store(target + axis_offset(pair, out[1][3]), turned, mask=written & (pair < half))
        tl.store(target + axis_offset(pair + half, out[1][3]), turned_too, mask=written & (pair < half))
    if REST:
        kept = kept.to(out[0].dtype.element_ty)
        tl.store(target + axis_offset(other + 2 * half, out[1][3]), kept, mask=written & (other < rest))


@jit
def _copy_tile(heads, first_head, b, s, page, place, written, length, HEADS: tl.constexpr, COLUMNS: tl.constexpr):
    """Copy HEADS heads of the tokens (``b``, ``s``) [TOKENS], of ``length`` elements, to row ``place`` of a page."""
    count, x, out = heads
    head = first_head + tl.arange(0, HEADS)
    rows = (head < count)[:, None, None] & written[None, :, None]
    source = x[0] + _heads(x[1], head, b, s)
    target = out[0] + _heads(out[1], head, page, place)
    for start in range(0, length, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, None, :]
        known = rows & (column < length)
        values = tl.load(source + axis_offset(column, x[1][3]), mask=known)
        tl.store(target + axis_offset(column, out[1][3]), values, mask=known)


@jit
def _slot(slots, owners, token, b, s, live, count):
    """The rows of the caches of tokens (b, s) [TOKENS], and which of them are written: those within ``count``."""
    slot = tl.load(slots[0] + _offset(slots[1], b, s), mask=live, other=0)
    slot, written = resolve(slot, count, live, False, False)
    slot = tl.where(written, slot, 0).to(count.dtype)
    if owners is not None:
        written &= tl.load(owners + slot, mask=written, other=-1) == token
    return slot, written


@jit
def _offset(strides, b, s, column=None):
    """Offsets of tokens (b, s) [TOKENS], or of their elements (b, s, column) [TOKENS, BLOCK]."""
    offset = axis_offset(b, strides[0]) + axis_offset(s, strides[1])
    if column is not None:
        offset = offset[:, None] + axis_offset(column, strides[2])[None, :]
    return offset


@jit
def _heads(strides, head, b, s):
    """Offsets of the heads ``head`` of tokens (b, s), [HEADS, TOKENS, 1]."""
    return axis_offset(head, strides[2])[:, None, None] + _offset(strides, b, s)[None, :, None]
