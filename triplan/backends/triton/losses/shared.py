"""What all loss kernels share: arguments, traffic, guarantees, and the sums over rows.

The rows' losses are reduced to one in two steps, without atomics: programs reduce chunks of rows, the last one merges
them in a fixed order. Where a gradient is divided by the number of rows (or the sum of their weights), a launch of its
own counts before the main one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from triplan.backends.runtime.launch import Arg, Float, Int, Launch, Ptr
from triplan.backends.triton.common import bounds
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.fill import fill_launch
from triplan.backends.triton.common.offsets import TL, padded_bytes
from triplan.backends.triton.common.rows import Tile
from triplan.backends.triton.common.rows_entries import (
    MOST_PROGRAMS,
    Family,
    Rowwise,
    Traffic,
    is_backward,
    launch_of,
    packed_beside_rows,
    placed,
)
from triplan.backends.triton.losses import shared_kernels as kernels
from triplan.descriptors import (
    CrossEntropyBackwardDescriptor,
    CrossEntropyDescriptor,
    NllLossBackwardDescriptor,
    NllLossDescriptor,
)
from triplan.descriptors.fields import NO_BAD_INDEX
from triplan.descriptors.losses import LossDescriptor
from triplan.sku import ElementKind, PrecisionGuarantee, Support

#: Rows of a chunk, which one program reduces, at least.
CHUNK = 8192
#: Chunks at most: larger ones are taken for more rows.
MOST_CHUNKS = 256
#: Warps of a program that reduces a chunk.
CHUNK_WARPS = 32
#: Weights of classes that the one program that sums them reads at a time, and its warps.
CLASS_BLOCK = 4096
CLASS_WARPS = 16


def is_mean(desc: LossDescriptor) -> bool:
    return desc.reduction in ("mean", "byte_mean")


def with_gradient(desc: LossDescriptor) -> bool:
    """Whether the forward op writes the gradient as well."""
    return isinstance(desc, CrossEntropyDescriptor) and desc.gradient


def smoothing(desc: LossDescriptor) -> float:
    if isinstance(desc, (CrossEntropyDescriptor, CrossEntropyBackwardDescriptor)):
        return desc.label_smoothing
    return 0.0


def sums_weights(desc: LossDescriptor) -> bool:
    """Whether the sum of all classes' weights is needed."""
    return smoothing(desc) != 0 and desc.weight


def elementwise_numerics(desc: Rowwise) -> str:
    """The numerics id of kernels in which no order of operations depends on tile or layout."""
    return f"{desc.op}.{desc.element}.v1"


