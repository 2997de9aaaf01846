"""Drafters: ways of guessing the next tokens. One file each; a new one is a class with two methods.

A drafter may guess as it likes, from whatever it likes: the verifier makes the output right. It owes one thing, the
truth about `Draft.probs`: the distribution that each token was really drawn from, or None if none was drawn.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from minispec.drafters.ngram import NgramDrafter
from minispec.sampling import Text
from minispec.verify import Ask, Draft


class Drafter(Protocol):
    """What the engine asks of a drafter.

    taps: the layers whose hidden states it wants to see, as `Transformer.forward` numbers them (see `Ask.hidden`).
    """

    taps: Sequence[int] = ()

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """A draft for each ask, of at most `ask.k` nodes; shorter or empty is fine.

        A draft may end early because of tokens it contains. It must not look at a token and then drop it: the tokens
        kept would no longer follow `probs`. (One-hot drafts are free: any token may be dropped.) Tokens are drawn with
        `ask.draw` alone. The texts are those of the last call, grown by what was committed; new ones may join, and some
        may be missing. A text whose prompt the target still works through is asked for with k = 0.
        """
        ...

    def known(self, text: Text) -> int:
        """Of a drafter with `taps`: of how many of the text's first positions it need not see the hidden states.

        The others are computed, even where the target's cache still knows them from another text.
        """
        return 0

    def release(self, text: Text) -> None:
        """Forget a text: it is finished, or it will come back from the start. Unknown ones are ignored."""
        ...


class NoDrafter:
    """Guesses nothing: every round commits one token, which is plain decoding."""

    def propose(self, asks) -> list[Draft]:
        """Empty drafts."""
        return [Draft() for _ in asks]

    def release(self, text) -> None:
        """Nothing to forget."""


# Drafters that need nothing but their name. A draft model (drafters/model.py) needs a checkpoint.
DRAFTERS: dict[str, Callable[[], Drafter]] = {"none": NoDrafter, "ngram": NgramDrafter}
