"""How the programs of ``wgmma_backward`` share the items of both products (Gluon)."""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import gl, gluon
from triplan.backends.triton.common.rings_kernels import tile_of
from triplan.backends.triton.gemm.wgmma_column_sums_kernels import first_item


@gluon.jit
def items_of(done, items):
    """How many of ``items``, which follow ``done`` others in the work list, are this program's."""
    return gl.cdiv(gl.maximum(items - first_item(done), 0), gl.num_programs(0))


@gluon.jit
def share_of(items):
    """(first, step, count) of this program's share of the first product's ``items``."""
    none = gl.to_tensor(0)
    return first_item(none), gl.num_programs(0), items_of(none, items)


@gluon.jit
def rest_of(done, items, few):
    """(first, step, count) of this program's share of the second product's ``items``.

    ``done``: items of the first product. ``few``: how many items the programs with one more of the first product take;
    -1 deals on in the order of the work list.
    """
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    more = done % programs
    others = programs - more
    given = more * few
    first = gl.where(program < more, program, given + program - more)
    step = gl.where(program < more, more, others)
    count = gl.where(program < more, few, gl.cdiv(gl.maximum(items - first, 0), others))
    plain = few < 0
    first = gl.where(plain, first_item(done), first)
    step = gl.where(plain, programs, step)
    return first, step, gl.where(plain, items_of(done, items), count)


@gluon.jit
def items_in(extent):
    """Items of a product of ``extent`` (rows of tiles, columns of tiles, steps of a part, parts of k).

    Each part of each tile is one.
    """
    tiles_m, tiles_n, _, parts = extent
    return tiles_m * tiles_n * parts


@gluon.jit
def place_of(item, extent, group_m):
    """(part, row and column of the tile) of an item: all tiles of a part, which read the same rows, then the next."""
    tiles_m, tiles_n, _, _ = extent
    tile_m, tile_n = tile_of(item % (tiles_m * tiles_n), tiles_m, tiles_n, group_m)
    return item // (tiles_m * tiles_n), tile_m, tile_n
