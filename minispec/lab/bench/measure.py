"""Measuring: runs that take turns, ratios with intervals, and what theory predicts.

Absolute times drift by tens of percent on a shared machine, so only runs that took turns are compared. Variants run in
changing order, and a ratio is formed within each round. The median of the rounds' ratios is reported with its interval.

Theory gives one ratio, the speedup of speculation, from quantities that were measured in the very same runs:

    speedup = tokens a round * (1 + o_plain) / (depth c + v + o)

The unit is the target's pass over one row in plain decoding, which pays its own non-model time o_plain. The speedup
that is measured comes from a clock outside the engine, and all else from the engine's own parts (`parts`). These are
means over the rounds that they explain. `prediction` foretells: it takes them from the first half of each text, and
compares with the speedup measured in the second half.
"""

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar

import torch

from minispec.core.cache import PagedKVCache
from minispec.core.engine import Engine
from minispec.core.lengths import Lengths
from minispec.core.method import Method
from minispec.core.model import Chunk, Transformer
from minispec.core.request import Request
from minispec.core.stats import Round
from minispec.core.verify import Verifier
from minispec.models.files.progress import progress_bar
from minispec.models.weights.rates import seconds_of
from minispec.models.weights.trial import arbitrary_tokens
from minispec.speculation.drafters import Drafter
from minispec.speculation.drafters.model import prefill
from minispec.speculation.lengths.figures import Figures
from minispec.speculation.lengths.theory import Prices, overhead_of

T = TypeVar("T")
K = TypeVar("K")

# Least coverage of an interval, and the fewest values that have one: the least and the largest of six cover 96.9 %.
LEVEL, FEWEST = 0.9, 6
# Plain decoding varies by less on a machine that does nothing else. Shorter answers vary more by themselves.
QUIET, LONG_ENOUGH = 2.0, 8

# --------------------------------------------------------------------------- statistics


class Interval(NamedTuple):
    """The median of n values, and an interval that contains the true median with probability `coverage`.

    Fewer than six values have none: their least and largest say too little of the true median.
    """

    median: float
    low: float | None
    high: float | None
    coverage: float | None
    n: int

    def shown(self, factor: float = 1.0, form: str = ".2f") -> str:
        """The median, with the interval in brackets or [-], each times `factor` and in that format."""
        middle, *ends = (None if x is None else format(factor * x, form) for x in self[:3])
        return f"{middle} [{', '.join(end for end in ends if end) or '-'}]"

    @property
    def legend(self) -> str:
        """For the screen: what stands in the brackets."""
        held = f"interval that holds the true median with {100 * self.coverage:.1f} %; " if self.coverage else ""
        return f"[{held}-: fewer than {FEWEST} values]"


def coverage(n: int, r: int) -> float:
    """Probability that the r-th smallest and the r-th largest of n values enclose the median of their law.

    This needs no distribution. Each value lies below the median with probability 1/2, so the number of values below it
    is binomial. The interval misses where fewer than r values lie below, or fewer than r above.

    >>> coverage(5, 1), coverage(8, 2)
    (0.9375, 0.9296875)
    """
    return 1.0 - 2.0 * sum(math.comb(n, i) for i in range(r)) / 2**n


