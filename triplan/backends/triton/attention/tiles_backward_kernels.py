"""Kernels of ``tiles`` of the backward op: dq by tiles of queries, then dk and dv by tiles of keys.

Both recompute the probabilities from lse. Each gradient is accumulated by one program in a fixed order, that of the
keys (dq), or of the query heads of a group and their queries (dk, dv). There are no atomics.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.attention.shared_kernels import (
    draw_of,
    dropped_of,
    exponential,
    head_pointer,
    keys_of,
    load_tile,
    packed_tile,
    packed_tiles,
    queries_of,
    scores_of,
    slope_of,
    store_tile,
)


@jit
def load_row(pointer, strides, batch, head, query, queries, other):
    """Load one number for each ``query`` from a (batch, head, query) tensor; ``other`` beyond ``queries``."""
    at = head_pointer(pointer, strides, batch, head)
    return tl.load(at + query.to(tl.int64) * strides[2], mask=query < queries, other=other)


@jit
def load_lse(lse, strides, batch, head, query, queries, UNIT: tl.constexpr):
    """lse * UNIT; +inf, which makes all probabilities 0, for queries that see no key and beyond the queries."""
    found = load_row(lse, strides, batch, head, query, queries, float("inf"))
    return tl.where(found == -float("inf"), float("inf"), found * UNIT)


@jit
def attention_dq_kernel(
    dout,
    q,
    k,
    v,
    out,
    lse,
    dq,
    delta,
    mask,
    query_starts,
    key_starts,
    slopes,
    state,
    scale,
    dropout_p,
    dout_strides,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    lse_strides,
    dq_strides,
    delta_strides,
    mask_strides,
    query_starts_stride,
    key_starts_stride,
    slopes_stride,
    state_stride,
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
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    """dq = scale * ds @ k of BLOCK_Q queries of one head, and ``delta`` = sum(dout * out), which the next launch reads.

    ds = p * (dout @ v.T - delta), p = exp(scores - lse). Operands as in ``attention_tiles_kernel``; ``dout`` and ``dq``
    are like ``out`` and ``q``, ``delta`` like ``lse``.
    """
    tiles = tl.cdiv(queries, BLOCK_Q)
    if PACKED is not None:
        tiles = packed_tiles(queries, sequences, BLOCK_Q)
    program = tl.program_id(0)
    first = (tiles - 1 - program % tiles) * BLOCK_Q
    batch = program // tiles // heads
    head = program // tiles % heads
    draw = draw_of(state, state_stride, dropout_p, keys, ACC)
    drawn = (program // tiles).to(tl.int64) * queries
    if PACKED is not None:
        tile = tiles - 1 - program % tiles
        queries_at, first, queries, keys_at, keys = packed_tile(
            tile, query_starts, query_starts_stride, queries, key_starts, key_starts_stride, keys, sequences, BLOCK_Q
        )
        shift = keys - queries if PACKED == "end" else 0
        drawn += queries_at
        dout += queries_at.to(tl.int64) * dout_strides[2]
        q += queries_at.to(tl.int64) * q_strides[2]
        k += keys_at.to(tl.int64) * k_strides[2]
        v += keys_at.to(tl.int64) * v_strides[2]
        out += queries_at.to(tl.int64) * out_strides[2]
        lse += queries_at.to(tl.int64) * lse_strides[2]
        dq += queries_at.to(tl.int64) * dq_strides[2]
        delta += queries_at.to(tl.int64) * delta_strides[2]
    query = first + tl.arange(0, BLOCK_Q)
    k = head_pointer(k, k_strides, batch, head // group)
    v = head_pointer(v, v_strides, batch, head // group)
    if MASK is not None:
        mask = head_pointer(mask, mask_strides, batch, head)
    g = load_tile(head_pointer(dout, dout_strides, batch, head), dout_strides, query, queries, VALUE, BLOCK_V, False)
    o = load_tile(head_pointer(out, out_strides, batch, head), out_strides, query, queries, VALUE, BLOCK_V, False)
    row = tl.sum(g.to(ACC) * o.to(ACC), 1)
    at = head_pointer(delta, delta_strides, batch, head)
    tl.store(at + query.to(tl.int64) * delta_strides[2], row, mask=query < queries)
    x = load_tile(head_pointer(q, q_strides, batch, head), q_strides, query, queries, HEAD, BLOCK_D, False)
    most = load_lse(lse, lse_strides, batch, head, query, queries, UNIT)
    slope = slope_of(slopes, slopes_stride, head, UNIT)
    acc = tl.zeros((BLOCK_Q, BLOCK_D), ACC)
    start, end = keys_of(first, first + BLOCK_Q - 1, keys, shift, left, right, BLOCK_K, LEFT, RIGHT)
    for at in range(start, end, BLOCK_K):
        key = at + tl.arange(0, BLOCK_K)
        y = load_tile(k, k_strides, key, keys, HEAD, BLOCK_D, False)
        product = tl.dot(x, tl.trans(y), input_precision=PRECISION, out_dtype=ACC)
        s, bent = scores_of(
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
        z = load_tile(v, v_strides, key, keys, VALUE, BLOCK_V, True)
        dp = tl.dot(g, z, input_precision=PRECISION, out_dtype=ACC)
        if draw is not None:
            dp = tl.where(dropped_of(draw, drawn + query, at, BLOCK_K, False), 0.0, dp * draw[4])
        ds = exponential(s - most[:, None]) * (dp - row[:, None])
        if CAPPED:
            ds *= 1.0 - bent * bent
        acc = tl.dot(ds.to(y.dtype), y, acc, input_precision=PRECISION, out_dtype=ACC)
    store_tile(head_pointer(dq, dq_strides, batch, head), dq_strides, query, queries, acc * scale, HEAD, BLOCK_D)


@jit
def attention_dkdv_kernel(
    dout,
    q,
    k,
    v,
    lse,
    dk,
    dv,
    delta,
    mask,
    query_starts,
    key_starts,
    slopes,
    state,
    scale,
    dropout_p,
    dout_strides,
    q_strides,
    k_strides,
    v_strides,
    lse_strides,
    dk_strides,
    dv_strides,
    delta_strides,
    mask_strides,
    query_starts_stride,
    key_starts_stride,
    slopes_stride,
    state_stride,
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
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    """dk = scale * ds.T @ q and dv = p.T @ dout of BLOCK_K keys of one head of k and v, over its ``group`` query heads.

    Scores are computed transposed, (key, query), so that p.T and ds.T need no transposition before they are multiplied.
    Rows beyond the queries are 0 in q and dout, and their p is 0. Operands as in ``attention_dq_kernel``.
    """
    tiles = tl.cdiv(keys, BLOCK_K)
    if PACKED is not None:
        tiles = packed_tiles(keys, sequences, BLOCK_K)
    program = tl.program_id(0)
    # With a causal mask the first keys are seen by the most queries: the longest programs start first.
    first = program % tiles * BLOCK_K
    batch = program // tiles // (heads // group)
    own = program // tiles % (heads // group)
    draw = draw_of(state, state_stride, dropout_p, keys, ACC)
    drawn, drawn_rows = batch.to(tl.int64) * heads * queries, queries
    if PACKED is not None:
        tile = program % tiles
        keys_at, first, keys, queries_at, queries = packed_tile(
            tile, key_starts, key_starts_stride, keys, query_starts, query_starts_stride, queries, sequences, BLOCK_K
        )
        shift = keys - queries if PACKED == "end" else 0
        drawn += queries_at
        dout += queries_at.to(tl.int64) * dout_strides[2]
        q += queries_at.to(tl.int64) * q_strides[2]
        k += keys_at.to(tl.int64) * k_strides[2]
        v += keys_at.to(tl.int64) * v_strides[2]
        lse += queries_at.to(tl.int64) * lse_strides[2]
        dk += keys_at.to(tl.int64) * dk_strides[2]
        dv += keys_at.to(tl.int64) * dv_strides[2]
        delta += queries_at.to(tl.int64) * delta_strides[2]
    key = first + tl.arange(0, BLOCK_K)
    y = load_tile(head_pointer(k, k_strides, batch, own), k_strides, key, keys, HEAD, BLOCK_D, False)
    z = load_tile(head_pointer(v, v_strides, batch, own), v_strides, key, keys, VALUE, BLOCK_V, False)
    of_k = tl.zeros((BLOCK_K, BLOCK_D), ACC)
    of_v = tl.zeros((BLOCK_K, BLOCK_V), ACC)
    start, end = queries_of(first, first + BLOCK_K - 1, queries, shift, left, right, BLOCK_Q, LEFT, RIGHT)
    # One loop over heads and their blocks: nested loops spill registers.
    blocks = tl.cdiv(end - start, BLOCK_Q)
    for step in range(group * blocks):
        head = own * group + step // blocks
        query = start + step % blocks * BLOCK_Q + tl.arange(0, BLOCK_Q)
        x = load_tile(head_pointer(q, q_strides, batch, head), q_strides, query, queries, HEAD, BLOCK_D, False)
        most = load_lse(lse, lse_strides, batch, head, query, queries, UNIT)
        product = tl.dot(y, tl.trans(x), input_precision=PRECISION, out_dtype=ACC)
        mask_head = mask
        if MASK is not None:
            mask_head = head_pointer(mask, mask_strides, batch, head)
        s, bent = scores_of(
            product,
            query[None, :],
            key[:, None],
            mask_head,
            mask_strides,
            slope_of(slopes, slopes_stride, head, UNIT),
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
            False,
            UNIT,
        )
        p = exponential(s - most[None, :])
        at = head_pointer(dout, dout_strides, batch, head)
        g = load_tile(at, dout_strides, query, queries, VALUE, BLOCK_V, False)
        kept = p
        if draw is not None:
            row = drawn + head.to(tl.int64) * drawn_rows + query
            dropped = dropped_of(draw, row, first, BLOCK_K, True)
            kept = tl.where(dropped, 0.0, p)
        of_v = tl.dot(kept.to(g.dtype), g, of_v, input_precision=PRECISION, out_dtype=ACC)
        dp = tl.dot(z, tl.trans(g), input_precision=PRECISION, out_dtype=ACC)
        if draw is not None:
            dp = tl.where(dropped, 0.0, dp * draw[4])
        row = load_row(delta, delta_strides, batch, head, query, queries, 0.0)
        ds = p * (dp - row[None, :])
        if CAPPED:
            ds *= 1.0 - bent * bent
        of_k = tl.dot(ds.to(x.dtype), x, of_k, input_precision=PRECISION, out_dtype=ACC)
    store_tile(head_pointer(dk, dk_strides, batch, own), dk_strides, key, keys, of_k * scale, HEAD, BLOCK_D)
    if draw is not None:
        of_v *= draw[4]
    store_tile(head_pointer(dv, dv_strides, batch, own), dv_strides, key, keys, of_v, VALUE, BLOCK_V)
