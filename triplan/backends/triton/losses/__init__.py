"""cross_entropy, nll_loss and the scaling of their gradients."""

from triplan.backends.triton.losses import blocks, elements, looped, rows, split

__all__ = ["blocks", "elements", "looped", "rows", "split"]
