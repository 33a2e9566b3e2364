"""Lists of tensors: the update rules of Adam, SGD and Lion, norms and clipping of gradients, expressions."""

from triplan.backends.triton.optim import clip, pointwise, total, update

__all__ = ["clip", "pointwise", "total", "update"]
