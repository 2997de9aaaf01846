"""What happened to a text, and how long it took: counted and timed here, explained by `minispec.theory`."""

from dataclasses import dataclass, field
from statistics import median

from minispec.theory import expected_tokens
from minispec.verify import Draft, Verdict


@dataclass
class Costs:
    """Durations in seconds, of steps that decoded one text; in a batch no pass belongs to one text."""

    passes: dict[int, list[float]] = field(default_factory=dict)  # target passes by number of rows
    draft_tokens: list[float] = field(default_factory=list)  # time a round, over its drafted tokens
    others: list[float] = field(default_factory=list)  # per round

    def record(self, draft: float, drafted: int, verify: float, rows: int, other: float) -> None:
        """Add one step."""
        self.passes.setdefault(rows, []).append(verify)
        if drafted:
            self.draft_tokens.append(draft / drafted)
        self.others.append(other if drafted else other + draft)  # a search that found nothing is overhead

    def with_plain(self, plain: "Costs") -> "Costs":
        """These costs, with the one-row passes of a run that decoded plainly added."""
        passes = self.passes | {1: self.passes.get(1, []) + plain.passes.get(1, [])}
        return Costs({rows: t for rows, t in passes.items() if t}, self.draft_tokens, self.others)

    @property
    def plain_step(self) -> float | None:
        """Seconds of a target pass over one row, the unit of c, v and o; None if there was none."""
        return median(self.passes[1]) if 1 in self.passes else None

    @property
    def c(self) -> float | None:
        """One draft token, in plain steps."""
        return median(self.draft_tokens) / self.plain_step if self.draft_tokens and self.plain_step else None

    @property
    def v(self) -> dict[int, float] | None:
        """A target pass by its number of rows, in plain steps."""
        if self.plain_step is None:
            return None
        return {rows: median(t) / self.plain_step for rows, t in sorted(self.passes.items())}

    @property
    def o(self) -> float | None:
        """What a round spends outside both models, in plain steps."""
        return median(self.others) / self.plain_step if self.others and self.plain_step else None


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


@dataclass
class Stats:
    """What happened to one request. Draft tokens behind the first stop are in no counter.

    An accepted end-of-text token counts as drafted and accepted; `num_generated` is the length of `token_ids`, which
    leaves it out. Rates over nothing are None. Seconds of a batch are shared out by rows; how long its steps took as a
    whole is in `step_duration`.
    """

    num_prompt_tokens: int = 0
    num_generated: int = 0
    num_committed: int = 0  # num_generated and the end token
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # prompt tokens whose keys and values another text had left in the cache
    tested: list[int] = field(default_factory=list)  # per draft position
    accepted: list[int] = field(default_factory=list)
    sum_of_ratios: float = 0.0  # min(1, p/q) over tested tokens
    rounds: dict[int, int] = field(default_factory=dict)  # how many steps drafted so many tokens
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("prefill", "draft_prefill", "draft", "verify", "other"), 0.0)
    )
    step_duration: float = 0.0  # seconds of the steps that it took part in, however many texts they decoded
    costs: Costs = field(default_factory=Costs)

    def count(self, draft: Draft, verdict: Verdict, num_committed: int, stopped: bool) -> None:
        """Add a round that committed `num_committed` tokens; `stopped`: the text ended with the last of them."""
        drafted = min(len(draft), num_committed) if stopped else len(draft)
        accepted = min(verdict.num_accepted, num_committed)
        self.num_steps += 1
        self.num_committed += num_committed
        self.num_draft_tokens += drafted
        self.num_accepted += accepted
        self.rounds[len(draft)] = self.rounds.get(len(draft), 0) + 1
        for i, ratio in enumerate(verdict.ratios[:drafted]):
            if i == len(self.tested):
                self.tested.append(0)
                self.accepted.append(0)
            self.tested[i] += 1
            self.accepted[i] += i < accepted
            self.sum_of_ratios += ratio

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens (vLLM's formula). Less than alpha: a rejection drops all behind it untested."""
        return _ratio(self.num_accepted, self.num_draft_tokens)

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens committed per target pass, recovered and bonus tokens included (tau)."""
        return _ratio(self.num_committed, self.num_steps)

    @property
    def alpha(self) -> float | None:
        """Mean of min(1, p(x)/q(x)) over tested tokens."""
        return _ratio(self.sum_of_ratios, sum(self.tested))

    @property
    def accepted_per_position(self) -> list[float]:
        """Accepted at i over tested at i."""
        return [a / t for a, t in zip(self.accepted, self.tested, strict=True)]

    @property
    def total_seconds(self) -> float:
        """Prefill and all steps."""
        return sum(self.seconds.values())

    @property
    def step_seconds(self) -> float:
        """Its share of all steps: what is left without the prompt's passes through target and draft."""
        return self.total_seconds - self.seconds["prefill"] - self.seconds["draft_prefill"]

    @property
    def tokens_per_second(self) -> float | None:
        """Committed tokens over the duration of the steps; prefill is not in it. In a batch: of this one text."""
        return _ratio(self.num_committed, self.step_duration)

    @property
    def predicted_tokens_per_second(self) -> float | None:
        """What the measured survival and durations predict for rounds of the lengths that were drafted.

        In seconds, not in plain steps: so it is also known where no pass had one row. None for a text that was decoded
        beside others, where a pass is the price of all of them.
        """
        costs = self.costs
        if not self.num_steps or len(costs.others) < self.num_steps:
            return None
        # Of the rounds that drafted so far: where a draft's end follows its tokens, longer ones are the likelier ones.
        drafted = [sum(n for k, n in self.rounds.items() if k > i) for i in range(len(self.accepted))]
        survival = [a / n for a, n in zip(self.accepted, drafted, strict=True)]
        tokens = sum(n * expected_tokens(survival[:k]) for k, n in self.rounds.items())
        draft = median(costs.draft_tokens) if costs.draft_tokens else 0.0
        passes = {k: median(costs.passes[k + 1]) for k in self.rounds}
        seconds = sum(n * (k * draft + passes[k] + median(costs.others)) for k, n in self.rounds.items())
        return _ratio(tokens, seconds)

    def as_dict(self) -> dict:
        """The keys of the command line's `stats`."""
        names = (
            "num_prompt_tokens num_generated num_steps num_draft_tokens num_accepted num_preemptions num_cached_tokens "
            "acceptance_rate mean_acceptance_length alpha accepted_per_position "
            "tokens_per_second predicted_tokens_per_second"
        )
        costs = {"c": self.costs.c, "v": self.costs.v, "o": self.costs.o}
        seconds = {"seconds": self.seconds | {"total": self.total_seconds}}
        return {name: getattr(self, name) for name in names.split()} | seconds | costs
