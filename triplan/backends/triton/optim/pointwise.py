"""Kernel ``pointwise``: one launch evaluates expressions of lists of tensors, a part of a tensor per program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triplan.backends.runtime.launch import Arg, Launch, Ptr, Scalar
from triplan.backends.table import kernel
from triplan.backends.triton.common.accuracy import of_results
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.expressions import MEMORY, digest, fused
from triplan.backends.triton.common.tables import BLOCKS, applies, parts_of, tables
from triplan.backends.triton.optim import pointwise_kernels as kernels
from triplan.descriptors.optim import ListExpressionDescriptor
from triplan.sku import ElementKind, PrecisionGuarantee, Target

ELEMENTS = tuple(e for e in ElementKind if not e.value.startswith("fp8"))
WARPS = 4
#: Bytes of the narrowest list that a thread reads at a time: one vector; but elements at least, which hide latency, and
#: at most: the masked path would need more registers than leave half of the warps.
VECTOR, LANES = 16, (4, 8)
#: Elements a thread holds at most, of all lists together. Untuned.
HELD = 64


def guarantee(desc: ListExpressionDescriptor) -> Mapping[str, PrecisionGuarantee]:
    return of_results(desc.tree, tuple(name for name, _, _ in desc.results))


def numerics(desc: ListExpressionDescriptor) -> str:
    return f"optim.expression.{digest(desc)}.v1"


def workspace(desc: ListExpressionDescriptor, target: Target) -> int:
    return tables(desc.sizes, len(desc.streams)).nbytes if desc.sizes else 0


def rank(desc: ListExpressionDescriptor, target: Target) -> float:
    moved = sum(o.nbytes * (1 + (o.role == "in_out")) for o in desc.operands() if o.name in desc.streams)
    return LAUNCH_US + moved / BYTES_PER_US


def _block(elements: list[ElementKind]) -> int:
    lanes = min(max(VECTOR // min(element.itemsize for element in elements), LANES[0]), LANES[1])
    while lanes > 1 and lanes * len(elements) > HELD:
        lanes //= 2
    return 32 * WARPS * lanes


@kernel(
    op="list_expression",
    name="pointwise",
    elements=ELEMENTS,
    guarantee=guarantee,
    supports=applies,
    workspace=workspace,
    rank=rank,
    numerics=numerics,
    version=6,  # atanh of f32 is computed in another way
)
def pointwise(desc: ListExpressionDescriptor, target: Target) -> list[Launch]:
    table = tables(desc.sizes, len(desc.streams))
    if not table.programs:
        return []
    operands, streams = {o.name: o for o in desc.operands()}, list(desc.streams)
    tensors = [i.name for i in desc.inputs_read() if i.shape is not None]
    ones = [name for name in tensors if name not in streams]
    args: dict[str, Arg] = {
        **table.args(desc),
        "ones": tuple(
            Ptr(n, ElementKind.I8 if _is_bool(desc, n) else operands[n].element, operands[n].alignment) for n in ones
        ),
        "scalars": tuple(Scalar(i.name, i.element, 0) for i in desc.inputs_read() if i.shape is None) or None,
    }
    elements = [operands[name].element for name in streams]
    block = min(_block(elements), table.chunk)
    parts = parts_of(desc.sizes, BLOCKS * block)
    constants: dict[str, Any] = {
        "FUNCTION": fused(desc),
        "READ": tuple(streams.index(n) if n in streams else -1 - ones.index(n) for n in tensors),
        "WRITTEN": tuple(streams.index(name) for name, _, _ in desc.results),
        "TYPES": tuple(MEMORY[element] for element in elements),
        "NARROWEST": min(range(len(elements)), key=lambda k: elements[k].itemsize),
        "CHUNK": table.chunk,
        "PARTS": parts,
        "BLOCK": block,
    }
    # fuses=False: the masked and the unmasked loop must round alike, so ptxas must not contract them differently.
    programs = table.programs * parts
    return [Launch(kernels.pointwise_kernel, programs, args, constants, num_warps=WARPS, fuses=False)]


def _is_bool(desc: ListExpressionDescriptor, name: str) -> bool:
    return desc.operand(name).element is ElementKind.BOOL
