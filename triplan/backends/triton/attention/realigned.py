"""Kernel ``realigned``: ``wgmma`` on copies of the operands that TMA cannot map.

Strides or an address that are no multiples of 16 bytes keep an operand from TMA, and so does a head whose width is no
multiple of 8. Kernels that read through pointers then take several times as long. Copies in the workspace are packed,
with zeros behind the elements of each head. They take as long as streaming the operands twice, which long sequences
outweigh many times. Results have the bits of ``wgmma``.
"""

from __future__ import annotations

from dataclasses import replace

from triplan.backends.runtime.launch import Launch, Scalar
from triplan.backends.triton.attention import copies, wgmma, wgmma_backward
from triplan.backends.triton.attention.entries import Hopper, hopper_entry
from triplan.descriptors.attention import AttendingDescriptor
from triplan.sku import Support, Target


def enter(name: str, whole: Hopper) -> None:
    """Register the entry ``name``: ``whole`` on copies, whose bits and so whose priority and version it has."""

    def supports(desc: AttendingDescriptor, target: Target) -> Support:
        return copies.supports(desc) and whole.supports(copies.inner(desc), target)

    def rank(desc: AttendingDescriptor, target: Target) -> float:
        return copies.cost_us(desc) + whole.rank(copies.inner(desc), target)

    def workspace(desc: AttendingDescriptor, target: Target) -> int:
        return copies.workspace_bytes(desc) + whole.workspace(copies.inner(desc), target)

    def build(desc: AttendingDescriptor, target: Target) -> list[Launch]:
        launches = whole.build(copies.inner(desc), target)
        return copies.around(desc, [_scaled(x, desc.head_dim) for x in launches]) if launches else []

    hopper_entry(
        whole.descriptor,
        name,
        supports=supports,
        rank=rank,
        numerics=lambda desc: whole.numerics(copies.inner(desc)),
        workspace=workspace,
        priority=whole.priority,
        version=whole.version,
    )(build)


def _scaled(launch: Launch, head_dim: int) -> Launch:
    """``launch`` with the default scale of heads of ``head_dim``, without the zeros behind them."""
    scale = launch.args.get("scale")
    if not isinstance(scale, Scalar):
        return launch
    return replace(launch, args={**launch.args, "scale": replace(scale, default=head_dim**-0.5)})


enter("realigned", wgmma.wgmma)
enter("realigned", wgmma_backward.wgmma_backward)
