"""``split`` of cross_entropy: each block of a row has its own program, for few and long rows.

Without a gradient, the second launch has one program a row, which writes its loss.
"""

from __future__ import annotations

from triplan.backends.triton.common.rows_entries import SplitRows
from triplan.backends.triton.common.tiles import Tile
from triplan.backends.triton.losses import split_kernels as kernels
from triplan.backends.triton.losses.shared import CrossEntropyEntry
from triplan.descriptors import CrossEntropyDescriptor


class CrossEntropySplit(SplitRows, CrossEntropyEntry, ops=CrossEntropyDescriptor.ops()):
    pairs = ((kernels.cross_entropy_partial_kernel, kernels.cross_entropy_finish_kernel),)

    def finish(self) -> tuple[Tile, int]:
        return super().finish() if self.desc.gradient else (Tile(1, self.tile.block, 4), 1)

    def partials(self) -> tuple[str, ...]:
        """Maxima; sums of exponentials relative to them; with label smoothing, sums of weighted logits."""
        return ("tops", "totals", "plains") if self.smoothing else ("tops", "totals")

    def arrays(self) -> dict[str, int]:
        return super().arrays() | {"mines": self.rows.count}  # logits of the targets, one a row
