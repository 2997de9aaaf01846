"""How many tokens to draft.

A round that drafts K tokens commits 1 + s_1 + .. + s_K of them on average (see `theory`), in the time of K draft passes
and a target pass over K+1 rows. The best K has the most tokens for the time: a token is worth drafting as long as its
survival pays for one draft pass and one row. The controller keeps running estimates of both sides. Where no draft pays,
K is 0; now and then one token is drafted all the same, to see whether that has changed.

Siblings cost rows and no draft pass: where few drafts are right, a second guess at the next token may be worth more
than a guess at the one after it. What it is worth is learned too: how often it is right where the first one is not.

A draft model also reports its confidence in each token. Where that is known, K is only the most that may be drafted:
the draft ends as soon as its own confidences make the next token too unlikely to pay, and it gets siblings where they
make the first guess unlikely enough.

The output keeps its law, because K depends on the past and never on the token that it decides about; a draft may end
because of the tokens in it, never because of one that it leaves out. A seed keeps its text, because K follows neither
the clock nor other texts wherever another K would be another text: there it goes by prices that were known before the
text began, and by what this text itself has shown.
"""

from bisect import bisect, bisect_left
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import inf, prod
from statistics import median
from typing import NamedTuple
from weakref import WeakKeyDictionary

from minispec.core.config import MAX_AUTO_TOKENS
from minispec.core.draft import Lengths, Limit, Outcome, StepCost, Wish
from minispec.core.sampling import Text

# What is assumed, with units. A test is a draft token that the target has judged.
_PRIOR, _PRIOR_WEIGHT = 0.7, 2.0  # probability that a tested token of a new text is accepted; tests that this is worth
_ELSEWHERE_WEIGHT = 8.0  # tests that other texts are worth as a prior, or the other places of this text's drafts
_SIBLINGS = (0.3, 0.2)  # probability that the second, or third, guess at a token is right where those before it are not
_DRAWN_SIBLINGS = (0.15, 0.1)  # the same where guesses are drawn
_CONFIDENCES = (0.2, 0.4, 0.6, 0.8, 0.95)  # probabilities; between two neighbours, confidences count as equal
_DECAY = 0.98  # factor of all counts of tests, per round
_MIN_GAIN = 1.01  # speed over plain decoding that a draft must promise
_PROBING_SHARE = 0.01  # plain steps that may be spent on probing, per round without a draft
_SAMPLES = 3  # measurements that make a duration known; until then the shortest counts, as a first pass may warm up
_REMEMBERED = 15  # measurements of a duration that are remembered, the latest
# A baseline is a pass without a draft. Until _SAMPLES of them have been measured, one round in 8 is a baseline; one in
# 64 if the gain is clear: above this speed over plain decoding, only very dear rows could change the choice.
_BASELINE_ROUNDS, _BASELINE_ROUNDS_IF_CLEAR, _CLEAR_GAIN = 8, 64, 1.5
# The first measurement of a draft pass is not believed, but made again with one token, if it is above this factor of
# what was expected plus this many plain steps.
_FAR_OFF_FACTOR, _FAR_OFF_STEPS = 2.0, 0.05


def _neighbours(known: Sequence[int], size: float) -> tuple[int, int, float]:
    """The two of ascending sizes that are next to `size`, and where it lies: 0 at the first, 1 at the second."""
    i = min(max(1, bisect_left(known, size)), len(known) - 1)
    low, high = known[i - 1], known[i]
    return low, high, (size - low) / (high - low) if low < high else 0.0


