"""softmax and log_softmax, forward and backward."""
