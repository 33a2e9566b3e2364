"""Kernel ``looped`` of sampling: a program for each row, which reads it once for each step of a search."""

from __future__ import annotations

from collections.abc import Mapping

from triplan.backends.runtime.launch import Int, Launch, Ptr, power_of_two_in
from triplan.backends.table import kernel
from triplan.backends.triton.common.card import LAUNCH_US, SM_BYTES_PER_US
from triplan.backends.triton.common.offsets import ceil_power, layout
from triplan.backends.triton.common.strides import known_strides, stride_arg
from triplan.backends.triton.sampling import looped_kernels as kernels
from triplan.descriptors import SampleDescriptor
from triplan.sku import SUPPORTED, ElementKind, PrecisionGuarantee, Support, Target

#: Tokens of a block at most, in 8 warps. Untuned.
BLOCK = 2048
#: Steps of a search, of two bits each: those of a logit that may not be 0, as f32 has them.
STEPS = {ElementKind.F32: 16, ElementKind.F16: 10, ElementKind.BF16: 8}


def guarantee(desc: SampleDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """Sums of integers: a row's token depends on that row alone."""
    return {"out": PrecisionGuarantee.exact(ElementKind.I64).replace(order_invariant=False)}


def supports(desc: SampleDescriptor, target: Target) -> Support:
    if desc.rows >= 2**31:
        return Support.no(f"needs {desc.rows} programs; a grid holds fewer than 2**31")
    return SUPPORTED


def rank(desc: SampleDescriptor, target: Target) -> float:
    """Each pass reads the row as fast as one multiprocessor can. Untuned."""
    passes = 3 + STEPS[desc.element] * (desc.top_k + desc.top_p) + desc.top_p
    waves = -(-desc.rows // max(target.sm_count, 1))
    return LAUNCH_US + waves * passes * desc.vocabulary * desc.element.itemsize / SM_BYTES_PER_US


@kernel(
    op="sample",
    name="looped",
    elements=STEPS,
    guarantee=guarantee,
    supports=supports,
    rank=rank,
    numerics=lambda desc: "sampling.sample.v1",
    layout=layout,
)
def looped(desc: SampleDescriptor, target: Target) -> list[Launch]:
    if desc.rows == 0:
        return []
    operands = {o.name: o for o in desc.operands()}
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "position", "out")
    row_step, step = known_strides(operands["logits"], 2)
    args = {
        "logits": Ptr("logits", desc.element, operands["logits"].alignment),
        "row_stride": stride_arg(operands["logits"], row_step),
        "stride": None if step == 1 or desc.vocabulary == 1 else stride_arg(operands["logits"], step),
        **{n: Ptr(n, operands[n].element, operands[n].alignment) if n in operands else None for n in names},
        "strides": tuple(
            stride_arg(operands[n], known_strides(operands[n], 1)[0]) if n in operands else Int(0, True) for n in names
        ),
        "n": Int(desc.vocabulary, divisibility=power_of_two_in(desc.vocabulary)),
    }
    block = min(ceil_power(max(desc.vocabulary, 1)), BLOCK)
    constants = {"STEPS": STEPS[desc.element], "BLOCK": block}
    warps = min(max(block // 256, 1), 8)
    # Left alone, ptxas spills 8 bytes of 128 registers to raise occupancy.
    return [Launch(kernels.sample_kernel, desc.rows, args, constants, num_warps=warps, max_registers=255)]
