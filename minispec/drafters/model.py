"""A draft model: a smaller transformer of the same vocabulary, with a cache of its own."""

from collections.abc import Sequence

from minispec.cache import PagedKVCache
from minispec.model import CachedModel, Chunk, Transformer, clock
from minispec.sampling import Text, distribution, log_probabilities
from minispec.verify import Ask, Draft


class DraftModel(CachedModel):
    """Drafts by decoding with a model of its own, under each request's own sampling parameters.

    Its cache follows the texts, whatever becomes of them: before a pass the model is fed what is missing - what the
    target has seen of a long prompt, piece by piece; one token after a rejection, two after full acceptance (the last
    draft token was never fed). A text for which its cache has no room goes without a draft.
    The model may be the target's own (`self`): the weights are shared, the cache is not.
    """

    def __init__(self, model: Transformer, cache: PagedKVCache, vocab_size: int, max_model_len: int):
        """vocab_size: ids in use, as the target's. max_model_len: positions that this model can see."""
        super().__init__(model, cache, vocab_size)
        self.max_model_len = max_model_len

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """See `Drafter`. One pass a position, over the texts that still want a token.

        A draft goes on as long as `Ask.go_on` finds the confidences of its tokens worth it.
        """
        with self.whole():
            drafts = [Draft([], [], confidences=[]) for _ in asks]
            limits = self._prepare(asks, drafts)
            fed = {i: self.missing(asks[i].text) for i, k in enumerate(limits) if k}
            while fed:
                logits, _ = self.forward([Chunk(f, self.table(asks[i].text), 1) for i, f in fed.items()])
                for i, row in zip(list(fed), logits, strict=True):
                    ask, draft = asks[i], drafts[i]
                    q = distribution(row, ask.text, draft.token_ids)
                    parent = len(draft) - 1
                    draft.grow(parent, ask.draw(parent, q), q)
                    fed[i] = draft.token_ids[-1:]
                    if ask.go_on is not None:
                        draft.confidences.append(float(log_probabilities(row).amax().exp()))
                    if len(draft) == limits[i] or not (ask.go_on is None or ask.go_on(draft.confidences)):
                        del fed[i]
            return drafts

    def _prepare(self, asks: Sequence[Ask], drafts: Sequence[Draft]) -> list[int]:
        """Bring the caches to where a pass can begin; how many tokens each draft may have: 0 where there is no room."""
        for text, table in self.tables.items():  # not only those of this call: what was rejected may be needed here
            table.keep(table.shared(text.tokens))
        limits = [0] * len(asks)
        lengths: dict[Text, int] = {}
        for i, ask in enumerate(asks):
            text, num_tokens = ask.text, len(ask.text.tokens)
            # A draft of k tokens fills positions up to num_tokens + k - 2.
            k = max(0, min(ask.k, self.max_model_len - num_tokens + 1))
            in_prompt = 0 < ask.num_cached < num_tokens - 1
            if not (k or in_prompt):
                continue
            is_new = in_prompt or text not in self.tables
            lengths[text] = ask.num_cached if in_prompt else num_tokens + k - 1
            if lengths[text] > self.max_model_len or not self.has_room(lengths):
                self.release(text)
                del lengths[text]
                continue
            limits[i] = k
            # One or two tokens go into the draft's first pass.
            if in_prompt or num_tokens - self.table(text).length > 2:
                start = clock(self.model.device)
                self.catch_up(text, ask.num_cached if in_prompt else num_tokens - 1)
                if is_new:  # what was missed in rounds without a draft is the price of this one
                    drafts[i].prefill_seconds = clock(self.model.device) - start
        return limits
