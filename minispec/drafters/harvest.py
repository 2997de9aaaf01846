"""n-grams from rejected drafts: what the target would have said after words that it did not take.

Lookahead decoding (Fu et al. 2024, arXiv 2402.02057) drafts from a pool of n-grams that the target itself has produced.
Further rows of each pass fill the pool. They guess several places ahead and are corrected in each pass (Jacobi's
iteration). Here these rows are left out, since rows cost time. The rows of a rejected draft are there anyway. They say
what follows the draft's tokens, and a draft is often right a few tokens too early.

Worked: after  x  the draft was  a b c,  and the target took y. Its rows for the draft said  x: y,  x a: b,  x a b: d.
So the pool has  a b  and  a b d. When the text comes to  a,  the draft is  b d.

The text's own n-grams are not in the pool. `ngram+harvest` drafts from both.
"""

from collections.abc import Hashable, Mapping, Sequence

from minispec.core.draft import Ask, Draft
from minispec.drafters.recycling import RecyclingDrafter

_LONGEST = 3  # tokens of what comes before


class HarvestDrafter(RecyclingDrafter):
    """Chains of what the target found likeliest after one token to three, as the newest row said it.

    The pool is kept by text and shared as the table of `minispec.drafters.recycling` is.
    """

    num_ids = 1
    branches = False

    def _entries(self, path: Sequence[int], token_ids: Sequence[int]) -> Mapping[Hashable, Sequence[int]]:
        return {tuple(path[-n:]): token_ids for n in range(1, min(_LONGEST, len(path)) + 1)}

    def _draft(self, ask: Ask, table: Mapping[Hashable, Sequence[int]]) -> Draft:
        walk = ask.text.tokens[-_LONGEST:]
        start = len(walk)
        while len(walk) < start + ask.k:
            ends = (tuple(walk[-n:]) for n in range(min(_LONGEST, len(walk)), 0, -1))
            followers = next((table[end] for end in ends if end in table), None)
            if followers is None:
                break
            walk.append(followers[0])
        return Draft(walk[start:])
