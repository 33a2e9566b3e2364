"""Optimizer steps: one kernel for lists of tensors, and the update rules of Adam, SGD and Lion."""

from triplan.backends.triton.optim import update

__all__ = ["update"]
