"""What all loss kernels share: arguments, traffic, guarantees, and the sums over rows.

The rows' losses are reduced to one in two steps, without atomics: programs reduce chunks of rows, the last one merges
them in a fixed order. Where a gradient is divided by a mean's denominator, a launch of its own counts before the main
one.
"""

from __future__ import annotations

import math
from typing import Any

from triplan.backends.runtime.launch import Arg, Float, Int, Launch, Ptr
from triplan.backends.triton.common import bounds, card
from triplan.backends.triton.common.fill import fill_launch
from triplan.backends.triton.common.rows_entries import Entry, rows_of
from triplan.backends.triton.common.tiles import Tile, waves_us
from triplan.backends.triton.losses import shared_kernels as kernels
from triplan.descriptors import CrossEntropyDescriptor, Operand
from triplan.descriptors.fields import NO_BAD_INDEX
from triplan.descriptors.losses import LossDescriptor
from triplan.sku import ElementKind, PrecisionGuarantee, Target

#: Rows of a chunk, which one program reduces, at least; chunks at most: they are larger for more rows.
CHUNK = 8192
MOST_CHUNKS = 256
CHUNK_WARPS = 32
#: Rows that one program reduces with a thread for each, in fewer warps. Untuned.
FEW_ROWS = 128
#: Rows at most that every program of a kernel counts again, and bytes of targets that all programs read for that at
#: most: what the L2 cache gives in the time of a launch. Untuned.
RECOUNTED_ROWS = 512
RECOUNTED_BYTES = card.LAUNCH_US * card.L2_BYTES_PER_US
#: Bytes of the shortest vectors by which it pays to access an operand across rows: on an H200, in drawn problems, those
#: of 4 are slower than single elements, and those of 16 faster. Between: untuned.
LEAST_VECTOR = 8
#: Weights of classes that the one program that sums them reads at a time.
CLASS_BLOCK = 4096
CLASS_WARPS = 16


