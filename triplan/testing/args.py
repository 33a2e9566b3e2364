"""Builds Args for any descriptor from its operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from triplan.backends.table import TABLE, CheckRules
from triplan.descriptors import Descriptor, Layout, Operand, OperandKind, Role
from triplan.facade import Plan, Workspace, plan_type
from triplan.sku import ElementKind
from triplan.testing.placing import Region, place, write
from triplan.testing.values import Indices, Values, draw, draw_indices, draw_scalar

__all__ = ["PlacedArgs", "args_for"]


@dataclass
class PlacedArgs:
    """Args whose tensors have exactly the promised layouts and lie between canaries.

    Attributes:
        args: the Args for a plan of ``desc``.
        regions: the memory of each tensor, by operand (``indices[1]`` is the second tensor of a list).
    """

    desc: Descriptor
    args: Any
    regions: dict[str, Region]
    device: torch.device
    generator: torch.Generator
    scratch: Region | None = None

    def host(self) -> Any:
        """The present values of the args in packed CPU tensors, as a reference reads them."""

        def copy(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [copy(v) for v in value]
            return value.detach().cpu().contiguous().clone() if isinstance(value, torch.Tensor) else value

        return SimpleNamespace(**{o.name: copy(getattr(self.args, o.name)) for o in self.desc.operands()})

    def reset(self, poison: int = 0) -> None:
        """Restore every byte to its value before the run, and fill the outputs with the poison of number ``poison``.

        With a different poison each time, a run that reads an output, or leaves some of it unwritten, changes its bits.
        """
        for name, region in self.regions.items():
            region.restore()
            operand = self.desc.operand(name.partition("[")[0])
            if operand.role is Role.OUTPUT:
                write(region.tensor, poisoned(operand, poison))
                region.remember()

    def workspace(self, plan: Plan[Any, Any]) -> Workspace | None:
        """A workspace of exactly the size that ``plan`` needs, of random bytes, between canaries; None for size 0."""
        size = plan.workspace_size()
        self.scratch = None
        if size == 0:
            return None
        garbage = torch.randint(0, 256, (size,), generator=self.generator, dtype=torch.uint8)
        layout = Layout(alignment=Workspace.ALIGNMENT)
        self.scratch = region = place(
            "workspace", garbage, ElementKind.U8, layout, written=True, device=self.device, g=self.generator
        )
        return Workspace.from_tensor(region.tensor)

    def assert_intact(self, outputs_may_change: bool = True) -> None:
        """Raise ``AssertionError`` if an input, a canary, or a gap between elements changed."""
        for region in self.regions.values():
            region.assert_intact(outputs_may_change)
        if self.scratch is not None:
            self.scratch.assert_intact(outputs_may_change)


def poisoned(o: Operand, turn: int = 0) -> torch.Tensor:
    """Values for an output before a run: NaNs, or bytes that a result is unlikely to have; ``turn`` says which."""
    if o.element is ElementKind.BOOL:
        return torch.full(o.shape, turn % 2 == 0)
    if o.element.is_floating_point and turn == 0:
        return torch.full(o.shape, float("nan")).to(o.element.torch)
    byte = (0x5A, 0xA5, 0x3C, 0xC3)[turn % 4]
    return torch.full((*o.shape, o.element.itemsize), byte, dtype=torch.uint8).view(o.element.torch).reshape(o.shape)


def args_for(
    desc: Descriptor,
    device: torch.device | str = "cpu",
    seed: int = 0,
    *,
    values: Values = "unit",
    indices: Indices | None = None,
    given: Mapping[str, torch.Tensor] | None = None,
) -> PlacedArgs:
    """Args for ``desc``; the same for the same seed.

    Args:
        desc: any descriptor whose op has a Plan.
        device: of the tensors.
        seed: for values, indices, strides and canaries.
        values: the kind of values of inputs and in-outs; outputs hold poison.
        indices: by default ``hostile`` if the descriptor has an ``out_of_bounds`` policy, else ``valid``.
        given: values for some operands (CPU tensors of their shape and element) instead of drawn ones. Others follow
            from these, as the ``CheckRules`` of the op's reference say.
    """
    device, given = torch.device(device), given or {}
    g = torch.Generator().manual_seed(seed)
    how: Indices = indices or ("hostile" if hasattr(desc, "out_of_bounds") else "valid")
    terms = max((o.numel for o in desc.operands() if o.is_tensor), default=1)
    fields: dict[str, Any] = {}
    regions: dict[str, Region] = {}

    def put(name: str, o: Operand, content: torch.Tensor) -> torch.Tensor:
        repeats = not (how == "distinct" and o.index_extents)
        region = place(name, content, o.element, o.layout, written=o.is_written, device=device, g=g, repeats=repeats)
        regions[name] = region
        return region.tensor

    for o in desc.operands():
        if o.kind is OperandKind.HOST_SCALAR:
            fields[o.name] = draw_scalar(o, values, g)
            continue
        if o.name in given:
            contents = [given[o.name]]
        elif o.index_extents:
            contents = draw_indices(o, how, bool(getattr(desc, "wrap_negative", False)), g)
        elif o.role is Role.OUTPUT:
            contents = [poisoned(o) for _ in range(o.count)]
        else:
            contents = [draw(o.shape, o.element, values, terms, g) for _ in range(o.count)]
        if o.kind is OperandKind.TENSOR_LIST:
            fields[o.name] = [put(f"{o.name}[{i}]", o, c) for i, c in enumerate(contents)]
        else:
            fields[o.name] = put(o.name, o, contents[0])
    placed = PlacedArgs(desc, plan_type(desc.op).args_type(**fields), regions, device, g)
    if (follows := _rules(desc).inputs) is not None:
        drawn = vars(placed.host())
        read = {o.name: drawn[o.name] for o in desc.operands() if o.role is not Role.OUTPUT}
        for name, content in follows(desc, read).items():
            if name not in regions:  # a host scalar
                placed.args = dataclasses.replace(placed.args, **{name: content})
            elif name not in given:
                write(regions[name].tensor, content.to(device))
                regions[name].remember()
    return placed


def _rules(desc: Descriptor) -> CheckRules:
    """Of the op's reference; an op without one has args all the same."""
    return next((entry.checks for entry in TABLE.rows(desc.op) if entry.compute is not None), CheckRules())
