"""Rotary position embedding: a program rotates a tile of heads of neighbouring tokens by angles that it finds once."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.indices_kernels import report, resolve
from triplan.backends.triton.common.rows_kernels import axis_offset


@triton.jit
def rotary_kernel(
    q,
    q_out,
    k,
    k_out,
    cos,
    sin,
    inv_freq,
    positions,
    status,
    q_strides,
    q_out_strides,
    k_strides,
    k_out_strides,
    cos_strides,
    sin_strides,
    inv_freq_strides,
    positions_strides,
    tokens,
    sequence,
    q_heads,
    k_heads,
    half,
    rest,
    table_rows,
    blocks,
    q_groups,
    groups,
    sign,
    scale,
    COMPUTE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CLAMP: tl.constexpr,
    GROUPS_FIRST: tl.constexpr,
):
    """out = (x * cos - y * sin, y * cos + x * sin) for each pair (x, y) of each head, with ``sign`` times sin.

    q, q_out, k, k_out: (batch, sequence, heads, elements of a head), of which 2 * ``half`` are rotated and ``rest``
    copied; k is None without keys. cos, sin: (batch, table_rows, half), or None, and inv_freq (half,) in their place.
    positions: (batch, sequence) or None. Strides are in elements; one of None is 1.

    There are ``blocks`` of TOKENS tokens of all sequences, and ``groups`` of HEADS heads, first those of q. Programs
    that run together work on the groups of a block if GROUPS_FIRST, where these are neighbours in memory; else on the
    blocks of a group.
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
    pair = tl.arange(0, BLOCK)
    used = pair < half
    position = s
    if positions is not None:
        at = axis_offset(b, positions_strides[0]) + axis_offset(s, positions_strides[1])
        position = tl.load(positions + at, mask=live, other=0)
    if cos is not None:
        row, inside = resolve(position, table_rows, live, False, CLAMP)
        if status is not None and positions is not None:
            if group == 0:
                report(status, live & (inside == 0), token)
        known = inside[:, None] & used[None, :]
        at = axis_offset(b, cos_strides[0]) + axis_offset(row, cos_strides[1])
        c = tl.load(cos + at[:, None] + axis_offset(pair, cos_strides[2])[None, :], mask=known, other=0).to(COMPUTE)
        at = axis_offset(b, sin_strides[0]) + axis_offset(row, sin_strides[1])
        d = tl.load(sin + at[:, None] + axis_offset(pair, sin_strides[2])[None, :], mask=known, other=0).to(COMPUTE)
    else:
        frequency = tl.load(inv_freq + axis_offset(pair, inv_freq_strides[0]), mask=used, other=0)
        angle = position.to(COMPUTE)[:, None] * frequency[None, :]
        c = tl.cos(angle) * scale
        d = tl.sin(angle) * scale
    d *= sign
    if group < q_groups:
        head = group * HEADS + tl.arange(0, HEADS)
        _rotate(
            q, q_out, q_strides, q_out_strides, head, q_heads, b, s, live, c, d, half, rest, BLOCK, REST, INTERLEAVED
        )
    elif k is not None:
        head = (group - q_groups) * HEADS + tl.arange(0, HEADS)
        _rotate(
            k, k_out, k_strides, k_out_strides, head, k_heads, b, s, live, c, d, half, rest, BLOCK, REST, INTERLEAVED
        )


@triton.jit
def _rotate(
    x,
    out,
    x_strides,
    out_strides,
    head,
    heads,
    b,
    s,
    live,
    c,
    d,
    half,
    rest,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rotate the heads ``head`` [HEADS] of the tokens (``b``, ``s``) [TOKENS] by c and d [TOKENS, BLOCK].

    Both results are one product, rounded, and one fused multiply-add: written so, no binary rounds otherwise.
    """
    rows = (head < heads)[:, None, None] & live[None, :, None]
    source = x + _heads(x_strides, head, b, s)
    target = out + _heads(out_strides, head, b, s)
    c = c[None, :, :]
    d = d[None, :, :]
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK)[None, None, :]
        known = rows & (column < 2 * half)
        both = tl.load(source + axis_offset(column, x_strides[3]), mask=known, other=0).to(c.dtype)
        first, second = tl.split(both.reshape(both.shape[0], both.shape[1], BLOCK, 2))
        turned = tl.join(tl.fma(first, c, -(second * d)), tl.fma(second, c, first * d)).reshape(both.shape)
        tl.store(target + axis_offset(column, out_strides[3]), turned.to(out.dtype.element_ty), mask=known)
    else:
        pair = tl.arange(0, BLOCK)[None, None, :]
        known = rows & (pair < half)
        first = tl.load(source + axis_offset(pair, x_strides[3]), mask=known, other=0).to(c.dtype)
        second = tl.load(source + axis_offset(pair + half, x_strides[3]), mask=known, other=0).to(c.dtype)
        turned = tl.fma(first, c, -(second * d)).to(out.dtype.element_ty)
        tl.store(target + axis_offset(pair, out_strides[3]), turned, mask=known)
        turned = tl.fma(second, c, first * d).to(out.dtype.element_ty)
        tl.store(target + axis_offset(pair + half, out_strides[3]), turned, mask=known)
    if REST:
        column = tl.arange(0, REST)[None, None, :]
        known = rows & (column < rest)
        kept = tl.load(source + axis_offset(column + 2 * half, x_strides[3]), mask=known)
        tl.store(target + axis_offset(column + 2 * half, out_strides[3]), kept, mask=known)


@triton.jit
def _heads(strides, head, b, s):
    """Offsets of the first elements of heads [HEADS, TOKENS, 1]."""
    token = axis_offset(b, strides[0]) + axis_offset(s, strides[1])
    return axis_offset(head, strides[2])[:, None, None] + token[None, :, None]
