"""Matrix products, forward and backward: importing this package registers their kernels."""

from triplan.backends.triton.gemm import (
    integer_tiles,
    split_k,
    tiles,
    tiles_backward,
    tiles_invariant,
    tiles_invariant_backward,
    wgmma,
    wgmma_backward,
    wgmma_tiles,
)

__all__ = [
    "integer_tiles",
    "split_k",
    "tiles",
    "tiles_backward",
    "tiles_invariant",
    "tiles_invariant_backward",
    "wgmma",
    "wgmma_backward",
    "wgmma_tiles",
]