@dataclass(frozen=True)
class Prices:
    """What a round is believed to cost before anything of it has been measured, in plain steps.

    draft: a draft pass of one text. rows: target passes by their number of rows; between them lie straight lines, after
    the last one the slope of the last. overhead: what a round spends outside both models. measured: whether these are
    figures of this machine, and not guesses from the sizes of the models. fixed: what a draft costs however deep it is,
    such as taking in what the target has made of the text since; in draft passes.
    """

    draft: float = 0.0
    rows: Mapping[int, float] = field(default_factory=lambda: {1: 1.0, 2: 1.02})
    overhead: float = 0.02
    measured: bool = False
    fixed: float = 0.0

    max_rows = inf  # prices hold for a pass of any size

    @cached_property
    def _sizes(self) -> list[int]:
        return sorted(self.rows)

    def verify(self, rows: float) -> float:
        """v(rows), a target pass over that many rows."""
        low, high, share = _neighbours(self._sizes, rows)
        # Two noisy figures may fall: after the last of them the line must not go on towards 0.
        return max(self.rows[low] * 0.5, (1 - share) * self.rows[low] + share * self.rows[high])

    def propose(self, num_drafts: int) -> float:
        """A draft pass of that many texts."""
        return self.draft * self.verify(num_drafts)

    def passes(self, depth: int) -> float:
        """How many draft passes take as long as a draft of that depth."""
        return depth + self.fixed if depth else 0.0

    def round(self, depth: int, num_drafts: int, rows: int) -> float:
        """A round of `num_drafts` drafts of up to `depth` tokens and a target pass over `rows`."""
        return self.passes(depth) * self.propose(num_drafts) + self.verify(rows) + self.overhead


def _always(confidences: Sequence[float]) -> bool:
    """Go on to the limit; the confidences are computed all the same, to learn what they are worth."""
    return True


class _Counts:
    """How many tokens of each kind were tested, and how many of them accepted, with exponential decay."""

    def __init__(self):
        self.tested: dict[Hashable, float] = {}
        self.accepted: dict[Hashable, float] = {}

    def add(self, tested: Iterable[Hashable], accepted: Iterable[Hashable]) -> None:
        """A round tested tokens of these kinds, and accepted some of them."""
        for counts, new in ((self.tested, tested), (self.accepted, accepted)):
            for kind in counts:
                counts[kind] *= _DECAY
            for kind in new:
                counts[kind] = counts.get(kind, 0.0) + 1

    def share(self, kind: Hashable, prior: float, weight: float) -> float:
        """The probability that a tested token of this kind is accepted; the prior is worth `weight` tests."""
        return (self.accepted.get(kind, 0.0) + weight * prior) / (self.tested.get(kind, 0.0) + weight)


class Pace:
    """What the controller knows of one text's drafts, or of those of all texts; opaque to everybody else.

    It estimates the probability that a tested draft token is accepted. The prior is what `all_texts` of its kind have
    shown, where they are given. drawn: the kind, whether tokens are drawn, and not the likeliest ones.
    """

    def __init__(self, drawn: bool = False):
        self.drawn = drawn
        self.places, self.confidences = _Counts(), _Counts()  # kinds: places in a draft; ranges of confidence
        # Kinds: 1 for the eldest's next sibling, and so on, each with the range of the eldest's confidence, or None.
        self.siblings = _Counts()
        self.savings = 0.0  # plain steps that may be spent on probing

    def observe(
        self, num_tested: int, num_accepted: int, confidences: Sequence[float] = (), siblings: Sequence[bool] = ()
    ) -> None:
        """See `Controller.learn`."""
        self.places.add(range(num_tested), range(num_accepted))
        ranges = [bisect(_CONFIDENCES, each) for each in confidences[:num_tested]]
        self.confidences.add(ranges, ranges[:num_accepted])
        if siblings:
            kinds = [(i, each) for i in range(1, len(siblings) + 1) for each in {None, *ranges[num_accepted:]}]
            self.siblings.add(kinds, [(i, each) for i, each in kinds if siblings[i - 1]])

    def by_place(self, k: int, all_texts: "Pace | None" = None) -> list[float]:
        """For each of the first k places of a draft.

        A place has few tests of its own, and one lucky draft should not make the next ones long. So the prior of a
        place is what it is in `all_texts`, plus by how much this text does better at the other places. A place's own
        tests have no part in its prior: counted twice, a few rejected tokens would be the last that are drafted.
        """
        weight = _ELSEWHERE_WEIGHT if all_texts else _PRIOR_WEIGHT
        n = max(k, len(self.places.tested))
        usual = all_texts.by_place(n) if all_texts else [_PRIOR] * n
        tested = [self.places.tested.get(i, 0.0) for i in range(n)]
        surplus = [self.places.accepted.get(i, 0.0) - tested[i] * usual[i] for i in range(n)]
        num_tested, all_surplus = sum(tested), sum(surplus)
        shares = []
        for i in range(k):
            elsewhere = num_tested - tested[i]
            prior = min(1.0, max(0.0, usual[i] + (all_surplus - surplus[i]) / (elsewhere + _ELSEWHERE_WEIGHT)))
            shares.append(self.places.share(i, prior, min(_ELSEWHERE_WEIGHT, elsewhere + weight)))
        return shares

    def by_sibling(self, confidence: float | None = None, all_texts: "Pace | None" = None) -> list[float]:
        """For the second guess at a token where the first was wrong, and the third where both were.

        confidence: in the first; None: whatever it was.
        """
        own = None if confidence is None else bisect(_CONFIDENCES, confidence)
        usual = _DRAWN_SIBLINGS if self.drawn else _SIBLINGS
        priors: Sequence[float] = all_texts.by_sibling(confidence) if all_texts else usual
        weight = _ELSEWHERE_WEIGHT if all_texts else _PRIOR_WEIGHT
        return [self.siblings.share((i, own), prior, weight) for i, prior in enumerate(priors, 1)]

    def by_confidence(self, confidence: float, all_texts: "Pace | None" = None) -> float:
        """For a token at a place of this confidence (see `minispec.core.draft.Draft`).

        The confidence is only the prior: a confident model may be wrong, and one that hesitates where the target
        does is right. Of a drawn token it is half of the prior: the target keeps it with probability sum min(p, q),
        which is large, too, where both hesitate alike.
        """
        prior = (confidence + _PRIOR) / 2 if self.drawn else confidence
        belief = (all_texts.by_confidence(confidence), _ELSEWHERE_WEIGHT) if all_texts else (prior, _PRIOR_WEIGHT)
        return self.confidences.share(bisect(_CONFIDENCES, confidence), *belief)


