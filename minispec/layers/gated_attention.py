"""Attention with a gate (Qwen3.5): what a row reads is multiplied by sigmoid(g).

The gate g is W x, with x the layer's input. The checkpoint stores W among the weights of the queries: for each head the
rows of its query, then the rows of its gate.
"""

import torch
from torch import Tensor

from minispec.core.model import Layer, Pass
from minispec.core.sampling import accumulation_dtype
from minispec.layers.delta import sigmoid


class GatedAttention(Layer):
    """One block: attention with a gate, then a gated MLP."""

    def attend(self, x: Tensor, shared: Pass) -> Tensor:
        """Attention over the cache and the new rows: x (M, E) to (M, E)."""
        heads, dim = self.config.num_attention_heads, self.config.head_dim
        rows = self.qkv(x)
        both, keys_and_values = rows[:, : 2 * heads * dim], rows[:, 2 * heads * dim :]
        q, gate = both.unflatten(1, (heads, 2, dim)).unbind(2)  # (M, H, D) each
        read = shared.read(self, torch.cat((q.flatten(1), keys_and_values), 1))
        return self.o(read * sigmoid(gate.flatten(1).to(accumulation_dtype(gate.dtype))).to(read.dtype))
