"""rms_norm, layer_norm and l2_norm, forward and backward."""

from triplan.backends.triton.norms import looped, rows, split

__all__ = ["looped", "rows", "split"]
