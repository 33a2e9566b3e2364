"""``elements`` of scale_gradient: packed operands are scaled block by block, by as many programs as are resident."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from triplan.backends.runtime.launch import Arg, Int, Launch
from triplan.backends.triton.common import bounds
from triplan.backends.triton.common.offsets import I32_LIMIT
from triplan.backends.triton.common.rows_entries import Entry
from triplan.backends.triton.common.tiles import Tile
from triplan.backends.triton.losses import elements_kernels as kernels
from triplan.descriptors import Operand, ScaleGradientDescriptor
from triplan.sku import SUPPORTED, PrecisionGuarantee, Support, Target

#: What a program holds; and below SMALL elements in all, so that every multiprocessor has work: on an H200 45 x 3881
#: bf16 take 4.7 us by the first. Untuned.
TILES, SMALL = (Tile(1, 8192, 16), Tile(1, 1024, 4)), 1 << 22
#: Programs of the first tile on a multiprocessor: each loops, so that little is launched where dloss is 1 and nothing
#: is to be done.
RESIDENT = 4


class ScaleElements(Entry, ops=ScaleGradientDescriptor.ops()):
    desc: ScaleGradientDescriptor
    name = "elements"
    which: Sequence[Any] = (kernels.scale_gradient_kernel,)
    elementwise = True

    def find_tile(self) -> Tile:
        return TILES[self.desc.operand("dx").numel < SMALL]

    def programs(self) -> int:
        return -(-self.desc.operand("dx").numel // self.tile.block)

    def arguments(self) -> dict[str, Arg]:
        args, n, tiles = super().arguments(), self.desc.operand("dx").numel, self.programs()
        numel = Int(n, n >= I32_LIMIT, 16 if n % 16 == 0 else 1)
        args |= {"numel": numel, "tiles": Int(tiles, tiles >= I32_LIMIT)}  # a loop over tiles counts beyond the last
        return {"unscaled": args["dx"], "unscaled_strides": args.get("dx_strides"), **args}  # those of ``in_place``

    def constants(self) -> dict[str, Any]:
        return {"IN_PLACE": self.desc.in_place}

    def supports(self, target: Target) -> Support:
        found = [o.name for o in self.desc.operands() if not o.layout.packed and o.numel > 1]
        return Support.no(f"{found[0]} is not promised packed") if found else SUPPORTED

    def guaranteed(self, o: Operand) -> PrecisionGuarantee:
        """One product."""
        return bounds.rounded(o.element, self.compute, 2, batch=True, order=True)

    def launches(self, target: Target) -> list[Launch]:
        """One launch, of no more programs than are resident."""
        most = RESIDENT * target.sm_count * TILES[0].warps // self.tile.warps
        return [replace(launch, grid=min(launch.grid, most)) for launch in super().launches(target)]
