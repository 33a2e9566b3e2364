"""What launches of attention that are no kernels in Gluon compute, for those that are emulated after them."""

from __future__ import annotations

import math
from typing import Any

import torch


def steep(queries: int, keys: int, width: int, element: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    """q and k of two heads. Scores, beside those of normal numbers, rise and fall along the keys, in other rows the
    other way, and in others not at all.
    """
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(2, n, 2, width, generator=g) for n in (queries, keys))
    for row, slope in enumerate((1.0, -1.0, 0.0, 0.1, -0.1)):
        q[:, row::5, :, 0] = slope * math.sqrt(width)
    at = torch.arange(keys)
    k[..., 0] = (2 * (0.3 * at).sin().cumsum(0) + 0.05 * at)[:, None]
    return {"q": q.to(element), "k": k.to(element)}


def fill_rows(x: dict[str, Any], workspace: torch.Tensor, rounded: int) -> None:
    """What ``attention_rows_kernel`` computes: sum(dout * out) and lse / ln(2) of each row of a padded head."""
    delta, lse2 = workspace.view(torch.float32).view(2, -1, rounded)
    queries = x["q"].shape[1]
    delta.zero_()[:, :queries] = (x["dout"].float() * x["out"].float()).sum(-1).mT.reshape(-1, queries)
    lse = x["lse"].reshape(-1, queries)
    lse2.fill_(torch.inf)[:, :queries] = torch.where(lse == -torch.inf, torch.inf, lse / math.log(2))
