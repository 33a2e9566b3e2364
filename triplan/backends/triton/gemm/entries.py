"""How the kernels of matrix products enter the kernel table."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from triplan.backends.table import Build, kernel
from triplan.sku import ArchSku

#: The ops of a ``MatrixProductDescriptor``: with and without a batch, they share their kernels.
OPS = ("gemm", "batched_gemm")
BACKWARD = "gemm_backward"
#: Elements of the floating-point kernels that read through pointers.
ELEMENTS = ("f16", "bf16", "f32", "f64")

#: ``kernel`` for one that reads by TMA and multiplies by wgmma.
hopper_kernel = partial(
    kernel, elements=("f16", "bf16"), archs=(ArchSku.SM90A,), features=("gluon", "tma"), interpretable=False
)


def for_products(entry: Callable[..., Callable[[Build], Build]]) -> Callable[[Build], Build]:
    """Register the decorated function for each of ``OPS``; ``entry`` is ``kernel`` with every argument but the op."""

    def register(build: Build) -> Build:
        for op in OPS:
            entry(op=op)(build)
        return build

    return register
