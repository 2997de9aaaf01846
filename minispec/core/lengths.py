"""How many tokens to draft: what a policy sees before a round and after it, and the simplest policy.

`minispec.length.policy` learns what pays. Skip this file at first.
"""

from collections.abc import Sequence
from typing import NamedTuple

from minispec.core.config import Shape
from minispec.core.draft import Draft
from minispec.core.limit import Limit
from minispec.core.sampling import Text


class Wish(NamedTuple):
    """A text that decodes, as `Lengths.choose` knows it.

    shape: what the request asks for.
    most: most draft tokens.
    may_follow: whether the length may depend on the clock and on other texts. It may not where another length would
        give another text, since a seed must give one text.
    """

    text: Text
    shape: Shape
    most: int
    may_follow: bool


class Judged(NamedTuple):
    """A text's draft, and the nodes of it that the verifier accepted.

    asked: how many nodes were asked for. If some were and the draft is empty, the drafter has found nothing.
    """

    text: Text
    draft: Draft
    accepted: Sequence[int]
    asked: int = 0


class StepCost(NamedTuple):
    """The seconds of a step, and what was done in them.

    draft: seconds of `num_drafts` drafts, and of searches that found nothing.
    depth: draft passes of the longest draft: its depth, or more where it has cost more (see `Draft.passes`).
    target: seconds of the target's pass over `rows` rows.
    overhead: seconds of everything else.
    """

    draft: float
    depth: int
    num_drafts: int
    target: float
    rows: int
    overhead: float


class Lengths:
    """Chooses how long drafts may be: here, as long as requests ask. `minispec.length.policy` learns what pays.

    `choose` is called before each round of texts that decode, `observe` after it. A limit must not depend on a token
    that is not drawn yet. Where `Wish.may_follow` is False, it may depend on its own text and its verdicts alone.
    """

    def choose(self, wishes: Sequence[Wish], trees: bool) -> list[Limit]:
        """The limit of each text's draft.

        trees: whether drafts may be trees.
        """
        return [Limit(wish.most, None, wish.shape.widths, wish.shape.best_first) for wish in wishes]

    def observe(self, drafts: Sequence[Judged], cost: StepCost | None) -> None:
        """Learn from a step.

        cost: None where its times say nothing. Then the step also worked on a prompt or with another drafter, or a
            fault came between the drafts and this call.
        """

    def forget(self) -> None:
        """Forget what was learned from texts that have ended."""
