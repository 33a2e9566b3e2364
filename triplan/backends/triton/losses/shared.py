"""What all loss kernels share: arguments, traffic, guarantees, and the sums over rows.

The rows' losses are reduced to one in two steps, without atomics: programs reduce chunks of rows, the last one merges
them in a fixed order. Where a gradient is divided by a mean's denominator, a launch of its own counts before the main
one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from triplan.backends.runtime.launch import Arg, Float, Int, Launch, Ptr
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.fill import fill_launch
from triplan.backends.triton.common.offsets import padded_bytes
from triplan.backends.triton.common.rows import Tile
from triplan.backends.triton.common.rows_entries import MOST_PROGRAMS, Entry, placed
from triplan.backends.triton.losses import shared_kernels as kernels
from triplan.descriptors import CrossEntropyDescriptor
from triplan.descriptors.fields import NO_BAD_INDEX
from triplan.descriptors.losses import LossDescriptor
from triplan.sku import ElementKind, PrecisionGuarantee, Support, Target

#: Rows of a chunk, which one program reduces, at least; chunks at most: they are larger for more rows.
CHUNK = 8192
MOST_CHUNKS = 256
CHUNK_WARPS = 32
#: Weights of classes that the one program that sums them reads at a time.
CLASS_BLOCK = 4096
CLASS_WARPS = 16

L = TypeVar("L", bound=LossDescriptor)


class LossEntry(Entry[L]):
    index_elements = ("i32", "i64")

    def __init__(self, desc: L) -> None:
        self.mean = desc.reduction in ("mean", "byte_mean")
        self.smooths = getattr(desc, "label_smoothing", 0.0) != 0  # nll_loss has none
        #: Whether the forward op writes the gradient as well.
        self.with_gradient = isinstance(desc, CrossEntropyDescriptor) and desc.gradient
        super().__init__(desc)

    def axis(self) -> int:
        return self.desc.class_axis

    def arguments(self) -> dict[str, Arg]:
        args, desc, (parts, each) = super().arguments(), self.desc, self.chunks()
        if isinstance(desc, CrossEntropyDescriptor) and desc.in_place:
            args |= {"dx": args["x"], "dx_strides": args["x_strides"]}
        # What a row's loss is multiplied by, and what is counted of it in a mean.
        args |= {"share": args.get("bytes"), "counted": args.get("bytes", args.get("weight"))}
        args |= {"parts": Int(parts), "each": Int(each), "rows": Int(self.rows.count, True)}
        smoothing = Float(getattr(desc, "label_smoothing", 0.0), self.compute)
        return args | {"ignore": Int(desc.ignore_index, True), "smoothing": smoothing}

    def constants(self) -> dict[str, Any]:
        return {
            "MEAN": self.mean,
            "EACH": not self.desc.reduced,
            "SMOOTH": self.smooths,
            "CLAMP": self.desc.out_of_bounds == "clamp",
            "GRAD": self.with_gradient,
            "PARTS": 1 if self.chunks()[0] == 1 else MOST_CHUNKS,
        }

    def supports(self, target: Target) -> Support:
        r = self.rows
        if self.desc.op.startswith("nll_loss") and r.count * -(-max(r.n, 1) // 64) > MOST_PROGRAMS:
            return Support.no(f"{r.count} rows of {r.n} elements need too many programs")
        return super().supports(target)

    # --- sums over rows ---

    def chunks(self) -> tuple[int, int]:
        """Chunks, and the rows of each."""
        each = max(-(-self.rows.count // (MOST_CHUNKS * CHUNK)), 1) * CHUNK
        return max(-(-self.rows.count // each), 1), each

    def arrays(self) -> dict[str, int]:
        """Denominators and numerators of the chunks, and the sum of the classes' weights."""
        found = {"counts": MOST_CHUNKS} if self.mean else {}
        found |= {"sums": MOST_CHUNKS} if self.desc.reduced and not self.backward else {}
        found |= {"class_sum": 1} if self.smooths and self.desc.weight else {}
        return {name: padded_bytes(length * self.compute.itemsize) for name, length in found.items()}

    def counts_first(self) -> bool:
        """Whether gradients are divided by a mean's denominator."""
        return self.mean and (self.backward or self.with_gradient) and self.rows.count > 0

    def chunk_tile(self) -> Tile:
        return Tile(1, CHUNK * 4 // self.compute.itemsize, CHUNK_WARPS)  # 32 bytes a thread

    def before(self) -> list[Launch]:
        """Reset the status; reduce what gradients need of targets and weights alone."""
        found, arrays = [], placed(self.arrays(), self.compute)
        if self.desc.out_of_bounds == "error":
            found.append(fill_launch(Ptr("status", ElementKind.I64, 8), 1, NO_BAD_INDEX))
        if self.counts_first():
            found.append(self.launch(kernels.loss_count_kernel, self.chunks()[0], self.chunk_tile()))
        if "class_sum" in arrays and self.rows.count:
            args, tile = {"total": arrays["class_sum"]}, Tile(1, CLASS_BLOCK, CLASS_WARPS)
            found.append(self.launch(kernels.class_sum_kernel, 1, tile, args))
        return found

    def after(self) -> list[Launch]:
        """Reduce the losses of all rows to one."""
        if not self.desc.reduced or self.backward:
            return []
        parts, tile, count = self.chunks()[0], self.chunk_tile(), self.mean and not self.counts_first()
        if parts == 1:
            return [self.launch(kernels.loss_sum_kernel, 1, tile, COUNT=count)]
        return [
            self.launch(kernels.loss_sum_kernel, parts, tile, {"loss": None}, COUNT=count),
            self.launch(kernels.loss_finish_kernel, 1, Tile(1, 1, 4)),
        ]

    def around_us(self) -> float:
        return LAUNCH_US * (2 + self.mean + self.smooths) + self.rows.count * 16 / BYTES_PER_US

    # --- guarantees ---

    def status(self) -> dict[str, PrecisionGuarantee]:
        """The lowest bad row is exact."""
        return {"status": PrecisionGuarantee.exact(ElementKind.I64)} if self.desc.out_of_bounds == "error" else {}

    def roundings_over_rows(self) -> int:
        """Roundings of a sum over all rows, and of its denominator."""
        per_thread = self.chunks()[1] // (32 * CHUNK_WARPS)
        return 2 * (per_thread + 16 + MOST_CHUNKS // 32) if self.desc.reduced else 0

    def roundings_over_classes(self) -> int:
        """Roundings of the sum of the classes' weights, where there is one."""
        needed = self.smooths and self.desc.weight
        return self.rows.n // CLASS_BLOCK + CLASS_BLOCK // 512 + 16 if needed else 0

    def counts_exactly(self) -> bool:
        """Whether a gradient's denominator is the same in any order of rows: a number of them that f32 holds."""
        rows_only = self.desc.reduction == "mean" and not self.desc.weight and self.rows.count < 2**24
        return not self.mean or rows_only


class CrossEntropyEntry(LossEntry[CrossEntropyDescriptor]):
    def guarantee(self) -> Mapping[str, PrecisionGuarantee]:
        """The sum of n exponentials has the relative roundings of its additions and of each exponential: 2 ulp of
        ex2.approx (CUDA C Programming Guide), and three roundings of the argument -d, amplified by d. Weighted by
        exp(-d) the latter are at most 3 log n, as an entropy is. The logarithm makes them absolute, beside roundings of
        the size of the maximum and of the target's logit. Label smoothing sums terms of differences of two logits, with
        no more roundings, and the classes' weights. For the gradient, p has the sum's relative error, and its argument
        one of 3 d u, with p d < 1/2.
        """
        r, desc, over_rows = self.rows, self.desc, self.roundings_over_rows()
        total = self.tile.additions(r.n) + 3 * math.log(max(r.n, 2)) + 16
        of_terms = total + 4 + self.roundings_over_classes()
        of_rows = self.rounded(4, of_terms, out=self.compute, batch=r.invariant)
        found = {"losses": of_rows, "lse": of_rows}
        if desc.reduced:
            found["loss"] = self.rounded(over_rows, of_terms + over_rows)
        if desc.gradient:
            relative = total + 16 + (0 if self.counts_exactly() else over_rows)
            batch = desc.reduction == "sum" and r.invariant
            found["x" if desc.in_place else "dx"] = self.rounded(relative, total + 24, batch=batch)
        return found | self.status()
