"""softmax and log_softmax, forward and backward."""

from triplan.backends.triton.softmax import entries

__all__ = ["entries"]
