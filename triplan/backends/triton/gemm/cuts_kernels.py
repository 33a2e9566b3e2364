"""Parts of tiles that are cut along k: how a kernel writes them (Gluon), and the kernel that adds them up."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.gluon import gl, gluon
from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.overlap import begin
from triplan.backends.triton.gemm.tiles_kernels import epilogue, tile_of


@gluon.jit
def store_part(acc, partial, place, layout: gl.constexpr):
    """partial[place] = acc; ``partial`` (places, rows, columns) is packed, in f32. ``place`` has 64 bits where it may
    have 2**31 elements or more."""
    row = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
    at = partial + place * (acc.shape[0] * acc.shape[1])
    gl.store(at + (row * acc.shape[1])[:, None] + column[None, :], acc)


@jit
def parts_kernel(
    partial,
    c,
    c0,
    bias,
    alpha,
    beta,
    whole,
    rest,
    parts,
    m,
    n,
    cm,
    cn,
    c0m,
    c0n,
    bias_n,
    pre,
    prem,
    pren,
    c_batch,
    c0_batch,
    pre_batch,
    ROWS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """c = act(alpha * (partial[0] + partial[1] + ...) + beta * c0 + bias), in ``rest`` tiles from tile ``whole`` on.

    ``partial`` (parts, rest, TILE_M, TILE_N) is packed, in f32; ``c`` and ``c0`` (products, m, n); ``bias`` (n,);
    ``pre`` is None. The parts, at most MOST_PARTS, are added in order. A program adds ROWS rows of a tile.
    """
    begin(OVERLAPS)
    own = tl.program_id(0) // (TILE_M // ROWS)
    within = tl.program_id(0) % (TILE_M // ROWS) * ROWS + tl.arange(0, ROWS)
    tiles_m = tl.cdiv(m, TILE_M)
    tiles_n = tl.cdiv(n, TILE_N)
    tile = whole + own
    if c_batch is not None:
        product = (tile // (tiles_m * tiles_n)).to(tl.int64)
        tile = tile % (tiles_m * tiles_n)
        c += product * c_batch
        if c0 is not None:
            c0 += product * c0_batch
    tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
    row = tile_m.to(tl.int64) * TILE_M + within
    place = tl.arange(0, TILE_N)
    column = tile_n.to(tl.int64) * TILE_N + place
    at = partial + own * (TILE_M * TILE_N) + within[:, None] * TILE_N + place[None, :]
    inside = (row < m)[:, None] & (column < n)[None, :]
    acc = tl.zeros((ROWS, TILE_N), tl.float32)
    for part in tl.static_range(MOST_PARTS):  # unrolled: all loads are in flight before the first addition
        acc += tl.load(at + part * (rest * TILE_M * TILE_N), mask=inside & (part < parts), other=0.0)
    epilogue(
        acc,
        row,
        column,
        c,
        c0,
        bias,
        alpha,
        beta,
        m,
        n,
        cm,
        cn,
        c0m,
        c0n,
        bias_n,
        pre,
        prem,
        pren,
        ACTIVATION,
        tl.float32,
    )
