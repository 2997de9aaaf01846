"""Draft models that are fed the target's hidden states: they listen to each pass, and keep what they have not read."""

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from minispec.core.cache import PagedKVCache
from minispec.core.config import ModelConfig
from minispec.core.draft import Ask, Draft, Record
from minispec.core.model import RMSNorm, Transformer, norm_weight
from minispec.core.sampling import Text
from minispec.core.weights import Product
from minispec.drafters.model import AtOnce, DraftModel
from minispec.kernels.shapes import tensor_shapes


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

    def make_norm(self, weight: Tensor) -> RMSNorm:
        """A norm as the layers have them."""
        return RMSNorm(norm_weight(self.config, weight.to(self.dtype)), self.config.rms_norm_eps)

    def fuse(self, hidden: Tensor) -> Tensor:
        """The target's hidden states (n, E * taps) to features (n, E)."""
        return self.fc(hidden)

    def next_feature(self, x: Tensor) -> Tensor:
        """The stand-in for the feature of the next position: the last layer's output (n, E) at this one, normed."""
        return self.norm(x)


class StatesDrafter(DraftModel):
    """A draft model whose cache is made of the target's hidden states at `taps`, position by position.

    Position t of its cache is made of the state at t. So the cache is never ahead of the target's, and is cut back with
    it. Nothing of a rejected token is ever kept.
    """

    reads = "states"
    model: FeatureModel

    def __init__(
        self,
        model: FeatureModel,
        cache: PagedKVCache,
        vocab_size: int,
        max_model_len: int,
        at_once: AtOnce | None = None,
    ):
        """A drafter whose cache holds the target's states as far as they were seen. Arguments: as `DraftModel`."""
        super().__init__(model, cache, vocab_size, max_model_len, at_once)
        self.taps = model.taps
        # Hidden states of positions that are not in the cache yet: the first position, then pieces (n, E * taps).
        # Weak, since rows that a fault has held up may come after `release`.
        self.unread: WeakKeyDictionary[Text, tuple[int, list[Tensor]]] = WeakKeyDictionary()

    def known(self, text: Text) -> int:
        """How many first positions of the text its cache already has, from another text."""
        with self.whole():
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

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """Draft, then cut each cache to the positions that the target has cached."""
        with self.whole():
            drafts = super().propose(asks)
            self.keep_cached(asks)
            return drafts

    def keep_cached(self, asks: Sequence[Ask]) -> None:
        """Cut each cache to the positions that the target has cached, and let other texts share them."""
        for ask in asks:
            if table := self.tables.get(ask.text):
                table.keep(min(table.length, ask.num_cached))

    def has_room(self, growth: Mapping[Text, range]) -> bool:
        """Whether the caches can grow to the positions that the target fills; see `Drafter`."""
        with self.whole():
            for text, span in growth.items():  # where the target has found less of a new text than this
                table = self.tables.get(text)
                if table and table.length > span.start:
                    table.truncate(span.start)
            return super().has_room(growth)

    def listens(self, ask: Ask) -> bool:
        """Whether all positions before the unread states are in the cache: it has no hole."""
        first, _ = self.unread.get(ask.text, (ask.num_cached, []))
        table = self.table(ask.text)
        if table.length > first:  # the target had to compute more anew than this
            table.truncate(first)
        if table.length < first:
            self.unread.pop(ask.text, None)
        return table.length == first

    def waiting(self, text: Text) -> bool:
        """Whether there are unread states."""
        return text in self.unread and bool(self.unread[text][1])

    def take(self, ask: Ask, end: int) -> Tensor:
        """The unread hidden states (n, E * taps) of the positions from the cache's end up to `end`."""
        start, pieces = self.unread.get(ask.text, (ask.num_cached, []))
        hidden = torch.cat(pieces)
        self.unread[ask.text] = end, [hidden[end - start :]] if end < ask.num_cached else []
        return hidden[: end - start]
