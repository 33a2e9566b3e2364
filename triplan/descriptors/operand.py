"""Operands: a descriptor's tensors and scalars. Checks, test strategies, references, CLI and docs read them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from triplan.descriptors.layout import PACKED, Layout
from triplan.errors import InvalidProblem, shown
from triplan.sku import ElementKind

__all__ = ["Operand", "OperandKind", "Role"]


class Role(str, Enum):
    """``in_out`` operands are read and written. ``output`` operands may contain anything before the run."""

    INPUT = "input"
    OUTPUT = "output"
    IN_OUT = "in_out"

    def __str__(self) -> str:
        return self.value


class OperandKind(str, Enum):
    """What the caller passes: a tensor, a list of tensors, a Python number, or a one-element tensor on the device."""

    TENSOR = "tensor"
    TENSOR_LIST = "tensor_list"
    HOST_SCALAR = "host_scalar"
    DEVICE_SCALAR = "device_scalar"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand of an op.

    Attributes:
        name: the field of Args.
        role: input, output or in-out.
        element: element type.
        shape: extents (``()`` for scalars); each tensor's, for a list.
        kind: tensor, list of tensors, host scalar or device scalar.
        count: number of tensors in a list.
        optional: None may be passed.
        batch_axes: axes along which the problem is a batch of independent problems.
        index_extents: for indices, the extents of the axes they point into, one for each tensor; otherwise empty.
        layout: what the caller promises.
        over: the inputs that this output may overwrite: the same memory with the same address and strides, and no
            other overlap. Every kernel of the op reads an element of these inputs, if at all, before it writes the
            element.
    """

    name: str
    role: Role
    element: ElementKind
    shape: tuple[int, ...] = ()
    kind: OperandKind = OperandKind.TENSOR
    count: int = 1
    optional: bool = False
    batch_axes: tuple[int, ...] = ()
    index_extents: tuple[int, ...] = ()
    layout: Layout = PACKED
    over: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.over, str):  # in which every part of a name would be found
            raise InvalidProblem(f"operand {shown(self.name)}: over = {shown(self.over)}; a tuple of names is wanted")

    @property
    def is_tensor(self) -> bool:
        return self.kind is not OperandKind.HOST_SCALAR

    @property
    def is_written(self) -> bool:
        return self.role is not Role.INPUT

    @property
    def alignment(self) -> int:
        """The promised alignment of its address, in bytes."""
        return self.layout.alignment or self.element.itemsize

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one tensor of this operand, packed."""
        return self.numel * self.element.itemsize
