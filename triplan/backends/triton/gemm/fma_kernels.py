"""Kernel of ``fma``: a product of f32 by FMAs, one tile of C per program, in a layout that reads shared memory seldom
(Gluon)."""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import (
    copies_committed,
    copies_wait,
    copy_block,
    gl,
    gluon,
    next_may_begin,
    previous_wait,
    thread_barrier,
)
from triplan.backends.triton.common.rings_kernels import tile_of
from triplan.backends.triton.gemm import tiles_kernels
from triplan.backends.triton.gemm.cuts_kernels import store_part

#: The epilogue of ``tiles``, compiled as Gluon.
epilogue = gluon.jit(tiles_kernels.epilogue.fn)


@gluon.jit
def piece_of(a, b, slab, products, depth, k, ak, bk, a_batch, b_batch):
    """The factors of slab ``slab``, from where it begins along k, its extent along k, and its product.

    A slab is a product, or with ``depth`` (else None) a piece of one: k is cut into pieces of that extent, and slabs of
    the same piece lie together. ``products`` is None without a batch.
    """
    product = slab
    left = k
    if depth is not None:
        piece = slab
        if products is not None:
            piece = slab // products
            product = slab % products
        first = piece * depth
        a += first.to(gl.int64) * ak
        b += first.to(gl.int64) * bk
        left = gl.minimum(depth, k - first)
    if products is not None:
        a += product.to(gl.int64) * a_batch
        b += product.to(gl.int64) * b_batch
    return a, b, left, product


@gluon.jit
def load_rows(factors, left):
    """The block of A of one step along k, of which ``left`` remains, in registers."""
    a_at, _, a_in, _, a_depth, _ = factors
    return gl.load(a_at, mask=a_in & (a_depth < left), other=0.0)


@gluon.jit
def start_copies(factors, ring, slot, left, A_HELD: gl.constexpr):
    """Start to copy the blocks of that step into ``slot`` of the ring; not of an A that passes through registers."""
    a_at, b_at, a_in, b_in, a_depth, b_depth = factors
    sa, sb = ring
    if not A_HELD:
        copy_block(sa.index(slot), a_at, mask=a_in & (a_depth < left))
    copy_block(sb.index(slot), b_at, mask=b_in & (b_depth < left))
    copies_committed()


@gluon.jit
def multiply_step(acc, x, y, layout: gl.constexpr):
    """acc + x @ y, for blocks (BLOCK_M, BLOCK_K) and (BLOCK_K, BLOCK_N) in shared memory, both read along C."""
    BLOCK_K: gl.constexpr = x.shape[1]
    for i in gl.static_range(BLOCK_K):
        acc += x.slice(i, 1, dim=1).load(layout) * y.slice(i, 1, dim=0).load(layout)
    return acc