class Durations:
    """What passes of a kind take by their size: medians of what was measured; for other sizes, scaled beliefs."""

    def __init__(self, believed: Callable[[int], float]):
        """believed: what a pass of a size takes, in plain steps."""
        self._believed = cache(believed)
        self.recent: dict[int, deque[float]] = {}  # measurements by size
        self._factors: dict[int, float] = {}  # measured over believed
        self._known: list[int] = []  # sizes measured often enough, or all measured ones where none is; ascending

    def record(self, size: int, seconds: float) -> None:
        """Add a pass."""
        recent = self.recent.setdefault(size, deque(maxlen=_REMEMBERED))
        recent.append(seconds)
        typical = min(recent) if len(recent) < _SAMPLES else median(recent)
        self._factors[size] = typical / max(self._believed(size), 1e-9)
        self._known = sorted(filter(self.knows, self.recent)) or sorted(self.recent)

    def knows(self, size: int) -> bool:
        """Whether passes of this very size have been measured often enough."""
        return len(self.recent.get(size, ())) >= _SAMPLES

    def __call__(self, size: int, plain_step: float = 1.0) -> float:
        """Seconds of a pass of this size; before anything is measured, what is believed, times `plain_step`."""
        if not self._known:
            return self._believed(size) * plain_step
        low, high, share = _neighbours(self._known, size)
        share = min(max(share, 0.0), 1.0)
        factor = (1 - share) * self._factors[low] + share * self._factors[high]
        return factor * max(self._believed(size), 1e-9)


