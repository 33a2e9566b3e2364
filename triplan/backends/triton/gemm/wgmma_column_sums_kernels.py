"""Sums of dc's columns within the launch of both backward products, through its ring (Gluon).

As items of the work list: columns are cut into strips, each as wide as a tile. The loading warp brings a strip in steps
of BLOCK_K rows, one per slot, and each of the two warpgroups that share the tiles sums the columns of one half.

Or on the way: where the first factor of db is the transpose of dc, the warpgroups add up what they find in the ring,
while ``wgmma`` runs and they would wait. They do so in the first column of db's tiles, which has all of dc.
"""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import gl, gluon, load_tile, mbarrier, reinterpret, thread_barrier
from triplan.backends.triton.common.rings_kernels import next_slot


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


#: Half the rows of a step: a thread adds one of each half.
ROWS = gl.constexpr(32)
#: Columns of dc in a warpgroup's part of the first factor.
WIDTH = gl.constexpr(64)
#: Of (ROWS, WIDTH) partial sums: eight threads read 16 bytes at the same place of eight rows, which the swizzle
#: spreads over all banks, and each column belongs to one warp, so that shuffles suffice to sum it.
LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [32, 1], [1, 4], [1, 0]))


@gluon.jit
def no_rows():
    """Zeros (ROWS, WIDTH): the partial sums of no rows."""
    return gl.zeros((ROWS, WIDTH), gl.float32, LAYOUT)


@gluon.jit
def add_rows(total, block):
    """total[r] + block[r] + block[r + ROWS]; ``block`` (2 * ROWS, WIDTH), of f16 or bf16, lies in shared memory."""
    upper = block.slice(0, ROWS).load(LAYOUT).to(gl.float32)
    lower = block.slice(ROWS, ROWS).load(LAYOUT).to(gl.float32)
    return total + (upper + lower)


@gluon.jit
def store_sums(total, out, column, columns):
    """out[column + j] = the sum of total[:, j], for the columns that there are."""
    at = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    gl.store(out + at, gl.sum(total, 0).to(out.dtype.element_ty), mask=at < columns)
