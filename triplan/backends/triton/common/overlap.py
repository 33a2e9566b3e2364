"""Programmatic dependent launch: how a kernel in Triton's own language starts before the previous launch ends.

Relies on ``gdc_wait`` and ``gdc_launch_dependents`` of ``triton.language.extra.cuda``, the same from Triton 3.6 to 3.9.
"""

# mypy: ignore-errors
# (Triton's language is not typed; this body is compiled, not executed as Python.)

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from triplan.backends.runtime.jit import jit


@jit
def begin(OVERLAPS: tl.constexpr):
    """Allow the next launch to start, then wait until the previous one has ended. Kernels call it first.

    After the wait a program may read what the previous launch wrote, and overwrite what it read. Every program
    waits, so a launch ends only after all launches before it have ended.
    """
    allow_next(OVERLAPS)
    wait_for_previous(OVERLAPS)


@jit
def allow_next(OVERLAPS: tl.constexpr):
    """Allow the next launch to start once all programs have done so.

    If the first of several launches allows its next only after its own wait, all launches before the first have ended.
    Then the others may read before they wait what none of them writes, and the second may write what the first does not
    touch.
    """
    if OVERLAPS:
        gdc_launch_dependents()


@jit
def wait_for_previous(OVERLAPS: tl.constexpr):
    """Wait until the previous launch has ended."""
    if OVERLAPS:
        gdc_wait()
