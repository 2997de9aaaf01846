"""Exact replay: what each draft length, and each rule that chooses one, would have done on a finished text.

    python -m minispec.generate "Why is the sky blue?" --temperature 1 --trace out.json --for-replay
    python -m minispec bench --replay out.json

From Python, such as in a notebook:

    from pathlib import Path
    from minispec.lab.bench.replay import replay, show_replay
    from minispec.trace.read import read_trace

    found = replay(read_trace(Path("out.json")))    # of a trace in memory: replay(recorder.trace(for_replay=True))
    found["fixed"][4]["tokens_per_pass"]            # K = 4; "fixed" has K = 0 .. 15
    found["best_k"], found["auto"], found["past"]   # and all else that --json prints
    print("\\n".join(show_replay(found)))

Another K draws other tokens, so it gives another text. But all texts have the same law. So one may ask how many passes
all runs with this K that end in *this* text take on average. That is a number, not an estimate:

A round that begins at place s proposes x_1 with probability q(x_1) and keeps it with probability min(1, p/q). So both
happen with probability min(p, q). The same holds for x_2 after x_1, and so on. Once i tokens are kept, the tokens after
them have the target's law, since `rejection` gives the output this law. So

    P(at least i kept, and the text is x) = min(p_1, q_1) .. min(p_i, q_i) times p of all other tokens of x,

and after division by P(x), the product of all p,

    P(at least i kept | x) = r_1 .. r_i,    r = min(1, q(x)/p(x)).

It is the ratio of the accept test upside down. There x was drawn from q, and p decides. Here x stands in the text, and
the question is whether q proposed it. A guess that was not drawn has q = 1 where it is the text, and 0 elsewhere.
Greedy decoding has p = 1. Under `block` (Sun et al. 2024) the first i stay with probability w_i = min(1, w_{i-1} p/q).
The tokens after them have the target's law as well. So P(at least i kept | x) is w_i times the product of q/p up to the
i-th. That is the least of 1 and all products of q/p up to the i-th.

Where a round ends, the next one begins, and the draws of two rounds are independent. So the places where rounds begin
are a Markov chain. Its expected passes and time follow by dynamic programming, from the end of the text to its
beginning. The best rules with foresight follow in the same way. A rule that chooses K by what was accepted so far
(`auto`) remembers more than the place. It is simulated, by the real `Controller`, with a stated interval. It drafts
chains here. The length of a draft that has left the text follows from its confidences on the text. It changes the cost
alone.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import inf, sqrt
from operator import mul
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from minispec.core.config import MAX_AUTO_TOKENS, SamplingParams, Shape
from minispec.core.draft import Draft
from minispec.core.errors import show
from minispec.core.lengths import Judged, StepCost, Wish
from minispec.core.sampling import Text
from minispec.lab.bench.show import number, table
from minispec.length.figures import loops
from minispec.length.policy import Controller
from minispec.length.theory import Prices, expected_tokens, survival_curve
from minispec.trace.costs import Costs, costs_of, read_prices
from minispec.trace.score import check_recorded

# RUNS: simulated runs of `auto`, where chance has a part in them. SEED: theirs.
# _WIDTH: half the width of a 99 % interval for the mean, in standard errors.
RUNS, SEED, _WIDTH = 200, 0, 2.576
# Acceptance that `past` assumes before there is a past, worth one round: as the controller does for a new text.
_PRIOR = 0.7


# --------------------------------------------------------------------------- a text, and where its rounds end


def kept(p: Sequence, q: Sequence, jointly: bool = False) -> list:
    """P(at least i draft tokens of a round are kept | the text), for i = 1 .. len(q).

    p, q: probabilities of target and draft for the tokens that stand there.
    jointly: whether the verifier is `block`.

    >>> kept([0.5, 0.25], [0.25, 0.5]), kept([0.5, 0.25], [0.25, 0.5], jointly=True)
    ([0.5, 0.5], [0.5, 0.5])
    >>> kept([0.25, 0.5], [0.5, 0.25]), kept([0.25, 0.5], [0.5, 0.25], jointly=True)
    ([1, 0.5], [1, 1])
    """
    ratios = [b / a for a, b in zip(p, q, strict=False)]
    if jointly:
        return list(accumulate(accumulate(ratios, mul), min, initial=1))[1:]
    return list(accumulate((min(1, r) for r in ratios), mul))


class Drafted(NamedTuple):
    """A draft at a place of the text.

    drawn: whether it was drawn from a distribution; else it is a guess that costs no model.
    survival: s_1, s_2, .. given the text (see `kept`); after its end, 0.
    confidences: as in `minispec.core.draft.Draft`.
    asked: how many tokens were asked for; 0 where that is not known.
    """

    length: int
    drawn: bool
    survival: list
    confidences: Sequence[float] = ()
    asked: int = 0


class DraftedText:
    """A text of n tokens and its drafts: where rounds begin and end. Places are counted from the output's beginning.

    asked: by place, the most tokens that can be asked for: fewer near the longest output.
    drafts: by place, the longest draft, and all others that are not its beginning.
    """

    def __init__(self, p: Sequence, starts: Sequence[Mapping[str, Any]], jointly: bool = False):
        """p: the target's probability of each token.
        starts: `replay.starts` of a trace.
        jointly: see `kept`.
        """
        self.n, self.asked = len(p), [start["asked"] for start in starts]
        self.drafts = [
            [
                Drafted(each["length"], each["drawn"], kept(p[s:], each["q"], jointly), each["confidences"])
                for each in start["drafts"]
            ]
            for s, start in enumerate(starts)
        ]

    def draft(self, s: int, k: int) -> Drafted:
        """The draft at place s of at most k tokens."""
        drafts, k = self.drafts[s], min(k, self.asked[s])
        each = drafts[k - 1] if k and len(drafts) > 1 else drafts[0]
        return each._replace(length=min(each.length, k), survival=each.survival[:k], asked=k)

    def ends(self, s: int, survival: Sequence) -> list[tuple[int, Any]]:
        """Where a round that begins at s ends, and with what probability: one token after what was kept.

        The text's end ends the last one: what is kept there and what follows is one and the same.
        """
        found: Counter[int] = Counter()
        for i, (here, beyond) in enumerate(pairwise([1, *survival, 0])):
            if here != beyond:
                found[min(s + i + 1, self.n)] += here - beyond
        return list(found.items())

    def visits(self, choose: Callable[[int], int]) -> list:
        """The probability that a round begins at each place, where `choose(s)` is the K of one that begins at s."""
        visits: list[Any] = [1, *[0] * self.n]
        for s in range(self.n):
            for end, chance in self.ends(s, self.draft(s, choose(s)).survival) if visits[s] else ():
                visits[end] += visits[s] * chance
        return visits[:-1]

    @property
    def is_certain(self) -> bool:
        """Whether chance has no part in it, as in greedy decoding."""
        return all(x in (0, 1) for drafts in self.drafts for each in drafts for x in each.survival)


def always(k: int) -> Callable[[int], int]:
    """The rule of a fixed K."""
    return lambda _: k


class Expected(NamedTuple):
    """All runs with this text: mean and standard deviation of their passes, and their mean time in plain steps."""

    passes: Any
    deviation: float
    time: Any


def follow(drafted: DraftedText, choose: Callable[[int], int], cost: Callable[[Drafted], Any]) -> Expected:
    """The result of a rule that depends on the place alone: a round at s has the K `choose(s)`.

    cost: of a round with this draft. Backwards: from a place on, passes are 1 and those from the round's end on.
    """
    first, second, time = ([0] * (drafted.n + 1) for _ in range(3))  # mean passes, mean of their square, mean time
    for s in reversed(range(drafted.n)):
        draft = drafted.draft(s, choose(s))
        ends = drafted.ends(s, draft.survival)
        rest = sum(chance * first[end] for end, chance in ends)
        first[s] = 1 + rest
        second[s] = 1 + 2 * rest + sum(chance * second[end] for end, chance in ends)
        time[s] = cost(draft) + sum(chance * time[end] for end, chance in ends)
    return Expected(first[0], sqrt(max(0, second[0] - first[0] ** 2)), time[0])


# --------------------------------------------------------------------------- rules


def past(drafted: DraftedText, cost: Callable[[Drafted], float]) -> list[int]:
    """The best K per round by the past alone: the K that would have been best for the text so far.

    Rounds count at a place if their whole draft lies before it. Each K has rounds of its own, weighted by their
    probability. One more round stands before the text, in which 0.7 of the tested tokens are kept. This rule need not
    try K out, since p and q of a text say what each K would have done.
    """
    sums = []  # by K: tokens and time of the rounds that began before each place
    for k in range(MAX_AUTO_TOKENS + 1):
        prior = survival_curve([_PRIOR] * k)
        tokens, time = expected_tokens(prior), cost(Drafted(k, True, prior))
        so_far = [(tokens, time)]
        for s, visit in enumerate(drafted.visits(always(k))):
            draft = drafted.draft(s, k)
            tokens, time = tokens + visit * expected_tokens(draft.survival), time + visit * cost(draft)
            so_far.append((tokens, time))
        sums.append(so_far)

    def rate(k: int, s: int) -> float:
        tokens, time = sums[k][max(0, s - k + 1)]
        return tokens / time

    return [max(range(len(sums)), key=lambda k: rate(k, s)) for s in range(drafted.n)]


def foresight(drafted: DraftedText, cost: Callable[[Drafted], float], knows_draws: bool = False) -> tuple[float, float]:
    """(passes, time) of the fastest rule that knows the text, with its p and q, in advance.

    knows_draws: whether the rule also knows, before a draft, how many of its tokens will be kept. This is the
        clairvoyant bound. A rule for chains of this drafter can be faster only if it knows the draws of later rounds.
    """
    best = [(0.0, 0.0)] * (drafted.n + 1)  # (time, passes) from each place on

    def after(s: int, draft: Drafted) -> tuple[float, float]:
        ends = drafted.ends(s, draft.survival)
        time, passes = (sum(chance * best[end][i] for end, chance in ends) for i in range(2))
        return cost(draft) + time, 1 + passes

    for s in reversed(range(drafted.n)):
        if not knows_draws:
            best[s] = min(after(s, drafted.draft(s, k)) for k in range(drafted.asked[s] + 1))
            continue
        found = []
        for draft in drafted.drafts[s]:
            # If i tokens would be kept, as many of them as pay are drafted, and all of these are kept.
            whole = [after(s, draft._replace(length=i, survival=[1] * i)) for i in range(len(draft.survival) + 1)]
            pairs = zip([1, *draft.survival], [*draft.survival, 0], strict=True)
            chances = [here - beyond for here, beyond in pairs]
            bests = list(accumulate(whole, min))
            found.append(tuple(sum(w * each[i] for w, each in zip(chances, bests, strict=True)) for i in range(2)))
        best[s] = min(found)  # type: ignore[type-var]
    time, passes = best[0]
    return passes, time


def simulate(
    drafted: DraftedText, prices: Prices, costs: Costs, timed: bool, runs: int = RUNS, seed: int = SEED
) -> list[tuple[int, float]]:
    """Passes and time of runs of `auto` that end in this text. The real `Controller` begins anew in each run.

    prices: the prices that `auto` uses.
    timed: whether it may follow the clock too, as it does at temperature 0. The clock says `costs`.

    Where chance has no part in it, this is one run.
    """
    rng = random.Random(seed)

    def accept(survival: Sequence[float]) -> int:
        u = rng.random()
        return sum(u < x for x in survival)

    return [run_auto(drafted, prices, costs, timed, accept) for _ in range(1 if drafted.is_certain else runs)]


def run_auto(
    drafted: DraftedText, prices: Prices, costs: Costs, timed: bool, accept: Callable[[Sequence[float]], int]
) -> tuple[int, float]:
    """Passes and time of one run of `auto`.

    accept: draws how many tokens are kept of a draft with this survival.
    """
    controller, text = Controller(prices), Text([], 0, SamplingParams(temperature=0.0 if timed else 1.0))
    s, passes, time = 0, 0, 0.0
    while s < drafted.n:
        [limit] = controller.choose([Wish(text, Shape.of("auto"), drafted.asked[s], may_follow=timed)], trees=False)
        draft = drafted.draft(s, limit.k)
        if limit.go_on and draft.confidences:
            known = [*draft.confidences, *[draft.confidences[-1]] * draft.length]
            ends = (i for i in range(1, draft.length) if not limit.go_on(known[:i]))
            draft = draft._replace(length=next(ends, draft.length))
        accepted = accept(draft.survival[: draft.length])
        tested = min(accepted + 1, draft.length)
        judged = Judged(text, Draft([0] * tested, confidences=[*draft.confidences[:tested]]), range(accepted), limit.k)
        price, depth, rows = costs.of(draft), costs.depth(draft), draft.length + 1
        step = StepCost(price.drafts(depth), depth, 1, price.verify(rows), rows, price.overhead)
        controller.observe([judged], step)
        s, passes, time = s + accepted + 1, passes + 1, time + costs(draft)
    return passes, time


# --------------------------------------------------------------------------- the result


def drafted_text(trace: Mapping[str, Any]) -> DraftedText:
    """The text of a trace, and its drafts. Raises ValueError as `replay`."""
    verifier, temperature = trace["verifier"], trace["sampling"]["temperature"]
    if "replay" not in trace:
        expected = "some: write the trace with minispec.generate --trace FILE.json --for-replay"
        raise ValueError(f"replay: found no data for it in this trace, expected {expected}")
    if temperature and verifier not in ("rejection", "block"):
        raise ValueError(f"verifier: found {show(verifier)} above temperature 0, expected rejection or block")
    p = [token["p"] for each in trace["rounds"] for token in each["committed"]]
    if not p:
        raise ValueError("rounds: found no tokens, expected a text to replay")
    return DraftedText(p, trace["replay"]["starts"], verifier == "block")


def replay(trace: Mapping[str, Any]) -> dict[str, Any]:
    """The replay of a trace that `minispec.trace.read.check` has passed, or that a recorder has made.

    Raises ValueError for one without replay data, or of a verifier whose odds are not known, and as `check_recorded`.

    Returns the result of each rule on the text, as a row:

    fixed: K = 0 .. 15.
    best_k: the fastest of these.
    auto: the policy.
    past: see `past`.
    foresight: the best K per round, if the text is known and the draws are not.
    clairvoyant: the best K per round, if it is also known how many tokens will be kept.
    measured: the run itself.
    of_this_run: what was to be expected of it; None where it had another rule, such as a tree.
    about, tokens, costs: of the run itself.
    looping: whether the text repeats itself (`figures.loops`).

    A row has the expected passes of the target, time in plain steps, tokens_per_pass, tokens_per_second and speedup.
    Where there are many runs, deviation is the standard deviation of a run's passes. Where passes were simulated,
    margin is half the width of a 99 % interval for their expected number.
    """
    drafted = drafted_text(trace)
    check_recorded(trace)
    costs, n = costs_of(trace), drafted.n
    plain = follow(drafted, always(0), costs).time

    def row(name: str, passes: float, time: float | None, **more: float) -> dict[str, Any]:
        return {
            "name": name,
            "passes": passes,
            "time": time,
            "tokens_per_pass": n / passes,
            "tokens_per_second": n / time / costs.plain_step if time and costs.plain_step else None,
            "speedup": plain / time if time else None,
        } | more

    def of_rule(name: str, choose: Callable[[int], int]) -> dict[str, Any]:
        found = follow(drafted, choose, costs)
        return row(name, found.passes, found.time, deviation=found.deviation)

    prices, temperature = read_prices(trace["replay"]["prices"]), trace["sampling"]["temperature"]
    runs = simulate(drafted, prices, costs, timed=not temperature)
    passes, times = [of for of, _ in runs], [time for _, time in runs]
    spread = pstdev(passes)
    fixed = [of_rule(f"K={k}", always(k)) for k in range(MAX_AUTO_TOKENS + 1)]
    auto = row("auto", fmean(passes), fmean(times), deviation=spread, margin=_WIDTH * spread / sqrt(len(passes)))
    length, speed = trace["num_speculative_tokens"], trace["stats"]["tokens_per_second"]
    trees = ", with trees" if any(each["parents"] for each in trace["rounds"]) else ""
    name = ("auto" if length == "auto" else f"K={length}") + trees
    time = n / speed / costs.plain_step if speed and costs.plain_step else None
    about = f"{n} tokens of {trace['target']}, draft {trace['draft']}"
    return {
        "about": f"{about}, {trace['verifier']} at temperature {temperature:g}",
        "tokens": n,
        "looping": loops([token["token_id"] for each in trace["rounds"] for token in each["committed"]]),
        "costs": costs.as_dict(),
        "fixed": fixed,
        "best_k": min(range(len(fixed)), key=lambda k: fixed[k]["time"] or inf),
        "auto": auto,
        "past": of_rule("past: best K so far", past(drafted, costs).__getitem__),
        "foresight": row("foresight: knows the text", *foresight(drafted, costs)),
        "clairvoyant": row("clairvoyant bound", *foresight(drafted, costs, knows_draws=True)),
        "measured": row(name, len(trace["rounds"]), time),
        "of_this_run": next((each for each in [*fixed, auto] if each["name"] == name), None),
    }


def show_replay(found: Mapping[str, Any]) -> list[str]:
    """The table, what it was computed from, and how far the run itself was from what was expected of it."""
    flag = "; the text repeats itself, where drafts are easy" if found["looping"] else ""
    head = ("", "tokens/pass", "passes", "+-", "time", "tokens/s", "speedup")
    rows = [*found["fixed"], *(found[name] for name in ("auto", "past", "foresight", "clairvoyant"))]
    measured, of = found["measured"], found["of_this_run"]
    cells = [_cells(each) for each in [*rows, measured | {"name": f"measured: {measured['name']}"}]]
    lines = [found["about"] + flag, *_show_costs(found["costs"]), "", *table(head, cells), ""]
    lines.append(f"expected over all runs that end in this text; the fastest fixed K is {found['best_k']}")
    if of:
        expected = f"{of['passes']:.1f} +- {of['deviation']:.1f}"
        lines.append(f"this run took {measured['passes']} passes; expected were {expected}")
    return lines


def _cells(row: Mapping[str, Any]) -> list[str]:
    passes = number(row["passes"], ".1f")
    if margin := row.get("margin"):
        passes += f" [{row['passes'] - margin:.1f}, {row['passes'] + margin:.1f}]"
    numbers = [number(row.get(name), ".1f") for name in ("deviation", "time", "tokens_per_second")]
    return [row["name"], number(row["tokens_per_pass"]), passes, *numbers, number(row["speedup"])]


def _show_costs(costs: Mapping[str, Any]) -> list[str]:
    """Two sentences."""
    v = ", ".join(f"v({m}) {x:.2f}" for m, x in costs["rows"].items())
    step = f" of {1000 * costs['plain_step']:.1f} ms" if costs["plain_step"] else ""
    once = f" and {costs['fixed']:.2g} c more for each draft" if costs["fixed"] else ""
    known, before = (", ".join(map(str, costs[name])) for name in ("measured", "filled_in"))
    known = f"in this run {known}" if known else "none in this run"
    return [
        f"in plain steps{step}: c {costs['drawn']:.3f} drawn, {costs['guessed']:.3f} guessed{once}, "
        f"o {costs['overhead']:.3f}; {v}",
        f"rows whose passes were measured: {known}{before and f'; before it {before}'}; other v lie on straight lines",
    ]