class LossEntry(Entry):
    desc: LossDescriptor
    index_elements = ("i32", "i64")
    along = True

    def __init__(self, desc: LossDescriptor) -> None:
        self.mean, self.smoothing = desc.reduction in ("mean", "byte_mean"), getattr(desc, "label_smoothing", 0.0)
        #: Whether the sum of the classes' weights is needed.
        self.weighs = self.smoothing != 0 and desc.weight
        #: Whether a gradient is written.
        self.differentiates = desc.op.endswith("_backward") or getattr(desc, "gradient", False)
        #: Whether one program whose threads have a row each reduces all rows.
        self.few = rows_of(desc).count <= min(CHUNK, 32 * CHUNK_WARPS)
        super().__init__(desc)
        self.version = 2 if desc.reduced else 1
        #: Rows of each chunk that is reduced, and the chunks.
        count = self.rows.count
        self.each = self.sum_tile().block if self.few else max(-(-count // (MOST_CHUNKS * CHUNK)), 1) * CHUNK
        self.parts = max(-(-count // self.each), 1)

    def arguments(self) -> dict[str, Arg]:
        args, desc = super().arguments(), self.desc
        if isinstance(desc, CrossEntropyDescriptor) and desc.in_place:
            args |= {"dx": args["x"], "dx_strides": args["x_strides"]}
        # What a row's loss is multiplied by, and what is counted of it in a mean.
        args |= {"share": args.get("bytes"), "counted": args.get("bytes", args.get("weight"))}
        parts = self.rows.count if self.recounts() else self.parts
        args |= {"parts": Int(parts), "each": Int(self.each), "rows": Int(self.rows.count, True)}
        return args | {"ignore": Int(desc.ignore_index, True), "smoothing": Float(self.smoothing, self.compute)}

    def constants(self) -> dict[str, Any]:
        return {
            "MEAN": self.mean,
            "EACH": not self.desc.reduced,
            "SMOOTH": self.smoothing != 0,
            "CLAMP": self.desc.out_of_bounds == "clamp",
            "GRAD": self.differentiates,
            "PARTS": RECOUNTED_ROWS if self.recounts() else 1 if self.parts == 1 else MOST_CHUNKS,
        }

    # --- sums over rows ---

    def reduces(self) -> bool:
        """Whether ``main`` reduces the rows' losses too."""
        return False

    def recounts(self) -> bool:
        """Whether each program of ``main`` counts a gradient's denominator by itself, which saves a launch."""
        count = self.rows.count
        few = count <= RECOUNTED_ROWS and self.programs() * count * 8 <= RECOUNTED_BYTES and self.parts == 1
        return few and count > 0 and self.mean and self.differentiates and self.counts_exactly()

    def counts_first(self) -> bool:
        """Whether a launch before ``main`` counts a gradient's denominator."""
        return self.mean and self.differentiates and self.rows.count > 0 and not self.recounts()

    def arrays(self) -> dict[str, int]:
        """Denominators and numerators of the chunks, and the sum of the classes' weights. The numerator of a lone chunk
        is not stored, nor is the denominator, unless it is counted first."""
        parts = self.parts
        counts = parts if self.counts_first() or (self.mean and parts > 1) else 0
        sums = parts if self.desc.reduced and not self.backward and parts > 1 else 0
        lengths = {"counts": counts, "sums": sums, "class_sum": int(self.weighs)}
        return {name: n for name, n in lengths.items() if n}

    def sum_tile(self) -> Tile:
        """What a program that reduces rows' losses holds: 32 bytes a thread, or of few rows one a thread."""
        if self.few:
            few = FEW_ROWS if self.rows.count <= FEW_ROWS else 32 * CHUNK_WARPS
            return Tile(1, few, few // 32)
        return Tile(1, CHUNK * 4 // self.compute.itemsize, CHUNK_WARPS)

    def launches(self, target: Target) -> list[Launch]:
        """Reset the status; reduce what gradients need of targets and weights alone; do the rows' own work; reduce the
        losses of all rows to one."""
        found, parts, tile = [], self.parts, self.sum_tile()
        if self.desc.out_of_bounds == "error":
            found.append(fill_launch(Ptr("status", ElementKind.I64, 8), 1, NO_BAD_INDEX))
        if self.counts_first():
            found.append(self.launch(kernels.loss_count_kernel, parts, tile))
        if self.weighs and self.rows.count:
            total = {"total": self.given["class_sum"]}
            found.append(self.launch(kernels.class_sum_kernel, 1, Tile(1, CLASS_BLOCK, CLASS_WARPS), total))
        found += super().launches(target)
        if self.desc.reduced and not self.backward and not self.reduces():
            given, count = {} if parts == 1 else {"loss": None}, self.mean and not self.counts_first()
            found.append(self.launch(kernels.loss_sum_kernel, parts, tile, given, COUNT=count))
            found += [self.launch(kernels.loss_finish_kernel, 1, Tile(1, 1, 4))] if parts > 1 else []
        return found

    def rank(self, target: Target) -> float:
        launches = 2 - self.reduces() + self.counts_first() + (self.smoothing != 0)
        return super().rank(target) + (card.LAUNCH_US * launches + self.rows.count * 16 / card.BYTES_PER_US)

    # --- guarantees ---

    def roundings_over_rows(self) -> int:
        """Roundings of a sum over all rows, and of its denominator."""
        per_thread = self.each // (32 * CHUNK_WARPS)
        return 2 * (per_thread + 16 + MOST_CHUNKS // 32) if self.desc.reduced else 0

    def roundings_over_classes(self) -> int:
        """Roundings of the sum of the classes' weights, where there is one."""
        return self.rows.n // CLASS_BLOCK + CLASS_BLOCK // 512 + 16 if self.weighs else 0

    def counts_exactly(self) -> bool:
        """Whether a gradient's denominator is the same in any order of rows: a number of them that f32 holds."""
        rows_only = self.desc.reduction == "mean" and not self.desc.weight and self.rows.count < 2**24
        return not self.mean or rows_only


class CrossEntropyEntry(LossEntry):
    desc: CrossEntropyDescriptor
    program_us = 1.5  # a program's last reduction, and waiting for its first loads. Untuned

    def is_turned(self) -> bool:
        """Where only the logits lie across rows, each warp would otherwise store single elements of the gradient, to
        many rows."""
        crossed = self.desc.gradient and super().is_turned()
        return crossed and self.rows.vector_bytes(self.desc.operand("dx")) >= LEAST_VECTOR

    def reducing_us(self, programs: int, nbytes: float, target: Target) -> float:
        """(No other program's traffic hides them.)"""
        return waves_us(programs, nbytes, target) + self.busy_us(programs, target)

    def guaranteed(self, o: Operand) -> PrecisionGuarantee:
        """The sum of n exponentials has the relative roundings of its additions and of each exponential: 2 ulp of
        ex2.approx (CUDA C Programming Guide), and three roundings of the argument -d, amplified by d. Weighted by
        exp(-d) the latter are at most 3 log n, as an entropy is. The logarithm makes them absolute, beside roundings of
        the size of the maximum and of the target's logit. Label smoothing sums terms of differences of two logits, with
        no more roundings, and the classes' weights. For the gradient, p has the sum's relative error, and its argument
        one of 3 d u, with p d < 1/2.
        """
        r, over_rows = self.rows, self.roundings_over_rows()
        total = self.tile.additions(r.n) + 3 * math.log(max(r.n, 2)) + 16
        of_terms = total + 4 + self.roundings_over_classes()
        if o.name == "loss":
            return bounds.rounded(o.element, self.compute, over_rows, of_terms + over_rows)
        if o.name in ("losses", "lse"):
            return bounds.rounded(o.element, self.compute, 4, of_terms, batch=r.invariant)
        relative = total + 16 + (0 if self.counts_exactly() else over_rows)
        batch = self.desc.reduction == "sum" and r.invariant
        return bounds.rounded(o.element, self.compute, relative, total + 24, batch=batch)
