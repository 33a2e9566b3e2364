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

    def arguments(self) -> dict[str, Arg]:
        args = super().arguments()
        return {"unscaled": args["dx"], "unscaled_strides": args.get("dx_strides"), **args}

    def constants(self) -> dict[str, Any]:
        return {"IN_PLACE": self.desc.in_place}

    def us(self, target: Target) -> float:
        return LAUNCH_US + 2 * self.desc.operand("dx").nbytes / BYTES_PER_US

    def guarantee(self) -> Mapping[str, PrecisionGuarantee]:
        """One product."""
        return {"dx": self.rounded(2, batch=True, order=True)}

    def launches(self, target: Target) -> Sequence[Launch]:
        """One launch, of no more programs than are resident."""
        most = RESIDENT * max(target.sm_count, 1)
        return [replace(launch, grid=min(launch.grid, most)) for launch in super().launches(target)]


class ScaleElements(ScaleEntry):
    name = "elements"

    def find_tile(self) -> Tile:
        return Tile(1, BLOCK, 16)

    def supports(self, target: Target) -> Support:
        for o in self.desc.operands():
            if not o.layout.packed and o.numel > 1:
                return Support.no(f"{o.name} is not promised packed")
        return SUPPORTED

    def idle(self) -> bool:
        return self.desc.operand("dx").numel == 0

    def arguments(self) -> dict[str, Arg]:
        n = self.desc.operand("dx").numel
        args: dict[str, Arg] = {o.name: values(o) for o in self.desc.operands()}
        return {"unscaled": args["dx"], **args, "numel": Int(n, n >= I32_LIMIT, 16 if n % 16 == 0 else 1)}

    def main(self) -> list[Launch]:
        return [self.launch(kernels.scale_gradient_kernel, -(-self.desc.operand("dx").numel // BLOCK))]


ScaleElements.register("scale_gradient")
