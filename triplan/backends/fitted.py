"""Estimated times, corrected by what was measured.

An entry's ``rank`` counts bytes, operations and launches; it does not know how far the compiled kernel falls short of
them, for which elements and layouts. ``costs.json`` holds, for each entry of a group of ops that the same entries
solve, a linear correction of the estimate's logarithm by a few features of the problem. ``python -m bench fit`` writes
the file from runs of ``python -m bench anywhere``: least squares on the logarithm of time, on an H200 or H100. Other
targets use the same corrections of estimates that follow from their own numbers. What has no line in the file keeps
its estimate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triplan.backends.table import KernelRow
from triplan.descriptors import Descriptor
from triplan.sku import Target
from triplan.sku.facts import fact

FILE = Path(__file__).with_name("costs.json")
#: What a correction depends on: logarithms of the estimate and of sizes (bytes of all operands, elements of the
#: largest and of the last result, the longest last axis, bytes of an element), and what layouts promise.
FEATURES = (
    *("estimate", "bytes", "elements", "result", "row", "itemsize"),
    *("turned", "turned_result", "strided", "unaligned"),
)
#: Where FEATURES has the bytes.
BYTES = FEATURES.index("bytes")


@dataclass(frozen=True, slots=True)
class Correction:
    """log(time / estimate) = constant + weights . features; each feature within what was measured.

    ``smallest``: the logarithm of the bytes of the group's smallest problem that was measured. Smaller ones keep their
    estimates: nearly all of their time is the launch, and a line through the logarithms of larger ones does not lead
    there.
    """

    constant: float
    weights: tuple[float, ...]
    lowest: tuple[float, ...]
    highest: tuple[float, ...]
    smallest: float = -math.inf

    def factor(self, found: Sequence[float]) -> float:
        if found[BYTES] < self.smallest:
            return 1.0
        total = 0.0
        for weight, x, low, high in zip(self.weights, found, self.lowest, self.highest, strict=True):
            total += weight * (low if x < low else high if x > high else x)  # select asks each entry: min and max cost
        return math.exp(self.constant + total)


def family(described: type[Descriptor]) -> str:
    """The module or package below ``triplan.descriptors`` that has the class; empty for ops of other packages."""
    parts = described.__module__.split(".")
    return parts[2] if parts[:2] == ["triplan", "descriptors"] else ""


@fact
def _of_problem(desc: Descriptor) -> tuple[float, ...]:
    """The features but the first."""
    tensors = [o for o in desc.operands() if o.is_tensor]
    result = next((o for o in reversed(tensors) if o.is_written), tensors[-1])
    turned = [o.layout.unit_axis is not None and o.layout.unit_axis != len(o.shape) - 1 for o in tensors]
    return (
        math.log(max(sum(o.nbytes * o.count for o in tensors), 1)),
        math.log(max(o.numel for o in tensors) or 1),
        math.log(result.numel or 1),
        math.log(max((o.shape[-1] for o in tensors if o.shape), default=1) or 1),
        math.log(result.element.itemsize),
        float(any(turned)),
        float(turned[tensors.index(result)]),
        float(not all(o.layout.packed for o in tensors)),
        float(any(o.alignment < 16 for o in tensors)),
    )


def features(desc: Descriptor, estimate: float) -> tuple[float, ...]:
    """FEATURES of a problem that is estimated to take ``estimate`` microseconds."""
    return (math.log(estimate), *_of_problem(desc))


def read(text: str) -> dict[tuple[str, str], Correction]:
    """The corrections of a file's text, by op and entry."""
    found: dict[str, Any] = json.loads(text)
    if tuple(found["features"]) != FEATURES:
        raise ValueError(f"the features of costs.json are {found['features']}; those of this version are {FEATURES}")
    return {
        (op, entry): Correction(
            own["constant"], tuple(own["weights"]), tuple(own["lowest"]), tuple(own["highest"]), own["smallest"]
        )
        for group in found["groups"]
        for op in group["ops"]
        for entry, own in group["entries"].items()
    }


@fact
def _corrections() -> dict[tuple[str, str], Correction]:
    return read(FILE.read_text())


def cost_us(entry: KernelRow, desc: Descriptor, target: Target) -> float:
    """Microseconds that ``entry`` is expected to take."""
    return _cost_us(entry.rank, entry.name, desc, target)


@fact
def _cost_us(rank: Callable[..., float], name: str, desc: Descriptor, target: Target) -> float:
    estimate = rank(desc, target)
    found = _corrections().get((desc.op, name))
    if found is None or not 0 < estimate < math.inf:
        return estimate
    return estimate * found.factor(features(desc, estimate))
