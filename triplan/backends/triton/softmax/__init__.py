"""softmax and log_softmax, forward and backward."""

from triplan.backends.triton.softmax import looped, rows, split

__all__ = ["looped", "rows", "split"]
