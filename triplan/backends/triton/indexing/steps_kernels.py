"""Steps: how one more contribution changes what an element of the table has accumulated. Constexprs of kernels."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit


@jit
def add_step(acc, written, value, hit):
    """(acc + value, True) where ``hit``, else (acc, written); all blocks broadcast to (slots, lanes)."""
    return tl.where(hit, acc + value, acc), written | hit


@jit
def multiply_step(acc, written, value, hit):
    """(acc * value, True) where ``hit``, else (acc, written); all blocks broadcast to (slots, lanes)."""
    return tl.where(hit, acc * value, acc), written | hit


@jit
def max_step(acc, written, value, hit):
    """(max(acc, value), True) where ``hit``, else (acc, written); all blocks broadcast to (slots, lanes)."""
    larger = tl.where((value > acc) | (value != value), value, acc)
    return tl.where(hit, larger + 0, acc), written | hit  # + 0: of zeros 0, whichever comes first


@jit
def min_step(acc, written, value, hit):
    """(min(acc, value), True) where ``hit``, else (acc, written); all blocks broadcast to (slots, lanes)."""
    smaller = tl.where((value < acc) | (value != value), value, acc)
    return tl.where(hit, smaller + 0, acc), written | hit  # + 0: as in ``max_step``


@jit
def last_step(acc, written, value, hit):
    """(value, True) where ``hit``, else (acc, written); all blocks broadcast to (slots, lanes)."""
    return tl.where(hit, value, acc), written | hit
