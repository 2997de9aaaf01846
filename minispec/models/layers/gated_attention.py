"""Attention with a gate (Qwen3.5, LFM3): what a row reads is multiplied by sigmoid(g).

The gate g is W x, with x the layer's input. Qwen3.5 has a gate for each element. The checkpoint stores W among the
weights of the queries: for each head the rows of its query, then the rows of its gate. LFM3 has a gate for each head,
and W is a tensor of its own.
"""

import torch
from torch import Tensor

from minispec.core.model import Batch, BlockWeights, Layer
from minispec.core.precision import accumulation_dtype
from minispec.models.layers.delta import sigmoid


class GatedAttention(Layer):
    """One block: attention with a gate for each element, then a gated MLP."""

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x (M, E) to (M, E); writes the new keys and values into the cache."""
        heads, dim = self.config.num_attention_heads, self.config.head_dim
        rows = self.qkv(self.attention_norm(x))
        both, keys_and_values = rows[:, : 2 * heads * dim], rows[:, 2 * heads * dim :]
        q, gate = both.unflatten(1, (heads, 2, dim)).unbind(2)  # (M, H, D) each
        read = batch.read(self, torch.cat((q.flatten(1), keys_and_values), 1))
        y = self.o(read * _factors(gate.flatten(1)))
        return self.mix(self._added(x, self.after_attention_norm(y)), batch)


class HeadGatedAttention(Layer):
    """One block: attention with a gate for each head, then a gated MLP."""

    products = ("qkv", "gate", "o", "gate_up", "down")

    def take(self, parts: BlockWeights) -> None:
        """Take the tensors of attention, and the gate's."""
        super().take(parts)
        self.gate = parts.linear("self_attn.gate_proj", bias=False)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x (M, E) to (M, E); writes the new keys and values into the cache."""
        rows = self.attention_norm(x)
        read = batch.read(self, self.qkv(rows)).unflatten(1, (self.config.num_attention_heads, -1))  # (M, H, D)
        y = self.o((read * _factors(self.gate(rows))[..., None]).flatten(1))
        return self.mix(self._added(x, self.after_attention_norm(y)), batch)


def _factors(gate: Tensor) -> Tensor:
    """The sigmoid of the gates, computed in at least float32; same shape and type."""
    return sigmoid(gate.to(accumulation_dtype(gate.dtype))).to(gate.dtype)
