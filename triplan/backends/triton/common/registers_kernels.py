"""What kernels share that have no registers to spare (Gluon)."""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import gl, gluon


@gluon.jit
def opaque(x):
    """``x`` (an i32 scalar), hidden from the compiler: it cannot move what depends on ``x`` out of a loop."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [gl.to_tensor(x)], gl.int32, is_pure=False, pack=1)


@gluon.jit
def multiply_step(acc, x, y, layout: gl.constexpr):
    """acc + x @ y, for blocks (BLOCK_M, BLOCK_K) and (BLOCK_K, BLOCK_N) in shared memory, both read along C."""
    BLOCK_K: gl.constexpr = x.shape[1]
    for i in gl.static_range(BLOCK_K):
        acc += x.slice(i, 1, dim=1).load(layout) * y.slice(i, 1, dim=0).load(layout)
    return acc