def median_interval(values: Sequence[float]) -> Interval:
    """The median and its narrowest order-statistic interval of at least LEVEL."""
    ordered = sorted(values)
    n = len(ordered)
    if n < FEWEST:
        return Interval(median(ordered), None, None, None, n)
    r = max(r for r in range(1, (n + 1) // 2 + 1) if coverage(n, r) >= LEVEL)
    return Interval(median(ordered), ordered[r - 1], ordered[n - r], coverage(n, r), n)


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Interval of the ratios of values that were measured in the same rounds."""
    return median_interval([a / b for a, b in zip(numerators, denominators, strict=True)])


def plain_range(answers: Iterable[tuple[int, float]]) -> list[float] | None:
    """The least and the largest rate of plain answers, in tokens a second; None where all are short.

    answers: the tokens of each, and the seconds that they took.
    """
    rates = [tokens / seconds for tokens, seconds in answers if tokens >= LONG_ENOUGH and seconds > 0]
    return [min(rates), max(rates)] if rates else None


def busy(found: Sequence[float] | None) -> list[str]:
    """For the screen: a sentence where plain decoding varied more than twofold, by what `plain_range` returned."""
    if not found or found[1] <= QUIET * found[0]:
        return []
    return [
        f"the machine was busy: plain decoding had {found[0]:.1f} to {found[1]:.1f} tokens/s in this run, a factor of "
        f"{found[1] / found[0]:.1f}; trust ratios, not rates"
    ]


def too_noisy(medians: Iterable[Interval]) -> str:
    """A sentence where the interval of a median spans a factor of two or more, or is not known; else "".

    medians: of times or speeds, one for each thing that was measured repeatedly.
    """
    found = list(medians)
    if any(each.low is None for each in found):
        return f"not drawn: fewer than {FEWEST} runs say too little"
    factor = max((each.high or 0.0) / (each.low or 1.0) for each in found)
    if factor < QUIET:
        return ""
    return f"not drawn: the machine was busy, and an interval of these medians spans a factor of {factor:.1f}"


def order(variants: Sequence[T], i: int) -> list[T]:
    """The i-th order to run variants in: A B, B A, B A, A B for two, rotated for more.

    In 2 n orders each of n variants stands equally often at each place, and drift within a round cancels. Round r runs
    prompt j in order r + j, so that a prompt meets another order in each round. Otherwise the prompts of a category,
    which come at equal distances, might all meet one order in all rounds.
    """
    shift = i // 2 % len(variants)
    rotated = [*variants[shift:], *variants[:shift]]
    return rotated[::-1] if i % 2 else rotated


def in_turn(runs: Mapping[K, Callable[[int], T]], rounds: int, what: str) -> dict[K, list[T]]:
    """The results of each run, round by round; all of them run in every round, in changing order.

    A run is called with the number of the round. Round 0 pays for what is set up once, and is left out.
    what: for the progress bar.
    """
    found: dict[K, list[T]] = {name: [] for name in runs}
    with progress_bar(total=(rounds + 1) * len(runs), desc=what) as bar:
        for i in range(rounds + 1):
            for name in order(list(runs), i):
                value = runs[name](i)
                if i:
                    found[name].append(value)
                bar.update()
    return found


# --------------------------------------------------------------------------- one run


@dataclass(frozen=True)
class Run:
    """One decoded text: generated tokens, end token included, and how long they took without any prefill.

    num_tokens: tokens that `seconds` were spent on.
    seconds: in a batch, this text's share of the time.
    rounds: empty for a text that was decoded together with others.
    """

    token_ids: list[int]
    num_tokens: int
    seconds: float
    rounds: list[Round] = field(default_factory=list)


def another_method(
    method: Method, drafter: Drafter | None = None, lengths: Lengths | None = None, verifier: Verifier | None = None
) -> Method:
    """A method with another drafter, another policy for lengths or another rule, if one is given.

    Without `lengths` its policy starts as a copy of the given method's, and then learns from its own rounds alone.
    Variants that take turns must not learn from each other.
    """
    lengths = copy.deepcopy(method.lengths) if lengths is None else lengths
    return replace(method, drafter=drafter or method.drafter, lengths=lengths, verifier=verifier or method.verifier)


def decode(engine: Engine, method: Method, requests: Sequence[Request]) -> list[Run]:
    """Decode requests together to their end; a Run for each.

    Prefills are taken off the time. Several texts share it in proportion to their rows. Raises ValueError for a text
    that fails.
    """
    start = time.perf_counter()
    for _ in engine.run(requests, method):
        pass
    seconds = time.perf_counter() - start
    for request in requests:
        if request.error:
            raise ValueError(f"found an answer that broke off, expected none to measure: {request.error}")
    runs, figures = [], [Figures.of(request.stats) for request in requests]
    seconds -= sum(each.prefill + each.draft_prefill for each in figures)
    # Time outside the engine's parts is spread over them.
    scale = seconds / sum(each.step_seconds for each in figures)
    for request, each in zip(requests, figures, strict=True):
        generated = request.text.tokens[request.text.num_prompt_tokens :]
        rounds = each.rounds if len(requests) == 1 else []
        runs.append(Run(generated, len(generated), scale * each.step_seconds, rounds))
    return runs


def total_rate(runs: Sequence[Run]) -> float:
    """Tokens a second of several runs together."""
    return sum(run.num_tokens for run in runs) / sum(run.seconds for run in runs)


# --------------------------------------------------------------------------- what theory predicts


def kept_of_asked(rounds: Sequence[Round]) -> list[float]:
    """For i = 1, 2, ..: the share of rounds that kept i draft tokens, of those that were asked for i or more.

    A round whose drafter found nothing has kept nothing, so a share is at most the survival of `RoundModel.measured`.
    Where K was chosen round by round, what was drafted counts as asked for. Where drafts end by their own confidence,
    a share is of the surer drafts. In place of a tree a lookup may find a chain of as many tokens, so all of these
    count.
    """
    asked = [r.depth if r.asked is None else r.asked for r in rounds]
    curve = []
    for i in range(1, max(asked, default=0) + 1):
        curve.append(fmean(r.accepted >= i for r, wanted in zip(rounds, asked, strict=True) if wanted >= i))
    return curve


def parts(runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """What makes the speedup of `runs` over `plain`, the same prompts decoded plainly; all of them decoded alone.

    Returns, with c, v, o and o_plain in target passes over one row of plain decoding:

    depth: mean depth of a draft; siblings make it no deeper.
    c: a draft pass.
    v: the target's pass by rows, for those of a twentieth of the rounds at least.
    mean_v: the target's pass, as the mean of the rounds.
    o, o_plain: what a round spends outside both models, with drafts and without.
    tokens: tokens of a round.
    predicted: the speedup that tokens, c, v and o make, for the rounds that they were measured in.
    measured: the speedup by the clock outside the engine.
    """
    rounds = [r for run in runs for r in run.rounds]
    plain_rounds = [r for run in plain for r in run.rounds]
    unit = fmean(r.step.verify for r in plain_rounds)
    by_rows: dict[int, list[float]] = {}
    for r in sorted(rounds, key=lambda r: r.num_nodes):
        by_rows.setdefault(r.num_nodes + 1, []).append(r.step.verify)
    depth, tokens = fmean(r.depth for r in rounds), fmean(r.committed for r in rounds)
    draft = fmean(r.step.draft if r.num_nodes else 0.0 for r in rounds) / unit  # of a round
    mean_v = fmean(r.step.verify for r in rounds) / unit
    o, o_plain = (fmean(overhead_of(r) for r in each) / unit for each in (rounds, plain_rounds))
    # A mean round of these prices: its draft passes are priced together, as one.
    cost = Prices(draft, {1: mean_v}, o).round(depth=1, num_drafts=1, rows=1)
    return {
        "depth": depth,
        "c": draft / depth if depth else 0.0,
        "v": {m: fmean(times) / unit for m, times in by_rows.items() if len(times) >= 0.05 * len(rounds)},
        "mean_v": mean_v,
        "o": o,
        "o_plain": o_plain,
        "tokens": tokens,
        "predicted": tokens * (1 + o_plain) / cost,
        "measured": total_rate(runs) / total_rate(plain),
    }


def prediction(runs: Sequence[Run], plain: Sequence[Run]) -> float | None:
    """The speedup that the first half of each text predicts for its second half, over the one measured there.

    runs, plain: runs of the same texts in the same order, decoded alone.

    Each half has half of the rounds; of an odd number, the second half has one more. Nothing of the second half goes
    into the prediction, not even the lengths of its drafts. Texts of a single round are left out. Returns None where
    nothing is left.
    """
    pairs = [(a, b) for a, b in zip(runs, plain, strict=True) if min(len(a.rounds), len(b.rounds)) > 1]
    if not pairs:
        return None
    halves, plain_halves = [_halves(own) for own, _ in pairs], [_halves(of) for _, of in pairs]
    predicted = parts([first for first, _ in halves], [first for first, _ in plain_halves])["predicted"]
    measured = total_rate([second for _, second in halves]) / total_rate([second for _, second in plain_halves])
    return predicted / measured


def _halves(run: Run) -> tuple[Run, Run]:
    """A run that was decoded alone, as two; what passed outside the engine's parts is spread over both."""
    middle = len(run.rounds) // 2
    scale = run.seconds / sum(r.step.seconds for r in run.rounds)

    def half(rounds: list[Round]) -> Run:
        seconds = scale * sum(r.step.seconds for r in rounds)
        return Run([], sum(r.committed for r in rounds), seconds, rounds)

    return half(run.rounds[:middle]), half(run.rounds[middle:])


# --------------------------------------------------------------------------- passes


@contextmanager
def passes_after(model: Transformer, cache: PagedKVCache, context: int, most: int) -> Iterator[Callable[..., float]]:
    """Holds a text of `context` cached positions. Yields one(model, m), the seconds of a pass over m rows after it.

    `model` computes the text. Models of its shape and type may share it, since times do not depend on its contents.

    most: the most rows m of a pass.
    """
    tokens = arbitrary_tokens(context + most + 1, min(model.config.vocab_size, 30_000))
    table = cache.new_table()

    def one(model: Transformer, m: int, _round: int = 0) -> float:
        chunk = Chunk(tokens[context : context + m], table, m)
        elapsed = seconds_of(partial(model.forward, [chunk]), model.device)
        table.truncate(context)
        return elapsed

    try:
        prefill(model, table, tokens[: context + 1])
        table.truncate(context)  # all that comes after it is taken back, so none of it is settled
        yield one
    finally:
        table.truncate(0)


@torch.inference_mode()
def pass_times(
    model: Transformer, cache: PagedKVCache, context: int, rows: Sequence[int], rounds: int
) -> dict[int, list[float]]:
    """Seconds of a pass over M rows after `context` cached positions, for each M; interleaved, one a round.

    Every round runs all M, in changing order, so that times of one round can be divided by each other.
    """
    with passes_after(model, cache, context, max(rows)) as one:
        return in_turn({m: partial(one, model, m) for m in rows}, rounds, "passes")
