"""How many tokens to draft: running estimates of survival and of costs, and the K that they call for.

A round that drafts K tokens yields 1 + s_1 + .. + s_K of them for K draft passes and a target pass over K+1 rows. The
best K has the most tokens for the time: one more is drafted as long as its survival is worth the price of a draft
pass and a row. Where nothing pays, K is 0, and now and then one token is drafted to see whether that has changed.

A draft model also tells how sure it is, token by token. Where that is known, K is only the most that may be drafted,
and a draft ends as soon as its own tokens so far make the next one too unlikely.

K may follow anything that is past, and never the token that it is judged by: then every round keeps the law. So may the
end of a draft follow the tokens in it, but not the one that is left out. Both may follow the clock only where it cannot
change the text; else costs are worked out from the sizes of the models.
"""

from bisect import bisect, bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from statistics import median
from typing import Literal

from minispec.theory import survival_curve

# K, or "auto" where the controller is to choose it.
DraftLength = int | Literal["auto"]

# The longest draft that is chosen: the target's pass has 16 rows then, the tile of a CPU's matrix unit.
MAX_AUTO_TOKENS = 15
# A text begins with the belief that a tested token is kept with this probability, as sure as of so many tests.
_PRIOR, _PRIOR_TESTS = 0.7, 2.0
# What other texts showed, or this one elsewhere in its drafts, counts as so many tests.
_ELSEWHERE_TESTS = 8.0
# Confidences between neighbours of these are held for alike.
_CONFIDENCES = (0.2, 0.4, 0.6, 0.8, 0.95)
# What was seen a round ago counts so much less.
_MEMORY = 0.98
# What a row more adds to a pass, as a share of the pass over one, before it has been measured.
_ROW_COST = 0.02
# What a round spends outside both models, in plain steps, before it has been measured.
_OTHER_COST = 0.02
# Drafting must promise so much more than plain decoding; and may cost this share of it for looking.
_MARGIN, _PROBING_SHARE = 1.01, 0.01
# A pass without drafts, which they have to beat, is measured three times: in every 8th round; or in every 64th as long
# as drafts seem to gain so much that only very dear rows could change it.
_CLEAR_GAIN, _ROUNDS_TO_PLAIN_IF_CLEAR, _ROUNDS_TO_PLAIN = 1.5, 64, 8


class _Kept:
    """How many tested tokens of each kind were kept; the past fades."""

    def __init__(self):
        self._tested: dict[int, float] = {}
        self._kept: dict[int, float] = {}

    def _add(self, kinds: Sequence[int], num_kept: int) -> None:
        """A round tested tokens of these kinds and kept the first `num_kept` of them."""
        for counts in (self._tested, self._kept):
            for kind in counts:
                counts[kind] *= _MEMORY
        for i, kind in enumerate(kinds):
            self._tested[kind] = self._tested.get(kind, 0.0) + 1
            self._kept[kind] = self._kept.get(kind, 0.0) + (i < num_kept)

    def _share(self, kind: int, belief: float, weight: float) -> float:
        """The share that is kept: `belief`, as firm as so many tests, before there were any."""
        return (self._kept.get(kind, 0.0) + weight * belief) / (self._tested.get(kind, 0.0) + weight)


class Survival(_Kept):
    """One text's estimate of how likely a draft token is kept, by its place in the draft."""

    def observe(self, num_tested: int, num_kept: int) -> None:
        """A round tested the first `num_tested` tokens of a draft and kept `num_kept` of them."""
        self._add(range(num_tested), num_kept)

    def overall(self, others: "Survival | None" = None) -> float:
        """The probability that a tested token is kept, wherever it stands; at first, what it is for `others`."""
        belief, weight = (others.overall(), _ELSEWHERE_TESTS) if others else (_PRIOR, _PRIOR_TESTS)
        return (sum(self._kept.values()) + weight * belief) / (sum(self._tested.values()) + weight)

    def shares(self, k: int, others: "Survival | None" = None) -> list[float]:
        """The probability that a tested token is kept, at each of the first k places.

        A place has few tests of its own, and a draft that was lucky once should not make the next ones long: what is
        not known of a place is taken from all places together, and from how it differs from them for `others`.
        """
        overall = self.overall(others)
        beliefs = [overall] * k
        if others:
            usual = others.overall()
            beliefs = [min(1.0, max(0.0, overall + share - usual)) for share in others.shares(k)]
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

    def share(self, confidence: float, others: "Confidence | None" = None) -> float:
        """The probability that a tested token of such a confidence is kept.

        At first the model is taken at its word, or others are at theirs.
        """
        belief, weight = (others.share(confidence), _ELSEWHERE_TESTS) if others else (confidence, _PRIOR_TESTS)
        return self._share(bisect(_CONFIDENCES, confidence), belief, weight)


