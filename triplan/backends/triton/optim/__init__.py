"""Optimizer steps: one body for lists of tensors, and the rules of Adam, SGD and Lion."""

from triplan.backends.triton.optim import update

__all__ = ["update"]
