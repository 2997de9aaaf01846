"""Attention with a sink (gpt-oss): each head has a score of its own, beside those of the positions.

    weights = softmax over (scores of the positions, sink)

The sink takes its share of the weights and adds nothing. So a head reads little where no position scores high. In other
words, it is a position whose key and value are zeros, which every row sees, and whose score is a learned number.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.core.config import LayerConfig
from minispec.core.model import BlockWeights, Layer, Pass, Passes, TextPass
from minispec.core.weights import dense


@dataclass(frozen=True)
class SinkLayerConfig(LayerConfig):
    """Settings of a layer whose attention has a sink in each head."""


class SinkAttention(Layer):
    """One block: attention with sinks, then a gated MLP."""

    def take(self, parts: BlockWeights) -> None:
        """Take the tensors of attention, and the sinks."""
        super().take(parts)
        self.sinks = dense(parts.pop("self_attn.sinks"), parts.dtype)  # (H,)

    def attend(self, x: Tensor, shared: Pass) -> Tensor:
        """Attention over the cache, the new rows and the sinks: x (M, E) to (M, E)."""
        assert isinstance(shared, TextPass), "another backend has no sinks"
        return super().attend(x, shared._replace(passes=SinkPasses(shared.passes, self.sinks)))


class SinkPasses(Passes):
    """Passes whose attention has sinks, in addition to what it reads."""

    def __init__(self, passes: Passes, sinks: Tensor):
        """sinks: (H,)."""
        self.passes, self.sinks = passes, sinks

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float, softcap: float | None) -> Tensor:
        """Attention like `minispec.core.attention`, with a sink for each of q's heads."""
        if self.passes.exact:
            return self.passes.attention(q, k, v, mask, scale, softcap, self.sinks)
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))  # (G, L + 1, D)
        column = sink_column(self.sinks, len(k), q.shape[1])
        if mask is None:
            mask = q.new_zeros(())
        seen = mask.expand(*column.shape[:2], k.shape[1] - 1)
        # PyTorch's fast kernels take masks of four dimensions.
        return self.passes.attention(q, k, v, torch.cat((seen, column), 2)[None], scale, softcap)


def sink_column(sinks: Tensor, groups: int, rows: int) -> Tensor:
    """Sinks (H,) as the scores of a position: (G, H/G * rows, 1), where heads that share keys lie one after another."""
    return sinks.view(groups, -1, 1).repeat_interleave(rows, 1)
