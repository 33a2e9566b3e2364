"""Sums of columns within the launch of both backward products, through its ring (Gluon).

Columns are cut into strips, each as wide as a tile. The loading warp brings a strip in steps of BLOCK_K rows, one per
slot, and each of the two warpgroups that share the tiles sums the columns of one half.
"""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import gl, gluon, load_tile, mbarrier, reinterpret, thread_barrier
from triplan.backends.triton.gemm.wgmma_shared_kernels import next_slot


@gluon.jit
def first_item(done):
    """The first item of this program in a part of the work list that ``done`` items precede.

    Items of the whole list are dealt to the programs one by one.
    """
    programs = gl.num_programs(0)
    return (gl.program_id(0) + programs - done % programs) % programs


@gluon.jit
def halves_of(buffer, operand):
    """A slot of the second factors as two blocks of ``operand``, a tensor map: one per half of a strip."""
    return reinterpret(buffer, operand.dtype, [2] + operand.block_type.shape, operand.layout)


@gluon.jit
def load_strips(sums, ring, done, slot, phase, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Load this program's strips of BLOCK_N columns through the second factors' slots, from the first row to the last.

    ``sums`` is (map of the matrix, output, rows, columns); ``slot`` and ``phase`` are those of the next step.
    """
    summed, _, rows, columns = sums
    _, sy, full, empty, _ = ring
    WIDTH: gl.constexpr = BLOCK_N // 2
    for strip in range(first_item(done), gl.cdiv(columns, BLOCK_N), gl.num_programs(0)):
        for step in range(gl.cdiv(rows, BLOCK_K)):
            ready = full.index(slot)
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(ready, BLOCK_N * BLOCK_K * (summed.dtype.primitive_bitwidth // 8))
            halves = halves_of(sy.index(slot), summed)
            for half in gl.static_range(2):
                load_tile(summed, [step * BLOCK_K, strip * BLOCK_N + half * WIDTH], ready, halves.index(half))
            slot, phase = next_slot(slot, phase, STAGES)


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
    """out[j] = the sum of summed[r, j] over all rows r, for warpgroup WHICH's half of each strip of this program.

    ``sums`` is (map of the matrix (rows, columns), output (columns,), rows, columns); ``taken`` counts the slots that
    this program has used. Each step sums BLOCK_K rows; the steps are added from the first to the last.
    """
    summed, out, rows, columns = sums
    _, sy, full, empty, _ = ring
    WIDTH: gl.constexpr = BLOCK_N // 2
    # Each column belongs to one warp, so that shuffles suffice to sum it.
    layout: gl.constexpr = gl.BlockedLayout([1, WIDTH // 16], [8, 4], [1, 4], [1, 0])
    along: gl.constexpr = gl.SliceLayout(0, layout)
    slot = taken % STAGES
    phase = taken // STAGES % 2
    for strip in range(first_item(done), gl.cdiv(columns, BLOCK_N), gl.num_programs(0)):
        total = gl.zeros((WIDTH,), gl.float32, along)
        for step in range(gl.cdiv(rows, BLOCK_K)):  # noqa: B007 - ``_`` is a value above
            mbarrier.wait(full.index(slot), phase)
            block = halves_of(sy.index(slot), summed).index(WHICH).load(layout)
            thread_barrier()  # the warpgroup's threads have all read the slot
            mbarrier.arrive(empty.index(slot), count=1)
            total += gl.sum(block.to(gl.float32), 0)
            slot, phase = next_slot(slot, phase, STAGES)
        column = strip * BLOCK_N + WHICH * WIDTH + gl.arange(0, WIDTH, layout=along)
        gl.store(out + column, total.to(out.dtype.element_ty), mask=column < columns)
