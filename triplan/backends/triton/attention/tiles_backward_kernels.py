"""Kernels of ``tiles`` of the backward op: dq by tiles of queries, then dk and dv by tiles of keys.

Both recompute the probabilities from lse. Each gradient is accumulated by one program in a fixed order, that of the
keys (dq), or of the query heads of a group and their queries (dk, dv). There are no atomics.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.attention.parts_kernels import (
    accumulate,
    load_parts,
    load_with_sums,
    multiply,
    store_chunks,
    transposed,
    zero_chunks,
)
from triplan.backends.triton.attention.shared_kernels import (
    draw_of,
    dropped_of,
    exponential,
    head_pointer,
    keys_of,
    packed_tile,
    packed_tiles,
    queries_of,
    scores_of,
    slope_of,
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
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
    LEAN: tl.constexpr,
):
    """dq = scale * ds @ k of BLOCK_Q queries of one head, and ``delta`` = sum(dout * out), which the next launch reads.

    ds = p * (dout @ v.T - delta), p = exp(scores - lse). Operands as in ``attention_tiles_kernel``; ``dout`` and ``dq``
    are like ``out`` and ``q``, ``delta`` like ``lse``. LEAN: values take their turn in shared memory before keys.
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
    g, row = load_with_sums(
        head_pointer(dout, dout_strides, batch, head),
        dout_strides,
        head_pointer(out, out_strides, batch, head),
        out_strides,
        query,
        queries,
        VALUE,
        BLOCK_V,
        PARTS,
        ACC,
    )
    at = head_pointer(delta, delta_strides, batch, head)
    tl.store(at + query.to(tl.int64) * delta_strides[2], row, mask=query < queries)
    at = head_pointer(q, q_strides, batch, head)
    x = load_parts(at, q_strides, query, queries, HEAD, BLOCK_D, False, PARTS)
    most = load_lse(lse, lse_strides, batch, head, query, queries, UNIT)
    slope = slope_of(slopes, slopes_stride, head, UNIT)
    acc = zero_chunks(BLOCK_Q, HEAD, BLOCK_D, ACC)
    start, end = keys_of(first, first + BLOCK_Q - 1, keys, shift, left, right, BLOCK_K, LEFT, RIGHT)
    for at in range(start, end, BLOCK_K):
        key = at + tl.arange(0, BLOCK_K)
        if LEAN:
            z = load_parts(v, v_strides, key, keys, VALUE, BLOCK_V, True, PARTS)
            dp = multiply(g, z, PRECISION, ACC)
        y = load_parts(k, k_strides, key, keys, HEAD, BLOCK_D, False, PARTS)
        product = multiply(x, transposed(y), PRECISION, ACC)
        s, steepness = scores_of(
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
        if not LEAN:
            z = load_parts(v, v_strides, key, keys, VALUE, BLOCK_V, True, PARTS)
            dp = multiply(g, z, PRECISION, ACC)
        if draw is not None:
            dp = tl.where(dropped_of(draw, drawn + query, at, BLOCK_K, False), 0.0, dp * draw[4])
        ds = exponential(s - most[:, None]) * (dp - row[:, None])
        if CAPPED:
            ds *= steepness
        acc = accumulate(acc, ds, y, PRECISION, ACC)
    store_chunks(head_pointer(dq, dq_strides, batch, head), dq_strides, query, queries, acc, scale, HEAD, BLOCK_D)


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
    PARTS: tl.constexpr,
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
    y = load_parts(head_pointer(k, k_strides, batch, own), k_strides, key, keys, HEAD, BLOCK_D, False, PARTS)
    z = load_parts(head_pointer(v, v_strides, batch, own), v_strides, key, keys, VALUE, BLOCK_V, False, PARTS)
    of_k = zero_chunks(BLOCK_K, HEAD, BLOCK_D, ACC)
    of_v = zero_chunks(BLOCK_K, VALUE, BLOCK_V, ACC)
    start, end = queries_of(first, first + BLOCK_K - 1, queries, shift, left, right, BLOCK_Q, LEFT, RIGHT)
    # One loop over heads and their blocks: nested loops spill registers.
    blocks = tl.cdiv(end - start, BLOCK_Q)
    for step in range(group * blocks):
        head = own * group + step // blocks
        query = start + step % blocks * BLOCK_Q + tl.arange(0, BLOCK_Q)
        at = head_pointer(q, q_strides, batch, head)
        x = load_parts(at, q_strides, query, queries, HEAD, BLOCK_D, False, PARTS)
        most = load_lse(lse, lse_strides, batch, head, query, queries, UNIT)
        product = multiply(y, transposed(x), PRECISION, ACC)
        mask_head = mask
        if MASK is not None:
            mask_head = head_pointer(mask, mask_strides, batch, head)
        s, steepness = scores_of(
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
        g = load_parts(at, dout_strides, query, queries, VALUE, BLOCK_V, False, PARTS)
        kept = p
        if draw is not None:
            row = drawn + head.to(tl.int64) * drawn_rows + query
            dropped = dropped_of(draw, row, first, BLOCK_K, True)
            kept = tl.where(dropped, 0.0, p)
        of_v = accumulate(of_v, kept, g, PRECISION, ACC)
        dp = multiply(z, transposed(g), PRECISION, ACC)
        if draw is not None:
            dp = tl.where(dropped, 0.0, dp * draw[4])
        row = load_row(delta, delta_strides, batch, head, query, queries, 0.0)
        ds = p * (dp - row[None, :])
        if CAPPED:
            ds *= steepness
        of_k = accumulate(of_k, ds, x, PRECISION, ACC)
    store_chunks(head_pointer(dk, dk_strides, batch, own), dk_strides, key, keys, of_k, scale, HEAD, BLOCK_D)
    factor = 1.0
    if draw is not None:
        factor = draw[4]
    store_chunks(head_pointer(dv, dv_strides, batch, own), dv_strides, key, keys, of_v, factor, VALUE, BLOCK_V)
