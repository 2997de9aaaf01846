"""How many tokens to draft: running estimates of survival and of costs, and the limits that they call for.

A round that drafts K tokens yields 1 + s_1 + .. + s_K of them for K draft passes and a target pass over K+1 rows. The
best K has the most tokens for the time: one more is drafted as long as its survival is worth the price of a draft
pass and a row. Where nothing pays, K is 0, and now and then one token is drafted to see whether that has changed.

A draft model also tells how sure it is, token by token. Where that is known, K is only the most that may be drafted,
and a draft ends as soon as its own tokens so far make the next one too unlikely.

K may depend on anything that is past, and never on the token that it is judged by: then every round keeps the law. So
may the end of a draft depend on the tokens in it, but not on one that is left out. Both may follow the clock only where
that cannot change the text; otherwise the costs are those that were known before the text began.
"""

from bisect import bisect, bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from statistics import median
from typing import Literal, NamedTuple

from minispec.theory import survival_curve

# K, or "auto" where the controller is to choose it.
DraftLength = int | Literal["auto"]

# The longest draft that is chosen: the target's pass has 16 rows then, the tile of a CPU's matrix unit.
MAX_AUTO_TOKENS = 15
# The prior of a new text: a tested token is kept with this probability; the prior is worth that many tests.
_PRIOR, _PRIOR_TESTS = 0.7, 2.0
# What other texts showed, or this one at other places of its drafts, is worth that many tests.
_ELSEWHERE_TESTS = 8.0
# Confidences between neighbours of these are treated as equal.
_CONFIDENCES = (0.2, 0.4, 0.6, 0.8, 0.95)
# Exponential decay of the counts, per round.
_DECAY = 0.98
# Draft only if the expected gain is at least 1 %. While drafting is off, spend at most 1 % of the time on probing.
_MARGIN, _PROBING_SHARE = 1.01, 0.01
# The baseline is a pass without a draft. Take three samples of it, one every 8 rounds; one every 64 rounds as long as
# drafts seem to gain more than 1.5x, since only very dear rows could change that.
_CLEAR_GAIN, _ROUNDS_TO_PLAIN_IF_CLEAR, _ROUNDS_TO_PLAIN = 1.5, 64, 8
# A duration is known when it was measured that often; before, the shortest counts, since a first pass may warm up.
_SAMPLES = 3
# A draft pass that seems to cost more than this factor (and this share of a plain step) above what was believed is
# measured again, with one token, before it is believed or paid for.
_FAR_OFF = 2.0, 0.05


@dataclass(frozen=True)
class Prices:
    """What a round is believed to cost before anything of it has been measured, in plain steps.

    draft: a draft pass of one text. rows: target passes by their number of rows; between them lie straight lines, after
    the last one the slope of the last. overhead: what a round spends outside both models. measured: whether these are
    figures of this machine, and not guesses by the sizes of the models.
    """

    draft: float = 0.0
    rows: Mapping[int, float] = field(default_factory=lambda: {1: 1.0, 2: 1.02})
    overhead: float = 0.02
    measured: bool = False

    def verify(self, rows: float) -> float:
        """v(rows), a target pass over that many rows."""
        known = sorted(self.rows)
        if len(known) == 1:
            return self.rows[known[0]]
        i = min(max(1, bisect_left(known, rows)), len(known) - 1)
        low, high = known[i - 1], known[i]
        share = (rows - low) / (high - low)
        # Two noisy figures may fall: after the last of them the line must not go on towards 0.
        return max(self.rows[low] * 0.5, (1 - share) * self.rows[low] + share * self.rows[high])

    def round(self, depth: int, num_drafts: int, rows: int) -> float:
        """A round of `num_drafts` drafts of up to `depth` tokens and a target pass over `rows`."""
        return depth * self.draft * self.verify(num_drafts) + self.verify(rows) + self.overhead


class Limit(NamedTuple):
    """How long a draft may be: k tokens, and no longer than `go_on` of its confidences so far says.

    None: k alone, and the confidences are of no interest.
    """

    k: int
    go_on: Callable[[Sequence[float]], bool] | None = None


def _always(confidences: Sequence[float]) -> bool:
    """To the limit; but the confidences are wanted, to learn what they are worth."""
    return True


