"""Kernel ``looped`` of sampling: a program for each row, which reads it once for each step of a search."""

from __future__ import annotations

from triplan.backends.runtime.launch import Launch
from triplan.backends.table import kernel
from triplan.backends.triton.common.card import LAUNCH_US, SM_BYTES_PER_US
from triplan.backends.triton.common.offsets import ceil_power, layout
from triplan.backends.triton.sampling import looped_kernels as kernels
from triplan.backends.triton.sampling.shared import (
    SM_EXPONENTIALS_PER_US,
    STEPS,
    guarantee,
    logits_args,
    numerics,
    row_args,
)
from triplan.descriptors import SampleDescriptor
from triplan.descriptors.sampling import FILTERS
from triplan.sku import SUPPORTED, Support, Target

#: Tokens of a block at most, in 8 warps. Untuned.
BLOCK = 2048
#: Microseconds from one pass to the next. Fitted to one row of 1,280 tokens on an H200.
PASS_US = 0.5


def supports(desc: SampleDescriptor, target: Target) -> Support:
    if desc.rows >= 2**31:
        return Support.no(f"needs {desc.rows} programs; a grid holds fewer than 2**31")
    return SUPPORTED


def rank(desc: SampleDescriptor, target: Target) -> float:
    """Each pass waits for the one ahead, or reads the row as fast as one multiprocessor can, and most take its
    exponentials."""
    searches = STEPS[desc.element] + 1
    masses = 2 + searches * desc.top_p
    passes = 1 + masses + searches * desc.top_k
    token = passes * desc.element.itemsize / SM_BYTES_PER_US + masses / SM_EXPONENTIALS_PER_US
    busy = -(-desc.rows // target.sm_count) * desc.vocabulary * token
    return LAUNCH_US + passes * PASS_US + busy


@kernel(
    op="sample",
    name="looped",
    elements=STEPS,
    guarantee=guarantee,
    supports=supports,
    rank=rank,
    numerics=numerics,
    version=5,
    layout=layout,
)
def looped(desc: SampleDescriptor, target: Target) -> list[Launch]:
    if desc.rows == 0:
        return []
    block = min(ceil_power(max(desc.vocabulary, 1)), BLOCK)
    constants = {"STEPS": STEPS[desc.element], "BLOCK": block}
    warps = min(max(block // 256, 1), 8)
    args = {**logits_args(desc), **row_args(desc)}
    # With filters, left alone, ptxas spills 8 bytes of 128 registers to raise occupancy. Without, 64 spill none.
    filtered = any(getattr(desc, name) for name in FILTERS)
    most = 255 if filtered else 64
    return [Launch(kernels.sample_kernel, desc.rows, args, constants, num_warps=warps, max_registers=most)]
