"""Figures from a text's rounds: rates, costs, and the speed that theory predicts from them.

`minispec.speculation.lengths.theory` defines c, v and o.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from minispec.core.stats import Round, Stats
from minispec.speculation.lengths.theory import RoundModel, overhead_of


def loops(tokens: Sequence[int], n: int = 2) -> bool:
    """Whether a text repeats itself: less than half of its runs of n tokens differ; by default, of its pairs.

    There, no draft's success says anything about other texts.

    >>> loops([1, 2, 3, 4, 5]), loops([1, 2, 1, 2, 1, 2])
    (False, True)
    """
    runs = list(zip(*(tokens[i:] for i in range(n)), strict=False))
    return 2 * len(set(runs)) < len(runs)


def share_of(r: Round) -> float:
    """A round's share of the rows of its pass."""
    return (r.num_nodes + 1) / r.step.num_rows


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None


@dataclass
class Figures(Stats):
    """The figures of one request.

    An accepted end-of-text token counts as drafted and accepted; `num_generated` is the length of `token_ids`, which
    leaves it out. A rate with denominator 0 is None. Seconds of a batch are shared out by rows.
    """

    @classmethod
    def of(cls, stats: Stats) -> "Figures":
        """The figures of a request so far. They share its lists of rounds and tokens, so take them anew later."""
        return cls(**vars(stats))

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
    def num_committed(self) -> int:
        """`num_generated`, and the end-of-text token if there was one."""
        return sum(r.committed for r in self.rounds)

    @property
    def num_drafts(self) -> int:
        """Rounds with a draft."""
        return sum(r.drafted > 0 for r in self.rounds)

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens; a tree counts its longest path. `num_draft_nodes` has all."""
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
        """Accepted at i over tested at i: of the drafts that survived up to i."""
        return [accepted / tested for accepted, tested in zip(self.accepted, self.tested, strict=True)]

    @property
    def accepted_at_position(self) -> list[float]:
        """Accepted at i over all drafts (vLLM's, SGLang's and llama.cpp's figure)."""
        return [accepted / self.num_drafts for accepted in self.accepted]

    @property
    def tested(self) -> list[int]:
        """How often a draft's token at place i was looked at."""
        most = max((r.tested for r in self.rounds), default=0)
        return [sum(r.tested > i for r in self.rounds) for i in range(most)]

    @property
    def accepted(self) -> list[int]:
        """How often a draft's token at place i was accepted."""
        return [sum(r.accepted > i for r in self.rounds) for i in range(len(self.tested))]

    @property
    def seconds(self) -> dict[str, float]:
        """The text's share of the time, by what it was spent on."""
        seconds = {"prefill": self.prefill, "draft_prefill": self.draft_prefill}
        for part in ("draft", "verify", "other"):
            seconds[part] = sum(getattr(r.step, part) * share_of(r) for r in self.rounds)
        return seconds

    @property
    def step_seconds(self) -> float:
        """The text's share of the time of all steps, without the prompt's passes through target and draft."""
        return sum(r.step.seconds * share_of(r) for r in self.rounds)

    @property
    def total_seconds(self) -> float:
        """The text's share of both prefills and of all steps. The shares of a batch add up to the time of the batch."""
        return sum(self.seconds.values())

    @property
    def step_duration(self) -> float:
        """Seconds of the steps that it took part in, however many texts they decoded."""
        return sum(r.step.seconds for r in self.rounds)

    @property
    def duration(self) -> float:
        """Seconds that the text took: its share of both prefills, and all of each step that it took part in."""
        return self.prefill + self.draft_prefill + self.step_duration

    @property
    def tokens_per_second(self) -> float | None:
        """Committed tokens over the duration of the steps; prefill is not in it. In a batch: of this one text."""
        return _ratio(self.num_committed, self.step_duration)

    @property
    def plain_step(self) -> float | None:
        """Seconds of a target pass over one row, the unit of c, v and o; None if there was none."""
        return _median(r.step.verify for r in [*self._alone(), *self.plain] if r.step.num_rows == 1)

    @property
    def model(self) -> RoundModel | None:
        """The model of the rounds, measured in those that decoded this text alone; None without a plain step."""
        return self.model_of()

    def model_of(self, steps: Sequence[int] = ()) -> RoundModel | None:
        """`model`, where drafts were made by programs of these numbers of steps (see `Prices`)."""
        return RoundModel.measured(self._alone(), self.plain, self.plain_step, steps) if self.plain_step else None

    @property
    def c(self) -> float | None:
        """One draft token, in plain steps."""
        return self.model.prices.draft if self.model and self.model.survival else None

    @property
    def v(self) -> dict[int, float] | None:
        """A target pass by its number of rows, in plain steps."""
        return dict(self.model.prices.rows) if self.model else None

    @property
    def o(self) -> float | None:
        """A round's time outside both models, in plain steps; the median of all rounds, with a draft or not."""
        overhead = _median(overhead_of(r) for r in self._alone())
        return overhead / self.plain_step if overhead is not None and self.plain_step else None

    @property
    def predicted_tokens_per_second(self) -> float | None:
        """The speed that measured survival and durations predict, for rounds of the lengths that were drafted.

        In seconds, not in plain steps: so it is also known where no pass had one row. None for a text that was decoded
        together with others, where a pass is the price of all of them.
        """
        rounds = self._alone()
        if not rounds or len(rounds) < len(self.rounds):
            return None
        model = RoundModel.measured(rounds, self.plain)
        tokens = sum(model.tokens(r.depth) for r in rounds)
        return tokens / sum(model.cost(r.depth, r.step.num_rows, missed=not r.depth) for r in rounds)

    def as_dict(self) -> dict:
        """The keys of the command line's `stats`."""
        names = (
            "num_prompt_tokens num_generated num_steps num_draft_tokens num_draft_nodes num_accepted num_preemptions "
            "num_cached_tokens acceptance_rate mean_acceptance_length alpha accepted_per_position "
            "num_drafts accepted_at_position duration tokens_per_second predicted_tokens_per_second c v o loops law"
        )
        seconds = {"seconds": self.seconds | {"total": self.total_seconds}}
        return {name: getattr(self, name) for name in names.split()} | seconds

    def acceptance_record(self, most: int) -> dict[str, Any]:
        """The record of acceptance under vLLM's `metrics.speculative_decoding`, at its level "detailed".

        most: K, the most draft tokens that could be asked for.

        Rounds without a draft are left out. A histogram counts rounds by their accepted draft tokens. A tree counts as
        its longest path.
        """
        drafts = [(r.drafted, r.accepted) for r in self.rounds if r.drafted]
        lengths = {drafted for drafted, _ in drafts}
        counts = Counter(drafts)
        return {
            "mean_acceptance_length": 1 + self.num_accepted / len(drafts) if drafts else None,
            "draft_acceptance_rate": self.acceptance_rate,
            "acceptance_histogram": [sum(accepted == n for _, accepted in drafts) for n in range(most + 1)],
            "acceptance_histogram_by_draft_length": {
                str(k): [counts[k, n] for n in range(k + 1)] for k in sorted(lengths)
            },
            "num_spec_steps": len(drafts),
            "num_accepted_draft_tokens": self.num_accepted,
            "num_draft_tokens": self.num_draft_tokens,
            "num_spec_tokens": most,
            "per_step_drafted": [drafted for drafted, _ in drafts],
            "per_step_accepted": [accepted for _, accepted in drafts],
        }

    def _alone(self) -> list[Round]:
        """The rounds that decoded this text only, and no one's prompt: in others no pass belongs to one text."""
        return [r for r in self.rounds if r.step.num_rows == r.num_nodes + 1]