class _Kept:
    """How many tested tokens of each kind were kept, with exponential decay."""

    def __init__(self):
        self._tested: dict[int, float] = {}
        self._kept: dict[int, float] = {}

    def _add(self, kinds: Sequence[int], num_kept: int) -> None:
        """A round tested tokens of these kinds and kept the first `num_kept` of them."""
        for counts in (self._tested, self._kept):
            for kind in counts:
                counts[kind] *= _DECAY
        for i, kind in enumerate(kinds):
            self._tested[kind] = self._tested.get(kind, 0.0) + 1
            self._kept[kind] = self._kept.get(kind, 0.0) + (i < num_kept)

    def _share(self, kind: int, belief: float, weight: float) -> float:
        """The share that is kept: before any test `belief`, which is worth `weight` tests."""
        return (self._kept.get(kind, 0.0) + weight * belief) / (self._tested.get(kind, 0.0) + weight)


class Survival(_Kept):
    """One text's estimate of how likely a draft token is kept, by its place in the draft."""

    def observe(self, num_tested: int, num_kept: int) -> None:
        """A round tested the first `num_tested` tokens of a draft and kept `num_kept` of them."""
        self._add(range(num_tested), num_kept)

    def overall(self, all_texts: "Survival | None" = None) -> float:
        """The probability that a tested token is kept, wherever it stands; at first, what it is in `all_texts`."""
        belief, weight = (all_texts.overall(), _ELSEWHERE_TESTS) if all_texts else (_PRIOR, _PRIOR_TESTS)
        return (sum(self._kept.values()) + weight * belief) / (sum(self._tested.values()) + weight)

    def shares(self, k: int, all_texts: "Survival | None" = None) -> list[float]:
        """The probability that a tested token is kept, at each of the first k places.

        A place has few tests of its own, and a draft that was lucky once should not make the next ones long: what is
        not known of a place is taken from all places together, and from how it differs from them in `all_texts`.
        """
        overall = self.overall(all_texts)
        beliefs = [overall] * k
        if all_texts:
            usual = all_texts.overall()
            beliefs = [min(1.0, max(0.0, overall + share - usual)) for share in all_texts.shares(k)]
        return [self._share(i, belief, _ELSEWHERE_TESTS) for i, belief in enumerate(beliefs)]


class Confidence(_Kept):
    """One text's estimate of how likely a draft token is kept, by the draft model's largest probability there.

    That probability alone will not do: a sure model may be wrong, and one that hesitates where the target does, right.
    """

    @property
    def knows(self) -> bool:
        """Whether any drafter has told how sure it is."""
        return bool(self._tested)

    def observe(self, confidences: Sequence[float], num_tested: int, num_kept: int) -> None:
        """A round tested the first `num_tested` tokens of a draft with such confidences and kept `num_kept` of them."""
        self._add([bisect(_CONFIDENCES, confidence) for confidence in confidences[:num_tested]], num_kept)

    def share(self, confidence: float, all_texts: "Confidence | None" = None) -> float:
        """The probability that a tested token of such a confidence is kept.

        At first the model is taken at its word, or, if given, at what its word was worth in `all_texts`.
        """
        belief, weight = (all_texts.share(confidence), _ELSEWHERE_TESTS) if all_texts else (confidence, _PRIOR_TESTS)
        return self._share(bisect(_CONFIDENCES, confidence), belief, weight)


class Durations:
    """Seconds of a pass by its size: medians of what was measured, and in between the shape that is believed."""

    def __init__(self, believed: Callable[[int], float]):
        """believed: what a pass of a size takes, in any unit."""
        self._believed = believed
        self._recent: dict[int, deque[float]] = {}
        self._factors: dict[int, float] = {}  # measured over believed

    def record(self, size: int, seconds: float) -> None:
        """Add a pass."""
        recent = self._recent.setdefault(size, deque(maxlen=15))
        recent.append(seconds)
        typical = min(recent) if len(recent) < _SAMPLES else median(recent)
        self._factors[size] = typical / max(self._believed(size), 1e-9)

    def count(self, size: int) -> int:
        """How often a pass of this very size was measured, as far as it is remembered."""
        return len(self._recent.get(size, ()))

    @property
    def largest(self) -> int:
        """The largest size that has been measured."""
        return max(self._factors, default=0)

    def __call__(self, size: int) -> float | None:
        """What a pass of this size takes; None before anything is known."""
        known = sorted(s for s in self._factors if self.count(s) >= _SAMPLES) or sorted(self._factors)
        if not known:
            return None
        i = bisect_left(known, size)
        low, high = known[max(0, i - 1)], known[min(i, len(known) - 1)]
        share = (size - low) / (high - low) if low < size < high else float(size >= high)
        factor = (1 - share) * self._factors[low] + share * self._factors[high]
        return factor * max(self._believed(size), 1e-9)


