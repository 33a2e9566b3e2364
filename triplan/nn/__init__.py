"""Modules on top of ``triplan.functional``: what torch.nn has by these names, with its parameters and state dicts."""

from triplan.nn.losses import CrossEntropyLoss
from triplan.nn.norms import LayerNorm, RMSNorm

__all__ = ["CrossEntropyLoss", "LayerNorm", "RMSNorm"]
