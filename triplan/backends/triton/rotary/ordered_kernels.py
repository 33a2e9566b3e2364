"""Kernel of ``ordered``: which token of each slot is the last."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.indices_kernels import resolve
from triplan.backends.triton.common.rows_kernels import axis_offset


@jit
def owners_kernel(slots, owners, tokens, sequence, slot_count, BLOCK: tl.constexpr):
    """owners[slot] = max(owners[slot], the tokens of that slot).

    slots: (batch, sequence) of i32 or i64, as (address, strides); owners: (slot_count,) of i32, -1 before. A maximum
    does not depend on the order of programs.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = token < tokens
    at = axis_offset(token // sequence, slots[1][0]) + axis_offset(token % sequence, slots[1][1])
    slot, written = resolve(tl.load(slots[0] + at, mask=live, other=-1), slot_count, live, False, False)
    tl.atomic_max(owners + tl.where(written, slot, 0), token, mask=written, sem="relaxed")
