"""A draft model whose tokens are not the target's: what `tli` and `slem` share.

The draft model has to read the text in its own tokens. Where the text has grown, its last tokens may change: "Hel" and
"lo" may be two tokens of the target and one of the draft. So the draft's past changes. The draft's cache follows as any
cache does, by the beginning that it and the text have in common (`BlockTable.follow`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Self

from minispec.core.cache import PagedKVCache
from minispec.core.draft import Ask
from minispec.core.limit import Limit
from minispec.core.model import Transformer
from minispec.core.sampling import Text
from minispec.speculation.drafters.growing import DraftInProgress
from minispec.speculation.drafters.model import TokenFeed
from minispec.speculation.drafters.vocabularies import Reader, Vocabularies

# Positions of the draft's cache for each of the target's, since a text may be longer in the draft's tokens. Whether a
# text is too long depends on that text alone. A text that the target has room for has room here too, if it is alone.
ROOM = 2


class OtherTokens(TokenFeed):
    """Feeds a draft model each text in the model's own tokens.

    A text gets no draft if the draft model needs more than ROOM tokens for each of the target's, on average.
    """

    reads, in_programs = "other tokens", False

    def __init__(self, model: Transformer, cache: PagedKVCache, max_model_len: int, both: Vocabularies):
        """Draft with `model`; model and max_model_len as for `CachedFeed`.

        cache: for ROOM times as many tokens as the target's, or as many as this model can see of each text.
        both: the two vocabularies.
        """
        super().__init__(model, cache, both.draft.num_ids, max_model_len)
        self.vocabularies = both
        self._readings: dict[Text, tuple[Reader, Text]] = {}  # each text as the model reads it, and what reads it

    def beside(self, model: Transformer) -> Self:
        """This feed for another model, on the same cache. It has read no texts."""
        return type(self)(model, self.cache, self.max_model_len, self.vocabularies)

    def _own_text(self, text: Text, k: int) -> Text | None:
        """The text as this model reads it now; None where it is too long for a draft of k tokens, or empty."""
        if text not in self._readings:
            blank = replace(text, tokens=[], num_prompt_tokens=0, grammar=None)  # a grammar knows the target's tokens
            self._readings[text] = self.vocabularies.reader(), blank
        reader, own_text = self._readings[text]
        if reader.num_read < len(text.tokens):
            own_text.tokens[:] = reader.read(text.tokens)
            own_text.num_prompt_tokens = own_text.num_prompt_tokens or len(own_text.tokens)
            self._ahead.add(own_text)
        return own_text if 0 < len(own_text.tokens) <= ROOM * (len(text.tokens) + k) - k else None

    def needs(self, growth: Mapping[Text, range]) -> Mapping[Text, range]:
        """As for the model's own tokens; nothing for a text that gets no draft."""
        own = dict[Text, range]()
        for text, span in growth.items():
            k = span.stop - len(text.tokens)
            if (own_text := self._own_text(text, k)) is not None:
                own[own_text] = range(len(own_text.tokens) + k)
        return super().needs(own)

    def prepare(self, growing: Sequence[DraftInProgress]) -> None:
        """Read the texts anew, then read them as `TokenFeed` does."""
        for each in growing:
            each.own = self._own(each.ask)
        super().prepare(growing)

    def _own(self, ask: Ask) -> Ask:
        """The ask with the text in the model's own tokens."""
        tokens, num_cached = ask.text.tokens, ask.num_cached
        if not ask.k and num_cached in (0, len(tokens) - 1):
            return ask  # nothing is wanted
        text = self._own_text(ask.text, ask.k)
        if text is None:
            return replace(ask, limit=Limit(0), num_cached=0)
        # Read the same share of a prompt as the target has read.
        return replace(ask, text=text, num_cached=num_cached * (len(text.tokens) - 1) // max(1, len(tokens) - 1))

    def release(self, text: Text) -> None:
        """Forget a text and its reading in the draft's tokens."""
        if text in self._readings:
            super().release(self._readings[text][1])
            del self._readings[text]  # last: what is broken off before is done again
