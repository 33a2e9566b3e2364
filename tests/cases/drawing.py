"""Calls of ``bench.functions`` with values of their own, without drawing those of all functions for each."""

from __future__ import annotations

from collections import defaultdict, deque
from copy import deepcopy
from dataclasses import replace

from bench.functions import Call, Draw, calls

#: Draws that are kept. No test calls a function with this many draws, so that it sees no values twice.
DRAWS = 8
_KEPT: defaultdict[tuple[type[Draw], Draw], deque[dict[str, Call]]] = defaultdict(deque)


def drawn(draw: Draw, name: str) -> Call:
    """A call whose tensors are its own. Values, and the parameters of modules, are those of ``DRAWS`` draws in turn."""
    kept = _KEPT[type(draw), draw]
    if len(kept) < DRAWS:
        kept.append(calls(draw))
    else:
        kept.rotate()
    call = kept[-1][name]
    return replace(call, args=deepcopy(call.args))
