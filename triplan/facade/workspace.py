"""Workspace: scratch that the caller owns. Its contents mean nothing between calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from triplan.errors import InvalidProblem, MisalignedOperand

__all__ = ["Workspace"]


class Workspace:
    """Contiguous bytes on one device, at a multiple of ``ALIGNMENT``. One call uses it at a time.

    Made of a contiguous tensor of any element, whose memory it shares. Its size stays what it was then. Raises
    ``InvalidProblem`` for another tensor, ``MisalignedOperand`` if its address is not a multiple of ``ALIGNMENT``. So
    does its use, if the memory has been moved or freed since (``resize_``, ``set_``) and is no longer such.
    """

    #: Bytes. torch's allocators align more strictly.
    ALIGNMENT: ClassVar[int] = 16

    __slots__ = ("_checked", "device", "nbytes", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        if not tensor.is_contiguous():
            raise InvalidProblem(f"Workspace: strides {tuple(tensor.stride())}; a contiguous tensor is needed")
        if tensor.dtype is not torch.uint8 or tensor.dim() != 1:
            tensor = tensor.detach().reshape(-1).view(torch.uint8)
        self.tensor = tensor
        self.nbytes = tensor.numel()
        self.device = tensor.device
        self._checked = tensor.data_ptr()
        self._check_alignment()

    @property
    def address(self) -> int:
        """That of the first byte, where the tensor has it now."""
        address = self.tensor.data_ptr()
        if address != self._checked:
            self._check_moved(address)
        return address

    def _check_moved(self, address: int) -> None:
        tensor = self.tensor
        room = tensor.untyped_storage().nbytes() - tensor.storage_offset()
        if room < self.nbytes or tensor.device != self.device or not tensor.is_contiguous():
            raise InvalidProblem(
                f"Workspace: its tensor has been resized or freed: {self.nbytes} bytes on {self.device} were "
                f"contiguous, {max(room, 0)} on {tensor.device} are left; make another workspace"
            )
        self._checked = address
        self._check_alignment()

    def _check_alignment(self) -> None:
        if self._checked % self.ALIGNMENT:
            address, self._checked = self._checked, -1
            raise MisalignedOperand(f"Workspace: address {address:#x} is not a multiple of {self.ALIGNMENT} bytes")

    def __reduce__(self) -> tuple[Any, ...]:
        return Workspace, (self.tensor,)  # a copy, or what is unpickled, has memory of its own

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
        """Use the caller's memory: ``Workspace(tensor)``."""
        return cls(tensor)
