"""Optimizer steps: one kernel for lists of tensors, the update rules of Adam, SGD and Lion; clipping of gradients."""

from triplan.backends.triton.optim import clip, total, update

__all__ = ["clip", "total", "update"]
