"""Places tensors in memory with promised strides and alignment; canaries lie before, after and between the elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from triplan.descriptors import Layout, packed_strides
from triplan.descriptors.layout import ordered_strides
from triplan.sku import ElementKind

#: Canary bytes on each side of a tensor: more than a vector load or a cache line covers.
GUARD = 256


@dataclass
class Region:
    """One allocation that holds one tensor (or several that share memory) between canaries.

    Attributes:
        name: the operand, for messages.
        storage: all bytes, uint8, on the device.
        tensor: the operand, a view of ``storage``.
        written: whether a run may change the tensor's elements.
        pristine: a copy of the bytes before the run, on the CPU.
    """

    name: str
    storage: torch.Tensor
    tensor: torch.Tensor
    written: bool
    pristine: torch.Tensor

    def remember(self) -> None:
        """Copy the present bytes to ``pristine``."""
        self.pristine = self.storage.cpu().clone()

    def restore(self) -> None:
        """Copy ``pristine`` back."""
        self.storage.copy_(self.pristine)

    def owned(self) -> torch.Tensor:
        """A mask of the bytes that belong to the tensor's elements (bool, CPU)."""
        itemsize = self.tensor.element_size()
        mask = torch.zeros(self.storage.numel() // itemsize, dtype=torch.bool)
        if self.tensor.numel():
            offsets = torch.zeros((), dtype=torch.int64)
            for n, s in zip(self.tensor.shape, self.tensor.stride(), strict=True):
                offsets = offsets[..., None] + torch.arange(n) * s
            mask[self.tensor.storage_offset() + offsets.reshape(-1)] = True
        return mask.repeat_interleave(itemsize)

    def assert_intact(self, outputs_may_change: bool = True) -> None:
        """Raise ``AssertionError`` if a byte changed that no run may change."""
        changed = self.storage.cpu() != self.pristine
        if self.written and outputs_may_change:
            changed &= ~self.owned()
        if changed.any():
            where = changed.nonzero()
            start = self.tensor.storage_offset() * self.tensor.element_size()
            inside = bool(self.owned()[where[0]].item())
            what = "an element" if inside else "a byte that is none of its elements (a canary)"
            raise AssertionError(
                f"{self.name}: {len(where)} bytes changed that no run may change; the first is {what}, "
                f"{int(where[0]) - start} bytes from the tensor's start (shape {tuple(self.tensor.shape)}, "
                f"strides {self.tensor.stride()})"
            )


def integer(low: int, high: int, g: torch.Generator) -> int:
    """A uniform integer in [low, high)."""
    return int(torch.randint(low, high, (), generator=g))


def chance(p: float, g: torch.Generator) -> bool:
    return float(torch.rand((), generator=g)) < p


def draw_strides(
    shape: Sequence[int], layout: Layout, written: bool, g: torch.Generator, repeats: bool = True
) -> tuple[int, ...]:
    """Random strides that keep the promise of ``layout``, and no more.

    Axes of extent 1 get any stride. Strided operands are transposed, have gaps and, if they are inputs and ``repeats``
    is set, sometimes have a stride of 0.
    """
    if layout.packed:
        found = list(packed_strides(shape))
    elif layout.order:
        found = list(ordered_strides(shape, layout.order))
    else:
        order = list(reversed(range(len(shape))))
        if chance(0.6, g):
            order = [order[i] for i in torch.randperm(len(order), generator=g)]
        if layout.unit_axis is not None:
            order.remove(layout.unit_axis)
            order.insert(0, layout.unit_axis)
        found = [0] * len(shape)
        step = 1 if layout.unit_axis is not None or chance(0.5, g) else integer(2, 4, g)
        for axis in order:
            free = not written and repeats and axis != layout.unit_axis and layout.stride_multiple == 1
            zero = axis in layout.zero_axes or (free and chance(0.12, g))
            if axis != layout.unit_axis:
                step = -(-step // layout.stride_multiple) * layout.stride_multiple
            found[axis] = 0 if zero else step
            if not zero:
                step = step * max(shape[axis], 1) + (integer(0, 4, g) if chance(0.5, g) else 0)
    for axis, n in enumerate(shape):
        if n == 1 and chance(0.5, g):
            found[axis] = integer(0, 50, g)
    return tuple(found)


def reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The number of elements from the first to the last in memory, gaps included; 0 for an empty tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def allocate(
    elements: int, element: ElementKind, alignment: int, device: torch.device | str, g: torch.Generator, off: int = 0
) -> tuple[torch.Tensor, int]:
    """Random bytes with space for ``elements`` between canaries, and the offset of that space in elements.

    Its address is an odd multiple of ``alignment``, so that it is not better aligned, plus ``off`` bytes.
    """
    size = elements * element.itemsize
    total = -(-(2 * GUARD + 4 * alignment + size) // 8) * 8
    storage = torch.randint(0, 256, (total,), generator=g, dtype=torch.uint8).to(device)
    address = storage.data_ptr()
    start = address + GUARD
    start += -start % alignment
    if start // alignment % 2 == 0:
        start += alignment
    return storage, (start + off - address) // element.itemsize


def place(
    name: str,
    values: torch.Tensor,
    element: ElementKind,
    layout: Layout,
    *,
    written: bool,
    device: torch.device | str,
    g: torch.Generator,
    strides: Sequence[int] | None = None,
    repeats: bool = True,
    off: int = 0,
) -> Region:
    """A region with a tensor of ``values`` (CPU, of ``element``), laid out and aligned as ``layout`` promises.

    ``strides`` and ``off`` (bytes added to the address) break the promise on purpose.
    """
    shape = tuple(values.shape)
    if strides is None:
        strides = draw_strides(shape, layout, written, g, repeats)
    alignment = layout.alignment or element.itemsize
    storage, start = allocate(reach(shape, strides), element, alignment, device, g, off)
    flat = storage.view(element.torch)
    tensor = flat.as_strided(shape, strides, start)
    write(tensor, values)
    region = Region(name, storage, tensor, written, torch.empty(0))
    region.remember()
    return region


def write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy the bits of ``values`` into ``tensor``; along axes of stride 0, of the first position only."""
    if tensor.numel() == 0:
        return
    for axis, s in enumerate(tensor.stride()):
        if s == 0:
            tensor, values = tensor.narrow(axis, 0, 1), values.narrow(axis, 0, 1)
    bits = ElementKind.of(tensor.dtype).bits.torch
    tensor.view(bits).copy_(values.view(bits))
