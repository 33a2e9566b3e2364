"""How a kernel in Triton's own language begins before the launch ahead of it ends (programmatic dependent launch).

Relies on ``gdc_wait`` and ``gdc_launch_dependents`` of ``triton.language.extra.cuda``, the same from Triton 3.6 to 3.9.
"""

# mypy: ignore-errors
# (Triton's language is not typed; this body is compiled, not executed as Python.)

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(OVERLAPS: tl.constexpr):
    """The first thing that a kernel does: let the launch behind it be placed, then wait for the one ahead to end.

    What follows may read what the launch ahead wrote, and write what it read. Every program waits, so that the end of
    a launch is also the end of all that were ahead of it.
    """
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
