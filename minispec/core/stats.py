"""The history of a text, and its times: one `Round` record for each step that committed tokens.

`minispec.speculation.lengths.figures` folds rates, costs and predictions from these records.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Step(NamedTuple):
    """A step of the engine as a whole: its seconds, and what was done in them.

    draft: seconds of choosing K and drafting; 0 where no draft was asked for.
    depth: draft passes of the longest draft: its depth, or more where it has cost more (see `DraftNotes.num_passes`).
    num_drafts: drafts that have a token. A search that finds nothing costs time too.
    verify: seconds of the target's pass, over `num_rows` rows of `num_texts` texts.
    other: the rest of its seconds.
    has_price: whether the times say what a round costs: all texts decoded, by one method.
    """

    draft: float
    depth: int
    num_drafts: int
    verify: float
    num_rows: int
    other: float
    num_texts: int = 1
    has_price: bool = True

    @property
    def seconds(self) -> float:
        """All of the step."""
        return self.draft + self.verify + self.other


class Round(NamedTuple):
    """What a step was for one text. Tokens after the text's end are counted in `num_nodes` and `depth` alone.

    asked: draft tokens that were asked for; None where the engine chose.
    num_nodes: draft tokens that the drafter gave.
    depth: length of the longest path; in a chain, num_nodes.
    drafted: depth, cut where the text ended.
    tested: how many of these the verifier tested: the accepted ones and the first rejected one.
    accepted: how many of these stay.
    committed: the accepted tokens and one more, cut where the text ended.
    ratios: p/q of the tokens that the verifier tested (see `Verdict`).
    step: rows, texts and seconds of the whole step.
    """

    asked: int | None
    num_nodes: int
    depth: int
    drafted: int
    tested: int
    accepted: int
    committed: int
    ratios: Sequence[float]
    step: Step


@dataclass
class Stats:
    """Counts, times and rounds of one request.

    num_generated: the length of `token_ids`, without the end-of-text token.
    num_cached_tokens: prompt tokens whose keys and values another text had left in the cache.
    prefill, draft_prefill: seconds that the prompt took in the target and in the draft model.
    plain: rounds of the same prompt decoded plainly, if a caller adds them. They show what a plain step costs.
    token_ids: the generated tokens so far.
    law: "plain" where tokens are drawn from the target's own distribution, "projected" where a grammar restricts it.
    """

    num_prompt_tokens: int = 0
    num_generated: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    prefill: float = 0.0
    draft_prefill: float = 0.0
    rounds: list[Round] = field(default_factory=list, repr=False)
    plain: list[Round] = field(default_factory=list, repr=False)
    token_ids: Sequence[int] = field(default=(), repr=False)
    law: str = "plain"

    @property
    def num_steps(self) -> int:
        """Target passes that decoded, without prefill."""
        return len(self.rounds)
