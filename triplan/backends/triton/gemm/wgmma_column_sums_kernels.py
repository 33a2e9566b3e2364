"""Sums of columns within a launch that multiplies on Hopper: strip by strip, through its ring of copies (Gluon).

A strip is as wide as a tile. The loading warp brings it, 64 rows a slot, and each of the two warpgroups that share the
tiles adds up the columns of one half.
"""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import gl, gluon, load_tile, mbarrier, reinterpret, thread_barrier
from triplan.backends.triton.gemm.wgmma_kernels import following


@gluon.jit
def first_of(done):
    """The first of the items of this program in a part of the list that ``done`` items come before."""
    programs = gl.num_programs(0)
    return (gl.program_id(0) + programs - done % programs) % programs


@gluon.jit
def halves_of(buffer, operand):
    """A slot of the second operands' as two blocks of ``operand``, a tensor map: half of a strip each."""
    return reinterpret(buffer, operand.dtype, [2] + operand.block_type.shape, operand.layout)


@gluon.jit
def load_strips(sums, ring, done, slot, phase, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Strips of BLOCK_N columns of ``summed``, from its first row to its last, through the second operands' slots."""
    summed, _, rows, columns = sums
    _, sy, full, empty, _ = ring
    WIDTH: gl.constexpr = BLOCK_N // 2
    for strip in range(first_of(done), gl.cdiv(columns, BLOCK_N), gl.num_programs(0)):
        for step in range(gl.cdiv(rows, BLOCK_K)):
            ready = full.index(slot)
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(ready, BLOCK_N * BLOCK_K * (summed.dtype.primitive_bitwidth // 8))
            halves = halves_of(sy.index(slot), summed)
            for half in gl.static_range(2):
                load_tile(summed, [step * BLOCK_K, strip * BLOCK_N + half * WIDTH], ready, halves.index(half))
            slot, phase = following(slot, phase, STAGES)


@gluon.jit
def sum_strips(
    sums,
    ring,
    done,
    taken,
    WHICH: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Each warpgroup's half of each strip: sums of BLOCK_K rows, added from the first to the last."""
    summed, out, rows, columns = sums
    _, sy, full, empty, _ = ring
    WIDTH: gl.constexpr = BLOCK_N // 2
    # No two warps share a column, so that sums go by shuffles alone.
    layout: gl.constexpr = gl.BlockedLayout([1, WIDTH // 16], [8, 4], [1, 4], [1, 0])
    along: gl.constexpr = gl.SliceLayout(0, layout)
    slot = taken % STAGES
    phase = taken // STAGES % 2
    for strip in range(first_of(done), gl.cdiv(columns, BLOCK_N), gl.num_programs(0)):
        total = gl.zeros((WIDTH,), gl.float32, along)
        for step in range(gl.cdiv(rows, BLOCK_K)):  # noqa: B007 - a name that is not taken
            mbarrier.wait(full.index(slot), phase)
            block = halves_of(sy.index(slot), summed).index(WHICH).load(layout)
            thread_barrier()  # all of these threads have read the slot
            mbarrier.arrive(empty.index(slot), count=1)
            total += gl.sum(block.to(gl.float32), 0)
            slot, phase = following(slot, phase, STAGES)
        column = strip * BLOCK_N + WHICH * WIDTH + gl.arange(0, WIDTH, layout=along)
        gl.store(out + column, total.to(out.dtype.element_ty), mask=column < columns)
