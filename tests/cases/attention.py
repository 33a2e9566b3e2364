"""What launches of attention that are no kernels in Gluon compute, for those that are emulated after them."""

from __future__ import annotations

import math
from typing import Any

import torch


def fill_rows(x: dict[str, Any], workspace: torch.Tensor, rounded: int) -> None:
    """What ``attention_rows_kernel`` computes: sum(dout * out) and lse / ln(2) of each row of a padded head."""
    delta, lse2 = workspace.view(torch.float32).view(2, -1, rounded)
    queries = x["q"].shape[1]
    delta.zero_()[:, :queries] = (x["dout"].float() * x["out"].float()).sum(-1).mT.reshape(-1, queries)
    lse = x["lse"].reshape(-1, queries)
    lse2.fill_(torch.inf)[:, :queries] = torch.where(lse == -torch.inf, torch.inf, lse / math.log(2))
