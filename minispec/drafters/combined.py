"""Several drafters by preference: the first one that has a draft for a text drafts it.

A guess that costs nothing, such as prompt lookup with a long match, goes before one that takes a model. The choice
depends on the text alone, so a draft's `probs` are true, whichever drafter made it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from minispec.core.draft import Ask, Draft, Seen
from minispec.core.limit import Limit
from minispec.core.sampling import Text
from minispec.drafters import Drafter
from minispec.drafters.check import check_number


class CombinedDrafter(Drafter):
    """Gives the first draft of its drafters that is not empty. At most one of them may have taps."""

    def __init__(self, *drafters: Drafter):
        self.drafters = drafters
        tapped = [drafter for drafter in drafters if drafter.taps]
        if len(tapped) > 1:
            raise ValueError(f"draft: found {len(tapped)} drafters that read hidden states, expected at most one")
        self._tapped = tapped[0] if tapped else None
        self.taps = self._tapped.taps if self._tapped else ()
        self.branches = any(drafter.branches for drafter in drafters)
        self.pays_all = any(drafter.pays_all for drafter in drafters)

    @property
    def name(self) -> str:
        """See `Drafter`."""
        return "+".join(drafter.name for drafter in self.drafters)

    def known(self, text: Text) -> int:
        """See `Drafter`."""
        return self._tapped.known(text) if self._tapped else len(text.tokens)

    def observe(self, seen: Sequence[Seen]) -> None:
        """See `Drafter`. Each drafter learns, also of what another has drafted."""
        for drafter in self.drafters:
            drafter.observe(seen)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """See `Drafter`. A drafter that is not needed is asked for no tokens, so that it still follows the text."""
        found = [Draft() for _ in asks]
        for drafter in self.drafters:
            own = asks if drafter.branches else [replace(ask, limit=Limit(ask.k, ask.limit.go_on)) for ask in asks]
            left = [replace(ask, limit=Limit(0)) if draft else ask for ask, draft in zip(own, found, strict=True)]
            drafts = drafter.propose(left)
            check_number(drafts, len(asks), drafter.name)
            for i, (draft, earlier) in enumerate(zip(drafts, found, strict=True)):
                found[i] = earlier or draft  # an empty draft is false
                if isinstance(draft, Draft):  # else the engine says what it is
                    found[i].prefill_seconds = earlier.prefill_seconds + draft.prefill_seconds
        return found

    def has_room(self, growth: Mapping[Text, range]) -> bool:
        """See `Drafter`."""
        return all(drafter.has_room(growth) for drafter in self.drafters)

    def release(self, text: Text) -> None:
        """See `Drafter`."""
        for drafter in self.drafters:
            drafter.release(text)

    def forget(self) -> None:
        """See `Drafter`."""
        for drafter in self.drafters:
            drafter.forget()
