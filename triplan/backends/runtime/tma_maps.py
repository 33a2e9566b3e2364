"""TMA tensor maps of descriptors made on the host: each is encoded once per address and then reused.

Triton encodes the maps again at every launch (about 8 us for three). Address, shape, strides, block and swizzle
determine a map. A ``Maps`` fixes all of these except the address, and caches the encoded maps by address. Reuse is
safe: another allocation at the same address has either another shape, hence another ``Maps``, or the same shape and
therefore the same map.

Relies on Triton 3.6: ``make_tensordesc_arg(descriptor, meta)`` returns [encoded map, *shape, *strides], and ``launch``
of Triton's launcher is a closure over the C function ``launcher``, whose arguments are ``_BASE_ARGS_FORMAT``. From 3.7
on the C function is called differently, and Triton encodes at every launch (``ENCODED`` is False).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.nvidia import driver

from triplan.backends.runtime.launch import TensorMap

#: Grid, stream, function, cooperative, dependent launch, two scratch pointers, metadata twice, two hooks.
_C_FORMAT = "iiiKKppOOOOOO"
#: Whether this module encodes the maps; else Triton does, at every launch.
ENCODED = triton.__version__.startswith("3.6.") and getattr(driver, "_BASE_ARGS_FORMAT", "") == _C_FORMAT
#: Maps cached per operand. A training step reuses a limited set of buffers; a loop over new ones must not fill memory.
_MAX_MAPS = 256


def viewed(spec: TensorMap, tensor: torch.Tensor) -> torch.Tensor:
    """What a map shows of its operand."""
    if spec.lies is not None:
        tensor = tensor.as_strided(*spec.lies)
    view = tensor.mT if spec.transposed else tensor
    if spec.view is not None:
        view = tensor.permute([axis for axis, *_ in spec.view])[tuple(slice(*part) for _, *part in spec.view)]
    return view


def copied(spec: TensorMap) -> torch.Tensor:
    """A tensor without memory, of the shape and strides of the copy that is mapped."""
    assert spec.copy is not None
    return torch.empty_strided(spec.copy.shape, spec.copy.strides, dtype=spec.element.torch, device="meta")


class _Encoded(tuple[Any, ...]):
    """A map, its shape and its strides: the arguments of one descriptor in the C call."""

    __slots__ = ()


class Maps:
    """The tensor maps of one operand, with one shape and strides, by address."""

    __slots__ = ("_by_address", "_meta", "_offset", "_shape", "_spec", "_strides")

    def __init__(self, spec: TensorMap, tensor: torch.Tensor, meta: Any) -> None:
        """``meta``: what the compiler chose for this descriptor (swizzle, block); None if the kernel uses no TMA."""
        self._spec, self._meta = spec, meta
        view = viewed(spec, tensor)
        self._offset = (view.storage_offset() - tensor.storage_offset()) * tensor.element_size()
        # An axis of stride 0 becomes one of size 1. The stride of a size-1 axis is never used, but cuTensorMapEncode
        # rejects some values, so we pass a valid one: a multiple of 16 bytes that is at least a row.
        row = -(-view.shape[-1] // 16) * 16
        self._shape = [n if s else 1 for n, s in zip(view.shape, view.stride(), strict=True)]
        strides = [row if n == 1 else s for n, s in zip(self._shape, view.stride(), strict=True)]
        self._strides = [*strides[:-1], 1]
        self._by_address: dict[int, Any] = {}

    def __call__(self, address: int) -> Any:
        """The launcher's argument for the operand at ``address``."""
        found = self._by_address.get(address)
        if found is None:
            if len(self._by_address) >= _MAX_MAPS:
                self._by_address.clear()
            found = self._by_address[address] = self._make(address)
        return found

    def _make(self, address: int) -> Any:
        base = SimpleNamespace(data_ptr=lambda: address + self._offset, dtype=self._spec.element.torch)
        descriptor = SimpleNamespace(
            base=base,
            shape=self._shape,
            strides=self._strides,
            block_shape=list(self._spec.block),
            padding="zero",
            round_f32_to_tf32=False,
        )
        return _Encoded(driver.make_tensordesc_arg(descriptor, self._meta)) if ENCODED else descriptor


def start_function(
    run: Any, grid: int, compiled: Any, values: Sequence[Any], hooks: tuple[Any, Any, Any] = (None, None, None)
) -> Callable[[int], None]:
    """A function that launches on a stream with encoded maps among ``values``.

    ``hooks``: (launch metadata, enter hook, exit hook).
    """
    flat: list[Any] = []
    for value in values:
        if type(value) is _Encoded:
            flat.extend(value)
        else:
            flat.append(value)
    c_launch = _c_launch(run)
    attributes = (run.launch_cooperative_grid, run.launch_pdl)
    rest = (compiled.function, *attributes, None, None, compiled.packed_metadata, *hooks, *flat)

    def start(stream: int) -> None:
        c_launch(grid, 1, 1, stream, *rest)

    return start


def _c_launch(run: Any) -> Any:
    wrapper = run.launch
    cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__, strict=True))
    return cells["launcher"].cell_contents
