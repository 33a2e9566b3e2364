"""TMA tensor maps of host-made descriptors: encoded once for an address, then reused.

Triton encodes them anew at every launch (about 8 us for three). A map is nothing but its address, shape, strides, block
and swizzle; a ``Maps`` fixes all of these but the address, by which it keeps what it has encoded. So an address that
another allocation reuses, under another shape, meets another ``Maps``, and under the same shape the same bits.

Relies on Triton 3.6: ``make_tensordesc_arg(descriptor, meta)`` gives [encoded map, *shape, *strides], and ``launch`` of
Triton's launcher closes over the C function ``launcher`` with the arguments ``_BASE_ARGS_FORMAT``. From 3.7 on the C
call is another, and Triton encodes at every launch (``ENCODED`` is False).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.nvidia import driver

from triplan.backends.runtime.launch import TensorMap

#: Grid, stream, function, cooperative, dependent launch, two scratches, metadata twice, two hooks.
_C_FORMAT = "iiiKKppOOOOOO"
ENCODED = triton.__version__.startswith("3.6.") and getattr(driver, "_BASE_ARGS_FORMAT", "") == _C_FORMAT
#: A training step meets as many addresses as it has buffers; past this, a loop over fresh ones would only grow this.
_MOST_MAPS = 256


class _Encoded(tuple[Any, ...]):
    """A map, its shape and strides: what stands for one descriptor in the C call."""

    __slots__ = ()


class Maps:
    """The tensor maps of one operand with one shape and strides, by address."""

    __slots__ = ("_by_address", "_meta", "_shape", "_spec", "_strides")

    def __init__(self, spec: TensorMap, tensor: torch.Tensor, meta: Any) -> None:
        """``meta``: what the compiler chose for this descriptor (swizzle, block); None where it uses no TMA."""
        self._spec, self._meta = spec, meta
        seen = tensor.mT if spec.transposed else tensor
        # An axis of stride 0 is one of one. No element is reached by the stride of such; the driver refuses some that
        # they have: here a multiple of 16 bytes that is no less than a row.
        row = -(-seen.shape[-1] // 16) * 16
        self._shape = [n if s else 1 for n, s in zip(seen.shape, seen.stride(), strict=True)]
        strides = [row if n == 1 else s for n, s in zip(self._shape, seen.stride(), strict=True)]
        self._strides = [*strides[:-1], 1]
        self._by_address: dict[int, Any] = {}

    def __call__(self, address: int) -> Any:
        """What the launcher takes for the operand at ``address``."""
        found = self._by_address.get(address)
        if found is None:
            if len(self._by_address) >= _MOST_MAPS:
                self._by_address.clear()
            found = self._by_address[address] = self._make(address)
        return found

    def _make(self, address: int) -> Any:
        base = SimpleNamespace(data_ptr=lambda: address, dtype=self._spec.element.torch)
        descriptor = SimpleNamespace(
            base=base,
            shape=self._shape,
            strides=self._strides,
            block_shape=list(self._spec.block),
            padding="zero",
            round_f32_to_tf32=False,
        )
        return _Encoded(driver.make_tensordesc_arg(descriptor, self._meta)) if ENCODED else descriptor


def starting(
    run: Any, grid: int, compiled: Any, values: Sequence[Any], hooks: tuple[Any, Any, Any] = (None, None, None)
) -> Callable[[int], None]:
    """What launches on a stream with encoded maps among ``values``; ``hooks`` are (launch metadata, enter, exit)."""
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