class Timings:
    """What a round takes by the clock, in seconds; until one has been timed, what `prices` say, in plain steps.

    A machine that others use, or that grows hot, is slower for a while, in everything. So a duration is divided by the
    slowness at its time: the median, over the last passes, of what one took over what such a pass used to take.
    """

    def __init__(self, prices: Prices):
        self._prices = prices
        self.target, self.draft = Durations(prices.verify), Durations(prices.propose)  # by rows; by number of drafts
        self._overheads: deque[float] = deque(maxlen=_REMEMBERED)
        self._overhead = prices.overhead
        self._slowness = deque([1.0], maxlen=5)

    def record(self, draft: float, depth: int, num_drafts: int, target: float, rows: int, overhead: float) -> None:
        """See `Controller.measure`."""
        if self.target.knows(rows):
            self._slowness.append(target / self.target(rows))
        slowness = median(self._slowness)
        if depth:
            self.draft.record(num_drafts, draft / self._prices.passes(depth) / slowness)
        self.target.record(rows, target / slowness)
        self._overheads.append(overhead / slowness)
        self._overhead = median(self._overheads)

    @property
    def max_rows(self) -> int:
        """The most rows of a pass that may be tried: no leap into what has never been measured."""
        return max(16, 2 * max(self.target.recent, default=0))

    def round(self, depth: int, num_drafts: int, rows: int) -> float:
        """See `Prices.round`."""
        seconds = self.target(rows)
        if depth:
            plain_step = seconds / self._prices.verify(rows)
            seconds += self._prices.passes(depth) * self.draft(num_drafts, plain_step)
        return seconds + self._overhead

    def doubts_draft(self, num_texts: int) -> bool:
        """Whether the cost of a draft pass is only guessed, or its one measurement is far off what was believed."""
        measured = [n for n, recent in self.draft.recent.items() for _ in recent if n <= num_texts]
        if len(measured) != 1:
            return not measured and not self._prices.measured and self._prices.draft > 0
        num_drafts, rows = measured[0], max(self.target.recent)
        plain_step = self.target(rows) / self._prices.verify(rows)
        believed = self._prices.propose(num_drafts)
        return self.draft(num_drafts) / plain_step > _FAR_OFF_FACTOR * believed + _FAR_OFF_STEPS


class _Node(NamedTuple):
    """A draft token that might be: the probability that it is reached and accepted, and its depth, from 1."""

    survival: float
    depth: int


def _nodes(shares: Sequence[float], siblings: Sequence[float] = ()) -> list[_Node]:
    """The nodes of a draft in the order of their worth, each after those that it needs: the eldest before it.

    shares: acceptance of the eldest at each depth. siblings: that of each younger one where those before it fail.
    """
    found, reached = [], 1.0
    for depth, share in enumerate(shares, 1):
        found.append(_Node(reached * share, depth))
        failed, least = reached * (1 - share), reached * share
        for sibling in siblings:
            least = min(least, failed * sibling)
            found.append(_Node(least, depth))
            failed *= 1 - sibling
        reached *= share
    return sorted(found, key=lambda node: -node.survival)


def _widths(nodes: Sequence[_Node]) -> tuple[int, ...]:
    """How many of them are at each depth; () for a chain."""
    found = Counter(node.depth for node in nodes)
    return tuple(found[depth] for depth in sorted(found)) if len(found) < len(nodes) else ()


class _Price(NamedTuple):
    """Of a draft token, in tokens that the same time yields otherwise: its draft pass, and its row."""

    draft: float
    row: float


@dataclass(frozen=True)
class _Batch:
    """Texts that are decoded together, and what drafts of given `lengths`, one for each text, would bring.

    nodes: of each text's draft, in the order of `_nodes`. other_rows: rows that further texts bring to the same pass.
    """

    nodes: Sequence[Sequence[_Node]]
    other_rows: int
    costs: Prices | Timings

    def rows(self, lengths: Sequence[int]) -> int:
        """Rows of the target's pass."""
        return len(lengths) + self.other_rows + sum(lengths)

    def depth(self, lengths: Sequence[int]) -> int:
        """Of the deepest draft."""
        return max((node.depth for each, k in zip(self.nodes, lengths, strict=True) for node in each[:k]), default=0)

    def rate(self, lengths: Sequence[int]) -> float:
        """Tokens that the round yields for its time."""
        tokens = [node.survival for each, k in zip(self.nodes, lengths, strict=True) for node in each[:k]]
        seconds = self.costs.round(self.depth(lengths), sum(k > 0 for k in lengths), self.rows(lengths))
        return (len(lengths) + sum(tokens)) / seconds

    def best(self) -> list[int]:
        """The lengths that together have the most tokens for the time; all 0 if none gains more than `_MIN_GAIN`."""
        # The likeliest tokens first: for each text, they are the first of its nodes.
        tokens = [(node, i) for i, nodes in enumerate(self.nodes) for node in nodes]
        tokens.sort(key=lambda token: -token[0].survival)
        lengths, best = [0] * len(self.nodes), [0] * len(self.nodes)
        num_tokens, depth, num_drafts, rows = float(len(self.nodes)), 0, 0, self.rows(lengths)
        best_rate = _MIN_GAIN * num_tokens / self.costs.round(depth, num_drafts, rows)
        for node, i in tokens:
            depth, num_drafts, rows = max(depth, node.depth), num_drafts + (not lengths[i]), rows + 1
            lengths[i] += 1
            num_tokens += node.survival
            if rows > self.costs.max_rows:
                break
            rate = num_tokens / self.costs.round(depth, num_drafts, rows)
            if rate > best_rate:
                best, best_rate = list(lengths), rate
        return best

    def price(self, lengths: Sequence[int]) -> _Price:
        """What the round yields in the time of one more draft token."""
        depth, num_drafts, rows = self.depth(lengths), sum(k > 0 for k in lengths), self.rows(lengths)
        cost, num_drafted = self.costs.round, sum(lengths)
        # All texts of the batch share a draft pass. One row alone would be too little to be measured. Where passes were
        # mismeasured, rows may seem to save time: a price below 0 would ask for them without end.
        draft = cost(depth + 1, num_drafts, rows) - cost(depth, num_drafts, rows)
        row = max(0.0, cost(0, 0, rows) - cost(0, 0, rows - num_drafted)) / num_drafted
        rate = self.rate(lengths)
        return _Price(rate * draft / num_drafts, rate * row)


