"""Embeddings: torch's modules over our kernels, and one with its RMSNorm."""

from __future__ import annotations

from typing import Any

import torch

from triplan import functional
from triplan.nn._modules import parameter

__all__ = ["Embedding", "EmbeddingBag", "FusedEmbeddingRMSNorm"]

Tensor = torch.Tensor


class Embedding(torch.nn.Embedding):
    """torch.nn.Embedding, computed by ``triplan.functional.embedding``, which refuses sparse gradients."""

    def forward(self, input: Tensor) -> Tensor:
        """Indices of any shape to that shape followed by ``embedding_dim``."""
        how = (self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse)
        return functional.embedding(input, parameter(self, "weight"), *how)


class EmbeddingBag(torch.nn.EmbeddingBag):
    """torch.nn.EmbeddingBag, computed by ``triplan.functional.embedding_bag``, which refuses sparse gradients."""

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Indices (bags, length), or (indices,) with ``offsets`` (bags,), to (bags, embedding_dim)."""
        return functional.embedding_bag(
            input,
            parameter(self, "weight"),
            offsets,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.mode,
            self.sparse,
            per_sample_weights,
            self.include_last_offset,
            self.padding_idx,
        )


class FusedEmbeddingRMSNorm(torch.nn.Embedding):
    """torch.nn.Embedding and torch.nn.RMSNorm of its rows, by ``functional.embedding_rms_norm``.

    The parameters are ``weight``, of (num_embeddings, embedding_dim), and ``norm_weight``, of (embedding_dim,).
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        eps: float = 1e-5,
        padding_idx: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.eps = eps
        self.norm_weight = torch.nn.Parameter(torch.ones(embedding_dim, device=device, dtype=dtype))

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """(the norm, the rows), each of the shape of ``input`` followed by ``embedding_dim``."""
        weights = parameter(self, "weight"), parameter(self, "norm_weight")
        return functional.embedding_rms_norm(input, *weights, self.eps, self.padding_idx)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, eps={self.eps}"