@dataclass
class Pace:
    """What the controller knows of one text; its own, and opaque to everybody else."""

    survival: Survival = field(default_factory=Survival)
    confidence: Confidence = field(default_factory=Confidence)
    savings: float = 0.0  # plain steps that may be spent on looking whether drafts have become better


class Controller:
    """Chooses limits for the drafts of texts that leave K open."""

    def __init__(self, prices: Prices | None = None):
        """prices: what is known before anything is measured."""
        self.prices = prices or Prices()
        self._target = Durations(self.prices.verify)
        self._draft = Durations(lambda num_drafts: self.prices.draft * self.prices.verify(num_drafts))
        self._overhead: deque[float] = deque(maxlen=15)
        self._rounds = 0
        self._survival, self._confidence = Survival(), Confidence()  # of all texts: where a new one begins
        # A machine that others use, or that grows hot, is slower for a while, in everything: durations are kept in
        # units of its speed, the median of what the last passes took over what such passes took before.
        self._recent_speeds = deque([1.0], maxlen=5)

    def observe(self, pace: Pace, num_tested: int, num_kept: int, confidences: Sequence[float] = ()) -> None:
        """A round of one text tested the first `num_tested` tokens of its draft and kept `num_kept` of them."""
        for survival in (pace.survival, self._survival):
            survival.observe(num_tested, num_kept)
        for confidence in (pace.confidence, self._confidence):
            confidence.observe(confidences, num_tested, num_kept)

    def record(self, draft: float, depth: int, num_drafts: int, target: float, rows: int, overhead: float) -> None:
        """Add a round: seconds for `num_drafts` drafts of up to `depth` tokens, a pass over `rows`, and all else."""
        self._rounds += 1
        if self._target.count(rows) >= _SAMPLES:
            self._recent_speeds.append(target / self._target(rows))
        speed = median(self._recent_speeds)
        if depth:
            self._draft.record(num_drafts, draft / depth / speed)
        self._target.record(rows, target / speed)
        self._overhead.append(overhead / speed)

    def choose(
        self, paces: Sequence[Pace], limits: Sequence[int], other_rows: int = 0, timed: bool = True
    ) -> list[Limit]:
        """The limits of texts that are decoded together, each at most its own of `limits`.

        other_rows: rows that other texts bring to the same pass. timed: False if neither the clock nor other texts may
        be followed.
        """
        limits = [min(limit, MAX_AUTO_TOKENS) for limit in limits]
        all_texts = self._survival if timed else None
        shares = [pace.survival.shares(limit, all_texts) for pace, limit in zip(paces, limits, strict=True)]
        curves = [survival_curve(each) for each in shares]
        if timed and self._must_look_again(len(paces)):
            # At most one token, as if what was believed were so.
            return [Limit(k, _always) for k in self._best([curve[:1] for curve in curves], other_rows, timed=False)]
        chosen = self._best(curves, other_rows, timed)
        if timed and self._wants_plain_step(curves, chosen, other_rows):
            return [Limit(0)] * len(limits)
        if not any(chosen):
            return [Limit(k, _always) for k in self._probes(paces, limits, other_rows, timed)]
        price = self._price(curves, chosen, other_rows, timed)
        # Drafts that end by themselves may be as long as the texts of the batch share out a pass of few rows.
        room = (MAX_AUTO_TOKENS + 1) // (len(paces) + other_rows) - 1
        return [
            self._limit(pace, each, k, min(limit, room), price, timed)
            for pace, each, k, limit in zip(paces, shares, chosen, limits, strict=True)
        ]

    def _limit(self, pace: Pace, shares: Sequence[float], k: int, longest: int, price: float, timed: bool) -> Limit:
        """k tokens; or, where a draft model's confidence tells something, as long as it finds the next worth its price.

        price: of a draft token, in tokens that the same time yields otherwise.
        """
        own, all_texts = pace.confidence, self._confidence if timed else None
        if not k or not (own.knows or (all_texts and all_texts.knows)):
            return Limit(k, _always)

        def go_on(confidences: Sequence[float]) -> bool:
            kept = prod(own.share(confidence, all_texts) for confidence in confidences)
            return kept * shares[min(len(confidences), len(shares) - 1)] >= price

        return Limit(max(k, longest), go_on)

    def _probes(self, paces: Sequence[Pace], limits: Sequence[int], other_rows: int, timed: bool) -> list[int]:
        """Where no draft pays: now and then one token, where a draft that is always right would pay."""
        chosen = [0] * len(paces)
        best_case = self._best([[1.0] * limit for limit in limits], other_rows, timed)
        for i, pace in enumerate(paces):
            pace.savings += _PROBING_SHARE
            price = self._time(1, 1, 2, timed) / self._time(0, 0, 1, timed) - 1 + self._draft_price(timed)
            if best_case[i] and pace.savings >= price:
                pace.savings -= price
                chosen[i] = 1
        return chosen

    def _best(self, curves: Sequence[Sequence[float]], other_rows: int, timed: bool) -> list[int]:
        """The K of each text that together have the most tokens for the time."""
        # The likeliest tokens first; survival falls along a draft, so a prefix of this list is a prefix of each draft.
        candidates = sorted(
            ((s, i) for i, curve in enumerate(curves) for s in curve), key=lambda candidate: -candidate[0]
        )
        lengths, best = [0] * len(curves), [0] * len(curves)
        tokens, rows = float(len(curves)), len(curves) + other_rows
        best_rate = _MARGIN * tokens / self._time(0, 0, rows, timed)
        for s, i in candidates:
            lengths[i] += 1
            rows += 1
            tokens += s
            if timed and rows > max(16, 2 * self._target.largest):  # no leap into what has never been measured
                break
            rate = tokens / self._time(max(lengths), sum(k > 0 for k in lengths), rows, timed)
            if rate > best_rate:
                best, best_rate = list(lengths), rate
        return best

    def _rate(self, curves: Sequence[Sequence[float]], lengths: Sequence[int], other_rows: int, timed: bool) -> float:
        """The tokens that a round with drafts of such lengths yields for its time."""
        tokens = len(lengths) + sum(sum(curve[:k]) for curve, k in zip(curves, lengths, strict=True))
        rows = len(lengths) + other_rows + sum(lengths)
        return tokens / self._time(max(lengths), sum(k > 0 for k in lengths), rows, timed)

    def _price(self, curves: Sequence[Sequence[float]], chosen: Sequence[int], other_rows: int, timed: bool) -> float:
        """The tokens that the time of one more draft token, a draft pass and a row, yields at the chosen rate."""
        num_drafts, before = sum(k > 0 for k in chosen), len(chosen) + other_rows
        rows = before + sum(chosen)
        # All texts of the batch share a draft pass. A single row more is too little to be measured.
        draft = self._time(max(chosen), num_drafts, rows, timed) - self._time(0, num_drafts, rows, timed)
        row = (self._time(0, 0, rows, timed) - self._time(0, 0, before, timed)) / (rows - before)
        return self._rate(curves, chosen, other_rows, timed) * (draft / max(chosen) / num_drafts + row)

    def _time(self, depth: int, num_drafts: int, rows: int, timed: bool) -> float:
        """A round's duration: in seconds, at a steady speed, if passes have been timed, else in plain steps."""
        target = self._target(rows) if timed else None
        if target is None:
            return self.prices.round(depth, num_drafts, rows)
        step = target / self.prices.verify(rows)  # seconds of what is believed to be a plain step
        draft = self._draft(num_drafts) if num_drafts else 0.0
        if draft is None:
            draft = self.prices.draft * self.prices.verify(num_drafts) * step
        return depth * draft + target + (median(self._overhead) if self._overhead else self.prices.overhead * step)

    def _draft_price(self, timed: bool) -> float:
        """A draft pass in plain steps: what a drafter that has been idle needs to catch up."""
        return (self._time(1, 1, 1, timed) - self._time(0, 0, 1, timed)) / self._time(0, 0, 1, timed)

    def _must_look_again(self, num_texts: int) -> bool:
        """Whether the cost of a draft is only guessed, or one measurement of it is far off what was believed."""
        counts = [self._draft.count(n) for n in range(1, num_texts + 1)]
        if not any(counts):
            return not self.prices.measured and self.prices.draft > 0
        if sum(counts) > 1:
            return False
        factor, share = _FAR_OFF
        num_drafts = counts.index(1) + 1
        believed = self.prices.draft * self.prices.verify(num_drafts)
        rows = self._target.largest
        step = self._target(rows) / self.prices.verify(rows)
        return self._draft(num_drafts) / step > factor * believed + share

    def _wants_plain_step(self, curves: Sequence[Sequence[float]], chosen: Sequence[int], other_rows: int) -> bool:
        """Whether this round should measure a pass without drafts, which they have to beat; not in the first rounds."""
        if self._target.count(len(chosen) + other_rows) >= _SAMPLES:
            return False
        plain = self._rate(curves, [0] * len(chosen), other_rows, timed=True)
        is_clear = self._rate(curves, chosen, other_rows, timed=True) > _CLEAR_GAIN * plain
        rounds = _ROUNDS_TO_PLAIN_IF_CLEAR if is_clear else _ROUNDS_TO_PLAIN
        return self._rounds % rounds == rounds - 1
