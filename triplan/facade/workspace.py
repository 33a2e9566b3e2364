"""Workspace: scratch that the caller owns. Its contents mean nothing between calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from triplan.errors import InvalidProblem, MisalignedOperand

__all__ = ["Workspace"]


class Workspace:
    """Contiguous bytes on one device, at a multiple of ``ALIGNMENT``. One call uses it at a time."""

    #: Bytes. torch's allocators align more strictly.
    ALIGNMENT: ClassVar[int] = 16

    __slots__ = ("address", "device", "nbytes", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.nbytes = tensor.numel()
        self.address = tensor.data_ptr()
        self.device = tensor.device

    def __repr__(self) -> str:
        return f"Workspace({self.nbytes} bytes on {self.device})"

    @classmethod
    def allocate(cls, plan: Any, device: torch.device | str | int | None = None) -> Workspace:
        """Allocate exactly what ``plan`` needs. ``device`` defaults to torch's current device of the plan's target."""
        return cls.for_plans([plan], device)

    @classmethod
    def for_plans(cls, plans: Iterable[Any], device: torch.device | str | int | None = None) -> Workspace:
        """Allocate one buffer, of the size of the largest need, for ``plans`` that never run at the same time."""
        plans = list(plans)
        if not plans:
            raise InvalidProblem("Workspace.for_plans: no plans were given")
        size = max(plan.workspace_size() for plan in plans)
        where = plans[0].target.device_type if device is None else device
        return cls(torch.empty(size, dtype=torch.uint8, device=where))

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> Workspace:
        """Use the caller's memory: a contiguous tensor of any element.

        Raises ``InvalidProblem`` if it is not contiguous, ``MisalignedOperand`` if its address is not a multiple of
        ``ALIGNMENT``.
        """
        if not tensor.is_contiguous():
            raise InvalidProblem(
                f"Workspace.from_tensor: strides {tuple(tensor.stride())}; a contiguous tensor is needed"
            )
        if tensor.data_ptr() % cls.ALIGNMENT:
            raise MisalignedOperand(
                f"Workspace.from_tensor: address {tensor.data_ptr():#x} is not a multiple of {cls.ALIGNMENT} bytes"
            )
        return cls(tensor.detach().reshape(-1).view(torch.uint8))
