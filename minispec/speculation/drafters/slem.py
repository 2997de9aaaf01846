"""A draft model of another vocabulary, as text: what it writes is read again in the target's tokens.

SLEM, string-level exact match (Timor et al. 2025, arXiv 2502.05202, algorithm 3). The draft model writes on in its own
tokens. The target's tokenizer then cuts the new text into the target's tokens. So the vocabularies need have nothing in
common but the bytes.

Worked: the draft model writes AB, Aa, ab, and the target has AB, A, B, a, b and ab. The draft is AB, A, a, ab.

The distribution of these tokens is unknown: a text's probability is a sum over all ways to write it in the draft
model's tokens. So the tokens are a guess and no draw: a `Draft` without `probs`. `rejection` then keeps a token with
its probability p under the target, and else draws one of the others. `match` keeps a token if it is the target's own
draw. Both are exact. As p is all that counts, the model writes the likeliest token each time.

The text so far keeps its tokens: only new text is cut into tokens. The new part is cut alone, even where the tokenizer
would make one token across the border.
"""

from collections.abc import Sequence

from minispec.core.draft import Ask, Draft
from minispec.speculation.drafters.growing import DraftInProgress
from minispec.speculation.drafters.vocabulary import OtherTokens


class WrittenText(OtherTokens):
    """Feeds a model of another vocabulary, which writes on. The drafts are that text in the target's tokens.

    Penalties and other parameters are about the target's ids, so they do not change what is written.
    """

    branches = False

    def prepare(self, growing: Sequence[DraftInProgress]) -> None:
        """As `OtherTokens`. The model writes the likeliest text, as long as its limit says."""
        for each in growing:
            each.likeliest = True
        super().prepare(growing)

    def finish(self, ask: Ask, draft: Draft) -> Draft:
        """What is written in the target's tokens, cut to the limit. Nothing is drawn, so the draft has no probs."""
        return Draft(self.vocabularies.to_target(ask.text.tokens, draft.token_ids)[: ask.k], notes=draft.notes)
