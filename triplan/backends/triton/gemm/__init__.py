"""Matrix products, forward and backward."""

from triplan.backends.triton.gemm import split_k, tiles, tiles_backward, wgmma, wgmma_backward

__all__ = ["split_k", "tiles", "tiles_backward", "wgmma", "wgmma_backward"]
