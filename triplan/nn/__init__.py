"""Modules over triplan.functional, named as torch's and with its state: their state dicts are exchanged freely."""

from triplan.nn.norms import LayerNorm, RMSNorm

__all__ = ["LayerNorm", "RMSNorm"]
