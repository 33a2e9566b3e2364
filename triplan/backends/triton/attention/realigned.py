"""Kernel ``realigned``: ``wgmma`` on copies of the operands that TMA cannot map.

Strides or an address that are no multiples of 16 bytes keep an operand from TMA, and so does a head whose width is no
multiple of 8. Kernels that read through pointers then take several times as long. Copies in the workspace are packed,
with zeros behind the elements of each head. They take as long as streaming the operands twice, which long sequences
outweigh many times. Results have the bits of ``wgmma``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from triplan.backends.runtime.launch import Launch, Scalar
from triplan.backends.triton.attention import copies, wgmma, wgmma_backward
from triplan.backends.triton.attention.tma import hopper_guarantee, hopper_kernel
from triplan.backends.triton.common.offsets import layout
from triplan.descriptors.attention import AttendingDescriptor
from triplan.sku import Support, Target


@dataclass(frozen=True)
class Way:
    """A kernel that reads by TMA, as the kernel table has it."""

    build: Callable[[Any, Target], Sequence[Launch]]
    supports: Callable[[Any, Target], Support]
    rank: Callable[[Any, Target], float]
    numerics: Callable[[Any], str | None]
    workspace: Callable[[Any, Target], int] = lambda desc, target: 0


def register(op: str, name: str, way: Way, priority: int = 0) -> None:
    """Register the entry ``name`` of ``op``: ``way`` on copies. ``priority``: that of ``way``, whose bits it has."""

    def supports(desc: AttendingDescriptor, target: Target) -> Support:
        return copies.supports(desc) and way.supports(copies.inner(desc), target)

    def rank(desc: AttendingDescriptor, target: Target) -> float:
        return copies.cost_us(desc) + way.rank(copies.inner(desc), target)

    def workspace(desc: AttendingDescriptor, target: Target) -> int:
        return copies.workspace_bytes(desc) + way.workspace(copies.inner(desc), target)

    def build(desc: AttendingDescriptor, target: Target) -> list[Launch]:
        launches = way.build(copies.inner(desc), target)
        return copies.around(desc, [_scaled(x, desc.head_dim) for x in launches]) if launches else []

    hopper_kernel(
        op=op,
        name=name,
        supports=supports,
        rank=rank,
        workspace=workspace,
        guarantee=hopper_guarantee,
        numerics=lambda desc: way.numerics(copies.inner(desc)),
        priority=priority,
        layout=layout,
    )(build)


def _scaled(launch: Launch, head_dim: int) -> Launch:
    """``launch`` with the default scale of heads of ``head_dim``, without the zeros behind them."""
    scale = launch.args.get("scale")
    if not isinstance(scale, Scalar):
        return launch
    return replace(launch, args={**launch.args, "scale": replace(scale, default=head_dim**-0.5)})


register("attention", "realigned", Way(wgmma.wgmma, wgmma.supports, wgmma.rank, wgmma.numerics))
register(
    "attention_backward",
    "realigned",
    Way(
        wgmma_backward.wgmma_backward,
        wgmma_backward.supports,
        wgmma_backward.rank,
        wgmma_backward.numerics,
        wgmma_backward.workspace,
    ),
)
