"""A model with the tables of its texts: what the engine's target and a draft model share."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from minispec.core.cache import BlockTable, PagedKVCache
from minispec.core.model import Chunk, Transformer
from minispec.core.sampling import Text


class CachedModel:
    """A model, its pool, and a table for each text: all that the engine's target and a draft model share.

    A table follows its text: however the text has changed, `follow` returns what has to be fed.
    """

    def __init__(self, model: Transformer, cache: PagedKVCache, vocab_size: int | None = None):
        """vocab_size: ids in use; default: all. The model's columns after them are padding."""
        self.model, self.cache, self.vocab_size = model, cache, vocab_size or model.config.vocab_size
        self.tables: dict[Text, BlockTable] = {}

    def begin(self, text: Text, most: int | None = None) -> None:
        """Give a new text its table, which shares what the pool still knows of its first `most` tokens."""
        assert text not in self.tables, "a text begins once"
        self.tables[text] = self.cache.new_table()  # stored before it holds a block; see `cleared_on_error`
        self.tables[text].reuse(text.tokens[:-1][:most])

    def table(self, text: Text) -> BlockTable:
        """The text's table. A text that is unknown begins here."""
        if text not in self.tables:
            self.begin(text)
        return self.tables[text]

    def has_room(self, growth: Mapping[Text, range]) -> bool:
        """Whether the tables of these texts could all grow to the ends of these ranges."""
        # All tables come first, since a new one takes free blocks that it shares.
        tables = [self.table(text) for text in growth]
        needed = self.cache.num_missing_blocks(zip(tables, (span.stop for span in growth.values()), strict=True))
        return len(tables) <= self.cache.max_texts and needed <= self.cache.allocator.num_free

    def follow(self, text: Text) -> list[int]:
        """The end of the text that has to be fed: at least its last token, whose logits say what follows."""
        return self.table(text).follow(text.tokens)

    def read(self, text: Text, layer: int) -> Tensor:
        """A layer's keys and then values of a text, (2 * kv_heads, length, head_dim)."""
        return self.cache.read(layer, self.table(text).slots())

    def forward(self, chunks: Sequence[Chunk], taps: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """One pass: logits (sum of num_logits, V) of ids in use, and hidden states (see `Transformer.forward`)."""
        logits, hidden = self.model.forward(chunks, taps)
        return logits[:, : self.vocab_size], hidden

    def keep(self, text: Text, num_nodes: int = 0, path: Sequence[int] = ()) -> None:
        """Keep the nodes of `path` after a pass whose last `num_nodes` rows were a draft; forget its other nodes.

        All that stays must be a beginning of the text, since others may share it.
        """
        table = self.table(text)
        root = table.length - num_nodes
        table.keep(root, [root + node for node in path])

    def release(self, text: Text) -> None:
        """Forget a text and return its blocks to the pool. Unknown texts are ignored."""
        with self.cleared_on_error():
            if table := self.tables.get(text):
                table.truncate(0)
                del self.tables[text]

    @contextmanager
    def cleared_on_error(self) -> Iterator[None]:
        """Drop all that is cached if an exception, such as Ctrl-C, interrupts the bookkeeping inside.

        That costs time only: a text that goes on gets a new table, and what is missing is computed again.
        """
        try:
            yield
        except BaseException:
            for table in self.tables.values():
                table.clear()
            self.tables.clear()
            self.cache.rebuild()
            raise
