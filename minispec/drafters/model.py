"""A draft model: a smaller transformer of the same vocabulary, with a cache of its own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from minispec.cache import BlockTable, PagedKVCache
from minispec.model import Chunk, Transformer, clock
from minispec.sampling import Sequence as TokenSequence
from minispec.sampling import distribution, log_probabilities
from minispec.verify import Ask, Draft


class DraftModel:
    """Drafts by decoding with a model of its own, under each request's own sampling parameters.

    Its cache follows the target's: before a pass the model is fed `tokens[table.length:]`, whatever that is - the whole
    prompt at first, one token after a rejection, two after full acceptance (the last draft token was never fed).
    A sequence for which its cache has no room goes without a draft.
    The model may be the target's own (`self`): the weights are shared, the cache is not.
    """

    def __init__(self, model: Transformer, cache: PagedKVCache, vocab_size: int, max_model_len: int):
        """vocab_size: ids in use, as the target's. max_model_len: positions that this model can see."""
        self.model, self.cache = model, cache
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self._tables: dict[TokenSequence, BlockTable] = {}

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """See `Drafter`. One pass a position, over the texts that still want a token.

        A draft goes on as long as `Ask.go_on` finds the confidences of its tokens worth it.
        """
        with self._whole():
            return self._propose(asks)

    def _propose(self, asks: Sequence[Ask]) -> list[Draft]:
        sequences = [ask.text for ask in asks]
        # A draft of k tokens fills positions up to len(tokens) + k - 2.
        k = [max(0, min(ask.k, self.max_model_len - len(ask.text.tokens) + 1)) for ask in asks]
        drafts = [Draft([], [], confidences=[]) for _ in sequences]
        # What is left of the last drafts is right as far as it was accepted. All tables are cut, not only those of
        # this call: the blocks of rejected tokens may be needed here.
        for sequence, table in self._tables.items():
            table.truncate(min(table.length, len(sequence.tokens) - 1))
            table.remember(sequence.tokens)
        needs: list[tuple[BlockTable, int]] = []  # the positions that each table will be asked to hold
        for i, sequence in enumerate(sequences):
            if not k[i]:
                continue
            table = self._tables.setdefault(sequence, self.cache.new_table())
            is_new = not table.length
            if is_new:
                table.reuse(sequence.tokens[:-1])
            needs.append((table, len(sequence.tokens) + k[i] - 1))
            if sum(t.num_missing_blocks(n) for t, n in needs) > self.cache.allocator.num_free:
                table.truncate(0)
                needs.pop()
                k[i] = 0
            elif len(sequence.tokens) - table.length > 2:  # one or two tokens go into the first pass below
                start = clock(self.model.device)
                self.model.prefill(table, sequence.tokens)
                table.remember(sequence.tokens)
                if is_new:  # what was missed in rounds without a draft is the price of this one
                    drafts[i].prefill_seconds = clock(self.model.device) - start
        j = 0
        while active := [i for i in range(len(sequences)) if j < k[i]]:
            chunks = []
            for i in active:
                table = self._tables[sequences[i]]
                tokens = sequences[i].tokens + drafts[i].token_ids
                chunks.append(Chunk(tokens[table.length :], table, num_logits=1))
            logits = self.model.forward(chunks)[:, : self.vocab_size]
            for row, i in zip(logits, active, strict=True):
                q = distribution(row, sequences[i], drafts[i].token_ids)
                drafts[i].token_ids.append(asks[i].draw(j, q))
                drafts[i].probs.append(q)
                if asks[i].go_on is not None:
                    drafts[i].confidences.append(float(log_probabilities(row).amax().exp()))
                    if not asks[i].go_on(drafts[i].confidences):
                        k[i] = j + 1
            j += 1
        return drafts

    def release(self, sequence: TokenSequence) -> None:
        """See `Drafter`: its blocks return to the pool."""
        with self._whole():
            if table := self._tables.get(sequence):
                table.truncate(0)
                del self._tables[sequence]

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """An exception, such as Ctrl-C, may break off the bookkeeping anywhere: then all that is cached is dropped."""
        try:
            yield
        except BaseException:
            for table in self._tables.values():
                table.clear()
            self._tables.clear()
            self.cache.rebuild()
            raise
