"""How the kernels of attention enter the kernel table: under the op of the descriptor that they are written for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from triplan.backends.table import Build, kernel
from triplan.backends.triton.attention.arguments import ELEMENTS
from triplan.backends.triton.attention.guarantees import guarantee
from triplan.backends.triton.attention.tma import is_invariant, width_of
from triplan.backends.triton.common.offsets import layout
from triplan.descriptors.attention import AttendingDescriptor
from triplan.sku import ArchSku, PrecisionGuarantee, Support, Target

Supports = Callable[[Any, Target], Support]
Rank = Callable[[Any, Target], float]
Numerics = Callable[[Any], str | None]
Workspace = Callable[[Any, Target], int]


def pointers_entry(descriptor: type[AttendingDescriptor], **fields: Any) -> Callable[[Build], Build]:
    """``kernel`` for one that reads through pointers; ``fields``: its other arguments."""
    usual: dict[str, Any] = {"elements": ELEMENTS, "guarantee": guarantee, "layout": layout}
    return kernel(op=descriptor.ops()[0], **usual | fields)


def _no_workspace(desc: AttendingDescriptor, target: Target) -> int:
    return 0


@dataclass(frozen=True)
class Hopper:
    """An entry whose kernels read by TMA and multiply by wgmma, as the kernel table has it."""

    descriptor: type[AttendingDescriptor]
    build: Build
    supports: Supports
    rank: Rank
    numerics: Numerics
    workspace: Workspace
    priority: int
    version: int


def hopper_entry(
    descriptor: type[AttendingDescriptor],
    name: str,
    *,
    supports: Supports,
    rank: Rank,
    numerics: Numerics | None = None,
    workspace: Workspace = _no_workspace,
    priority: int = 0,
    version: int = 1,
) -> Callable[[Build], Hopper]:
    """Register the decorated function as an entry whose kernels read by TMA.

    ``numerics``: by default an id by which the bits of a head of one sequence depend on that head alone.
    """

    def own_numerics(desc: AttendingDescriptor) -> str | None:
        if not is_invariant(desc):
            return None
        return f"{desc.op}-{name}.{desc.element}.{width_of(desc)}.{desc.causal:d}.v1"

    def register(build: Build) -> Hopper:
        entry = Hopper(descriptor, build, supports, rank, numerics or own_numerics, workspace, priority, version)
        kernel(
            op=descriptor.ops()[0],
            name=name,
            elements=("f16", "bf16"),
            archs=(ArchSku.SM90A,),
            features=("gluon", "tma"),
            interpretable=False,
            supports=supports,
            rank=rank,
            workspace=workspace,
            guarantee=_hopper_guarantee,
            numerics=entry.numerics,
            priority=priority,
            version=version,
            layout=layout,
        )(build)
        return entry

    return register


def _hopper_guarantee(desc: AttendingDescriptor) -> Mapping[str, PrecisionGuarantee]:
    return guarantee(desc, is_invariant(desc))
