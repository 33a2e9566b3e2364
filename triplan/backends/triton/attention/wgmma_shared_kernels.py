"""What the attention kernels for Hopper share (Gluon): barriers between warpgroups, slots of rings, blocks."""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import gl, gluon, reinterpret

#: Rows of one warpgroup's product.
ROWS = gl.constexpr(64)
#: The first named barrier that Triton leaves free: it takes 0, 1, and one for each partition.
FREE = gl.constexpr(8)
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)


@gluon.constexpr_function
def barrier_asm(kind, threads):
    return f"bar.{kind} $1, {threads}; mov.u32 $0, 0;"


@gluon.jit
def bar_sync(which, THREADS: gl.constexpr):
    """Arrive at a named barrier, and wait until THREADS have."""
    gl.inline_asm_elementwise(
        barrier_asm("sync", THREADS), "=r,r", [gl.to_tensor(which)], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def bar_arrive(which, THREADS: gl.constexpr):
    """Arrive at a named barrier, and go on."""
    gl.inline_asm_elementwise(
        barrier_asm("arrive", THREADS), "=r,r", [gl.to_tensor(which)], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def opaque(x):
    """``x`` (an i32 scalar), of which the compiler knows nothing: what follows from it is not moved out of loops."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [gl.to_tensor(x)], gl.int32, is_pure=False, pack=1)


@gluon.jit
def following(slot, phase, STAGES: gl.constexpr):
    """The next slot of a ring, and the parity of its phase."""
    slot += 1
    wraps = slot == STAGES
    return gl.where(wraps, 0, slot), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def matrix(buffer, HEIGHT: gl.constexpr, WIDTH: gl.constexpr):
    """A buffer of rank 4, (1, HEIGHT, 1, WIDTH) as TMA fills it, as a matrix."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEIGHT, WIDTH], buffer.dtype)
    return reinterpret(buffer, buffer.dtype, [HEIGHT, WIDTH], layout)
