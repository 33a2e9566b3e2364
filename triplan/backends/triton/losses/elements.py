"""``elements`` of scale_gradient: packed operands are scaled block by block, by as many programs as are resident."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from triplan.backends.runtime.launch import Arg, Int, Launch
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.offsets import I32_LIMIT, values
from triplan.backends.triton.common.rows import Tile
from triplan.backends.triton.common.rows_entries import Entry
from triplan.backends.triton.losses import elements_kernels as kernels
from triplan.backends.triton.losses.shared import rounded
from triplan.descriptors import ScaleGradientDescriptor
from triplan.sku import SUPPORTED, PrecisionGuarantee, Support, Target

#: Elements that a program scales at a time. Untuned.
BLOCK = 8192
#: Programs on a multiprocessor: each loops, so that little is launched where dloss is 1 and nothing is to be done.
RESIDENT = 4


class ScaleEntry(Entry[ScaleGradientDescriptor]):
    """dx = dloss * unscaled; with ``in_place``, dx *= dloss."""

    elementwise = True
    in_order = False

    def arguments(self, desc: ScaleGradientDescriptor, rows: int) -> dict[str, Arg]:
        args = super().arguments(desc, rows)
        return {"unscaled": args["dx"], "unscaled_strides": args.get("dx_strides"), **args}

    def constants(self, desc: ScaleGradientDescriptor) -> dict[str, Any]:
        return {"IN_PLACE": desc.in_place}

    def us(self, desc: ScaleGradientDescriptor, tile: Tile, target: Target) -> float:
        return LAUNCH_US + 2 * desc.operand("dx").nbytes / BYTES_PER_US

    def guarantee(self, desc: ScaleGradientDescriptor) -> Mapping[str, PrecisionGuarantee]:
        """One product."""
        return {"dx": rounded(desc, 2, 0, batch=True, order=True)}

    def launches(self, desc: ScaleGradientDescriptor, target: Target) -> Sequence[Launch]:
        """One launch, of no more programs than are resident."""
        most = RESIDENT * max(target.sm_count, 1)
        return [replace(launch, grid=min(launch.grid, most)) for launch in super().launches(desc, target)]


class ScaleElements(ScaleEntry):
    name = "elements"

    def tile(self, desc: ScaleGradientDescriptor) -> Tile:
        return Tile(1, BLOCK, 16)

    def supports(self, desc: ScaleGradientDescriptor, target: Target) -> Support:
        for o in desc.operands():
            if not o.layout.packed and o.numel > 1:
                return Support.no(f"{o.name} is not promised packed")
        return SUPPORTED

    def idle(self, desc: ScaleGradientDescriptor) -> bool:
        return desc.operand("dx").numel == 0

    def arguments(self, desc: ScaleGradientDescriptor, rows: int) -> dict[str, Arg]:
        return {"unscaled": values(desc.operand("dx")), **{o.name: values(o) for o in desc.operands()}}

    def main(self, desc: ScaleGradientDescriptor, tile: Tile) -> list[Launch]:
        n = desc.operand("dx").numel
        args = {"numel": Int(n, n >= I32_LIMIT, 16 if n % 16 == 0 else 1)}
        return [self.launch(desc, kernels.scale_gradient_kernel, -(-n // BLOCK), tile, args)]


ScaleElements().register("scale_gradient")