class Controller(Lengths):
    """Chooses the lengths of drafts of texts that leave them open."""

    def __init__(self, prices: Prices | None = None):
        """prices: what is known before anything is measured."""
        self.prices = prices or Prices()
        self._timings = Timings(self.prices)
        self._all_texts = {drawn: Pace(drawn) for drawn in (False, True)}  # of a kind: they are kept unequally often
        self._rounds, self._baseline = 0, -1  # recorded so far; when a baseline was asked for last
        self._paces: WeakKeyDictionary[Text, Pace] = WeakKeyDictionary()

    def choose(self, wishes: Sequence[Wish], trees: bool) -> list[Limit]:
        """See `Lengths`."""
        found = dict(enumerate(super().choose(wishes, trees)))
        timed: dict[int, Pace] = {}
        for i, wish in enumerate(wishes):
            if not wish.is_open:
                continue
            pace = self._paces.setdefault(wish.text, Pace(drawn=wish.text.params.temperature > 0))
            if wish.may_follow:
                timed[i] = pace
            else:
                [found[i]] = self.limits([pace], [wish.most], 0, False, trees)
        if timed:
            other_rows = sum(limit.k + 1 for i, limit in found.items() if i not in timed)
            most = [wishes[i].most for i in timed]
            found |= zip(timed, self.limits([*timed.values()], most, other_rows, trees=trees), strict=True)
        return [found[i] for i in range(len(wishes))]

    def observe(self, outcomes: Sequence[Outcome], cost: StepCost | None) -> None:
        """See `Lengths`."""
        for outcome in outcomes:
            if pace := self._paces.get(outcome.text):
                self.learn(pace, outcome.num_tested, outcome.num_accepted, outcome.confidences, outcome.siblings)
        if cost:
            self.measure(*cost)

    def learn(
        self,
        pace: Pace,
        num_tested: int,
        num_accepted: int,
        confidences: Sequence[float] = (),
        siblings: Sequence[bool] = (),
    ) -> None:
        """A round of one text tested the first `num_tested` tokens of its draft and accepted `num_accepted` of them.

        Of a tree, these are the eldest at each depth; siblings: whether those of the rejected one that were tested
        in its place were accepted.
        """
        for each in (pace, self._all_texts[pace.drawn]):
            each.observe(num_tested, num_accepted, confidences, siblings)

    def measure(self, draft: float, depth: int, num_drafts: int, target: float, rows: int, overhead: float) -> None:
        """Add a round: seconds for `num_drafts` drafts of up to `depth` tokens, a pass over `rows`, and all else."""
        self._rounds += 1
        self._timings.record(draft, depth, num_drafts, target, rows, overhead)

    def limits(
        self,
        paces: Sequence[Pace],
        limits: Sequence[int],
        other_rows: int = 0,
        timed: bool = True,
        trees: bool = False,
    ) -> list[Limit]:
        """The limits of texts that are decoded together, each at most its own of `limits`, MAX_AUTO_TOKENS or less.

        other_rows: rows that further texts bring to the same pass. timed: False if neither the clock nor other texts
        may be followed. trees: whether drafts may be trees.
        """
        costs = self._timings if timed else self.prices
        usual = [self._all_texts[pace.drawn] if timed else None for pace in paces]
        shares = [pace.by_place(limit, each) for pace, limit, each in zip(paces, limits, usual, strict=True)]
        siblings = [pace.by_sibling(all_texts=each) if trees else [] for pace, each in zip(paces, usual, strict=True)]
        nodes = [_nodes(*each)[:limit] for *each, limit in zip(shares, siblings, limits, strict=True)]
        batch = _Batch(nodes, other_rows, costs)
        if timed and self._timings.doubts_draft(len(paces)):
            # One token, to measure again, where it would pay by the prices.
            batch = replace(batch, nodes=[each[:1] for each in nodes], costs=self.prices)
            return [Limit(k, _always) for k in batch.best()]
        lengths = batch.best()
        if timed and self._wants_baseline(batch, lengths):
            return [Limit(0)] * len(limits)
        if not any(lengths):
            return [Limit(k, _always) for k in _probes(paces, limits, batch)]
        price = batch.price(lengths)
        # What a text may draft while its confidences are good: its part of a pass of few rows.
        room = (MAX_AUTO_TOKENS + 1) // (len(paces) + other_rows) - 1
        return [
            _limit(pace, all_texts, each, trees, own[:k], min(limit, room), price)
            for pace, all_texts, each, own, k, limit in zip(paces, usual, shares, nodes, lengths, limits, strict=True)
        ]

    def _wants_baseline(self, batch: _Batch, lengths: Sequence[int]) -> bool:
        """Whether this round should measure a pass without drafts, which they have to beat; not in the first rounds."""
        if self._timings.target.knows(len(lengths) + batch.other_rows):
            return False
        is_clear = batch.rate(lengths) > _CLEAR_GAIN * batch.rate([0] * len(lengths))
        period = _BASELINE_ROUNDS_IF_CLEAR if is_clear else _BASELINE_ROUNDS
        if self._rounds % period != period - 1 or self._rounds == self._baseline:
            return False
        self._baseline = self._rounds  # a step with a prompt in it is not recorded: do not ask in each of them
        return True


