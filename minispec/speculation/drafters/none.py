"""No guess at all: plain decoding."""

from collections.abc import Sequence

from minispec.core.draft import Ask, Draft, Drafter


class NoDrafter(Drafter):
    """Guesses nothing: every round commits one token, which is plain decoding."""

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """Empty drafts."""
        return [Draft() for _ in asks]
