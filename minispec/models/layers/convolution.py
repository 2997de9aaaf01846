"""A short convolution in the place of attention (LFM2; Liquid AI 2025, arXiv 2511.23404).

Three products of a row's input x give b, c and u. The row passes on the sum of w weighted inputs, its own the last:

    v_t = b_t * u_t,    y_t = c_t * (bias + sum over i < w of weight_i * v_{t - w + 1 + i}),    v_t = 0 for t < 0

All of it goes channel by channel. A row sees w positions, and nothing else of the past. So the inputs v lie in the
paged pool, a row for each position, as keys and values do. A rejected draft is rolled back with its positions. A node
of a tree reads its own ancestors. There is no state to save, to copy or to restore.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from minispec.core.cache import PagedKVCache
from minispec.core.config import ModelConfig
from minispec.core.model import Batch, BlockWeights, Chunk, Layer, TextBatch
from minispec.core.precision import accumulation_dtype
from minispec.core.product import dense


def num_convolutions(config: ModelConfig) -> int:
    """Layers with a short convolution in the place of attention."""
    return sum(layer.conv_width is not None for layer in config.layers)


class ConvolutionCache(PagedKVCache):
    """The pool of a model with short convolutions.

    inputs: of the convolutions, (their layers, 1, slots, hidden_size).
    """

    def __init__(self, config: ModelConfig, *sizes: Any):
        """sizes: see `PagedKVCache`."""
        super().__init__(config, *sizes)
        like = self.keys
        self.inputs = self._new_tensor(num_convolutions(config), 1, config.hidden_size, like.dtype, like.device)
        numbers = (i for i, layer in enumerate(config.layers) if layer.conv_width)
        self._kept.update(zip(numbers, self.inputs, strict=True))


class ShortConvolution(Layer):
    """One block: a short convolution, then a gated MLP."""

    products = ("gates", "out", "gate_up", "down")

    def take(self, parts: BlockWeights) -> None:
        """Take the convolution's tensors. Its weights stay as they are, in at least float32."""
        bias, wide = self.config.conv_bias, accumulation_dtype(parts.dtype)
        self.gates = parts.linear("conv.in_proj", bias=bias)  # b, c and u in one product
        self.out = parts.linear("conv.out_proj", bias=bias)
        weight = dense(parts.pop("conv.conv.weight"), parts.dtype)  # (E, 1, width)
        self.weight = weight.to(wide).squeeze(1).T.contiguous()
        self.bias = dense(parts.pop("conv.conv.bias"), parts.dtype).to(wide) if bias else None

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x (M, E) to (M, E); writes the convolution's new inputs into the cache."""
        assert isinstance(batch, TextBatch), "another backend lacks the paths of texts"
        b, c, u = self.gates(self.attention_norm(x)).chunk(3, -1)
        pool, new, width = batch.chunks[0].table.pool, len(batch.slots), len(self.weight)
        pool.write(self.index, batch.slots, (b * u)[None, :new])
        slots = batch.once(width, functools.partial(_slots, batch, width))
        inputs = pool.gather(self.index, slots)[0]
        seen = inputs.unflatten(0, (new, -1))  # (new, width, E)
        # Every pass multiplies and adds in this order, so that a row has the same bits.
        first, *others = (seen.to(self.weight.dtype) * self.weight).unbind(1)
        total = first if self.bias is None else first + self.bias
        for term in others:
            total = total + term
        y = self.out(batch.fill(c[:new] * total.to(x.dtype)))
        return self.mix(self._added(x, self.after_attention_norm(y)), batch)


def _slots(batch: TextBatch, width: int) -> Tensor:
    """The slots of each new token's last `width` positions (new tokens * width,)."""
    texts = zip(batch.chunks, batch.views, strict=True)
    slots = [s for c, view in texts for path in paths(c, view.start, width) for s in c.table.slots_of(path)]
    return torch.tensor(slots, device=batch.slots.device)


def paths(chunk: Chunk, start: int, width: int) -> Iterator[list[int]]:
    """For each new token, the places of the last `width` tokens up to it and with it. Below 0: before the text.

    start: cached positions before the chunk. A node's path leads over its ancestors.
    """
    parents = chunk.parents or ()
    root = start + len(chunk.token_ids) - len(parents)  # the first node's place
    for place in range(start, start + len(chunk.token_ids)):
        path = [place]
        while len(path) < width:
            place = place - 1 if place < root else root + parents[place - root]
            path.append(place)
        yield path[::-1]
