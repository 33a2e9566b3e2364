"""``rows`` of the losses.

* cross_entropy: a program holds whole rows in registers.
* nll_loss: a program reads the target's element of many rows.
* scale_gradient: programs scale blocks of rows that are not promised packed.
"""

from __future__ import annotations

from collections.abc import Mapping

from triplan.backends.runtime.launch import Arg, Int, Launch
from triplan.backends.table import kernel
from triplan.backends.triton.common.card import BYTES_PER_US
from triplan.backends.triton.common.offsets import TL, ceil_power, values
from triplan.backends.triton.common.rows import Rows, Tile, registers_for
from triplan.backends.triton.common.rows_entries import (
    FLOATS,
    MOST_PROGRAMS,
    Entry,
    WholeRows,
    launch_of,
    layout,
)
from triplan.backends.triton.losses import elements
from triplan.backends.triton.losses import rows_kernels as kernels
from triplan.backends.triton.losses.shared import LOSSES, elementwise_numerics, smoothing
from triplan.descriptors import CrossEntropyDescriptor, NllLossDescriptor, ScaleGradientDescriptor
from triplan.sku import SUPPORTED, ElementKind, Support, Target, interpreting
from triplan.sku.facts import fact

#: Elements of a row at most, in registers as the compute element.
MOST = 8192
#: Elements of a row at most where threads hold 16-bit elements as they are read, and so many each.
MOST_NARROW = 32768
NARROW_EACH = 128


class CrossEntropyRows(WholeRows[CrossEntropyDescriptor]):
    family = LOSSES

    def tile(self, desc: CrossEntropyDescriptor) -> Tile | None:
        r, block = LOSSES.rows(desc), ceil_power(LOSSES.rows(desc).n)
        if self.holds_narrow(desc, block) and r.vectors:
            return Tile(1, block, block // (32 * NARROW_EACH))
        return r.whole_tile(desc.element, MOST // (4 if desc.element is ElementKind.F64 else 1))

    def holds_narrow(self, desc: CrossEntropyDescriptor, block: int) -> bool:
        """Whether threads hold elements as they are read: a gradient would otherwise read them again. (Smoothing would
        need as many registers again for weights.)"""
        fits = MOST < block <= MOST_NARROW and desc.element.itemsize == 2
        return fits and desc.gradient and smoothing(desc) == 0

    def main(self, desc: CrossEntropyDescriptor, tile: Tile) -> list[Launch]:
        narrow = self.holds_narrow(desc, tile.block) and not interpreting()
        registers = min(registers_for(tile, 2), 128) if narrow else 0
        which, grid = kernels.cross_entropy_rows_kernel, self.programs(desc, tile)
        return [self.launch(desc, which, grid, tile, max_registers=registers, NARROW=narrow)]


class NllLossRows(Entry[NllLossDescriptor]):
    name = "rows"
    family = LOSSES

    def tile(self, desc: NllLossDescriptor) -> Tile:
        return Tile(128, 1, 4)

    def numerics(self, desc: NllLossDescriptor) -> str:
        return elementwise_numerics(desc)

    def us(self, desc: NllLossDescriptor, tile: Tile, target: Target) -> float:
        return LOSSES.rows(desc).count * 64 / BYTES_PER_US  # sectors of a target and of an element

    def main(self, desc: NllLossDescriptor, tile: Tile) -> list[Launch]:
        return [self.launch(desc, kernels.nll_loss_kernel, self.programs(desc, tile), tile)]


ROWS = CrossEntropyRows()
ROWS.register("cross_entropy")
NllLossRows().register("nll_loss")


# --- scale_gradient ---


@fact
def blocks_of(desc: ScaleGradientDescriptor) -> tuple[Rows, Tile, int]:
    """The rows along the last axis, the block that is scaled at a time, and the number of blocks."""
    r = Rows([o for o in desc.operands() if o.name != "dloss"], len(desc.input_shape) - 1)
    tile = r.whole_tile(desc.element, elements.BLOCK) or r.block_tile(desc.element)
    return r, tile, r.programs(tile.rows) * -(-r.n // tile.block)


def supports(desc: ScaleGradientDescriptor, target: Target) -> Support:
    if not desc.input_shape:
        return Support.no("a scalar has no rows")
    if blocks_of(desc)[2] > MOST_PROGRAMS:
        return Support.no(f"{blocks_of(desc)[2]} blocks of rows; at most {MOST_PROGRAMS} are counted")
    return SUPPORTED


def rank(desc: ScaleGradientDescriptor, target: Target) -> float:
    return 1.2 * elements.rank(desc, target)  # addresses are computed, and loads may be narrow


@kernel(
    op="scale_gradient",
    name="rows",
    elements=FLOATS,
    guarantee=elements.guarantee,
    supports=supports,
    rank=rank,
    numerics=elementwise_numerics,
    layout=layout,
)
def scale_launches(desc: ScaleGradientDescriptor, target: Target) -> list[Launch]:
    r, tile, count = blocks_of(desc)
    if r.count * r.n == 0:
        return []
    args: dict[str, Arg] = {**r.arguments(tile.rows), "tiles": Int(count)}
    for o in desc.operands():
        args[o.name] = values(o)
        if o.name != "dloss":
            args[f"{o.name}_strides"] = r.strides(o)
    for name in ("unscaled", "unscaled_strides"):
        args.setdefault(name, args[name.replace("unscaled", "dx")])
    constants: Mapping[str, object] = {
        "IN_PLACE": desc.in_place,
        "COMPUTE": TL[desc.element.compute],
        "ROWS": tile.rows,
        "BLOCK": tile.block,
    }
    grid = min(count, elements.programs(target))
    return [launch_of(kernels.scale_gradient_rows_kernel, grid, args, constants, tile.warps)]
