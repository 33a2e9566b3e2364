"""What the attention kernels for Hopper share (Gluon): barriers between warpgroups, order of tiles, rows."""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import gl, gluon, reinterpret

#: Rows of one warpgroup's product.
ROWS = gl.constexpr(64)
#: The first named barrier that Triton leaves free: it uses 0, 1, and one for each partition.
FREE = gl.constexpr(8)
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)


@gluon.constexpr_function
def barrier_asm(kind, threads):
    return f"bar.{kind} $1, {threads}; mov.u32 $0, 0;"


@gluon.jit
def bar_sync(which, THREADS: gl.constexpr):
    """Arrive at named barrier ``which``, and wait until THREADS threads have arrived."""
    gl.inline_asm_elementwise(
        barrier_asm("sync", THREADS), "=r,r", [gl.to_tensor(which)], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def bar_arrive(which, THREADS: gl.constexpr):
    """Arrive at named barrier ``which`` without waiting."""
    gl.inline_asm_elementwise(
        barrier_asm("arrive", THREADS), "=r,r", [gl.to_tensor(which)], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def opaque(x):
    """``x`` (an i32 scalar), hidden from the compiler: it cannot move what depends on ``x`` out of a loop."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [gl.to_tensor(x)], gl.int32, is_pure=False, pack=1)


@gluon.jit
def numbered_tile(index, tiles, heads, section, turning, programs=None):
    """(tile of a head, head) of tile number ``index`` of ``tiles`` * ``heads``.

    Tiles are numbered by sections of heads, and within a section all first tiles come first. A program takes every
    so many tiles as there are programs. With ``turning`` 1 the order of programs is reversed at every other turn, so
    that none has the longest tile each time; see ``tma.order_of``.
    """
    if programs is None:
        programs = gl.num_programs(0)
    turn = index // programs
    begin = turn * programs
    end = gl.minimum(begin + programs, tiles * heads)
    index = gl.where((turn & turning) == 1, begin + end - 1 - index, index)
    per = tiles * section
    first = index // per * section
    n = gl.minimum(heads - first, section)
    within = index % per
    return within // n, first + within % n


@gluon.jit
def row_values(buffer, N: gl.constexpr, layout: gl.constexpr):
    """N values of f32 that TMA loaded into a buffer (1, N), in registers."""
    return reinterpret(buffer, gl.float32, [N], gl.SwizzledSharedLayout(1, 1, 1, [0])).load(layout)
