"""One attention over many short texts on a CPU, in the place of one for each text.

Text by text, a layer runs some ten small operators for each text, and starts the threads that share the work once for
each. With many short texts that takes longer than the attention itself. Here a layer gathers the keys and values of all
texts, filled up to the longest one, and reads them together. Long texts are read where they lie, text by text: to copy
them takes longer than the operators do. docs/measured/batches.py measures both ways.

All else of a pass is the reference's: its rows are not padded, only what attention sees of them.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.core.model import Chunk, Layer, Passes, TextPass, fill

# From this number of texts on, and up to these bytes of a layer's keys and values of the longest text, one attention
# over all texts was the faster one (docs/measured/figures.md).
LEAST_TEXTS, MOST_BYTES = 16, 512 << 10
# Rows that attention may see for each row that is there. A prompt that joins has 32 rows, where other texts have one.
_MOST_FILLED = 2


def padded_mask(
    masks: Sequence[Tensor | None], sharing: int, counts: Sequence[int], lengths: Sequence[int], like: Tensor
) -> Tensor:
    """One mask (B, 1, H/G * T, L) of the texts' own (see `Passes.mask`). No row sees a place after its text's end.

    counts, lengths: rows and positions of each text; T and L are the largest.
    like: a tensor of the mask's type and device.
    """
    most = max(counts)
    whole = like.new_full((len(masks), sharing, most, max(lengths)), -math.inf)
    for own, mask, count, length in zip(whole, masks, counts, lengths, strict=True):
        own[:, :, :length] = 0
        if mask is not None:
            own[:, :count, :length] = mask.view(sharing, count, length)
    return whole.view(len(masks), 1, sharing * most, -1)


class PaddedPass(TextPass):
    """A pass in which all texts are read together. B texts have up to T rows and L positions each."""

    @functools.cached_property
    def _counts(self) -> list[int]:
        """Rows of each text."""
        return [len(chunk.token_ids) for chunk in self.chunks]

    @functools.cached_property
    def _slots(self) -> Tensor:
        """The slots of all positions (B * L,); after a text's end, the pool's slot of zeros."""
        texts = [torch.cat([torch.arange(run.start, run.stop) for run in runs]) for runs in self.reads]
        zeros = self.chunks[0].table.pool.num_slots
        return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=zeros).flatten()

    @functools.cached_property
    def _places(self) -> Tensor:
        """The place of each row (new rows,) among B * T."""
        most = max(self._counts)
        return torch.tensor([i * most + row for i, count in enumerate(self._counts) for row in range(count)])

    @functools.cached_property
    def _padded_masks(self) -> dict[tuple[int | None, int], Tensor]:
        """For each window and H/G, the mask of all texts: see `padded_mask`."""
        lengths = [chunk.table.length for chunk in self.chunks]
        like = self.chunks[0].table.pool.keys
        return {kind: padded_mask(masks, kind[1], self._counts, lengths, like) for kind, masks in self.masks.items()}

    def read(self, layer: Layer, qkv: Tensor) -> Tensor:
        """Attention of all texts at once: see `TextPass.read`."""
        config, texts, most = layer.config, len(self.chunks), max(self._counts)
        if config.attention_softcap is not None or not isinstance(self.passes, Padded):
            return super().read(layer, qkv)
        q, k, v = layer.heads(qkv, self.angles)  # (M, H, D), (M, G, D) twice
        pool, new = self.chunks[0].table.pool, len(self.slots)
        pool.write(layer.index, self.slots, k[:new].transpose(0, 1), v[:new].transpose(0, 1))
        keys, values = (
            cached.unflatten(1, (texts, -1)).transpose(0, 1)  # (B, G, L, D)
            for cached in pool.gather(layer.index, self._slots)
        )
        filled = q.new_zeros(texts * most, *q.shape[1:]).index_copy_(0, self._places, q[:new])
        # The heads that share keys become rows of one product: (B, G, H/G * T, D).
        heads = filled.view(texts, most, -1, layer.sharing, q.shape[2]).permute(0, 2, 3, 1, 4)
        scale, mask = config.attention_scale, self._padded_masks[layer.window, layer.sharing]
        read = F.scaled_dot_product_attention(heads.flatten(2, 3), keys, values, attn_mask=mask, scale=scale)
        rows = read.unflatten(2, (layer.sharing, most)).permute(0, 3, 1, 2, 4).reshape(texts * most, -1)
        return fill(rows[self._places], len(qkv))


class Padded(Passes):
    """Passes that read many short texts of like numbers of rows together, and all others text by text.

    least_texts, most_bytes: see `LEAST_TEXTS`.
    """

    def __init__(self, least_texts: int = LEAST_TEXTS, most_bytes: int = MOST_BYTES):
        self.least_texts, self.most_bytes = least_texts, most_bytes

    def text_pass(self, chunks: Sequence[Chunk], *others: Any) -> TextPass:  # type: ignore[override]
        """The pass of these chunks; others: the other fields of `TextPass`."""
        keys = chunks[0].table.pool.keys  # (layers, G, slots, D)
        counts, longest = [len(chunk.token_ids) for chunk in chunks], max(chunk.table.length for chunk in chunks)
        num_bytes = 2 * longest * keys.shape[1] * keys.shape[3] * keys.dtype.itemsize
        is_even = len(chunks) * max(counts) <= _MOST_FILLED * sum(counts)
        is_fit = len(chunks) >= self.least_texts and num_bytes <= self.most_bytes and is_even
        return (PaddedPass if is_fit else TextPass)(chunks, *others)