@gluon.jit
def fma_kernel(
    a,
    b,
    c,
    c0,
    bias,
    alpha,
    beta,
    products,
    depth,
    partial,
    whole,
    rest,
    a_rows,
    b_columns,
    m,
    n,
    k,
    am,
    ak,
    bk,
    bn,
    cm,
    cn,
    c0m,
    c0n,
    bias_n,
    pre,
    prem,
    pren,
    a_batch,
    b_batch,
    c_batch,
    c0_batch,
    pre_batch,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS_M: gl.constexpr,
    WARPS_N: gl.constexpr,
    A_ROWS: gl.constexpr,
    A_HELD: gl.constexpr,
    A_VECTOR: gl.constexpr,
    B_VECTOR: gl.constexpr,
    C_SINGLE: gl.constexpr,
    C_COLUMNS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    ACC: gl.constexpr,
    OVERLAPS: gl.constexpr,
):
    """c = act(alpha * a @ b + beta * c0 + bias), one tile (BLOCK_M, BLOCK_N) per program.

    The operands are those of ``tiles_kernel``; A is row-major (A_ROWS; with A_HELD it passes through registers) or
    column-major, B row-major, read in vectors of A_VECTOR and B_VECTOR elements; C_SINGLE: rows of c begin at any
    element; C_COLUMNS: it is column-major. ``a_rows`` and ``b_columns`` are those of the factors, or None if they are m
    and n: a copy has zeros behind its rows, and so have partial sums. With ``depth`` (else None) k is cut into pieces
    of that extent, and c (pieces, products, m, n) is packed, ``c_batch`` elements from one matrix to the next: partial
    sums. ``products`` is None without a batch.

    With ``partial`` (else None, as ``whole`` and ``rest``) only the ``rest`` tiles from tile ``whole`` on are cut, into
    pieces of ``depth``, whose sums go to ``partial`` (pieces, rest, BLOCK_M, BLOCK_N), packed.

    A thread accumulates as many elements as registers hold, 8 rows by 16 columns or 16 by 8: for 128 FMAs, 24 elements
    come from shared memory, which passes 32 a clock to all warps of a multiprocessor.
    """
    if OVERLAPS:
        next_may_begin()
        previous_wait()
    WARPS: gl.constexpr = WARPS_M * WARPS_N
    if A_ROWS and not A_HELD:
        # Copied rows of A stay rows in shared memory, from which vectors along k are read. These take registers, so a
        # thread has 8 rows in every tile. Threads down have adjacent rows, which lie in different banks.
        across: gl.constexpr = (BLOCK_N // WARPS_N) // 16
        layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // across, across], [WARPS_M, WARPS_N], [1, 0])
    else:
        # Four threads down and eight across: the eight that are served at a time read one row of A, and 128 bytes of B.
        # Of 32 columns, eight down and four across, which read two rows of A and 64 bytes of B.
        across: gl.constexpr = 8 if BLOCK_N >= 64 else 4
        layout: gl.constexpr = gl.BlockedLayout([4, 4], [32 // across, across], [WARPS_M, WARPS_N], [1, 0])
    # Rows of A become columns. Through registers, each thread has 4 of 16 elements of a row; where registers are few
    # (elements are loaded one by one, or a warp has 64 rows), more of one row, which has one address.
    if A_ROWS and not A_HELD:
        # Four threads along a row: a thread has few rows then, each of which has an address.
        a_copies: gl.constexpr = gl.BlockedLayout([1, A_VECTOR], [8, 4], [WARPS, 1], [1, 0])
    elif A_ROWS and A_VECTOR * B_VECTOR == 16 and BLOCK_M == 32 * WARPS_M:
        a_copies: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
    elif A_ROWS:
        a_copies: gl.constexpr = gl.BlockedLayout([1, BLOCK_K // WARPS_N], [32, 1], [WARPS_M, WARPS_N], [1, 0])
    else:
        a_copies: gl.constexpr = gl.BlockedLayout([A_VECTOR, 1], [32, 1], [1, WARPS], [0, 1])
    # In narrow tiles of rows each thread has 4 columns, vectors or not, and thus few rows of B with an address each.
    if A_ROWS and not A_HELD and BLOCK_N < 128:
        b_copies: gl.constexpr = gl.BlockedLayout([1, 4], [128 // BLOCK_N, BLOCK_N // 4], [WARPS, 1], [1, 0])
    else:
        b_copies: gl.constexpr = gl.BlockedLayout([1, B_VECTOR], [1, 32], [WARPS, 1], [1, 0])
    if A_ROWS and not A_HELD:
        # Vectors of one column from eight adjacent rows are in different banks.
        a_shared: gl.constexpr = gl.SwizzledSharedLayout(4, 32 // BLOCK_K, BLOCK_K // 4, [1, 0])
    else:
        a_shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0, 1])
    sa = gl.allocate_shared_memory(a.dtype.element_ty, [STAGES, BLOCK_M, BLOCK_K], a_shared)
    sb = gl.allocate_shared_memory(
        b.dtype.element_ty, [STAGES, BLOCK_K, BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    tiles_m = gl.cdiv(m, BLOCK_M)
    tiles_n = gl.cdiv(n, BLOCK_N)
    program = gl.program_id(0)
    tile = program
    IS_CUT: gl.constexpr = partial is not None
    IS_SUMMED: gl.constexpr = depth is not None and not IS_CUT
    if IS_CUT:
        piece = gl.maximum(program - whole, 0) // rest
        tile -= piece * rest
    slab = tile // (tiles_m * tiles_n)
    tile_m, tile_n = tile_of(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    if IS_CUT:
        a, b, left, product = piece_of(a, b, slab, products, None, k, ak, bk, a_batch, b_batch)
        first = piece * depth
        a += first.to(gl.int64) * ak
        b += first.to(gl.int64) * bk
        left = gl.where(program < whole, k, gl.minimum(depth, k - first))
    else:
        a, b, left, product = piece_of(a, b, slab, products, depth, k, ak, bk, a_batch, b_batch)
    if IS_SUMMED:
        c += slab.to(gl.int64) * c_batch
    if products is not None:
        if not IS_SUMMED:
            c += product.to(gl.int64) * c_batch
        if c0 is not None:
            c0 += product.to(gl.int64) * c0_batch
        if pre is not None:
            pre += product.to(gl.int64) * pre_batch
    top = tile_m.to(gl.int64) * BLOCK_M
    side = tile_n.to(gl.int64) * BLOCK_N

    row = top + gl.arange(0, BLOCK_M, gl.SliceLayout(1, a_copies))
    column = side + gl.arange(0, BLOCK_N, gl.SliceLayout(0, b_copies))
    a_depth = gl.arange(0, BLOCK_K, gl.SliceLayout(0, a_copies))[None, :]
    b_depth = gl.arange(0, BLOCK_K, gl.SliceLayout(1, b_copies))[:, None]
    a_end = m if a_rows is None else a_rows
    if A_ROWS and not A_HELD:
        # The last row stands for those behind it, which are not stored: their loads need no masks.
        row = gl.minimum(row, a_end - 1)
        a_in = gl.full((BLOCK_M, BLOCK_K), True, gl.int1, a_copies)
    else:
        a_in = (row < a_end)[:, None]
    b_in = (column < (n if b_columns is None else b_columns))[None, :]
    a_at = a + row[:, None] * am + a_depth.to(gl.int64) * ak
    b_at = b + b_depth.to(gl.int64) * bk + column[None, :] * bn
    for i in gl.static_range(STAGES - 1):
        factors = (a_at, b_at, a_in, b_in, a_depth, b_depth)
        start_copies(factors, (sa, sb), i, left - i * BLOCK_K, A_HELD)
        if A_HELD:
            sa.index(i).store(load_rows(factors, left - i * BLOCK_K))
        a_at += BLOCK_K * ak
        b_at += BLOCK_K * bk
    acc = gl.zeros((BLOCK_M, BLOCK_N), ACC, layout)
    slot = 0
    free = STAGES - 1
    for start in range(0, left, BLOCK_K):
        copies_wait(STAGES - 2)
        # This step has come for every warp, and all are done with the one before, whose slot is filled again.
        thread_barrier()
        factors = (a_at, b_at, a_in, b_in, a_depth, b_depth)
        ahead = left - start - (STAGES - 1) * BLOCK_K
        if A_HELD:
            rows = load_rows(factors, ahead)
        start_copies(factors, (sa, sb), free, ahead, A_HELD)
        a_at += BLOCK_K * ak
        b_at += BLOCK_K * bk
        acc = multiply_step(acc, sa.index(slot), sb.index(slot), layout)
        if A_HELD:
            sa.index(free).store(rows)
        free = slot
        slot = gl.where(slot + 1 == STAGES, 0, slot + 1)
    copies_wait(0)
    if IS_CUT:
        if program >= whole:
            store_part(acc, partial, (program - whole).to(gl.int64), layout)
        m = gl.where(program < whole, m, 0)  # a piece writes nothing to c
    if C_SINGLE:
        # Elements are stored one by one: those that a warp stores at a time are adjacent.
        stored: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS_M, WARPS_N], [1, 0])
        acc = gl.convert_layout(acc, stored)
    elif C_COLUMNS:
        # The same along columns.
        stored: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [WARPS_M, WARPS_N], [0, 1])
        acc = gl.convert_layout(acc, stored)
    else:
        stored: gl.constexpr = layout
    row = top + gl.arange(0, BLOCK_M, gl.SliceLayout(1, stored))
    column = side + gl.arange(0, BLOCK_N, gl.SliceLayout(0, stored))
    epilogue(
        acc, row, column, c, c0, bias, alpha, beta, m, n, cm, cn, c0m, c0n, bias_n, pre, prem, pren, ACTIVATION, ACC
    )