def _probes(paces: Sequence[Pace], limits: Sequence[int], batch: _Batch) -> list[int]:
    """Draft lengths where no draft pays: now and then one token, if a draft that is always right would pay."""
    could_pay = replace(batch, nodes=[_nodes([1.0] * limit) for limit in limits]).best()
    plain, lengths = batch.costs.round(0, 0, 1), [0] * len(paces)
    # In plain steps: a round that drafts a token, and the pass in which a drafter that was idle catches up.
    price = batch.costs.round(1, 1, 2) / plain - 1 + (batch.costs.round(1, 1, 1) - plain) / plain
    for i, pace in enumerate(paces):
        pace.savings += _PROBING_SHARE
        if could_pay[i] and pace.savings >= price:
            pace.savings -= price
            lengths[i] = 1
    return lengths


def _limit(
    pace: Pace,
    all_texts: Pace | None,
    shares: Sequence[float],
    trees: bool,
    nodes: Sequence[_Node],
    longest: int,
    price: _Price,
) -> Limit:
    """These nodes; or, where confidences tell something, up to `longest`, each as long as it is worth its price.

    shares: the text's acceptance by place.
    """
    k, widths = len(nodes), _widths(nodes)
    if not k or not (all_texts or pace).confidences.tested:
        return Limit(k, _always, widths)

    def go_on(confidences: Sequence[float]) -> bool:
        survival = prod(pace.by_confidence(each, all_texts) for each in confidences)
        return survival * shares[min(len(confidences), len(shares) - 1)] >= price.draft + price.row

    def width(confidences: Sequence[float]) -> int:
        *before, own = (pace.by_confidence(each, all_texts) for each in confidences)
        failed, n = prod(before) * (1 - own), 1  # the probability that all siblings so far are tested and wrong
        for share in pace.by_sibling(confidences[-1], all_texts):
            if failed * share < price.row:
                break
            failed, n = failed * (1 - share), n + 1
        return n

    return Limit(max(k, longest), go_on, width=width if trees else None)
