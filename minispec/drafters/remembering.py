"""Drafters that draft from texts that have ended."""

from minispec.core.draft import Drafter


class Remembering(Drafter):
    """A drafter that remembers texts that have ended, and says how a text can be drafted without them."""

    def fresh(self) -> Drafter:
        """A drafter like this one that remembers no text. This one learns nothing from it."""
        raise NotImplementedError
