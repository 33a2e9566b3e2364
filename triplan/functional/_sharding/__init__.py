"""How registered ops compute on DTensors, whose elements are divided between ranks: one engine, and a table of axes.

Nothing is registered before the first DTensor is seen: importing torch's module of them takes half a second.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from triplan.functional._watching import tensors_in

#: Ops that DTensors reach.
_KNOWN: set[str] = set()


def is_dtensor(t: Any) -> bool:
    """Whether ``t`` is a DTensor. There is none before its module is imported."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def dispatched(name: str, overload: Any, args: Sequence[Any]) -> Any:
    """``overload(*args)``, of the op ``name``, through torch's dispatcher."""
    if not any(map(is_dtensor, tensors_in(args))):
        return overload(*args)
    known(name, overload)
    result = overload(*args)
    if torch.are_deterministic_algorithms_enabled():
        from triplan.functional._sharding.sums import ordered

        result = ordered(result)
    return result


def known(name: str, overload: Any) -> None:
    """Let DTensors reach the op, wherever it is called from."""
    if name not in _KNOWN:
        from triplan.functional._sharding.engine import register

        register(name, overload)
        _KNOWN.add(name)
