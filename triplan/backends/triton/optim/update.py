"""Kernel ``update``: one launch counts the steps, one updates all tensors, a chunk of a tensor per program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton.language as tl

from triplan.backends.runtime.launch import Arg, Int, Launch, Ptr
from triplan.backends.table import kernel
from triplan.backends.triton.common import bounds
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.tables import BLOCKS, applies, parts_of, tables
from triplan.backends.triton.optim import update_kernels as kernels
from triplan.descriptors.optim import UpdateDescriptor
from triplan.sku import ElementKind, PrecisionGuarantee, Target

TYPES = {ElementKind.F32: tl.float32, ElementKind.BF16: tl.bfloat16, ElementKind.F16: tl.float16}
ELEMENTS = tuple(str(element) for element in TYPES)
#: Bytes of the narrowest stream per thread: one vector. With two, Adam of f32 takes more registers, which lowers
#: occupancy.
VECTOR = 16
WARPS = 4
#: Tensors whose steps one program counts. Untuned.
COUNTED = 1024
#: By op: (update rule, its scalars, bits of FLAGS by descriptor field).
RULES: Mapping[str, tuple[Any, Any, Mapping[str, int]]] = {
    "adam": (kernels.adam_scalars, kernels.adam, {"decoupled": 1, "amsgrad": 2}),
    "sgd": (kernels.sgd_scalars, kernels.sgd, {"momentum": 4, "nesterov": 8}),
    "lion": (kernels.lion_scalars, kernels.lion, {}),
}


def guarantee(desc: UpdateDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """An element's update depends only on its own values and its tensor's step. Tolerances are relative to a running
    error at the actual values."""
    found = {}
    for o in desc.operands():
        if o.is_written:
            at_random = desc.stochastic and o.name == "param"  # by place, so neither order nor other tensors may change
            tolerance = bounds.running(o.element, ElementKind.F32, directed=at_random)
            exact = bounds.EXACT if o.name == "steps" else tolerance
            found[o.name] = bounds.guarantee(ElementKind.F32, exact, batch=not at_random, order=not at_random)
    return found


def flags(desc: UpdateDescriptor) -> int:
    return sum(bit for name, bit in RULES[desc.op][2].items() if getattr(desc, name))


def numerics(desc: UpdateDescriptor) -> str:
    elements = ".".join(str(o.element) for o in desc.operands() if o.name in desc.streams)
    options = f"{'-' if desc.maximize else '+'}{'s' if desc.scaled else ''}{'r' if desc.stochastic else ''}"
    return f"optim.{desc.op}.{elements}.{flags(desc)}{options}.v1"


def workspace(desc: UpdateDescriptor, target: Target) -> int:
    return tables(desc.sizes, len(desc.streams)).nbytes if desc.sizes else 0


def rank(desc: UpdateDescriptor, target: Target) -> float:
    moved = sum(o.nbytes * (1 + o.is_written) for o in desc.operands() if o.name in desc.streams)
    return 2 * LAUNCH_US + moved / BYTES_PER_US


def update(desc: UpdateDescriptor, target: Target) -> list[Launch]:
    if not desc.sizes:
        return []
    scalars, rule, _ = RULES[desc.op]
    table, operands, count = (
        tables(desc.sizes, len(desc.streams)),
        {o.name: o for o in desc.operands()},
        len(desc.sizes),
    )

    def pointer(name: str) -> Arg:
        return Ptr(name, operands[name].element, operands[name].alignment) if name in operands else None

    steps, found_inf = pointer("steps"), pointer("found_inf")
    counts: dict[str, Arg] = {"steps": steps, "tensors": Int(count), "found_inf": found_inf}
    # A launch of its own: within the update, programs would read a step before or after another one counts it.
    counting = Launch(kernels.count_kernel, -(-count // COUNTED), counts, {"BLOCK": COUNTED}, overlaps=True)
    if not table.programs:
        return [counting]
    args: dict[str, Arg] = {
        **table.args(desc),
        "steps": steps,
        "hyper": pointer("hyper"),
        "grad_scale": pointer("grad_scale"),
        "found_inf": found_inf,
        "seed": pointer("seed"),
    }
    elements = [operands[name].element for name in desc.streams]
    narrowest = min(range(len(elements)), key=lambda k: elements[k].itemsize)
    block = 32 * WARPS * VECTOR // elements[narrowest].itemsize
    parts = parts_of(desc.sizes, BLOCKS * block)
    constants: dict[str, Any] = {
        "SCALARS": scalars,
        "RULE": rule,
        "FLAGS": flags(desc),
        "MAXIMIZE": desc.maximize,
        "TYPES": tuple(TYPES[element] for element in elements),
        "STATES": len(desc.kept),
        "COPIES": desc.copy_element is not None,
        "NARROWEST": narrowest,
        "CHUNK": table.chunk,
        "PARTS": parts,
        "BLOCK": block,
    }
    programs = table.programs * parts
    # fuses=False: the masked and the unmasked loop must round alike, so ptxas must not contract them differently.
    return [
        counting,
        Launch(kernels.update_kernel, programs, args, constants, num_warps=WARPS, fuses=False, overlaps=True),
    ]


for _op in RULES:
    kernel(
        op=_op,
        name="update",
        elements=ELEMENTS,
        guarantee=guarantee,
        supports=applies,
        workspace=workspace,
        rank=rank,
        numerics=numerics,
    )(update)