class LossFamily(Family[LossDescriptor]):
    index_elements = ("i32", "i64")

    def axis(self, desc: LossDescriptor) -> int:
        return desc.class_axis

    def supports(self, desc: LossDescriptor) -> Support:
        r, is_nll = self.rows(desc), isinstance(desc, (NllLossDescriptor, NllLossBackwardDescriptor))
        if is_nll and r.count * -(-max(r.n, 1) // 64) > MOST_PROGRAMS:
            return Support.no(f"{r.count} rows of {r.n} elements need too many programs")
        return packed_beside_rows(desc)

    def traffic(self, desc: LossDescriptor) -> Traffic:
        row = self.rows(desc).n * desc.element.itemsize
        if isinstance(desc, CrossEntropyBackwardDescriptor):
            return Traffic(first=0, second=2 * row, again=0)
        if isinstance(desc, NllLossBackwardDescriptor):
            return Traffic(first=0, second=row, again=0)
        return Traffic(first=row, second=row, again=row) if with_gradient(desc) else Traffic(row, 0, 0)

    def arguments(self, desc: LossDescriptor, rows: int) -> dict[str, Arg]:
        args, count = super().arguments(desc, rows), self.rows(desc).count
        if isinstance(desc, CrossEntropyDescriptor) and desc.in_place:
            args |= {"dx": args["x"], "dx_strides": args["x_strides"]}
        # What a row's loss is multiplied by, and what is counted of it in a mean.
        args |= {"share": args.get("bytes"), "counted": args.get("bytes", args.get("weight"))}
        parts, each = self.chunks(desc)
        args |= {"parts": Int(parts), "each": Int(each), "rows": Int(count, True)}
        args |= {"ignore": Int(desc.ignore_index, True), "smoothing": Float(smoothing(desc), desc.element.compute)}
        return args

    def constants(self, desc: LossDescriptor) -> dict[str, Any]:
        return {
            "MEAN": is_mean(desc),
            "EACH": not desc.reduced,
            "SMOOTH": smoothing(desc) != 0,
            "CLAMP": desc.out_of_bounds == "clamp",
            "GRAD": with_gradient(desc),
            "PARTS": 1 if self.chunks(desc)[0] == 1 else MOST_CHUNKS,
        }

    # --- sums over rows ---

    def chunks(self, desc: LossDescriptor) -> tuple[int, int]:
        """Chunks, and the rows of each."""
        count = self.rows(desc).count
        each = max(-(-count // (MOST_CHUNKS * CHUNK)), 1) * CHUNK
        return max(-(-count // each), 1), each

    def arrays(self, desc: LossDescriptor, shared: Tile | None = None) -> dict[str, int]:
        """Denominators and numerators of the chunks, and the sum of the classes' weights."""
        size = desc.element.compute.itemsize
        needed = {
            "counts": (is_mean(desc), MOST_CHUNKS),
            "sums": (desc.reduced and not is_backward(desc), MOST_CHUNKS),
            "class_sum": (sums_weights(desc), 1),
        }
        return {name: padded_bytes(length * size) for name, (needs, length) in needed.items() if needs}

    def counts_first(self, desc: LossDescriptor) -> bool:
        """Whether the denominator of a mean must be known before the main launch: gradients are divided by it."""
        return is_mean(desc) and (is_backward(desc) or with_gradient(desc)) and self.rows(desc).count > 0

    def _launch(
        self, desc: LossDescriptor, which: Any, grid: int, warps: int, args: Mapping[str, Arg], **constants: Any
    ) -> Launch:
        compute = desc.element.compute
        args = {**self.arguments(desc, 1), **placed(self.arrays(desc), compute), **args}
        block = CHUNK * 4 // compute.itemsize  # 32 bytes a thread
        constants = {"COMPUTE": TL[compute], "BLOCK": block, **self.constants(desc), **constants}
        return launch_of(which, grid, args, constants, warps)

    def before(self, desc: LossDescriptor) -> list[Launch]:
        """Reset the status; reduce what gradients need of targets and weights alone."""
        found = []
        if desc.out_of_bounds == "error":
            found.append(fill_launch(Ptr("status", ElementKind.I64, 8), 1, NO_BAD_INDEX))
        if self.counts_first(desc):
            found.append(self._launch(desc, kernels.loss_count_kernel, self.chunks(desc)[0], CHUNK_WARPS, {}))
        if sums_weights(desc) and self.rows(desc).count:
            total = placed(self.arrays(desc), desc.element.compute)["class_sum"]
            which = kernels.class_sum_kernel
            found.append(self._launch(desc, which, 1, CLASS_WARPS, {"total": total}, BLOCK=CLASS_BLOCK))
        return found

    def after(self, desc: LossDescriptor, shared: Tile) -> list[Launch]:
        """Reduce the losses of all rows to one."""
        if not desc.reduced or is_backward(desc):
            return []
        parts, count = self.chunks(desc)[0], is_mean(desc) and not self.counts_first(desc)
        if parts == 1:
            return [self._launch(desc, kernels.loss_sum_kernel, 1, CHUNK_WARPS, {}, COUNT=count)]
        return [
            self._launch(desc, kernels.loss_sum_kernel, parts, CHUNK_WARPS, {"loss": None}, COUNT=count),
            self._launch(desc, kernels.loss_finish_kernel, 1, 4, {}),
        ]

    def around_us(self, desc: LossDescriptor, shared: Tile) -> float:
        launches = 2 + is_mean(desc) + (smoothing(desc) != 0)
        return LAUNCH_US * launches + self.rows(desc).count * 16 / BYTES_PER_US

    # --- guarantees ---

    def guarantee(self, desc: LossDescriptor, tile: Tile, shared: Tile) -> Mapping[str, PrecisionGuarantee]:
        """See the functions below; ``status``, the lowest bad row, is exact."""
        r, element, compute = self.rows(desc), desc.element, desc.element.compute
        over_rows, classes = self._roundings_over_rows(desc), self._roundings_over_classes(desc)
        divided = 0 if self._counts_exactly(desc) else over_rows
        found: dict[str, PrecisionGuarantee] = {}
        if desc.out_of_bounds == "error":
            found["status"] = PrecisionGuarantee.exact(ElementKind.I64)
        if isinstance(desc, NllLossBackwardDescriptor):  # products, and the denominator
            batch, order = not is_mean(desc), self._counts_exactly(desc)
            return {"dx": rounded(element, compute, 8 + divided, 0, batch, order), **found}
        if isinstance(desc, CrossEntropyBackwardDescriptor):
            # exp(x - lse): the difference has a rounding of the size of lse where the exponential is not small, and lse
            # the forward op's roundings.
            batch, order = not is_mean(desc), self._counts_exactly(desc) and not classes
            relative, of_terms = 24 + divided + classes, 24 + classes
            return {"dx": rounded(element, compute, relative, of_terms, batch, order), **found}
        per_term = 0.0
        if isinstance(desc, CrossEntropyDescriptor):
            total = self._roundings_of_exponentials(desc, tile)
            per_term = total + 4 + classes
            found["losses"] = found["lse"] = rounded(compute, compute, 4, per_term, r.invariant)
            if desc.gradient:
                # p has the sum's relative error, and its argument one of 3 d u, with p d < 1/2.
                batch, name = desc.reduction == "sum" and r.invariant, "x" if desc.in_place else "dx"
                found[name] = rounded(element, compute, total + 16 + divided, total + 24, batch)
        else:  # nll_loss: one product a row
            found["losses"] = rounded(compute, compute, 2, 0, True, True)
        if desc.reduced:
            found["loss"] = rounded(element, compute, over_rows, per_term + over_rows)
        return found

    def _roundings_of_exponentials(self, desc: LossDescriptor, tile: Tile) -> float:
        """Relative roundings of a row's sum of n exponentials; the logarithm makes them absolute, beside roundings of
        the size of the maximum and of the target's logit.

        They are those of its additions, and those of each exponential: 2 ulp of ex2.approx (CUDA C Programming Guide)
        and three roundings of the argument -d, amplified by d. Weighted by exp(-d) the latter are at most 3 log n, as
        an entropy is. Label smoothing sums terms of differences of two logits, with no more roundings than this sum.
        """
        n = self.rows(desc).n
        return tile.additions(n) + 3 * math.log(max(n, 2)) + 16

    def _roundings_over_rows(self, desc: LossDescriptor) -> int:
        """Roundings of a sum over all rows, and of its denominator."""
        per_thread = self.chunks(desc)[1] // (32 * CHUNK_WARPS)
        return 2 * (per_thread + 16 + MOST_CHUNKS // 32) if desc.reduced else 0

    def _roundings_over_classes(self, desc: LossDescriptor) -> int:
        """Roundings of the sum of the classes' weights, where there is one."""
        return self.rows(desc).n // CLASS_BLOCK + CLASS_BLOCK // 512 + 16 if sums_weights(desc) else 0

    def _counts_exactly(self, desc: LossDescriptor) -> bool:
        """Whether a gradient's denominator is the same in any order of rows: a number of them that f32 holds."""
        rows_only = desc.reduction == "mean" and not desc.weight and self.rows(desc).count < 2**24
        return not is_mean(desc) or rows_only


def rounded(
    out: ElementKind, compute: ElementKind, relative: float, per_term: float, batch: bool = False, order: bool = False
) -> PrecisionGuarantee:
    """``bounds.rounded`` for kernels in which any operation may flush: approximate exponentials and products do."""
    flushes = relative + per_term
    return bounds.rounded(out, compute, relative=relative, per_term=per_term, flushes=flushes, batch=batch, order=order)


LOSSES = LossFamily()
