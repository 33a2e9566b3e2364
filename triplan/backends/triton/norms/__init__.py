"""rms_norm, layer_norm and l2_norm, forward and backward."""

from triplan.backends.triton.norms import entries, split

__all__ = ["entries", "split"]
