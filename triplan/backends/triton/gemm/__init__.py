"""Matrix products, forward and backward."""
