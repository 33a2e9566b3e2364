"""``split`` of scans: each block of a row has its own program, for few and long rows.

Three launches: totals of the blocks, their scan, and the scan of each block from the total of all before it. Blocks
depend on a row's length alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from triplan.backends.runtime.launch import Int, Launch
from triplan.backends.triton.common.card import LAUNCH_US
from triplan.backends.triton.common.offsets import I32_LIMIT, ceil_power
from triplan.backends.triton.common.rows import Tile, again_us, warps_for, waves_us
from triplan.backends.triton.common.rows_entries import SplitRows
from triplan.backends.triton.scans import split_kernels as kernels
from triplan.backends.triton.scans.looped_kernels import scan_looped_kernel
from triplan.backends.triton.scans.shared import MOST, SCANS, ScanEntry
from triplan.sku import SUPPORTED, Support, Target

#: Blocks of a row from which on it is divided whatever the number of rows, where batch invariance is required, as the
#: choice must not depend on that number; shorter ones are walked along. Untuned.
FEWEST_BLOCKS = 4


class ScanSplit(SplitRows, ScanEntry):
    ops = SCANS
    priority = 1

    def find_tile(self) -> Tile:
        block = min(self.rows.block_tile(alone=True).block, self.most())
        return Tile(1, block, warps_for(block, self.element.itemsize))

    def invariant(self) -> bool:
        return super().invariant() and self.blocks() >= FEWEST_BLOCKS

    def partials(self) -> Sequence[str]:
        return ("totals",)

    def supports(self, target: Target) -> Support:
        programs = self.rows.count * self.blocks()
        return (
            SUPPORTED if programs < 2**31 else Support.no(f"needs {programs} programs; a grid holds fewer than 2**31")
        )

    def totals_tile(self) -> Tile:
        """What a program scans of a row's totals at a time."""
        block = min(ceil_power(self.blocks()), MOST * 4 // self.compute.itemsize)
        return Tile(1, block, warps_for(block, self.compute.itemsize))

    def depth(self) -> int:
        """A term is added within its block, within the scan of totals, and as part of what a block starts from."""
        within = self.totals_tile().block
        return 2 * self.tile.block + within + -(-self.blocks() // within)

    def us(self, target: Target) -> float:
        count, row = self.rows.count, self.rows.sectors() * self.rows.n * self.element.itemsize
        read, written = (waves_us(count * self.blocks(), k * row / self.blocks(), target) for k in (1, 1))
        return read + written + again_us(count * row) + LAUNCH_US

    def main(self) -> list[Launch]:
        blocks, programs = self.blocks(), self.rows.count * self.blocks()
        totals, wide = self.given["totals"], programs >= I32_LIMIT
        strides = (None, Int(blocks, wide), None)
        rows = {"x": totals, "out": totals, "x_strides": strides, "out_strides": strides, "sizes": None}
        rows |= {"lanes": Int(self.rows.count), "n": Int(blocks), "blocks": Int(self.rows.count)}
        return [
            self.launch(kernels.scan_totals_kernel, programs),
            self.launch(scan_looped_kernel, self.rows.count, self.totals_tile(), rows),
            self.launch(kernels.scan_finish_kernel, programs),
        ]


ScanSplit.register()
