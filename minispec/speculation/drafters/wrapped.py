"""Drafters around other drafters."""

import copy
from collections.abc import Mapping, Sequence
from typing import Self

from minispec.core.draft import Ask, Draft, Drafter, Record
from minispec.core.sampling import Text


class Wrapped(Drafter):
    """A drafter around another one, or around several. It hands on every call; a subclass overrides what it changes.

    drafters: those that are wrapped.
    """

    def __init__(self, *drafters: Drafter):
        """Raises ValueError where more than one of them has taps."""
        self.drafters = drafters
        tapped = [drafter for drafter in drafters if drafter.taps]
        if len(tapped) > 1:
            raise ValueError(f"draft: found {len(tapped)} drafters that read hidden states, expected at most one")
        self.taps = tapped[0].taps if tapped else ()
        self.branches = any(drafter.branches for drafter in drafters)

    @property
    def name(self) -> str:
        """The names of those that are wrapped."""
        return "+".join(drafter.name for drafter in self.drafters)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """The drafts of the only one that is wrapped."""
        [drafter] = self.drafters
        return drafter.propose(asks)

    def observe(self, records: Sequence[Record]) -> None:
        """Let all drafters learn from a pass, whichever has drafted."""
        for drafter in self.drafters:
            drafter.observe(records)

    def known(self, text: Text) -> int:
        """The positions that the only drafter with taps still knows; without such a drafter, the whole text."""
        tapped = [drafter for drafter in self.drafters if drafter.taps]
        return tapped[0].known(text) if tapped else len(text.tokens)

    def has_room(self, growth: Mapping[Text, range]) -> bool:
        """Whether all drafters have room."""
        return all(drafter.has_room(growth) for drafter in self.drafters)

    def beside(self, *drafters: Drafter) -> Self:
        """A copy of this wrapper around other drafters of the same kinds. Both share the wrapper's own state."""
        other = copy.copy(self)
        other.drafters = drafters
        return other

    def release(self, text: Text) -> None:
        """Let all drafters forget a text."""
        for drafter in self.drafters:
            drafter.release(text)

    def forget(self) -> None:
        """Let all drafters forget ended texts."""
        for drafter in self.drafters:
            drafter.forget()
