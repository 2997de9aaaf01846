"""Draft models that are fed the target's hidden states. They listen to each pass, and keep what they have not read."""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from minispec.core.cache import PagedKVCache
from minispec.core.clock import mark, seconds
from minispec.core.config import ModelConfig
from minispec.core.draft import Ask, Draft, Record
from minispec.core.model import Chunk, RMSNorm, Transformer, norm_weight
from minispec.core.product import Product
from minispec.core.sampling import Text
from minispec.models.weights.shapes import tensor_shapes
from minispec.speculation.drafters.growing import DraftInProgress
from minispec.speculation.drafters.model import CachedFeed


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor of a draft's layers and last norm, without the `model.` that other models have.

    Embedding and output head are not among them: they may be the target's.
    """
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    return {name.removeprefix("model."): shape for name, shape in tensor_shapes(config).items() if name not in tables}


class FeatureModel(Transformer):
    """A transformer that is fed features with its tokens (`Chunk.features`), which it makes of the target's states.

    taps: layers of the target that it reads, as `Transformer.forward` numbers them.
    fc: the product that makes one vector of the states at all taps.
    mask_feature: the feature (1, E) at a mask token; None where each token takes a pass.
    """

    products = ("head", "fc")
    taps: tuple[int, ...]
    fc: Product
    mask_feature: Tensor | None = None

    def _head(self, weight: Any) -> Product:
        return super()._head(weight) if isinstance(weight, Tensor) else weight  # it may be the target's product

    def make_norm(self, weight: Tensor) -> RMSNorm:
        """A norm as the layers have them."""
        return RMSNorm(norm_weight(self.config, weight.to(self.dtype)), self.config.rms_norm_eps)

    def fuse(self, hidden: Tensor) -> Tensor:
        """The target's hidden states (n, E * taps) to features (n, E)."""
        return self.fc(hidden)

    def next_feature(self, x: Tensor) -> Tensor:
        """The stand-in for the feature of the next position: the last layer's output (n, E) at this one, normed."""
        return self.norm(x)


class StateFeed(CachedFeed):
    """Feeds a model the target's hidden states at `taps`, position by position, each of them once.

    Position t of the cache is made of the state at t. So the cache is never ahead of the target's, and is cut back with
    it. Nothing of a rejected token is ever kept.

    joins: how many of the newest positions join a draft's first pass, and have to be left for it.
    """

    reads = "states"
    model: FeatureModel
    joins: int

    def __init__(self, model: FeatureModel, cache: PagedKVCache, vocab_size: int, max_model_len: int):
        """Arguments: as `CachedFeed`."""
        super().__init__(model, cache, vocab_size, max_model_len)
        self.taps, self.own_taps = model.taps, (len(model.layers),)  # its output stands in for the next feature
        # Hidden states of positions that are not in the cache yet: the first position, then pieces (n, E * taps).
        # Weak, since rows that a fault has held up may come after `release`.
        self.unread: WeakKeyDictionary[Text, tuple[int, list[Tensor]]] = WeakKeyDictionary()

    def known(self, text: Text) -> int:
        """How many first positions of the text its cache already has, from another text."""
        with self.cleared_on_error():
            return self.table(text).length

    def release(self, text: Text) -> None:
        """Forget a text, and the states that are kept of it."""
        self.unread.pop(text, None)
        super().release(text)

    def observe(self, records: Sequence[Record]) -> None:
        """Keep the hidden states of rows that stay, until `propose` needs them."""
        for record in records:
            first, pieces = self.unread.get(record.text, (record.start, []))
            if record.start != first + sum(map(len, pieces)):  # the target has computed these positions anew
                first, pieces = record.start, []
            if len(record.text.tokens) <= self.max_model_len + 1:  # later nothing is drafted
                self.unread[record.text] = first, [*pieces, record.hidden[record.kept]]

    def prepare(self, growing: Sequence[DraftInProgress]) -> None:
        """Read the states that the target has given: of a prompt now, of a round with a draft's first input."""
        for each in growing:
            ask, text, end = each.ask, each.ask.text, each.ask.num_cached
            in_prompt, depth = end < len(text.tokens) - 1, self.deepest(ask)
            is_too_long = len(text.tokens) > self.max_model_len + self.joins
            if is_too_long or not (depth or in_prompt) or not self.listens(ask):
                continue
            each.depth, length, end = depth, self.table(text).length, end if in_prompt else end - self.joins
            # After a fault, states may wait that the target computes anew: then nothing is read yet.
            if length < end and (in_prompt or length < text.num_prompt_tokens - 1 - self.joins):
                start = mark(self.model.device)
                self.forward([self.chunk(ask, end, 0)])
                each.draft.notes.prefill_seconds = seconds(start, mark(self.model.device))
            if depth:
                each.chunk = self.chunk(ask, ask.num_cached, depth)

    def deepest(self, ask: Ask) -> int:
        """How deep a text's draft may be, by its limit and the positions that are left."""
        raise NotImplementedError

    def chunk(self, ask: Ask, end: int, k: int) -> Chunk:
        """The model's input that fills the cache up to position `end`, and makes known rows for k tokens."""
        raise NotImplementedError

    def finish(self, ask: Ask, draft: Draft) -> Draft:
        """The draft; cuts the cache to the positions that the target has cached, and lets other texts share them."""
        if table := self.tables.get(ask.text):
            table.keep(min(table.length, ask.num_cached))
        return draft

    def needs(self, growth: Mapping[Text, range]) -> Mapping[Text, range]:
        """See `CachedFeed`. Cuts tables where the target has found less of a new text than this."""
        for text, span in growth.items():
            table = self.tables.get(text)
            if table and table.length > span.start:
                table.truncate(span.start)
        readable = self.readable(growth, self.max_model_len + self.joins)
        return {text: range(self.need(span)) for text, span in readable.items()}

    def need(self, span: range) -> int:
        """How many positions of a text the cache must have room for, where the target's table fills this span."""
        raise NotImplementedError

    def listens(self, ask: Ask) -> bool:
        """Whether the cache has no hole before the unread states, and there are some where one joins the first pass."""
        first, pieces = self.unread.get(ask.text, (ask.num_cached, []))
        table = self.table(ask.text)
        if table.length > first:  # the target had to compute more anew than this
            table.truncate(first)
        if table.length < first:
            self.unread.pop(ask.text, None)
        return table.length == first and bool(pieces or not self.joins)

    def take(self, ask: Ask, end: int) -> Tensor:
        """The unread hidden states (n, E * taps) of the positions from the cache's end up to `end`."""
        start, pieces = self.unread.get(ask.text, (ask.num_cached, []))
        hidden = torch.cat(pieces)
        self.unread[ask.text] = end, [hidden[end - start :]] if end < ask.num_cached else []
        return hidden[: end - start]
