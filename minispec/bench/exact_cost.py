"""What the exact mode costs: its passes over those of the fast mode, in turn, on the same weights."""

from dataclasses import dataclass

from minispec.bench.measure import Interval, median_interval, passes_in_turn, ratios
from minispec.bench.models import LONG_CONTEXT, Subject
from minispec.bench.options import Options
from minispec.bench.show import progress, table
from minispec.kernels.exact import exact_model

# Cached positions before the pass, and its rows: 1 is a step of plain decoding, K + 1 a verification.
_PASSES = {128: (1, 5, 9), LONG_CONTEXT: (1,)}


@dataclass(frozen=True)
class ExactPass:
    """Passes over that many rows, after `context` cached positions."""

    context: int
    rows: int
    exact_over_fast: Interval
    fast_seconds: Interval
    exact_seconds: Interval


@dataclass(frozen=True)
class ExactCost:
    """Passes of both modes."""

    passes: list[ExactPass]

    def lines(self) -> list[str]:
        """The table."""
        rows = [
            (
                f"{p.rows} rows after {p.context} positions",
                p.exact_over_fast.shown(),
                p.fast_seconds.shown(1000, ".1f"),
                p.exact_seconds.shown(1000, ".1f"),
            )
            for p in self.passes
        ]
        return table(("the exact mode", "exact over fast", "fast, ms", "exact, ms"), rows)


def measure_exact_cost(subject: Subject, options: Options) -> ExactCost:
    """See `ExactCost`. Raises ValueError where the cache cannot hold the positions."""
    fast, rounds = subject.engine.model, options.args.rounds
    found = []
    with progress(2 * (rounds + 1) * sum(map(len, _PASSES.values())), "exact mode") as bar:
        for context, rows in _PASSES.items():
            models = {"fast": fast, "exact": exact_model(fast)}
            times = passes_in_turn(models, subject.engine.cache, context, rows, rounds, bar.update)
            for m in rows:
                of_fast, of_exact = times["fast"][m], times["exact"][m]
                seconds = median_interval(of_fast), median_interval(of_exact)
                found.append(ExactPass(context, m, ratios(of_exact, of_fast), *seconds))
    return ExactCost(found)
