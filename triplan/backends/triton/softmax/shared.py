"""What all softmax kernels share: constants, traffic and guarantees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triplan.backends.triton.common import bounds
from triplan.backends.triton.common.rows_entries import Entry
from triplan.descriptors.softmax import AnySoftmaxDescriptor
from triplan.sku import PrecisionGuarantee

OPS = ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward")


class SoftmaxEntry(Entry[AnySoftmaxDescriptor]):
    version = 2
    in_order = False  # no operand has one element a row

    def axis(self, desc: AnySoftmaxDescriptor) -> int:
        return desc.softmax_axis

    def constants(self, desc: AnySoftmaxDescriptor) -> dict[str, Any]:
        return {"LOG": desc.op.startswith("log_")}

    def guarantee(self, desc: AnySoftmaxDescriptor) -> Mapping[str, PrecisionGuarantee]:
        """A term of the sum is rounded by each addition on its path; in each block also by an exponential and a product
        where the sum is rescaled to a new maximum.

        The computed exp(-d) has its own error (2 ulp of ex2.approx, CUDA C Programming Guide) and that of its argument:
        one rounding each of x - max, of the product with log2(e) and of that constant, amplified by d; and d is at most
        ``MOST_EXPONENT``. The sum is of positive terms. In log_softmax the sum's error becomes absolute, of the size of
        the largest term: sum|terms| is 1.
        """
        r, element, compute = self.rows(desc), desc.element, desc.element.compute
        additions = self.some_tile(desc).additions(r.n, each_block=6)
        exponential = 0 if desc.op == "softmax_backward" else 3 * bounds.MOST_EXPONENT[compute]
        error = additions + 16 + exponential
        # ex2.approx and products flush subnormals.
        flushes, batch = additions + 4, r.invariant
        found = bounds.rounded(element, compute, relative=error, per_term=error, flushes=flushes, batch=batch)
        return bounds.of_outputs(desc, found)
