"""Kernel ``clip``: one launch over all tensors of a list, a chunk of a tensor per program."""

from __future__ import annotations

from collections.abc import Mapping

from triplan.backends.runtime.launch import Arg, Launch, Ptr, Scalar
from triplan.backends.table import kernel
from triplan.backends.triton.common import bounds
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.tables import BLOCKS, applies, parts_of, tables
from triplan.backends.triton.optim import clip_kernels as kernels
from triplan.backends.triton.optim.update import ELEMENTS, TYPES
from triplan.descriptors.optim import ClipDescriptor
from triplan.sku import ElementKind, PrecisionGuarantee, Target

WARPS = 4
#: Elements that a thread loads in one iteration. Set by hand, from drawn lists of bf16 and f32 on an H200.
LANES = 8


def guarantee(desc: ClipDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """A few roundings in f64, one to the element, by way of f32. An element's bits depend on it and the norm."""
    relative = bounds.compounded(8 * ElementKind.F64.unit_roundoff)
    relative += 0.0 if desc.element is ElementKind.F32 else ElementKind.F32.unit_roundoff
    found = bounds.tolerance(desc.element, ElementKind.F64, relative=relative)
    return {"x": bounds.guarantee(ElementKind.F64, found, batch=True, order=True)}


def workspace(desc: ClipDescriptor, target: Target) -> int:
    return tables(desc.sizes, 1).nbytes


def rank(desc: ClipDescriptor, target: Target) -> float:
    return LAUNCH_US + 2 * desc.operand("x").nbytes / BYTES_PER_US


def clip(desc: ClipDescriptor, target: Target) -> list[Launch]:
    table = tables(desc.sizes, 1)
    if not table.programs:
        return []
    norm = desc.operand("norm") if desc.op == "clip_norm" else None
    args: dict[str, Arg] = {
        **table.args(desc),
        "norm": None if norm is None else Ptr("norm", norm.element, norm.alignment),
        "limit": Scalar("limit", ElementKind.F64, 0.0),
    }
    block = 32 * WARPS * LANES
    parts = parts_of(desc.sizes, BLOCKS * block)
    constants = {"TYPE": TYPES[desc.element], "CHUNK": table.chunk, "PARTS": parts, "BLOCK": block}
    return [Launch(kernels.clip_kernel, table.programs * parts, args, constants, num_warps=WARPS)]


for _op in ClipDescriptor.ops():
    kernel(
        op=_op,
        name="clip",
        elements=ELEMENTS,
        guarantee=guarantee,
        supports=applies,
        workspace=workspace,
        rank=rank,
        numerics=lambda desc: f"optim.{desc.op}.{desc.element}.v1",
    )(clip)
