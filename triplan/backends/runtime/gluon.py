"""Gluon's names, the same for Triton 3.6 to 3.9. Only this module knows what changed between those versions:

- ``tma.async_copy_global_to_shared`` and ``async_copy_shared_to_global`` became ``async_load`` and ``async_store``.
- ``gl.thread_barrier`` became ``gl.barrier``.
- A buffer's ``_reinterpret`` became ``reinterpret``, and no longer gives views of more bytes than the buffer has.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource, constexpr_function
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra import cuda

from triplan.backends.runtime.jit import gluon_jit

#: The decorators of ``triton.experimental.gluon``.
gluon: Any = SimpleNamespace(jit=gluon_jit, constexpr_function=constexpr_function)
mbarrier: Any = hopper.mbarrier
fence_async_shared: Any = hopper.fence_async_shared
warpgroup_mma: Any = hopper.warpgroup_mma
warpgroup_mma_wait: Any = hopper.warpgroup_mma_wait
#: Ampere's product of factors in registers.
mma: Any = mma_v2
_tma: Any = hopper.tma
load_tile: Any = getattr(_tma, "async_load", None) or _tma.async_copy_global_to_shared
store_tile: Any = getattr(_tma, "async_store", None) or _tma.async_copy_shared_to_global
store_wait: Any = _tma.store_wait
#: Whether ``reinterpret`` gives views of more bytes than a buffer has.
VIEWS_GROW = triton.__version__.startswith("3.6.")
#: Asynchronous copies from pointers to shared memory (``cp.async``); masked elements become 0.
copy_block: Any = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
copies_committed: Any = async_copy.commit_group
copies_wait: Any = async_copy.wait_group
#: A barrier for the threads of one warp-specialised partition.
thread_barrier: Any = getattr(gl, "thread_barrier", None) or gl.barrier
#: Programmatic dependent launch: wait until the previous launch has ended; allow the next one to begin.
previous_wait: Any = cuda.gdc_wait
next_may_begin: Any = cuda.gdc_launch_dependents


@builtin
def reinterpret(buffer, dtype, shape, layout, _semantic=None):  # type: ignore[no-untyped-def]
    """A view of a buffer's bytes, or of the first of them, with another dtype, shape and layout."""
    method = buffer.reinterpret if hasattr(buffer, "reinterpret") else buffer._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


@builtin
def several_by_asm(asm, constraints, args, dtypes, pack, _semantic=None):  # type: ignore[no-untyped-def]
    """``inline_asm_elementwise`` of several results; that one does not take their ``dtypes`` from a kernel's tuple."""
    found = [getattr(t, "value", t) for t in dtypes]
    text, how, each = (getattr(x, "value", x) for x in (asm, constraints, pack))
    results = gl.inline_asm_elementwise(text, how, list(args), found, is_pure=True, pack=each, _semantic=_semantic)
    return gl.tuple(results)


__all__ = [
    "VIEWS_GROW",
    "GluonASTSource",
    "copies_committed",
    "copies_wait",
    "copy_block",
    "fence_async_shared",
    "gl",
    "gluon",
    "load_tile",
    "mbarrier",
    "mma",
    "next_may_begin",
    "previous_wait",
    "reinterpret",
    "several_by_asm",
    "store_tile",
    "store_wait",
    "thread_barrier",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
