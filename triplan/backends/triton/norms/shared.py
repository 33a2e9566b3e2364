"""What all norm kernels share: arguments, traffic, guarantees, and the gradients of weight and bias.

Those gradients are sums over rows. Programs write partial sums into the workspace, and a last launch folds them in one
fixed order, without atomics.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

from triplan.backends.runtime.launch import Arg, Float, Int, Launch
from triplan.backends.triton.common import bounds, card
from triplan.backends.triton.common.offsets import I32_LIMIT, ceil_power
from triplan.backends.triton.common.rows_entries import Entry
from triplan.backends.triton.common.tiles import Tile
from triplan.backends.triton.norms.parameters_kernels import norm_fold_kernel, norm_parameters_kernel
from triplan.descriptors import Operand
from triplan.descriptors.norms import NormDescriptor
from triplan.sku import PrecisionGuarantee, Target, interpreting

OPS = ("rms_norm", "layer_norm", "l2_norm", "rms_norm_backward", "layer_norm_backward", "l2_norm_backward")
#: The kernels' arguments for partial sums, by the gradient that they become.
PARTIALS = {"dweight": "dweights", "dbias": "dbiases"}
#: Partial sums of a gradient at most: an H200's multiprocessors. One number for all targets: tolerances depend on it.
MOST_PARTIALS = 132
#: Groups of rows at most that are accumulated in one partial sum, which then needs no fold; and blocks of columns from
#: which on one program for each keeps a card busy. With fewer blocks, all groups but one may take as many microseconds
#: as the fold. Untuned.
FEW_GROUPS = 4
ENOUGH_BLOCKS = 128
FOLD_US = 3.0
#: Microseconds of a group of rows in ``norm_parameters_kernel``, which waits for memory: for as many sectors as rows
#: have. (From drawn problems on an H200.)
GROUP_US = 0.6
#: How much longer tiles of several rows take that are centred. (From drawn problems on an H200, as the next one.)
CENTRED = 1.6
#: Bytes that an access of a single element costs as much as, beside its own.
WIDE = 2
#: Microseconds of a program of one row that is alone. (From drawn problems on an H200.)
LONE_US = 1.2
#: Columns of a block at most in which 16-bit elements accumulate exactly in f32, and in which their number times the 14
#: leading bits of their mean is exact.
SHORT = 1024
#: What a program of the fold holds: all partial sums that there may be of some columns. Untuned. And as few as these,
#: of more columns.
FOLD, FOLD_FEW_PARTIALS = Tile(ceil_power(MOST_PARTIALS), 16, 8), 16


class NormEntry(Entry):
    desc: NormDescriptor
    late = ("dsummed",)
    two_sums = CENTRED
    program_us = 2.5  # fitted to drawn problems of ``bench anywhere`` on an H100, as the other costs of this family
    #: ``version`` forward and backward; with gradients of weight or bias at least 4.
    versions: ClassVar[tuple[int, int]] = (2, 2)

    def __init__(self, desc: NormDescriptor) -> None:
        self.centred, self.residual = desc.op.startswith("layer_norm"), getattr(desc, "residual", False)
        #: The gradients of weight and bias that are computed.
        self.gradients = [o.name for o in desc.operands() if o.name in PARTIALS]
        super().__init__(desc)
        #: Whether the mean of a row that the tile holds whole comes from one sum, which is all but exact.
        narrow = self.element.itemsize == 2 and not self.residual
        self.mean_is_one_sum = self.centred and narrow and self.rows.n <= self.tile.block <= SHORT
        #: What accumulates the gradients reads this tile at a time, of so many blocks of columns.
        self.shared = self.partials_tile()
        self.column_blocks = -(-self.rows.n // self.shared.block)
        self.sums, self.each = self.partial_sums()
        #: The gradients whose partial sums are folded.
        self.folded = self.gradients if self.sums != 1 else []
        self.version = max(self.versions[self.backward], 4 if self.gradients else 0)

    def arguments(self) -> dict[str, Arg]:
        """(A lone partial sum is the gradient itself.)"""
        args, count = super().arguments(), self.rows.count
        args |= {"rstd": args.get("norm", args.get("rstd")), "each": Int(self.each)}
        args |= {PARTIALS[name]: args[name] for name in self.gradients if not self.folded}
        eps = getattr(self.desc, "eps", 0.0)  # gradients of rms_norm and layer_norm find it in rstd
        return args | {"rows": Int(count, count >= I32_LIMIT), "eps": Float(eps, self.compute)}

    def constants(self) -> dict[str, Any]:
        offset = getattr(self.desc, "weight_offset", 0)
        return {"CENTRED": self.centred, "LENGTH": self.desc.op.startswith("l2_norm"), "OFFSET": offset}

    def numerics(self) -> str | None:
        found, branch = super().numerics(), getattr(self.desc, "branch_element", None)
        return found if found is None or branch is None else f"{found}.{branch}"

    # --- gradients of weight and bias ---

    def partials_tile(self) -> Tile:
        """``shared``: in ``norm_parameters_kernel`` a few rows of the columns that its threads load."""
        vector = 16 // self.element.itemsize if self.rows.unit else 1
        block = min(ceil_power(self.rows.n), 256 * vector)
        return Tile(4, block, max(block // (32 * vector), 1))

    def partial_sums(self) -> tuple[int, int]:
        """Partial sums of a gradient, and the groups of a tile's rows that are accumulated in each. Each has a program
        for each block of columns; without gradients, each group has.

        There is one where rows are few, and either so long that a program for each block of columns keeps a card busy,
        or so short that a program takes less time than the fold.
        """
        tile = self.shared
        groups = -(-self.rows.count // tile.rows)
        more_us = (groups - 1) * tile.rows * tile.block * len(self.moved) * self.element.itemsize / card.SM_BYTES_PER_US
        alone = self.column_blocks >= ENOUGH_BLOCKS or more_us <= FOLD_US
        most = 1 if groups <= FEW_GROUPS and alone else MOST_PARTIALS
        each = max(-(-groups // most), 1) if self.gradients else 1
        return -(-groups // each), each

    def accumulate(self, registers: int = 0) -> Launch:
        """The launch of ``norm_parameters_kernel``; ``registers``: a thread's at most.

        A product and the first addition between lanes in one instruction would round another product in each of two
        lanes that hold the same sum. Both write it, different in the last bit, to one address of shared memory, and
        which stays is not defined (racecheck).
        """
        args, programs = {"blocks": Int(self.column_blocks)}, self.sums * self.column_blocks
        return replace(self.launch(norm_parameters_kernel, programs, self.shared, args, registers), fuses=False)

    def accumulate_us(self, target: Target) -> float:
        sectors = self.rows.sectors(self.shared.rows, self.read_first)
        nbytes = self.each * self.shared.rows * self.traffic()[0] / max(self.column_blocks, 1)
        return max(self.reducing_us(self.sums * self.column_blocks, nbytes, target), GROUP_US * self.each * sectors)

    def arrays(self) -> dict[str, int]:
        """Partial sums. (No rows have one all the same: no kernel reads it, but one is given its address.)"""
        return {PARTIALS[name]: max(self.sums, 1) * self.rows.n for name in self.folded}

    def launches(self, target: Target) -> list[Launch]:
        """The rows' own work, and the fold of partial sums."""
        n, count = self.rows.n, self.sums
        if n == 0 or not self.folded:
            return super().launches(target)
        held = FOLD_FEW_PARTIALS if count <= FOLD_FEW_PARTIALS else FOLD.rows
        # (The interpreter runs one program after another: there, fewer and larger ones.)
        most = FOLD.rows * (1024 if interpreting() else FOLD.block) // held
        tile = Tile(held, min(most, max(ceil_power(n), FOLD.block)), FOLD.warps)
        blocks = -(-n // tile.block)
        args: dict[str, Arg] = {"n": Int(n, n >= 2**31), "lines": Int(count), "blocks": Int(blocks)}
        return [*super().launches(target), self.launch(norm_fold_kernel, len(self.folded) * blocks, tile, args)]

    def busy_us(self, programs: int, target: Target) -> float:
        """As of any entry; but forward, programs of one row of the last wave take at least as long as a lone one."""
        us = super().busy_us(programs, target)
        waves = programs * self.tile.warps / (card.SM_WARPS * target.sm_count)
        alone = waves > 1 and self.tile.rows == 1 and not self.backward
        return us + (LONE_US * (math.ceil(waves) - waves) if alone else 0.0)

    def tiles_us(self, tile: Tile, programs: int, per_us: float, target: Target, alone: float = 1.0) -> float:
        """As of any entry; forward, ``per_us`` is of two operands. Centred rows take longer: they have two sums."""
        us = super().tiles_us(tile, programs, per_us, target, alone) * (self.two_sums if self.centred else 1.0)
        return us if self.backward else us * len(self.moved) / 2

    def weighted(self) -> bool:
        """Whether there is a weight or a bias."""
        return any(o.name in ("weight", "bias") for o in self.desc.operands())

    def single_us(self, per_us: float, rows: float) -> float:
        """Microseconds where no vectors are loaded, of ``rows`` rows: ``per_us`` accesses of single elements of 16
        bits, or somewhat fewer wider ones, as instructions are the limit. What is read to reduce rows is read twice,
        weight and bias once for each row."""
        if self.rows.vectors:
            return 0.0
        shared = sum(o.name in ("weight", "bias") for o in self.desc.operands())
        accesses = rows * self.rows.n * (len(self.moved) + len(self.read_first) + shared)
        return accesses * (WIDE + self.element.itemsize) / (WIDE + 2) / per_us

    def rank(self, target: Target) -> float:
        nbytes = self.nbytes(*NormEntry.arrays(self).values())
        return super().rank(target) + (self.later_us() + 2 * nbytes / card.BYTES_PER_US if nbytes else 0.0)

    # --- guarantees ---

    def guaranteed(self, o: Operand) -> PrecisionGuarantee:
        """*Results.* Sums of squares are of positive terms, so rms_norm and l2_norm have errors relative to the result.
        The centred results of layer_norm have errors of the size of a standard deviation, once for each of two means,
        and those of the backward ops errors of the size of their terms. The bounds hold for layer_norm while the mean
        is less than 2**18 standard deviations off zero, beyond which f32 cannot hold the values themselves (with a
        residual, a hundred: the sum is rounded first); and for l2_norm while eps**2 is above the n smallest normal
        numbers of the compute element, as smaller squares vanish.

        *layer_norm in a loop* takes deviations d from the mean of the first block. sum(d**2) is at most 4 * n * s**2, s
        the standard deviation, or the row is read again. That sum and sum(d)**2 / n, the lesser of the two, are within
        depth + 3 and 2 * depth + 5 roundings, so n * s**2 within 12 * depth + 32, and its root within half of that.

        *The mean from one sum* of 16-bit elements is exact unless the largest is more than twice another: s is then at
        least a share 1 / (2 * sqrt(2 * n)) of it, and the sum within depth roundings of it. The squares are of
        deviations from the 14 leading bits of the mean, which are at most 8 * s off it.
        """
        if o.name in PARTIALS:
            # First the groups of a program; then its rows, by threads and between them; then the partial sums.
            accumulated = self.each + self.shared.additions(0) + FOLD.additions(0) + 4
            return bounds.rounded(o.element, self.compute, accumulated, accumulated, flushes=accumulated)
        n, depth = self.rows.n, self.tile.additions(self.rows.n)
        roundings = (3 if self.centred else 2) * (depth + 12)
        if self.centred:
            once = math.ceil(2 * depth * math.sqrt(2 * n)) if self.mean_is_one_sum else 0
            roundings += max(6 * depth + 16, once)
        relative = o.name in ("rstd", "norm", "summed") or self.desc.op in ("rms_norm", "l2_norm")
        # The root of n squares lacks those that vanish.
        lost = math.sqrt(n * bounds.smallest_normal(self.compute)) if o.name == "norm" else 0.0
        of_terms, batch = 0.0 if relative else roundings, self.rows.invariant
        return bounds.rounded(o.element, self.compute, roundings, of_terms, flushes=roundings, lost=lost, batch=batch)
