"""Run a reference on CPU tensors, and prepare its inputs in float64 for use as the oracle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from triplan.backends.table import KernelRow
from triplan.descriptors import Descriptor, OperandKind, Role
from triplan.errors import InvalidProblem
from triplan.sku import MathPrecision


def inputs_of(desc: Descriptor, args: Any, wide: torch.dtype | None = None, *, as_is: bool = False) -> dict[str, Any]:
    """The inputs and in-outs that a reference reads. Floats are converted to their compute element, or to ``wide``.

    ``as_is`` converts nothing. Ops that only move elements need it: a conversion would change the bits of NaNs.
    """
    found: dict[str, Any] = {}
    for o in desc.operands():
        value = getattr(args, o.name)
        if o.role is Role.OUTPUT or value is None:
            continue
        converts = o.element.is_floating_point and not as_is
        dtype = (wide or o.element.compute.torch) if converts else o.element.torch
        if o.kind is OperandKind.HOST_SCALAR:
            found[o.name] = value
        elif o.kind is OperandKind.TENSOR_LIST:
            found[o.name] = [t.detach().to(dtype) for t in value]
        else:
            found[o.name] = value.detach().to(dtype)
    return found


def run_reference(entry: KernelRow, desc: Descriptor, args: Any) -> None:
    """Compute, then round each output once into the caller's tensor. Exact ops move bits unchanged."""
    assert entry.compute is not None
    guarantees = entry.guarantee(desc).values()
    moves = all(g.math_precision is MathPrecision.EXACT and g.tolerance.exact for g in guarantees)
    # Under autocast torch would choose the type that it multiplies in.
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        outputs: Mapping[str, torch.Tensor] = entry.compute(desc, inputs_of(desc, args, as_is=moves))
        wanted = {o.name for o in desc.operands() if o.is_written and getattr(args, o.name) is not None}
        if outputs.keys() != wanted:
            raise InvalidProblem(f"{entry!s} returned {', '.join(outputs)}; the outputs are {', '.join(wanted)}")
        for name, value in outputs.items():
            getattr(args, name).detach().copy_(value)