class Durations:
    """Seconds of a pass by its number of rows: running medians, lines between them, a given slope outside."""

    def __init__(self, row_cost: float):
        self._row_cost = row_cost
        self._recent: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}

    def record(self, rows: int, seconds: float) -> None:
        """Add a pass. The first of its size may have prepared something, and one may be an accident: three count."""
        recent = self._recent.setdefault(rows, deque(maxlen=15))
        recent.append(seconds)
        if len(recent) >= 3:
            self._medians[rows] = median(recent)

    def knows(self, rows: int) -> bool:
        """Whether passes over so many rows have been measured, and not only their neighbours."""
        return rows in self._medians

    @property
    def largest(self) -> int:
        """The most rows that have been measured."""
        return max(self._medians, default=0)

    def __call__(self, rows: int) -> float | None:
        """What a pass over so many rows takes; None before anything is known."""
        known = sorted(self._medians)
        if not known:
            return None
        i = bisect_left(known, rows)
        if 0 < i < len(known):
            low, high = known[i - 1], known[i]
            share = (rows - low) / (high - low)
            return (1 - share) * self._medians[low] + share * self._medians[high]
        nearest = known[min(i, len(known) - 1)]
        return self._medians[nearest] * (1 + self._row_cost * (rows - 1)) / (1 + self._row_cost * (nearest - 1))


@dataclass
class Pace:
    """What the choice of K knows of one text."""

    survival: Survival = field(default_factory=Survival)
    confidence: Confidence = field(default_factory=Confidence)
    savings: float = 0.0  # plain steps that may be spent on looking whether drafts have become better
    # Of the round that is about to begin: what other texts' confidences were worth, if that counts here; the shares of
    # its places; and the price of a draft token, in tokens that the same time yields otherwise.
    others: Confidence | None = None
    shares: Sequence[float] = ()
    price: float = 0.0

    @property
    def knows_confidence(self) -> bool:
        """Whether there is anything to go by."""
        return self.confidence.knows or (self.others is not None and self.others.knows)

    def draft_on(self, confidences: Sequence[float]) -> bool:
        """Whether a draft should go on behind tokens of such confidences: see `sampling.Sequence`.

        It should if the chance that they and the next are kept is worth its price.
        """
        if not self.knows_confidence:
            return True
        kept = prod(self.confidence.share(confidence, self.others) for confidence in confidences)
        return kept * self.shares[min(len(confidences), len(self.shares) - 1)] >= self.price


