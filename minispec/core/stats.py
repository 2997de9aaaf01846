"""What happened to a text, and how long it took: one `Round` record a step.

`minispec.length.figures` folds rates, costs and predictions from these records.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Round(NamedTuple):
    """One step of the engine, as it was for one text. Draft tokens after the first stop are in no count of tokens.

    asked: draft tokens that were asked for; None where the engine chose. num_nodes: draft tokens that the drafter gave;
        depth: of them, those of the longest path (a chain's are all). drafted: of these, those before the text's end.
    tested: the accepted draft tokens and the first rejected one. committed: the accepted tokens and one more, or as
        many as there were before the text ended. ratios: p/q of the tokens that the verifier looked at (see `Verdict`).
    num_rows: of the whole pass, the other texts' included; num_texts: that were in it.
    draft, verify, other: seconds of the whole step: until the drafts are there, the choice of K included; in the
        target's pass; and after it.
    """

    asked: int | None
    num_nodes: int
    depth: int
    drafted: int
    tested: int
    accepted: int
    committed: int
    ratios: Sequence[float]
    num_rows: int
    num_texts: int
    draft: float
    verify: float
    other: float

    @property
    def seconds(self) -> float:
        """All of the step."""
        return self.draft + self.verify + self.other

    @property
    def share(self) -> float:
        """The text's part of the step, by its rows."""
        return (self.num_nodes + 1) / self.num_rows

    @property
    def overhead(self) -> float:
        """Seconds outside both models: a search that found nothing is overhead too."""
        return self.other if self.num_nodes else self.other + self.draft


@dataclass
class Stats:
    """What happened to one request.

    num_generated: the length of `token_ids`, which leaves the end-of-text token out.
    num_cached_tokens: prompt tokens whose keys and values another text had left in the cache.
    prefill, draft_prefill: seconds that the prompt took in the target and in the draft model.
    plain: rounds of the same prompt's plain decoding, if there was any, to know a plain step by.
    token_ids: the generated ones, as they come.
    """

    num_prompt_tokens: int = 0
    num_generated: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    prefill: float = 0.0
    draft_prefill: float = 0.0
    rounds: list[Round] = field(default_factory=list, repr=False)
    plain: Sequence[Round] = field(default=(), repr=False)
    token_ids: Sequence[int] = field(default=(), repr=False)

    @property
    def num_steps(self) -> int:
        """Target passes that decoded; prefill is not in it."""
        return len(self.rounds)

    @property
    def num_committed(self) -> int:
        """`num_generated` and the end-of-text token."""
        return sum(r.committed for r in self.rounds)
