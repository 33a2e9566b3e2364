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
from triplan.backends.triton.common import bounds
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.fill import fill_launch
from triplan.backends.triton.common.offsets import padded_bytes
from triplan.backends.triton.common.rows import Tile
from triplan.backends.triton.common.rows_entries import MOST_PROGRAMS, Entry, Rowwise, is_backward, placed
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


def is_mean(desc: LossDescriptor) -> bool:
    return desc.reduction in ("mean", "byte_mean")


def smooths(desc: LossDescriptor) -> bool:
    return getattr(desc, "label_smoothing", 0.0) != 0  # nll_loss has none


def with_gradient(desc: LossDescriptor) -> bool:
    """Whether the forward op writes the gradient as well."""
    return isinstance(desc, CrossEntropyDescriptor) and desc.gradient


def rounded(
    desc: Rowwise, relative: float, per_term: float, *, rows: bool = False, batch: bool = False, order: bool = False
) -> PrecisionGuarantee:
    """``bounds.rounded`` of an output in the descriptor's element; or, if it has one element for each of the rows, in
    the compute element. Any operation may flush: approximate exponentials and products do."""
    out, flushes = desc.element.compute if rows else desc.element, relative + per_term
    return bounds.rounded(
        out, desc.element.compute, relative=relative, per_term=per_term, flushes=flushes, batch=batch, order=order
    )


