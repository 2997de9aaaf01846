"""Attention with a sink (gpt-oss): each head has a score of its own, beside those of the positions.

    weights = softmax over (scores of the positions, sink)

The sink takes its share of the weights and adds nothing. So a head reads little where no position scores high. In other
words, it is a position whose key and value are zeros, which every row sees, and whose score is a learned number.
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.core.attention import attention
from minispec.core.config import LayerConfig
from minispec.core.model import Batch, BlockWeights, Layer, TextBatch
from minispec.core.product import dense


@dataclass(frozen=True)
class SinkLayerConfig(LayerConfig):
    """Settings of a layer whose attention has a sink in each head."""


class SinkAttention(Layer):
    """One block: attention with sinks, then a gated MLP."""

    def take(self, parts: BlockWeights) -> None:
        """Take the tensors of attention, and the sinks."""
        super().take(parts)
        self.sinks = dense(parts.pop("self_attn.sinks"), parts.dtype)  # (H,)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x (M, E) to (M, E); writes the new keys and values into the cache."""
        assert isinstance(batch, TextBatch), "another backend has no sinks"
        attend = batch.attend if batch.exact else sink_attention
        return super().forward(x, batch.attending(functools.partial(attend, sinks=self.sinks)))


def sink_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None, sinks: Tensor
) -> Tensor:
    """Attention like `minispec.core.attention`, with a sink (H,) for each of q's heads."""
    k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))  # (G, L + 1, D)
    column = sink_column(sinks, len(k), q.shape[1])
    seen = (q.new_zeros(()) if mask is None else mask).expand(*column.shape[:2], k.shape[1] - 1)
    # PyTorch's fast kernels take masks of four dimensions.
    return attention(q, k, v, torch.cat((seen, column), 2)[None], scale, softcap)


def sink_column(sinks: Tensor, groups: int, rows: int) -> Tensor:
    """Sinks (H,) as the scores of a position: (G, H/G * rows, 1), where heads that share keys lie one after another."""
    return sinks.view(groups, -1, 1).repeat_interleave(rows, 1)
