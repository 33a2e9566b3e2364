"""``split`` of softmax: each block of a row has its own program, for few and long rows.

Where programs write blocks of several rows of which each has many, a launch of its own merges the partial results.
"""

from __future__ import annotations

from triplan.backends.runtime.launch import Int, Launch
from triplan.backends.triton.common.card import LAUNCH_US
from triplan.backends.triton.common.offsets import ceil_power
from triplan.backends.triton.common.rows_entries import MOST_MERGED, TurnedSplit
from triplan.backends.triton.common.tiles import Tile, registers_for, warps_for
from triplan.backends.triton.softmax import split_kernels as kernels
from triplan.backends.triton.softmax.shared import OPS, SoftmaxEntry
from triplan.sku import Target

#: Elements of tiles of several rows that a multiprocessor has in a microsecond in both launches: forward, backward, and
#: backward of more than 16 bits. (From drawn problems on an H200.)
TURNED_PER_US = (2300.0, 1900.0, 1450.0)
#: The same, forward, of 16 bits, where the axis is contiguous in one operand and not in the other.
CROSSED_PER_US = 3600.0
#: The kernels that merge the partial results of a row, forward and backward.
MERGED = (kernels.softmax_merge_kernel, kernels.softmax_backward_merge_kernel)


class SoftmaxSplit(TurnedSplit, SoftmaxEntry, ops=OPS):
    priority, version, merges = 1, 3, True
    pairs = (
        (kernels.softmax_partial_kernel, kernels.softmax_finish_kernel),
        (kernels.softmax_backward_partial_kernel, kernels.softmax_backward_finish_kernel),
    )

    def merges_apart(self) -> bool:
        return self.tiles[1].rows > 1 and self.tiles[1].rows * ceil_power(self.blocks()) > MOST_MERGED

    def arrays(self) -> dict[str, int]:
        """Those of the blocks, and if they are merged apart those of the rows."""
        found = super().arrays()
        if self.merges_apart():
            size = 0 if self.idle() else self.rows.count
            found |= {f"row_{name}": size for name in self.partials()}
        return found

    def main(self) -> list[Launch]:
        if not self.merges_apart():
            return super().main()
        (tile, pieces), which, blocks = self.finish(), MERGED[self.backward], ceil_power(self.blocks())
        merge = self.launch(which, self.rows.count, Tile(1, blocks, warps_for(blocks, self.compute.itemsize)))
        args = {name: self.given[f"row_{name}"] for name in self.partials()} | {"blocks": Int(1)}
        finish, most = self.pairs[self.backward][1], registers_for(tile, 1)
        return [self.reduce(), merge, self.launch(finish, self.rows.programs(tile, pieces), tile, args, most, BLOCKS=1)]

    def us(self, target: Target) -> float:
        us, (tile, pieces) = super().us(target), self.finish()
        us += LAUNCH_US if self.merges_apart() else 0.0
        if tile.rows == 1:
            return us
        wide = self.element.itemsize > 2
        per_us = TURNED_PER_US[self.backward + (self.backward and wide)]
        if self.rows.crossed and not self.backward and not wide:
            per_us = CROSSED_PER_US
        busy = self.tiles_us(tile, self.rows.programs(tile, pieces), per_us, target, 0.5)
        return max(us, (3 if self.merges_apart() else 2) * LAUNCH_US + busy)

    def partials(self) -> tuple[str, ...]:
        """Maxima and sums of exponentials relative to them; backward, sums."""
        return ("totals",) if self.backward else ("tops", "totals")
