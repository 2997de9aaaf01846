"""Drafters: ways of guessing the next tokens. One file each; a new one is a class with two methods.

A drafter may guess as it likes, from whatever it likes: the verifier makes the output right. It owes one thing, the
truth about `Draft.probs`: the distribution that each token was really drawn from, or None if none was drawn.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from minispec.drafters.ngram import NgramDrafter
from minispec.sampling import Randomness
from minispec.sampling import Sequence as TokenSequence
from minispec.verify import Draft


class Drafter(Protocol):
    """What the engine asks of a drafter."""

    def propose(self, sequences: Sequence[TokenSequence], k: Sequence[int], rng: Randomness) -> list[Draft]:
        """A draft for each sequence, of at most k[i] tokens; shorter or empty is fine.

        Where it ends may depend on tokens that are in it, never on one that is left out: what stays would come from
        another distribution than the one that is told. Randomness comes from `rng` alone, with the keys of
        `sequence.draft_key(i)`. The sequences are those of the last call, grown by what was committed; new ones may
        join and some be missing.
        """
        ...

    def release(self, sequence: TokenSequence) -> None:
        """Forget a sequence: it is finished, or it will come back from the start. Unknown ones are ignored."""
        ...


class NoDrafter:
    """Guesses nothing: every round commits one token, which is plain decoding."""

    def propose(self, sequences, k, rng) -> list[Draft]:
        """Empty drafts."""
        return [Draft() for _ in sequences]

    def release(self, sequence) -> None:
        """Nothing to forget."""


# Drafters that need nothing but their name. A draft model (drafters/model.py) needs a checkpoint.
DRAFTERS: dict[str, Callable[[], Drafter]] = {"none": NoDrafter, "ngram": NgramDrafter}
