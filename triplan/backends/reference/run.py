"""Running a reference row on CPU tensors, and evaluating it in float64 as the oracle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from triplan.backends.table import KernelRow
from triplan.descriptors import Descriptor, OperandKind, Role
from triplan.sku import MathPrecision


def inputs_of(desc: Descriptor, args: Any, wide: torch.dtype | None = None, *, as_is: bool = False) -> dict[str, Any]:
    """What a reference reads: inputs and in-outs, floats converted to their compute element, or to ``wide``.

    ``as_is`` converts nothing: for ops that only move elements (a conversion would quieten or merge NaNs).
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


def run_reference(row: KernelRow, desc: Descriptor, args: Any) -> None:
    """Compute, then round each output once into the caller's tensor. Where all is exact, bits are moved as they are."""
    assert row.compute is not None
    guarantees = row.guarantee(desc).values()
    moves = all(g.math_precision is MathPrecision.EXACT and g.tolerance.exact for g in guarantees)
    # Under autocast torch would multiply in a type of its own choice.
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        outputs: Mapping[str, torch.Tensor] = row.compute(desc, inputs_of(desc, args, as_is=moves))
        for name, value in outputs.items():
            getattr(args, name).detach().copy_(value)