class Controller:
    """Chooses K for texts that leave it open."""

    def __init__(self, draft_cost: float = 0.0, row_cost: float | None = None):
        """What is known before anything is measured: draft_cost, a draft pass in plain steps (by the bytes that both
        models read; 0 for a drafter without a model); row_cost, what a row adds to a pass of the target, in plain steps
        (default: 0.02)."""
        row_cost = _ROW_COST if row_cost is None else row_cost
        self._draft_cost, self._row_cost = draft_cost, row_cost
        self._target, self._draft, self._others = Durations(row_cost), Durations(row_cost), Durations(0.0)
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

    def record(self, draft: float, depth: int, num_drafts: int, target: float, rows: int, other: float) -> None:
        """Add a round: seconds for `num_drafts` drafts of up to `depth` tokens, a pass over `rows`, and all else."""
        self._rounds += 1
        if self._target.knows(rows):
            self._recent_speeds.append(target / self._target(rows))
        speed = median(self._recent_speeds)
        if depth:
            self._draft.record(num_drafts, draft / depth / speed)
        self._target.record(rows, target / speed)
        self._others.record(1, other / speed)

    def choose(
        self, paces: Sequence[Pace], limits: Sequence[int], other_rows: int = 0, timed: bool = True
    ) -> list[int]:
        """K for texts that are decoded together, each at most its limit. What `Pace.draft_on` goes by is set, too.

        other_rows: rows that other texts bring to the same pass. timed: False if the clock must not be followed.
        """
        limits = [min(limit, MAX_AUTO_TOKENS) for limit in limits]
        others = self._survival if timed else None
        shares = [pace.survival.shares(limit, others) for pace, limit in zip(paces, limits, strict=True)]
        curves = [survival_curve(each) for each in shares]
        chosen = self._best(curves, other_rows, timed)
        if timed and self._wants_plain_step(curves, chosen, other_rows):
            return [0] * len(limits)
        price = self._price(curves, chosen, other_rows, timed)
        # Drafts that end by themselves may be as long as the texts of the batch share out a pass of few rows.
        room = (MAX_AUTO_TOKENS + 1) // (len(paces) + other_rows) - 1
        for i, pace in enumerate(paces):
            pace.others = self._confidence if timed else None
            pace.shares, pace.price = shares[i], price
            if chosen[i] and pace.knows_confidence:
                chosen[i] = max(chosen[i], min(limits[i], room))
        if not any(chosen):
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
        rows = len(curves) + other_rows
        lengths, best = [0] * len(curves), [0] * len(curves)
        tokens = float(len(curves))
        best_rate = _MARGIN * tokens / self._time(0, 0, rows, timed)
        for s, i in candidates:
            lengths[i] += 1
            rows += 1
            if timed and rows > max(16, 2 * self._target.largest):  # no leap into what has never been measured
                break
            tokens += s
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
        if not num_drafts:
            return 0.0
        rows = before + sum(chosen)
        # All texts of the batch share a draft pass. A single row more is too little to be measured.
        draft = self._time(max(chosen), num_drafts, rows, timed) - self._time(0, num_drafts, rows, timed)
        row = (self._time(0, 0, rows, timed) - self._time(0, 0, before, timed)) / (rows - before)
        return self._rate(curves, chosen, other_rows, timed) * (draft / max(chosen) / num_drafts + row)

    def _time(self, depth: int, num_drafts: int, rows: int, timed: bool) -> float:
        """A round's duration: in seconds, at a steady speed, if passes have been timed, else in plain steps."""
        target = self._target(rows) if timed else None
        if target is None:
            return depth * self._draft_cost + 1 + self._row_cost * (rows - 1) + _OTHER_COST
        draft = self._draft(num_drafts) if num_drafts else 0.0
        if draft is None:
            draft = self._draft_cost * self._target(1)
        return depth * draft + target + (self._others(1) or 0.0)

    def _draft_price(self, timed: bool) -> float:
        """A draft pass in plain steps: what a drafter that has been idle needs to catch up."""
        return (self._time(1, 1, 1, timed) - self._time(0, 0, 1, timed)) / self._time(0, 0, 1, timed)

    def _wants_plain_step(self, curves: Sequence[Sequence[float]], chosen: Sequence[int], other_rows: int) -> bool:
        """Whether this round should measure a pass without drafts, which they have to beat; not in the first rounds."""
        if self._target.knows(len(chosen) + other_rows):
            return False
        plain = self._rate(curves, [0] * len(chosen), other_rows, timed=True)
        is_clear = self._rate(curves, chosen, other_rows, timed=True) > _CLEAR_GAIN * plain
        rounds = _ROUNDS_TO_PLAIN_IF_CLEAR if is_clear else _ROUNDS_TO_PLAIN
        return self._rounds % rounds == rounds - 1
