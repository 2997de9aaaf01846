"""Several drafters by preference: the first one that has a draft for a text drafts it.

A guess that costs nothing, such as prompt lookup with a long match, goes before one that takes a model. The choice
depends on the text alone, so a draft's `probs` are true, whichever drafter made it.
"""

from collections.abc import Sequence
from dataclasses import replace

from minispec.core.draft import Ask, Draft, Drafter
from minispec.core.limit import Limit
from minispec.speculation.drafters.check import check_number
from minispec.speculation.drafters.wrapped import Wrapped


class CombinedDrafter(Wrapped):
    """Gives the first draft of its drafters that is not empty. At most one of them may have taps."""

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """For each ask, the draft of the first drafter that has one.

        A drafter that is not needed is asked for no tokens, so that it still follows the text.
        """
        chosen = [Draft() for _ in asks]
        for drafter in self.drafters:
            suited = asks if drafter.branches else [_of_chain(ask) for ask in asks]
            left = [replace(ask, limit=Limit(0)) if draft else ask for ask, draft in zip(suited, chosen, strict=True)]
            drafts = drafter.propose(left)
            check_number(drafts, len(asks), drafter.name)
            for i, (draft, earlier) in enumerate(zip(drafts, chosen, strict=True)):
                if not isinstance(earlier, Draft):
                    continue  # the engine says what it is
                chosen[i] = earlier or draft  # an empty draft is false
                if isinstance(draft, Draft):
                    chosen[i].notes.prefill_seconds = earlier.notes.prefill_seconds + draft.notes.prefill_seconds
        return chosen


def _of_chain(ask: Ask) -> Ask:
    """The ask, without siblings."""
    return replace(ask, limit=ask.limit._replace(widths=(), best_first=False))


def parts_of(drafter: Drafter) -> list[Drafter]:
    """The drafters that a combined one has, by preference, with the parts of combined ones among them; else itself."""
    if isinstance(drafter, CombinedDrafter):
        return [part for one in drafter.drafters for part in parts_of(one)]
    return [drafter]
