"""Where indices repeat and any one write may stay: which results are right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from triplan.descriptors import Descriptor, Operand, OperandKind
from triplan.sku import ElementKind
from triplan.testing.oracle import bit_oracle

#: Positions up to which each write is told apart (one reference run each); beyond, distinct indices do the proof.
POSITIONS = 48


def index_operand(desc: Descriptor) -> Operand | None:
    """The operand of indices, if there is one."""
    return next((o for o in desc.operands() if o.index_extents), None)


def meets_distinctly(desc: Descriptor) -> bool:
    """Whether indices can be drawn so that no two meet, the surplus being dropped."""
    o = index_operand(desc)
    if o is None or o.layout.zero_axes:
        return False
    slots, count = 1, 1
    for n in o.index_extents:
        slots *= n
    for a in [a for a in range(len(o.shape)) if a not in o.batch_axes] or range(len(o.shape)):
        count *= o.shape[a]
    return count <= slots or getattr(desc, "out_of_bounds", "clamp") != "clamp"


def check_any(desc: Descriptor, args: Any, name: str, got: torch.Tensor) -> None:
    """Each element of ``got`` is one of the writes that reach it, or, where none does, what was there before.

    ``args`` are CPU copies from before the run. Raises ``AssertionError``.
    """
    before = getattr(args, name)
    touched, candidate = _writes(desc, args, name, got)
    wrong = torch.where(touched, ~candidate, _bits(got) != _bits(before))
    if bool(wrong.any()):
        at = tuple(int(i) for i in wrong.nonzero()[0])
        what = "none of the writes that reach it" if bool(touched[at]) else f"not {before[at].item()!r}, as before"
        raise AssertionError(
            f"{name}[{', '.join(map(str, at))}]: got {got[at].item()!r}, which is {what}; {int(wrong.sum())} of "
            f"{got.numel()} elements are wrong"
        )


def _writes(desc: Descriptor, args: Any, name: str, got: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which elements some write reaches, and which of them hold one of those writes."""
    o = index_operand(desc)
    assert o is not None
    clamps = getattr(desc, "out_of_bounds", "") == "clamp"
    if o.numel > POSITIONS or clamps:
        # All writes at once: what is reached is exact; of the value only that it is some value of the sources.
        touched, _ = _reached(desc, args, name)
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
        # One write alone: the index everywhere else is out of bounds, and dropped.
        alone = []
        for t in tensors:
            only = torch.full_like(t, lowest)
            only.view(-1)[position] = t.reshape(-1)[position]
            alone.append(only)
        changed = SimpleNamespace(**{**vars(args), o.name: alone if o.kind is OperandKind.TENSOR_LIST else alone[0]})
        reached, value = _reached(desc, changed, name)
        touched |= reached
        candidate |= reached & (value == _bits(got))
    return touched, candidate


def _reached(desc: Descriptor, args: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements that do not depend on what was there before, and the bits that the reference gives them."""
    before = getattr(args, name)
    other = ~before if before.dtype is torch.bool else (~_bits(before)).view(before.dtype)
    a = bit_oracle(desc, args)[name]
    b = bit_oracle(desc, SimpleNamespace(**{**vars(args), name: other}))[name]
    return _bits(a) == _bits(b), _bits(a)


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(ElementKind.of(t.dtype).bits.torch)
