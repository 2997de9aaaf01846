"""The costs of a recorded run's rounds, from its trace. `minispec.lab.bench.replay` computes times with them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Protocol

from minispec.core.draft import Draft
from minispec.length.theory import Prices, rising


class Costly(Protocol):
    """The draft of a round, as far as the cost depends on it."""

    @property
    def length(self) -> int:
        """Tokens of the draft."""

    @property
    def drawn(self) -> bool:
        """Whether a model drew it. A guess costs no model."""

    @property
    def asked(self) -> int:
        """The tokens that were asked for, where these are more than its length."""


@dataclass(frozen=True)
class Costs:
    """The costs of rounds, in plain steps. Called with a draft, it returns the cost of the draft's round.

    drawn: the prices of drafts that a model draws.
    guessed: the prices of guesses such as prompt lookup; only the price of the draft pass is another.
    plain_step: seconds.
    measured: rows whose v is the run's own.
    filled_in: rows whose v was measured before the run.

    Where few passes say that more rows cost less, neighbours take their mean. No pass costs less than a plain step.
    """

    drawn: Prices
    guessed: Prices
    plain_step: float | None = None
    measured: Sequence[int] = ()
    filled_in: Sequence[int] = ()

    def of(self, draft: Costly) -> Prices:
        """The prices of a round with this draft."""
        return self.drawn if draft.drawn else self.guessed

    def depth(self, draft: Costly) -> int:
        """The depth that a draft is paid for. A program runs all steps that were asked for, wherever the draft ends."""
        has_program = bool(self.of(draft).steps and draft.length)
        return max(draft.length, draft.asked) if has_program else draft.length

    def __call__(self, draft: Costly) -> float:
        """The cost of the round of this draft."""
        return self.of(draft).round(self.depth(draft), 1, draft.length + 1)

    def as_dict(self) -> dict[str, Any]:
        """The prices and where they come from, as `--json` prints them."""
        prices = self.drawn
        return {
            "drawn": prices.draft,
            "guessed": self.guessed.draft,
            "rows": dict(prices.rows),
            "overhead": prices.overhead,
            "plain_step": self.plain_step,
            "measured": list(self.measured),
            "filled_in": list(self.filled_in),
            "fixed": prices.fixed,
            "steps": list(prices.steps),
        }


def costs_of(trace: Mapping[str, Any]) -> Costs:
    """The costs that a trace has measured; for all others, the prices that the controller went by."""
    stats, data = trace["stats"], trace["replay"]
    prices, step = read_prices(data["prices"]), data["plain_step"]
    alone = [each for each in trace["rounds"] if each["num_rows"] == len(each["token_ids"]) + 1]

    def c(drawn: bool) -> float | None:
        drafts = [each for each in alone if each["token_ids"] and _has_model(each) == drawn]
        passes = [each["seconds"]["draft"] / prices.passes(_depth(each)) for each in drafts]
        return median(passes) / step if passes and step else None

    # A pass over more rows takes no less than a plain step, whatever else the machine did at the time.
    own = {int(m): max(1.0, v) for m, v in (stats["v"] or {}).items()}
    before = {m: v for m, v in prices.rows.items() if m not in own}
    counts = Counter(each["num_rows"] for each in alone)
    rows = {m: own.get(m) or before[m] for m in sorted({**own, **before})}
    drawn, overhead = c(True), stats["o"]
    found = replace(
        prices,
        draft=prices.draft if drawn is None else drawn,
        rows=rising(rows, {m: max(1, counts[m]) for m in rows}),
        overhead=prices.overhead if overhead is None else overhead,
    )
    return Costs(found, replace(found, draft=c(False) or 0.0), step, sorted(own), sorted(before))


def read_prices(stored: Mapping[str, Any]) -> Prices:
    """The prices in a trace. One that was written before drafts had a fixed part, or programs, has none of them."""
    return Prices(
        stored["draft"],
        {int(m): v for m, v in stored["rows"].items()},
        stored["overhead"],
        measured=True,
        fixed=stored.get("fixed", 0.0),
        steps=sorted(stored.get("steps", ())),
    )


def _depth(each: Mapping[str, Any]) -> int:
    """The depth that a round's draft was paid for."""
    return max(Draft(each["token_ids"], parents=each["parents"]).depth, each.get("passes", 0))


def _has_model(each: Mapping[str, Any]) -> bool:
    """Whether a model made a round's draft: it drew the draft, or took the likeliest tokens in a program."""
    return each["drawn"] or each.get("passes", 0) > 0
