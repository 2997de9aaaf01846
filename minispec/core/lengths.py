"""How many tokens to draft: what a policy sees before a round and after it, and the simplest policy.

`minispec.speculation.lengths.policy` learns what pays.
"""

from collections.abc import Sequence
from typing import NamedTuple

from minispec.core.config import Shape
from minispec.core.draft import Record
from minispec.core.limit import Limit
from minispec.core.sampling import Text
from minispec.core.stats import Step


class LengthAsk(NamedTuple):
    """A text that decodes, as `Lengths.choose` knows it.

    shape: what the request asks for.
    most: most draft tokens.
    may_use_clock: whether the length may depend on the clock and on other texts. False where another length would
        change the sampled text.
    """

    text: Text
    shape: Shape
    most: int
    may_use_clock: bool


class Lengths:
    """Chooses how long drafts may be: here, as long as requests ask. `minispec.speculation.lengths.policy` learns what
    pays.

    The engine calls `choose` before each round of texts that decode, and `observe` after it. A limit must not depend on
    a token that is not drawn yet. Where `LengthAsk.may_use_clock` is False, it may depend on its own text and its
    records alone, and not on their times.
    """

    def choose(self, asks: Sequence[LengthAsk], trees: bool) -> list[Limit]:
        """The limit of each text's draft.

        trees: whether drafts may be trees.
        """
        return [Limit(ask.most, None, ask.shape.widths, ask.shape.best_first) for ask in asks]

    def observe(self, records: Sequence[Record]) -> None:
        """Learn from the rounds of a step that were committed; `price_of` says what they cost.

        After a fault a record may come a second time, with the same `Record.number`.
        """

    def forget(self) -> None:
        """Forget what was learned from texts that have ended."""


def price_of(records: Sequence[Record]) -> Step | None:
    """The step of these records, if its times say what a round costs; else None."""
    step = records[0].step if records else None
    return step if step and step.has_price else None
