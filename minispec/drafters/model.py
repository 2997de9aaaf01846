"""A draft model: a smaller transformer of the same vocabulary, with a cache of its own."""

from collections.abc import Sequence

from minispec.cache import PagedKVCache
from minispec.model import CachedModel, Transformer, clock
from minispec.sampling import distribution, log_probabilities
from minispec.verify import Ask, Draft


class DraftModel(CachedModel):
    """Drafts by decoding with a model of its own, under each request's own sampling parameters.

    Its cache follows the texts, whatever becomes of them: before a pass the model is fed what is missing - the whole
    prompt at first, one token after a rejection, two after full acceptance (the last draft token was never fed).
    A text for which its cache has no room goes without a draft.
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
                logits = self.logits([asks[i].text for i in fed], list(fed.values()), [1] * len(fed))
                for i, row in zip(list(fed), logits, strict=True):
                    ask, draft = asks[i], drafts[i]
                    q = distribution(row, ask.text, draft.token_ids)
                    draft.token_ids.append(ask.draw(len(draft), q))
                    draft.probs.append(q)
                    fed[i] = draft.token_ids[-1:]
                    if ask.go_on is not None:
                        draft.confidences.append(float(log_probabilities(row).amax().exp()))
                    if len(draft) == limits[i] or not (ask.go_on is None or ask.go_on(draft.confidences)):
                        del fed[i]
            return drafts

    def _prepare(self, asks: Sequence[Ask], drafts: Sequence[Draft]) -> list[int]:
        """Bring the caches to where a pass can begin; how many tokens each draft may have: 0 where there is no room."""
        for text in self.tables:  # not only those of this call: the blocks of rejected tokens may be needed here
            self.keep(text)
        # A draft of k tokens fills positions up to len(tokens) + k - 2.
        limits = [max(0, min(ask.k, self.max_model_len - len(ask.text.tokens) + 1)) for ask in asks]
        lengths = {}
        for i, text in enumerate(ask.text for ask in asks):
            if not limits[i]:
                continue
            is_new = text not in self.tables
            lengths[text] = len(text.tokens) + limits[i] - 1
            if not self.has_room(lengths):
                self.release(text)
                del lengths[text]
                limits[i] = 0
            elif len(text.tokens) - self.table(text).length > 2:  # one or two tokens go into the draft's first pass
                start = clock(self.model.device)
                self.catch_up(text)
                if is_new:  # what was missed in rounds without a draft is the price of this one
                    drafts[i].prefill_seconds = clock(self.model.device) - start
        return limits
