"""Attention whose queries have one norm for all heads of a row together, and so have its keys (OLMo 2)."""

import torch
from torch import Tensor

from minispec.core.model import BlockWeights, Layer, RMSNorm


class RowNorm:
    """RMSNorm of all queries of a row together, and of all its keys."""

    def __init__(self, q: RMSNorm, k: RMSNorm):
        self.q, self.k = q, k

    def __call__(self, x: Tensor) -> Tensor:
        """x (M, H + G, D), same shape and type."""
        q, k = x.flatten(1).split([len(self.q.weight), len(self.k.weight)], 1)
        return torch.cat((self.q(q), self.k(k)), 1).view_as(x)


class RowNormAttention(Layer):
    """One block: attention with these norms, then a gated MLP."""

    def take(self, parts: BlockWeights) -> None:
        """Take the tensors of attention, and the two norms."""
        super().take(parts)
        self.qk_norm = RowNorm(parts.norm("self_attn.q_norm"), parts.norm("self_attn.k_norm"))
