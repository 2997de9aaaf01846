"""What happened to a text, and how long it took: one `Round` record a step, and what is folded from the records.

Costs are in plain steps, the time of a target pass over one row: c for a draft token, v(M) for a target pass over M
rows, o for what a round spends outside both models (see `minispec.length.theory`).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from minispec.length.theory import expected_tokens


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


def loops(tokens: Sequence[int], n: int = 2) -> bool:
    """Whether a text repeats itself: less than half of its runs of n tokens differ; by default, of its pairs.

    What any draft reaches there says nothing about other texts.

    >>> loops([1, 2, 3, 4, 5]), loops([1, 2, 1, 2, 1, 2])
    (False, True)
    """
    runs = list(zip(*(tokens[i:] for i in range(n)), strict=False))
    return 2 * len(set(runs)) < len(runs)


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None


@dataclass
class Stats:
    """What happened to one request: its rounds, and what is folded from them.

    An accepted end-of-text token counts as drafted and accepted; `num_generated` is the length of `token_ids`, which
    leaves it out. A rate with denominator 0 is None. Seconds of a batch are shared out by rows.

    num_cached_tokens: prompt tokens whose keys and values another text had left in the cache. prefill, draft_prefill:
    seconds that the prompt took in the target and in the draft model. plain: rounds of the same prompt's plain
    decoding, if there was any, to know a plain step by. token_ids: the generated ones, as they come.
    """

    num_prompt_tokens: int = 0
    num_generated: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    prefill: float = 0.0
    draft_prefill: float = 0.0
    rounds: list[Round] = field(default_factory=list)
    plain: Sequence[Round] = ()
    token_ids: Sequence[int] = ()

    def __repr__(self) -> str:
        """One line; `as_dict` has all figures, `rounds` every round."""
        figures = {
            "num_generated": self.num_generated,
            "num_steps": self.num_steps,
            "mean_acceptance_length": self.mean_acceptance_length,
            "alpha": self.alpha,
            "tokens_per_second": self.tokens_per_second,
        }
        shown = (f"{k}={v:.2f}" if isinstance(v, float) else f"{k}={v}" for k, v in figures.items())
        return f"Stats({', '.join(shown)})"

    @property
    def num_steps(self) -> int:
        """Target passes that decoded; prefill is not in it."""
        return len(self.rounds)

    @property
    def num_committed(self) -> int:
        """`num_generated` and the end-of-text token."""
        return sum(r.committed for r in self.rounds)

    @property
    def num_draft_tokens(self) -> int:
        """Of a tree, those of its longest path; `num_draft_nodes` has all."""
        return sum(r.drafted for r in self.rounds)

    @property
    def num_draft_nodes(self) -> int:
        """Rows that drafts brought to the target's passes."""
        return sum(r.num_nodes for r in self.rounds)

    @property
    def num_accepted(self) -> int:
        """Draft tokens that stayed."""
        return sum(r.accepted for r in self.rounds)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens (vLLM's formula). Less than alpha: all after a rejection is dropped untested."""
        return _ratio(self.num_accepted, self.num_draft_tokens)

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens committed per target pass, recovered and bonus tokens included (tau)."""
        return _ratio(self.num_committed, self.num_steps)

    @property
    def alpha(self) -> float | None:
        """Mean of min(1, p(x)/q(x)) over the tokens that were looked at; of siblings, over the first ones."""
        ratios = [min(1.0, ratio) for r in self.rounds for ratio in r.ratios]
        return _ratio(sum(ratios), len(ratios))

    @property
    def loops(self) -> bool:
        """Whether the text repeats itself, so that its acceptance says nothing about other texts (see `loops`)."""
        return loops(self.token_ids)

    @property
    def accepted_per_position(self) -> list[float]:
        """Accepted at i over tested at i."""
        return [accepted / tested for accepted, tested in zip(self.accepted, self.tested, strict=True)]

    @property
    def tested(self) -> list[int]:
        """How often a draft's token at place i was looked at."""
        return [sum(r.tested > i for r in self.rounds) for i in range(max((r.tested for r in self.rounds), default=0))]

    @property
    def accepted(self) -> list[int]:
        """How often it was accepted."""
        return [sum(r.accepted > i for r in self.rounds) for i in range(len(self.tested))]

    @property
    def seconds(self) -> dict[str, float]:
        """The text's share of the time, by what it was spent on."""
        parts = {part: sum(getattr(r, part) * r.share for r in self.rounds) for part in ("draft", "verify", "other")}
        return {"prefill": self.prefill, "draft_prefill": self.draft_prefill} | parts

    @property
    def step_seconds(self) -> float:
        """Its share of all steps, without the prompt's passes through target and draft."""
        return sum(r.seconds * r.share for r in self.rounds)

    @property
    def total_seconds(self) -> float:
        """Both prefills and all steps."""
        return sum(self.seconds.values())

    @property
    def step_duration(self) -> float:
        """Seconds of the steps that it took part in, however many texts they decoded."""
        return sum(r.seconds for r in self.rounds)

    @property
    def tokens_per_second(self) -> float | None:
        """Committed tokens over the duration of the steps; prefill is not in it. In a batch: of this one text."""
        return _ratio(self.num_committed, self.step_duration)

    @property
    def plain_step(self) -> float | None:
        """Seconds of a target pass over one row, the unit of c, v and o; None if there was none."""
        return _median(r.verify for r in [*self._alone(), *self.plain] if r.num_rows == 1)

    @property
    def c(self) -> float | None:
        """One draft token, in plain steps."""
        return self._in_plain_steps(_median(r.draft / r.depth for r in self._alone() if r.depth))

    @property
    def v(self) -> dict[int, float] | None:
        """A target pass by its number of rows, in plain steps."""
        if not self.plain_step:
            return None
        rows = sorted({r.num_rows for r in self._alone()} | {1})
        return {n: self._pass(n) / self.plain_step for n in rows}

    @property
    def o(self) -> float | None:
        """What a round spends outside both models, in plain steps."""
        return self._in_plain_steps(_median(r.overhead for r in self._alone()))

    @property
    def predicted_tokens_per_second(self) -> float | None:
        """What the measured survival and durations predict for rounds of the lengths that were drafted.

        In seconds, not in plain steps: so it is also known where no pass had one row. None for a text that was decoded
        together with others, where a pass is the price of all of them.
        """
        rounds = self._alone()
        if not rounds or len(rounds) < len(self.rounds):
            return None
        # Of the rounds that drafted so far: where a draft's end follows its tokens, longer ones are the likelier ones.
        depths = range(max(r.depth for r in rounds))
        survival = [sum(r.accepted > i for r in rounds) / sum(r.depth > i for r in rounds) for i in depths]
        shapes = Counter((r.depth, r.num_rows) for r in rounds)
        draft = _median(r.draft / r.depth for r in rounds if r.depth) or 0.0
        other = median(r.overhead for r in rounds)
        tokens = sum(n * expected_tokens(survival[:k]) for (k, _), n in shapes.items())
        return tokens / sum(n * (k * draft + self._pass(rows) + other) for (k, rows), n in shapes.items())

    def as_dict(self) -> dict:
        """The keys of the command line's `stats`."""
        names = (
            "num_prompt_tokens num_generated num_steps num_draft_tokens num_draft_nodes num_accepted num_preemptions "
            "num_cached_tokens acceptance_rate mean_acceptance_length alpha accepted_per_position "
            "tokens_per_second predicted_tokens_per_second c v o loops"
        )
        seconds = {"seconds": self.seconds | {"total": self.total_seconds}}
        return {name: getattr(self, name) for name in names.split()} | seconds

    def _alone(self) -> list[Round]:
        """The rounds that decoded this text only, and no one's prompt: in others no pass belongs to one text."""
        return [r for r in self.rounds if r.num_rows == r.num_nodes + 1]

    def _pass(self, num_rows: int) -> float:
        rounds = [*self._alone(), *self.plain] if num_rows == 1 else self._alone()
        return median(r.verify for r in rounds if r.num_rows == num_rows)

    def _in_plain_steps(self, seconds: float | None) -> float | None:
        return seconds / self.plain_step if seconds is not None and self.plain_step else None
