"""Seeds and offsets that torch draws into device memory, so that a captured graph draws them anew at each replay."""

from __future__ import annotations

from typing import Any

import torch

from triplan.functional._sharding import of_first_rank
from triplan.functional._watching import transformed

Tensor = torch.Tensor


def device_state(t: Tensor, generator: torch.Generator | None) -> Tensor:
    """(seed, offset) in i64 on the device of ``t``, drawn by torch. The generator moves on.

    Of a DTensor, all ranks get those of the first: they draw as one, whatever their generators hold.
    """
    if torch.compiler.is_compiling() or transformed():
        given: dict[str, Any] = {} if generator is None else {"generator": generator}  # dynamo takes no None
        return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=t.device, **given)
    found = torch.empty(2, dtype=torch.int64, device=t.device).random_(generator=generator)
    return of_first_rank(found, t)
