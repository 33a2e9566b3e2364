"""Sampling in plain torch, in float64 and 64-bit integers: shares no computation with the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from triplan.backends.reference.philox import MASK, philox
from triplan.backends.table import CheckRules, reference
from triplan.backends.triton.sampling.shared import guarantee
from triplan.descriptors import SampleDescriptor
from triplan.descriptors.sampling import MASS_BITS

Tensors = Mapping[str, Tensor]


def weight_of_greater(x: Tensor, weight: Tensor) -> Tensor:
    """For each element of a row ``x``, the sum of ``weight`` over the greater elements."""
    ascending, order = x.sort()
    up_to = torch.cat([weight.new_zeros(1), weight[order].cumsum(0)])
    return up_to[-1] - up_to[torch.searchsorted(ascending, x, right=True)]


def masses(row: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """The integer mass of each token of ``row``, float64 without NaN: 0 where a filter drops it."""
    top = row.max()
    z = (row - top) / temperature if temperature > 0 else torch.full_like(row, -torch.inf)
    mass = torch.where(row == top, 2.0**MASS_BITS, z.exp().nan_to_num(0.0) * 2.0**MASS_BITS).round().long()
    if 0 < top_k < row.numel():
        mass = torch.where(weight_of_greater(row, torch.ones_like(mass)) < top_k, mass, 0)
    if top_p < 1:
        bound = max(top_p * float(mass.sum()), 1.0)
        mass = torch.where(weight_of_greater(row, mass).double() < bound, mass, 0)
    return torch.where(mass.double() < min(min_p, 1.0) * 2.0**MASS_BITS, 0, mass)


@reference(op="sample", elements=("f16", "bf16", "f32"), guarantee=guarantee, checks=CheckRules())
def sample(desc: SampleDescriptor, x: Tensors) -> Tensors:
    seed, position = x["seed"], x["position"]
    zero = torch.zeros_like(position)
    words = philox(
        [zero, zero, position & MASK, position >> 32 & MASK],
        (seed & MASK, seed >> 32 & MASK),
    )
    out = torch.full((desc.rows,), -1)
    for r, row in enumerate(x["logits"].double().contiguous()):
        if row.numel() == 0 or row.isnan().any() or row.max() == -torch.inf:
            continue
        temperature = float(x["temperature"][r])
        filters: dict[str, Any] = {name: x[name][r].item() for name in ("top_k", "top_p", "min_p") if name in x}
        up_to = masses(row, temperature, **filters).cumsum(0)
        u = int(words[0][r]) | int(words[1][r]) << 32 if temperature > 0 else 0
        out[r] = torch.searchsorted(up_to, u * int(up_to[-1]) >> 64, right=True)
    return {"out": out}
