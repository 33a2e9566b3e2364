"""What all norm kernels share: arguments, traffic, guarantees, and the gradients of weight and bias.

Those gradients are sums over rows. Programs write partial sums into the workspace, and a last launch folds them in one
fixed order, without atomics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from triplan.backends.runtime.launch import Arg, Float, Int, Launch
from triplan.backends.triton.common import bounds
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.offsets import I32_LIMIT, ceil_power, padded_bytes, values
from triplan.backends.triton.common.rows import Tile
from triplan.backends.triton.common.rows_entries import (
    Family,
    Traffic,
    launch_of,
    packed_beside_rows,
    placed,
)
from triplan.backends.triton.norms import parameters_kernels as kernels
from triplan.descriptors.norms import NormDescriptor, ScaledNormDescriptor
from triplan.sku import PrecisionGuarantee, Support, interpreting

FORWARD = ("rms_norm", "layer_norm", "l2_norm")
OPS = (*FORWARD, *(f"{op}_backward" for op in FORWARD))

#: Partial sums of a gradient at most: the multiprocessors of an H200. The same for all targets, as tolerances depend
#: on it.
MOST_PARTIALS = 132
#: Groups of rows at most that are accumulated in one partial sum, which then needs no fold. Untuned.
FEW_GROUPS = 4
#: Blocks of columns from which on one program for each keeps a card busy. Untuned.
ENOUGH_BLOCKS = 128
#: Columns of a block at most in which 16-bit elements accumulate exactly in f32, and in which their number times the 14
#: leading bits of their mean is exact.
SHORT = 1024
#: Partial sums that a program of the fold holds for each of its columns: the next power of two of MOST_PARTIALS.
FOLD_PARTIALS = ceil_power(MOST_PARTIALS)
#: As many where there are no more than these: the program then has more columns.
FOLD_FEW_PARTIALS = 16
#: Columns of a program of the fold that holds FOLD_PARTIALS. Untuned.
FOLD_COLUMNS = 16
FOLD_WARPS = 8

#: The kernels' arguments for partial sums, by the gradient that they become.
PARTIALS = {"dweight": "dweights", "dbias": "dbiases"}


def is_centred(desc: NormDescriptor) -> bool:
    return desc.op.startswith("layer_norm")


def operands_read_twice(desc: NormDescriptor) -> int:
    """Operands of whole rows that both the statistics and the results need."""
    return sum(o.shape == desc.input_shape and not o.is_written and o.name != "dsummed" for o in desc.operands())


def gradients(desc: NormDescriptor) -> list[str]:
    """The gradients of weight and bias that are computed."""
    return [o.name for o in desc.operands() if o.name in PARTIALS]


def mean_is_one_sum(desc: NormDescriptor, tile: Tile) -> bool:
    """Whether the mean of a row that ``tile`` holds whole comes from one sum, which is all but exact."""
    residual = isinstance(desc, ScaledNormDescriptor) and desc.residual
    narrow = is_centred(desc) and desc.element.itemsize == 2 and not residual
    return narrow and NORMS.rows(desc).n <= tile.block <= SHORT


def strip_tile(desc: NormDescriptor) -> Tile:
    """What a program of ``norm_parameters_kernel`` reads at a time: a few rows of the columns its threads load."""
    r = NORMS.rows(desc)
    vector = 16 // desc.element.itemsize if r.unit else 1
    block = min(ceil_power(r.n), 256 * vector)
    return Tile(4, block, max(block // (32 * vector), 1))


class NormFamily(Family[NormDescriptor]):
    version = 2

    def axis(self, desc: NormDescriptor) -> int:
        return len(desc.input_shape) - 1

    def supports(self, desc: NormDescriptor) -> Support:
        return packed_beside_rows(desc)

    def arguments(self, desc: NormDescriptor, rows: int) -> dict[str, Arg]:
        args = super().arguments(desc, rows)
        if "norm" in args:
            args["rstd"] = args["norm"]
        count = self.rows(desc).count
        args["rows"] = Int(count, count >= I32_LIMIT)
        args["eps"] = Float(getattr(desc, "eps", 0.0), desc.element.compute)  # rstd has it already, of those without
        return args

    def constants(self, desc: NormDescriptor) -> dict[str, Any]:
        return {
            "CENTRED": is_centred(desc),
            "LENGTH": desc.op.startswith("l2_norm"),
            "OFFSET": desc.weight_offset if isinstance(desc, ScaledNormDescriptor) else 0,
        }

    def traffic(self, desc: NormDescriptor) -> Traffic:
        row = self.rows(desc).n * desc.element.itemsize
        first = operands_read_twice(desc) * row
        return Traffic(first, sum(o.shape == desc.input_shape for o in desc.operands()) * row - first, first)

    # --- gradients of weight and bias ---

    def partials(self, desc: NormDescriptor, shared: Tile) -> tuple[int, int]:
        """Partial sums of a gradient, and the groups of ``shared.rows`` rows that are accumulated in each.

        There is one where rows are few, and so long that a program for each block of columns keeps a card busy.
        """
        r = self.rows(desc)
        groups = -(-r.count // shared.rows)
        most = 1 if groups <= FEW_GROUPS and -(-r.n // shared.block) >= ENOUGH_BLOCKS else MOST_PARTIALS
        each = max(-(-groups // most), 1)
        return -(-groups // each), each

    def arrays(self, desc: NormDescriptor, shared: Tile) -> dict[str, int]:
        """A lone partial sum is the gradient itself. (No rows have one all the same: no kernel reads it, but one is
        given its address.)"""
        count = self.partials(desc, shared)[0]
        if count == 1:
            return {}
        size = padded_bytes(max(count, 1) * self.rows(desc).n * desc.element.compute.itemsize)
        return {PARTIALS[name]: size for name in gradients(desc)}

    def lone_partials(self, desc: NormDescriptor, shared: Tile) -> dict[str, Arg]:
        """The gradients as arguments of the kernels that write partial sums, where there is one of each."""
        if self.partials(desc, shared)[0] != 1:
            return {}
        return {PARTIALS[name]: values(desc.operand(name)) for name in gradients(desc)}

    def after(self, desc: NormDescriptor, shared: Tile) -> list[Launch]:
        """The fold of partial sums."""
        n, arrays = self.rows(desc).n, self.arrays(desc, shared)
        if n == 0 or not arrays:
            return []
        count = self.partials(desc, shared)[0]
        held = FOLD_FEW_PARTIALS if count <= FOLD_FEW_PARTIALS else FOLD_PARTIALS
        # (The interpreter runs one program after another: there, fewer and larger ones.)
        columns = FOLD_PARTIALS * (1024 if interpreting() else FOLD_COLUMNS) // held
        columns = min(columns, max(ceil_power(n), FOLD_COLUMNS))
        blocks = -(-n // columns)
        args = {**self.arguments(desc, 1), **placed(arrays, desc.element.compute)}
        args |= {"n": Int(n, n >= 2**31), "lines": Int(count), "blocks": Int(blocks)}
        constants = {"ROWS": held, "BLOCK": columns}
        return [launch_of(kernels.norm_fold_kernel, len(arrays) * blocks, args, constants, FOLD_WARPS)]

    def around_us(self, desc: NormDescriptor, shared: Tile) -> float:
        nbytes = sum(self.arrays(desc, shared).values())
        return LAUNCH_US + 2 * nbytes / BYTES_PER_US if nbytes else 0.0

    # --- guarantees ---

    def guarantee(self, desc: NormDescriptor, tile: Tile, shared: Tile) -> Mapping[str, PrecisionGuarantee]:
        """Roundings by output; all sums of squares are of positive terms.

        *Results.* rms_norm and l2_norm have errors relative to the result. The centred results of layer_norm have
        errors of the size of a standard deviation, once for each of two means, and those of the backward ops errors of
        the size of their terms. The bounds hold for layer_norm while the mean is less than 2**18 standard deviations
        off zero, beyond which f32 cannot hold the values themselves (with a residual, a hundred: the sum is rounded
        first); and for l2_norm while eps**2 is above the n smallest normal numbers of the compute element, as smaller
        squares vanish.

        *layer_norm in a loop* takes deviations d from the mean of the first block. sum(d**2) is at most 4 * n * s**2, s
        the standard deviation, or the row is read again. That sum and sum(d)**2 / n, the lesser of the two, are within
        depth + 3 and 2 * depth + 5 roundings, so n * s**2 within 12 * depth + 32, and its root within half of that.

        *The mean from one sum* of 16-bit elements is exact unless the largest is more than twice another: s is then at
        least a share 1 / (2 * sqrt(2 * n)) of it, and the sum within depth roundings of it. The squares are of
        deviations from the 14 leading bits of the mean, which is at most 8 * s off.
        """
        r, compute = self.rows(desc), desc.element.compute
        depth = math.floor(tile.additions(r.n))
        found = {}
        for o in desc.operands():
            if o.name in PARTIALS:
                # First the groups of a program; then its rows, by threads and between them; then the partial sums.
                _, groups = self.partials(desc, shared)
                rows = shared.rows * shared.block // (32 * shared.warps) + 12
                folded = FOLD_PARTIALS * FOLD_COLUMNS // (32 * FOLD_WARPS) + 12
                roundings = groups + rows + folded + 4
                found[o.name] = bounds.rounded(
                    desc.element, compute, relative=roundings, per_term=roundings, flushes=roundings
                )
            elif o.is_written:
                centred = 6 * depth + 16 if is_centred(desc) else 0
                if mean_is_one_sum(desc, tile):
                    centred = max(centred, math.ceil(2 * depth * math.sqrt(2 * r.n)))
                roundings = (3 if is_centred(desc) else 2) * (depth + 12) + centred
                relative = o.name in ("rstd", "norm", "summed") or desc.op in ("rms_norm", "l2_norm")
                found[o.name] = bounds.rounded(
                    o.element,
                    compute,
                    relative=roundings,
                    per_term=0 if relative else roundings,
                    flushes=roundings,
                    # The root of n squares lacks those that vanish.
                    lost=math.sqrt(r.n * bounds.smallest_normal(compute)) if o.name == "norm" else 0.0,
                    batch=r.invariant,
                )
        return found


NORMS = NormFamily()
