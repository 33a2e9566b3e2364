"""What kernels share whose tiles come by TMA into a ring of slots (Gluon): order of tiles, slots, buffers."""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import gl, gluon, reinterpret


@gluon.jit
def tile_of(tile, tiles_m, tiles_n, group_m):
    """The (row, column) of a tile: ``group_m`` rows of tiles at a time, column by column, for the L2 cache."""
    in_group = group_m * tiles_n
    first = tile // in_group * group_m
    height = gl.minimum(tiles_m - first, group_m)
    within = tile % in_group
    return first + within % height, within // height


@gluon.jit
def next_slot(slot, phase, STAGES: gl.constexpr):
    """The slot after ``slot``, and the phase of its barriers, which flips when the ring wraps."""
    slot += 1
    wraps = slot == STAGES
    return gl.where(wraps, 0, slot), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def matrix(buffer, HEIGHT: gl.constexpr, WIDTH: gl.constexpr):
    """A buffer of any rank, as TMA fills it, viewed as a matrix (HEIGHT, WIDTH)."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEIGHT, WIDTH], buffer.dtype)
    return reinterpret(buffer, buffer.dtype, [HEIGHT, WIDTH], layout)
