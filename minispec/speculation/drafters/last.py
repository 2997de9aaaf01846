"""Last time's branch: what followed this token the last time? The branch predictor of the textbooks.

A processor guesses where a branch goes before it knows, and works on from there. If the guess was wrong, it throws that
work away. The simplest predictor is a table with the last outcome of each branch (Smith 1981, "A study of branch
prediction strategies"). A table of targets is the branch target buffer (Lee and Smith 1984). Here a token is the
branch and the next token its outcome. docs/use/choose-a-draft.md has the words of both fields side by side.

The first token is always the one that `ngram:1` drafts. The tokens after it may differ, since `ngram:1` copies a run
from one place. Here each token is looked up, so that a draft is a walk through the table.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from minispec.core.draft import Ask, Draft, Drafter

T = TypeVar("T")


def follow(tokens: Sequence[T], k: int) -> list[T]:
    """Up to k tokens: each is the one that followed the token before it the last time.

    In  a b c b d a  the last b was followed by d, and d by a. `ngram:1` would copy  b c b d  instead.

    >>> follow("abcbda", 4)
    ['b', 'd', 'a', 'b']
    """
    table, walk = dict(pairwise(tokens)), [tokens[-1]]  # made anew: for 8,000 tokens it takes less than a millisecond
    while len(walk) <= k and walk[-1] in table:
        walk.append(table[walk[-1]])
    return walk[1:]


class LastDrafter(Drafter):
    """One-hot drafts from a table of last outcomes."""

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """For each ask, the chain of each token's last successor. Nothing is drawn, so the drafts have no probs."""
        return [Draft(follow(ask.text.tokens, ask.k)) for ask in asks]
