"""Kernel of ``tiles``: attention with one tile of queries of one head per program, read through pointers.

A program loops over blocks of keys with a running maximum and sum (Milakov and Gimelshein, arXiv 1805.02867; Dao et
al., FlashAttention, arXiv 2205.14135). The contribution of a block to a row does not depend on the other rows of the
tile, and a block of which the row sees no key changes nothing. So a row's bits do not depend on the number of queries.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.attention.parts_kernels import accumulate, load_parts, multiply, scaled, zero_chunks
from triplan.backends.triton.attention.shared_kernels import (
    draw_of,
    dropped_of,
    exponential,
    head_pointer,
    keys_of,
    logarithm,
    packed_tile,
    packed_tiles,
    scores_of,
    slope_of,
    store_tile,
)
from triplan.backends.triton.common.rows_kernels import finite_shift


@jit
def attention_tiles_kernel(
    q,
    k,
    v,
    out,
    lse,
    mask,
    query_starts,
    key_starts,
    slopes,
    state,
    sink,
    scale,
    dropout_p,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    lse_strides,
    mask_strides,
    query_starts_stride,
    key_starts_stride,
    slopes_stride,
    state_stride,
    sink_stride,
    queries,
    keys,
    heads,
    group,
    sequences,
    softcap,
    shift,
    left,
    right,
    HEAD: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CAPPED: tl.constexpr,
    MASK: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    PACKED: tl.constexpr,
    EDGE: tl.constexpr,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    """out = softmax(scores) @ v and lse of BLOCK_Q queries of one head, in blocks of BLOCK_K keys.

    ``q``, ``k``, ``v``, ``out``: (batch, row, head, HEAD or VALUE) of f16, bf16, f32 or f64; ``lse``: (batch, head,
    query) of ACC, in which all is computed; ``mask``: (batch, head, query, key) or None. Strides are (batch, head, row,
    element), the last None for 1. PACKED: None, or for packed sequences (see ``packed_tile``) the descriptor's
    ``align``, "start" or "end". For the others see ``scores_of``.
    """
    tiles = tl.cdiv(queries, BLOCK_Q)
    if PACKED is not None:
        tiles = packed_tiles(queries, sequences, BLOCK_Q)
    program = tl.program_id(0)
    # With a causal mask the last tiles see the most keys: the longest programs start first.
    first = (tiles - 1 - program % tiles) * BLOCK_Q
    batch = program // tiles // heads
    head = program // tiles % heads
    draw = draw_of(state, state_stride, dropout_p, keys, ACC)
    row = (program // tiles).to(tl.int64) * queries
    if PACKED is not None:
        tile = tiles - 1 - program % tiles
        queries_at, first, queries, keys_at, keys = packed_tile(
            tile, query_starts, query_starts_stride, queries, key_starts, key_starts_stride, keys, sequences, BLOCK_Q
        )
        shift = keys - queries if PACKED == "end" else 0
        row += queries_at
        q += queries_at.to(tl.int64) * q_strides[2]
        k += keys_at.to(tl.int64) * k_strides[2]
        v += keys_at.to(tl.int64) * v_strides[2]
        out += queries_at.to(tl.int64) * out_strides[2]
        lse += queries_at.to(tl.int64) * lse_strides[2]
    query = first + tl.arange(0, BLOCK_Q)
    q = head_pointer(q, q_strides, batch, head)
    k = head_pointer(k, k_strides, batch, head // group)
    v = head_pointer(v, v_strides, batch, head // group)
    out = head_pointer(out, out_strides, batch, head)
    if MASK is not None:
        mask = head_pointer(mask, mask_strides, batch, head)
    x = load_parts(q, q_strides, query, queries, HEAD, BLOCK_D, False, PARTS)
    slope = slope_of(slopes, slopes_stride, head, UNIT)
    top = tl.full((BLOCK_Q,), -float("inf"), ACC)
    total = tl.zeros((BLOCK_Q,), ACC)
    if sink is not None:  # a sink is a first key whose value is 0
        logit = tl.load(sink + head.to(tl.int64) * (1 if sink_stride is None else sink_stride)) * UNIT
        top = tl.zeros((BLOCK_Q,), ACC) + logit
        total += tl.where(logit == -float("inf"), 0.0, 1.0)
    acc = zero_chunks(BLOCK_Q, VALUE, BLOCK_V, ACC)
    start, end = keys_of(first, first + BLOCK_Q - 1, keys, shift, left, right, BLOCK_K, LEFT, RIGHT)
    for at in range(start, end, BLOCK_K):
        key = at + tl.arange(0, BLOCK_K)
        y = load_parts(k, k_strides, key, keys, HEAD, BLOCK_D, True, PARTS)
        product = multiply(x, y, PRECISION, ACC)
        s, _ = scores_of(
            product,
            query[:, None],
            key[None, :],
            mask,
            mask_strides,
            slope,
            queries,
            keys,
            scale,
            softcap,
            shift,
            left,
            right,
            CAPPED,
            MASK,
            LEFT,
            RIGHT,
            EDGE,
            UNIT,
        )
        new = tl.maximum(top, tl.max(s, 1))
        base = finite_shift(new)
        p = exponential(s - base[:, None])
        factor = exponential(top - base)
        total = total * factor + tl.sum(p, 1)
        if draw is not None:
            p = tl.where(dropped_of(draw, row + query, at, BLOCK_K, False), 0.0, p)
        z = load_parts(v, v_strides, key, keys, VALUE, BLOCK_V, False, PARTS)
        acc = accumulate(scaled(acc, factor[:, None]), p, z, PRECISION, ACC)
        top = new
    # A row that sees no key gets 0 and -inf.
    divisor = tl.where(total == 0, 1.0, total)[:, None]
    for i in tl.static_range(len(acc)):
        found = acc[i] / divisor
        if draw is not None:
            found *= draw[4]
        store_tile(out, out_strides, query, queries, found, VALUE, found.shape[1], i * BLOCK_V)
    at = head_pointer(lse, lse_strides, batch, head)
    found = (finite_shift(top) + logarithm(total)) / UNIT
    tl.store(at + query.to(tl.int64) * lse_strides[2], found, mask=query < queries)