class LossEntry(Entry[L]):
    index_elements = ("i32", "i64")

    def axis(self, desc: L) -> int:
        return desc.class_axis

    def arguments(self, desc: L, rows: int) -> dict[str, Arg]:
        args, (parts, each) = super().arguments(desc, rows), self.chunks(desc)
        if isinstance(desc, CrossEntropyDescriptor) and desc.in_place:
            args |= {"dx": args["x"], "dx_strides": args["x_strides"]}
        # What a row's loss is multiplied by, and what is counted of it in a mean.
        args |= {"share": args.get("bytes"), "counted": args.get("bytes", args.get("weight"))}
        args |= {"parts": Int(parts), "each": Int(each), "rows": Int(self.rows(desc).count, True)}
        smoothing = Float(getattr(desc, "label_smoothing", 0.0), desc.element.compute)
        return args | {"ignore": Int(desc.ignore_index, True), "smoothing": smoothing}

    def constants(self, desc: L) -> dict[str, Any]:
        return {
            "MEAN": is_mean(desc),
            "EACH": not desc.reduced,
            "SMOOTH": smooths(desc),
            "CLAMP": desc.out_of_bounds == "clamp",
            "GRAD": with_gradient(desc),
            "PARTS": 1 if self.chunks(desc)[0] == 1 else MOST_CHUNKS,
        }

    def supports(self, desc: L, target: Target) -> Support:
        r = self.rows(desc)
        if desc.op.startswith("nll_loss") and r.count * -(-max(r.n, 1) // 64) > MOST_PROGRAMS:
            return Support.no(f"{r.count} rows of {r.n} elements need too many programs")
        return super().supports(desc, target)

    # --- sums over rows ---

    def chunks(self, desc: L) -> tuple[int, int]:
        """Chunks, and the rows of each."""
        count = self.rows(desc).count
        each = max(-(-count // (MOST_CHUNKS * CHUNK)), 1) * CHUNK
        return max(-(-count // each), 1), each

    def arrays(self, desc: L) -> dict[str, int]:
        """Denominators and numerators of the chunks, and the sum of the classes' weights."""
        size, sums = desc.element.compute.itemsize, desc.reduced and not is_backward(desc)
        found = {"counts": MOST_CHUNKS} if is_mean(desc) else {}
        found |= {"sums": MOST_CHUNKS} if sums else {}
        found |= {"class_sum": 1} if smooths(desc) and desc.weight else {}
        return {name: padded_bytes(length * size) for name, length in found.items()}

    def counts_first(self, desc: L) -> bool:
        """Whether gradients are divided by a mean's denominator."""
        return is_mean(desc) and (is_backward(desc) or with_gradient(desc)) and self.rows(desc).count > 0

    def chunk_tile(self, desc: L) -> Tile:
        return Tile(1, CHUNK * 4 // desc.element.compute.itemsize, CHUNK_WARPS)  # 32 bytes a thread

    def before(self, desc: L) -> list[Launch]:
        """Reset the status; reduce what gradients need of targets and weights alone."""
        found, arrays = [], placed(self.arrays(desc), desc.element.compute)
        if desc.out_of_bounds == "error":
            found.append(fill_launch(Ptr("status", ElementKind.I64, 8), 1, NO_BAD_INDEX))
        if self.counts_first(desc):
            found.append(self.launch(desc, kernels.loss_count_kernel, self.chunks(desc)[0], self.chunk_tile(desc)))
        if "class_sum" in arrays and self.rows(desc).count:
            args, tile = {"total": arrays["class_sum"]}, Tile(1, CLASS_BLOCK, CLASS_WARPS)
            found.append(self.launch(desc, kernels.class_sum_kernel, 1, tile, args))
        return found

    def after(self, desc: L) -> list[Launch]:
        """Reduce the losses of all rows to one."""
        if not desc.reduced or is_backward(desc):
            return []
        parts, tile, count = self.chunks(desc)[0], self.chunk_tile(desc), is_mean(desc) and not self.counts_first(desc)
        if parts == 1:
            return [self.launch(desc, kernels.loss_sum_kernel, 1, tile, COUNT=count)]
        return [
            self.launch(desc, kernels.loss_sum_kernel, parts, tile, {"loss": None}, COUNT=count),
            self.launch(desc, kernels.loss_finish_kernel, 1, Tile(1, 1, 4)),
        ]

    def around_us(self, desc: L) -> float:
        return LAUNCH_US * (2 + is_mean(desc) + smooths(desc)) + self.rows(desc).count * 16 / BYTES_PER_US

    # --- guarantees ---

    def status(self, desc: L) -> dict[str, PrecisionGuarantee]:
        """The lowest bad row is exact."""
        return {"status": PrecisionGuarantee.exact(ElementKind.I64)} if desc.out_of_bounds == "error" else {}

    def roundings_over_rows(self, desc: L) -> int:
        """Roundings of a sum over all rows, and of its denominator."""
        per_thread = self.chunks(desc)[1] // (32 * CHUNK_WARPS)
        return 2 * (per_thread + 16 + MOST_CHUNKS // 32) if desc.reduced else 0

    def roundings_over_classes(self, desc: L) -> int:
        """Roundings of the sum of the classes' weights, where there is one."""
        needed = smooths(desc) and desc.weight
        return self.rows(desc).n // CLASS_BLOCK + CLASS_BLOCK // 512 + 16 if needed else 0

    def counts_exactly(self, desc: L) -> bool:
        """Whether a gradient's denominator is the same in any order of rows: a number of them that f32 holds."""
        rows_only = desc.reduction == "mean" and not desc.weight and self.rows(desc).count < 2**24
        return not is_mean(desc) or rows_only


class CrossEntropyEntry(LossEntry[CrossEntropyDescriptor]):
    def guarantee(self, desc: CrossEntropyDescriptor) -> Mapping[str, PrecisionGuarantee]:
        """The sum of n exponentials has the relative roundings of its additions and of each exponential: 2 ulp of
        ex2.approx (CUDA C Programming Guide), and three roundings of the argument -d, amplified by d. Weighted by
        exp(-d) the latter are at most 3 log n, as an entropy is. The logarithm makes them absolute, beside roundings of
        the size of the maximum and of the target's logit. Label smoothing sums terms of differences of two logits, with
        no more roundings, and the classes' weights. For the gradient, p has the sum's relative error, and its argument
        one of 3 d u, with p d < 1/2.
        """
        r, over_rows = self.rows(desc), self.roundings_over_rows(desc)
        total = self.some_tile(desc).additions(r.n) + 3 * math.log(max(r.n, 2)) + 16
        of_terms = total + 4 + self.roundings_over_classes(desc)
        found = dict.fromkeys(("losses", "lse"), rounded(desc, 4, of_terms, rows=True, batch=r.invariant))
        if desc.reduced:
            found["loss"] = rounded(desc, over_rows, of_terms + over_rows)
        if desc.gradient:
            relative = total + 16 + (0 if self.counts_exactly(desc) else over_rows)
            batch = desc.reduction == "sum" and r.invariant
            found["x" if desc.in_place else "dx"] = rounded(desc, relative, total + 24, batch=batch)
        return found | self.status(desc)
