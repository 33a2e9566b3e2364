"""cross_entropy, nll_loss and the scaling of their gradients."""
