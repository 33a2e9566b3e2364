"""Copies in plain torch: shares no code with the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from triplan.backends.table import CheckRules, reference
from triplan.backends.triton.copies.fill import guarantee as of_numbers
from triplan.backends.triton.copies.geometry import ELEMENTS, OPS, guarantee
from triplan.backends.triton.copies.join import guarantee as of_joined
from triplan.descriptors import ArangeDescriptor, FillDescriptor, JoinDescriptor
from triplan.descriptors.copies import MoveDescriptor


def _number(value: float | int | bool, dtype: torch.dtype) -> Tensor:
    """``value`` as an element, converted from float64, or from i64 modulo 2**bits."""
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64).to(dtype)


def _moved(desc: MoveDescriptor, given: Mapping[str, Any]) -> Mapping[str, Tensor]:
    x, amounts = given["x"], desc.by_axis
    axes = list(range(x.dim()))
    if desc.op == "flip":
        x = x.flip([a for a in axes if amounts[a]])
    elif desc.op == "roll":
        x = x.roll(amounts, axes) if axes else x
    elif desc.op == "pad":
        value = _number(given["value"], x.dtype).item()
        pairs = [amounts[2 * a + i] for a in reversed(axes) for i in (0, 1)]
        x = torch.constant_pad_nd(x, pairs, value)
    elif desc.op in ("tril", "triu"):
        row, column = (torch.arange(n).unsqueeze(1 - i) for i, n in enumerate(x.shape[-2:]))
        beyond = column - row - amounts[0]
        x = torch.where(beyond <= 0 if desc.op == "tril" else beyond >= 0, x, torch.zeros((), dtype=x.dtype))
    elif desc.result is not desc.element and not desc.result.is_floating_point:
        x = x.to(desc.result.torch)
    return {"out": x}


def _fitting(desc: MoveDescriptor, given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Floats that the integers of the result can hold."""
    if desc.element.is_floating_point and not desc.result.is_floating_point:
        return {"x": given["x"].float().nan_to_num(0.0).clamp(-100, 100).abs().to(given["x"].dtype)}
    return {}


def _joined(desc: JoinDescriptor, given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {"out": torch.cat([given[f"x{i}"] for i in range(len(desc.widths))], 1)}


def _filled(desc: FillDescriptor, given: Mapping[str, Any]) -> Mapping[str, Tensor]:
    return {"out": _number(given["value"], desc.element.torch).expand(tuple(desc.out_shape))}


def _counted(desc: ArangeDescriptor, given: Mapping[str, Any]) -> Mapping[str, Tensor]:
    wide = torch.float64 if desc.element.is_floating_point else torch.int64
    values = given["start"] + torch.arange(desc.count, dtype=wide) * given["step"]
    return {"out": values if desc.element.is_floating_point else values.to(desc.element.torch)}


_RULES = CheckRules(terms=CheckRules.no_terms, inputs=_fitting)
for _op in OPS:
    reference(op=_op, elements=ELEMENTS, guarantee=guarantee, checks=_RULES)(_moved)
reference(op="join", elements=ELEMENTS, guarantee=of_joined, checks=CheckRules(terms=CheckRules.no_terms))(_joined)
reference(op="fill", elements=ELEMENTS, guarantee=of_numbers, checks=CheckRules(terms=CheckRules.no_terms))(_filled)
reference(op="arange", elements=ELEMENTS, guarantee=of_numbers)(_counted)
