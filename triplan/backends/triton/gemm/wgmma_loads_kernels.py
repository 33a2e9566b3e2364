"""What the loading warp of ``wgmma_kernel`` does, and which items a program has (Gluon)."""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import gl, gluon, load_tile, mbarrier, previous_wait
from triplan.backends.triton.common.meeting_kernels import PATIENCE, close_meetings, meet, open_meetings
from triplan.backends.triton.common.rings_kernels import next_slot
from triplan.backends.triton.gemm.wgmma_shared_kernels import HALF, place_of, tiles_in


@gluon.jit
def load_block(operand, product, x, y, ready, buffer, EACH: gl.constexpr, pred=True):
    """buffer = the block of a matrix at (x, y); barrier ``ready`` counts its bytes.

    EACH: None without a batch, 1 if each product has a matrix of its own, 0 if one matrix serves all.
    """
    if EACH is None:
        load_tile(operand, [x, y], ready, buffer, pred=pred)
    else:
        load_tile(operand, [product * EACH, x, y], ready, buffer, pred=pred)


@gluon.constexpr_function
def rows_of_tile(pieces):
    """Rows of a tile that so many warpgroups share, 64 each; in ping-pong one has two of these pieces."""
    return max(pieces, 2) * 64


@gluon.jit
def load_operands(
    a,
    b,
    ring,
    extent,
    cut,
    counter,
    rounds,
    A_ROWS: gl.constexpr,
    B_ROWS: gl.constexpr,
    A_EACH: gl.constexpr,
    B_EACH: gl.constexpr,
    PIECES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    LOWER: gl.constexpr,
    CUT: gl.constexpr,
    b_rest,
    sb_rest,
    REST: gl.constexpr,
):
    """The loading warp: the operands of every step of this program's items, through the ring.

    ``extent`` is (batch, tiles along m, tiles along n, steps along k, group_m); ``cut`` and CUT: see ``range_of``.
    A_ROWS, B_ROWS: A and B are row-major; else the maps are those of their transposes. The last REST of a tile's
    columns come by the map ``b_rest`` into ``sb_rest``.
    """
    sa, sb, _, full, empty, _ = ring
    previous_wait()
    HEIGHT: gl.constexpr = rows_of_tile(PIECES)
    BYTES: gl.constexpr = (HEIGHT + BLOCK_N) * BLOCK_K * (a.dtype.primitive_bitwidth // 8)
    slot = 0
    phase = 1  # all slots are free at first: waiting for the phase before the first one returns at once
    meetings = open_meetings(counter, rounds)
    patience = gl.to_tensor(PATIENCE)
    for item in range(gl.program_id(0), items_in(extent, cut, LOWER, CUT), gl.num_programs(0)):
        patience = meet(meetings, item // gl.num_programs(0), patience)
        tile, first, steps = range_of(item, extent, cut, LOWER, CUT)
        product, tile_m, tile_n = place_of(tile, extent, LOWER)
        row = tile_m * HEIGHT
        column = tile_n * BLOCK_N
        for step in range(steps):
            depth = (first + step) * BLOCK_K
            ready = full.index(slot)
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(ready, BYTES)
            for piece in gl.static_range(PIECES):
                if A_ROWS:
                    load_block(a, product, row + piece * HALF, depth, ready, sa.index(slot * PIECES + piece), A_EACH)
                else:
                    load_block(a, product, depth, row + piece * HALF, ready, sa.index(slot * PIECES + piece), A_EACH)
            if B_ROWS:
                load_block(b, product, depth, column, ready, sb.index(slot), B_EACH)
            else:
                load_block(b, product, column, depth, ready, sb.index(slot), B_EACH)
            if REST:
                beyond = column + BLOCK_N - REST
                if B_ROWS:
                    load_block(b_rest, product, depth, beyond, ready, sb_rest.index(slot), B_EACH)
                else:
                    load_block(b_rest, product, beyond, depth, ready, sb_rest.index(slot), B_EACH)
            slot, phase = next_slot(slot, phase, STAGES)
    close_meetings(meetings)


@gluon.jit
def items_in(extent, cut, LOWER: gl.constexpr, CUT: gl.constexpr):
    """How many items all programs share: tiles, and parts along k of those tiles that are cut."""
    tiles = tiles_in(extent, LOWER)
    if CUT:
        whole, parts, _ = cut
        return whole + (tiles - whole) * parts
    else:  # noqa: RET505 - Gluon also compiles what follows a return
        return tiles


@gluon.jit
def range_of(item, extent, cut, LOWER: gl.constexpr, CUT: gl.constexpr):
    """(tile, first step, steps along k) of an item.

    With CUT, ``cut`` is (whole, parts, depth). The first ``whole`` items are whole tiles. Each other tile is cut
    into ``parts`` of ``depth`` steps, of which the last may have some beyond k, where TMA reads zeros. The first parts
    of all tiles precede the second ones: what runs at a time reads the same rows.
    """
    steps = extent[3]
    if CUT:
        whole, _, depth = cut
        rest = tiles_in(extent, LOWER) - whole
        is_whole = item < whole
        first = gl.where(is_whole, 0, (item - whole) // rest * depth)
        tile = gl.where(is_whole, item, whole + (item - whole) % rest)
        return tile, first, gl.where(is_whole, steps, depth)
    else:  # noqa: RET505 - as above
        return item, 0, steps
