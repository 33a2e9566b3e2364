"""Which results are right where indices repeat and any one of the writes may stay (``duplicates=any``).

Where writes are computed, they are right within the tolerance of the guarantee.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from triplan.descriptors import Descriptor, Operand, OperandKind
from triplan.sku import ElementKind, PrecisionGuarantee
from triplan.testing.oracle import bit_oracle, judge, magnitudes, moved_bits, oracle

#: Up to this many positions, each write is tested alone, by a run of the reference. With more, ``check_plan`` relies on
#: its second run, whose indices do not repeat.
POSITIONS = 48


def index_operand(desc: Descriptor) -> Operand | None:
    """The operand that holds indices, if there is one."""
    return next((o for o in desc.operands() if o.index_extents), None)


def can_be_distinct(desc: Descriptor) -> bool:
    """Whether indices can be drawn so that none repeats; those in excess lie out of bounds and are dropped."""
    o = index_operand(desc)
    if o is None or o.layout.zero_axes:
        return False
    slots, count = 1, 1
    for n in o.index_extents:
        slots *= n
    for a in [a for a in range(len(o.shape)) if a not in o.batch_axes] or range(len(o.shape)):
        count *= o.shape[a]
    return count <= slots or getattr(desc, "out_of_bounds", "clamp") != "clamp"


def check_any(desc: Descriptor, args: Any, name: str, got: torch.Tensor, guarantee: PrecisionGuarantee) -> None:
    """Raise ``AssertionError`` unless each element of ``got`` is one of the writes to it or, without any, unchanged.

    ``args`` are CPU copies from before the run.
    """
    before = getattr(args, name)
    touched, candidate = _writes(desc, args, name, got, guarantee)
    wrong = torch.where(touched, ~candidate, _bits(got) != _bits(before))
    if bool(wrong.any()):
        at = tuple(int(i) for i in wrong.nonzero()[0])
        what = "none of the writes to it" if bool(touched[at]) else f"not {before[at].item()!r}, as before"
        raise AssertionError(
            f"{name}[{', '.join(map(str, at))}]: got {got[at].item()!r}, which is {what}; {int(wrong.sum())} of "
            f"{got.numel()} elements are wrong"
        )


def _writes(
    desc: Descriptor, args: Any, name: str, got: torch.Tensor, guarantee: PrecisionGuarantee
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks of ``got``: elements that are written to, and those of them that hold one of the writes."""
    o = index_operand(desc)
    assert o is not None
    clamps = getattr(desc, "out_of_bounds", "") == "clamp"
    if o.numel > POSITIONS or clamps:
        # All writes at once. Which elements are written to is exact; of a value we only know that it is in a source, if
        # it is only moved.
        touched, _ = _reached(desc, args, name)
        if not moved_bits(guarantee):
            return touched, touched
        sources = [
            _bits(v).reshape(-1)
            for n, v in vars(args).items()
            if isinstance(v, torch.Tensor) and v.dtype == got.dtype and n != name
        ]
        return touched, torch.isin(_bits(got), torch.cat(sources))
    touched = torch.zeros(got.shape, dtype=torch.bool)
    candidate = torch.zeros(got.shape, dtype=torch.bool)
    lowest = torch.iinfo(o.element.torch).min
    given = getattr(args, o.name)
    tensors = given if o.kind is OperandKind.TENSOR_LIST else [given]
    for position in range(o.numel):
        # One write alone: every other index is out of bounds, and dropped.
        alone = []
        for t in tensors:
            only = torch.full_like(t, lowest)
            only.view(-1)[position] = t.reshape(-1)[position]
            alone.append(only)
        changed = SimpleNamespace(**{**vars(args), o.name: alone if o.kind is OperandKind.TENSOR_LIST else alone[0]})
        reached, value = _reached(desc, changed, name)
        touched |= reached
        right = value == _bits(got)
        if not moved_bits(guarantee):
            sums = magnitudes(desc, changed).get(name)
            right = ~judge(got, oracle(desc, changed)[name], sums, guarantee).wrong
        candidate |= reached & right
    return touched, candidate


def _reached(desc: Descriptor, args: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Which elements do not depend on their former values, and the bits that the reference gives each element."""
    before = getattr(args, name)
    other = ~before if before.dtype is torch.bool else (~_bits(before)).view(before.dtype)
    a = bit_oracle(desc, args)[name]
    b = bit_oracle(desc, SimpleNamespace(**{**vars(args), name: other}))[name]
    return _bits(a) == _bits(b), _bits(a)


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(ElementKind.of(t.dtype).bits.torch)
