"""cross_entropy, nll_loss and the scaling of their gradients."""

from triplan.backends.triton.losses import cross_entropy, nll_loss

__all__ = ["cross_entropy", "nll_loss"]
