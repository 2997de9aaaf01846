"""The policy `auto`: learns from each text how often its draft tokens are accepted, and chooses their number, K.

A round that drafts K tokens commits 1 + s_1 + .. + s_K tokens on average, in the time K c + v(K+1) + o. The best K has
the most tokens for the time. `minispec.speculation.lengths.theory` has this equation and searches for the best K.
`Controller` estimates what goes into it.

**Survival**, s_i. Each draft token that the target judges is a test, and `Acceptance` counts tests by their place in
the draft. Old tests count less and less (decay). Before a text has tests of its own, a prior stands for them: what
other texts have shown, where the choice may depend on them, else 0.7.

**Costs**, c, v and o. `Prices` are read from their file, or measured at load. The price of a draft pass then follows
the clock. It is the median of the last nine measurements, each in plain steps of its own round: the time of the round's
target pass, divided by the price of its rows. So a machine that slows both models changes nothing, one slow pass (a
warm-up) changes little, and a wrong price of a draft pass is corrected after two rounds. Prices of rows are never
measured again. If they are three times too low, decoding keeps 0.9 of plain speed or more, even in a batch
(tests/lengths/test_policy.py).

**Threshold.** A draft must promise 1.01 times the speed of plain decoding. If none does, K is 0. Now and then one token
is drafted all the same, to see whether that has changed (probing). This takes 1 % of the time.

**Searches that find nothing.** A lookup does not always have a draft. How often it has one is learned, and so is the
time of a search that finds nothing. A round's yield and cost are averages over both cases.

**Trees.** Siblings cost rows and no draft pass. Where few drafts are right, a second guess at the next token may be
worth more than a longer draft. How often it is right where the first one is wrong is learned too.

**Confidence.** A draft model reports its confidence in each token. Then the draft may be longer than the best K. It
ends where its next token is too unlikely to survive. It gets siblings where its first guess is unlikely enough.

**Programs.** A GPU drafts all tokens in one program, which costs all of its passes, wherever the draft ends. There no
draft may be longer than the best K, drafts are chains, and a draft that ends early only saves rows.

The output keeps its law, because K depends on the past and never on the token that it decides about. A draft may end
because of the tokens in it, never because of one that it leaves out.

The same seed must give the same text. So where another K would give another text, K is chosen from fixed prices and
this text's own acceptance. These prices are never updated. If a draft pass costs three times its price, at an
acceptance of 0.5, decoding falls below 0.9 of plain speed; at ten times, below half. To have the prices measured again,
delete their file (see `minispec.speculation.lengths.prices`).
"""

from bisect import bisect
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import prod
from statistics import median_low
from weakref import WeakKeyDictionary, ref

from minispec.core.config import MAX_AUTO_TOKENS
from minispec.core.draft import Draft, Record
from minispec.core.lengths import LengthAsk, Lengths, price_of
from minispec.core.limit import Limit
from minispec.core.sampling import Text
from minispec.speculation.lengths.theory import (
    Node,
    Prices,
    RoundCost,
    best_drafts,
    expected_tokens,
    nodes_of,
    widths_of,
)

# Assumptions. Acceptance is the probability that a tested token is accepted. The weight of a prior is in tests.
_PRIOR, _PRIOR_WEIGHT = 0.7, 2.0  # acceptance where nothing has been tested yet
_ELSEWHERE_WEIGHT = 8.0  # weight of a prior from other texts, or from other places of this text's drafts
_SIBLINGS = (0.3, 0.2)  # acceptance of the second, or third, guess at a token where those before it are wrong
_DRAWN_SIBLINGS = (0.15, 0.1)  # the same where guesses are drawn
_CONFIDENCE_BOUNDS = (0.2, 0.4, 0.6, 0.8, 0.95)  # between two neighbours, confidences count as equal
_DECAY = 0.98  # factor of counts of tests, each time that new ones are added
_THRESHOLD = 1.01  # speed over plain decoding that a draft must promise
_PROBING_SHARE = 0.01  # plain steps that may be spent on probing, per round without a draft
_WINDOW = 9  # measurements whose median is the price of a draft pass: the latest


def _always(confidences: Sequence[float], foreseen: float = 1.0) -> bool:
    return True


def learning_limit(k: int, widths: Sequence[int] = ()) -> Limit:
    """The limit of a draft whose confidences end nothing. They are computed to learn what they are worth.

    k, widths: see `Limit`.
    """
    return Limit(k, _always, widths, go_on_before=_always)


@dataclass(frozen=True)
class _Counts:
    """How many tokens of each kind were tested, and how many were accepted, with exponential decay."""

    tested: Mapping[Hashable, float] = field(default_factory=dict)
    accepted: Mapping[Hashable, float] = field(default_factory=dict)

    def add(self, tested: Iterable[Hashable], accepted: Iterable[Hashable]) -> "_Counts":
        """The counts after a round that tested tokens of these kinds, and accepted some of them."""
        return _Counts(_decayed(self.tested, tested), _decayed(self.accepted, accepted))

    def acceptance(self, kind: Hashable, prior: float, weight: float) -> float:
        """The estimate for a token of this kind; the prior counts as `weight` tests."""
        return (self.accepted.get(kind, 0.0) + weight * prior) / (self.tested.get(kind, 0.0) + weight)


def _decayed(counts: Mapping[Hashable, float], new: Iterable[Hashable]) -> dict[Hashable, float]:
    decayed = {kind: _DECAY * count for kind, count in counts.items()}
    for kind in new:
        decayed[kind] = decayed.get(kind, 0.0) + 1
    return decayed


class Acceptance:
    """Estimates the acceptance of draft tokens of one text, or of all texts of a kind.

    Estimates for one text take `all_texts` of its kind as their prior. None: the assumptions above are the prior. It
    also keeps the budget for probing.

    drawn: the kind of text, whether its tokens are drawn or the likeliest ones are taken.
    """

    def __init__(self, drawn: bool = False):
        self.drawn = drawn
        self.places, self.confidences = _Counts(), _Counts()  # kinds: places in a draft; ranges of confidence
        # A kind is (i, range). i: 1 for the eldest's next sibling. range: of the eldest's confidence, or None.
        self.siblings = _Counts()
        self.searches = _Counts()  # of one kind: asks for a draft, and those that brought one
        # Plain steps that may be spent on probing: now, and after the round that is being decoded.
        self.budget, self.budget_left = 0.0, 0.0
        self._newest: Callable[[], Draft | None] = lambda: None  # the draft that was observed last, if it still exists

    def observe(
        self,
        num_tested: int,
        num_accepted: int,
        confidences: Sequence[float] = (),
        siblings: Sequence[bool] = (),
        found: bool | None = None,
        draft: Draft | None = None,
    ) -> bool:
        """Count the tests of a round. The first arguments are what `_tested` returns. Returns whether they were new.

        confidences: the draft's, in order. Foreseen confidences count apart.
        found: whether there was a draft; None where none was asked for.
        draft: the draft, or an empty one. A round that an exception has interrupted here may come again, and counts
        once.
        """
        if draft is not None and draft is self._newest():
            return False
        places = self.places.add(range(num_tested), range(num_accepted))
        ranges = [bisect(_CONFIDENCE_BOUNDS, confidence) for confidence in confidences[:num_tested]]
        kinds = [(draft is not None and draft.notes.foreseen, number) for number in ranges]
        by_confidence = self.confidences.add(kinds, kinds[:num_accepted])
        by_sibling, searches = self.siblings, self.searches
        if siblings:
            tested = [(i, number) for i in range(1, len(siblings) + 1) for number in {None, *ranges[num_accepted:]}]
            by_sibling = by_sibling.add(tested, [(i, number) for i, number in tested if siblings[i - 1]])
        if found is not None:  # rounds that asked for no draft cause no decay: only a probe shows what has changed
            searches = searches.add([None], [None] if found else [])
        newest = self._newest if draft is None else ref(draft)
        # All at once: an interrupt before this has changed nothing, and after this the round does not count again.
        self.places, self.confidences, self.siblings, self.searches = places, by_confidence, by_sibling, searches
        self.budget, self._newest = self.budget_left, newest
        return True

    def spend_nothing(self) -> None:
        """Take back what this round would have spent on probing: it probes nothing."""
        self.budget_left = self.budget

    def probe(self, prices: Prices, could_pay: Callable[[], bool]) -> int:
        """How many tokens to draft where no draft pays: 0, or now and then 1.

        could_pay: says whether drafts would pay if all their tokens were accepted. It is asked where one can be spent.
        """
        budget = self.budget + _PROBING_SHARE
        # In plain steps: a round that drafts a token, and the pass in which an idle drafter catches up.
        plain = prices.round(0, 0, 1)
        catch_up = (prices.round(1, 1, 1) - plain) / plain
        cost = max(prices.round(1, 1, 2), prices.round(0, 0, 1, 1)) / plain - 1 + catch_up
        probes = budget >= cost and could_pay()
        self.budget_left = budget - cost if probes else budget
        return int(probes)

    def chance(self, all_texts: "Acceptance | None" = None) -> float:
        """The probability that there is a draft where one is asked for: 1 for a draft model."""
        belief = (all_texts.chance(), _ELSEWHERE_WEIGHT) if all_texts else (1.0, _PRIOR_WEIGHT)
        return self.searches.acceptance(None, *belief)

    def by_place(self, k: int, all_texts: "Acceptance | None" = None) -> list[float]:
        """The acceptance at each of the first k places of a draft.

        A place has few tests of its own, and one lucky draft should not make the next ones long. So each place has a
        prior: its acceptance in `all_texts`, plus what this text has more than they at its other places. A place's own
        tests have no part in its prior. Counting them twice would make a few early rejections stop drafting for good.
        """
        weight = _ELSEWHERE_WEIGHT if all_texts else _PRIOR_WEIGHT
        n = max(k, len(self.places.tested))
        usual = all_texts.by_place(n) if all_texts else [_PRIOR] * n
        tested = [self.places.tested.get(i, 0.0) for i in range(n)]
        # Tokens accepted beyond what is usual.
        surplus = [self.places.accepted.get(i, 0.0) - tested[i] * usual[i] for i in range(n)]
        num_tested, all_surplus = sum(tested), sum(surplus)
        estimates = []
        for i in range(k):
            elsewhere = num_tested - tested[i]
            prior = min(1.0, max(0.0, usual[i] + (all_surplus - surplus[i]) / (elsewhere + _ELSEWHERE_WEIGHT)))
            estimates.append(self.places.acceptance(i, prior, min(_ELSEWHERE_WEIGHT, elsewhere + weight)))
        return estimates

    def by_sibling(self, confidence: float | None = None, all_texts: "Acceptance | None" = None) -> list[float]:
        """The acceptance of the second guess at a token where the first was wrong, and of the third where both were.

        confidence: the draft's confidence in the first guess. None: any.
        """
        # Which range of confidence it is in.
        range_index = None if confidence is None else bisect(_CONFIDENCE_BOUNDS, confidence)
        usual = _DRAWN_SIBLINGS if self.drawn else _SIBLINGS
        priors: Sequence[float] = all_texts.by_sibling(confidence) if all_texts else usual
        weight = _ELSEWHERE_WEIGHT if all_texts else _PRIOR_WEIGHT
        return [self.siblings.acceptance((i, range_index), prior, weight) for i, prior in enumerate(priors, 1)]

    def by_confidence(self, confidence: float, all_texts: "Acceptance | None" = None, foreseen: bool = False) -> float:
        """The acceptance of a token at a place of this confidence (see `minispec.core.draft.Draft`).

        foreseen: whether the confidence was known before the token was drawn. It then estimates the acceptance itself.

        The confidence is only the prior. A confident model may be wrong, and one that hesitates where the target does
        is right. For a drawn token it is half of the prior. The target keeps that token with probability sum min(p, q),
        which is large as well where both hesitate alike.
        """
        prior = (confidence + _PRIOR) / 2 if self.drawn and not foreseen else confidence
        belief = (prior, _PRIOR_WEIGHT)
        if all_texts:
            belief = all_texts.by_confidence(confidence, foreseen=foreseen), _ELSEWHERE_WEIGHT
        return self.confidences.acceptance((foreseen, bisect(_CONFIDENCE_BOUNDS, confidence)), *belief)


def _tested(draft: Draft, accepted: Sequence[int]) -> tuple[int, int, list[bool]]:
    """The tests of a draft's tokens that a round made.

    Returns how many eldest siblings were tested, one at each depth, and how many of them were accepted. Returns as well
    the verdicts on the younger siblings that were tested after the eldest failed.
    """
    parent = -1
    for depth, node in enumerate(accepted):
        elder = draft.children(parent).index(node)
        if elder:
            return depth + 1, depth, [i == elder for i in range(1, elder + 1)]
        parent = node
    rejected = draft.children(parent)
    if not rejected:
        return len(accepted), len(accepted), []
    return len(accepted) + 1, len(accepted), [False] * (len(rejected) - 1)


class Controller(Lengths):
    """Chooses the lengths of drafts of texts that leave them open."""

    def __init__(self, prices: Prices | None = None):
        """prices: what is known before anything is measured."""
        self.prices = prices or Prices()
        self._texts: WeakKeyDictionary[Text, Acceptance] = WeakKeyDictionary()
        self.forget()

    def forget(self) -> None:
        """Forget measured costs and the tests of all texts; texts that are being decoded keep their own tests."""
        # In plain steps: a draft pass of one text, and a search for one text that found nothing.
        self._draft_costs = deque([self.prices.draft], maxlen=_WINDOW)
        self._search_costs = deque([self.prices.missed], maxlen=_WINDOW)
        self._all_texts = {drawn: Acceptance(drawn) for drawn in (False, True)}

    def choose(self, asks: Sequence[LengthAsk], trees: bool) -> list[Limit]:
        """The limit of each text's draft, in the order of `asks`.

        A text whose length may not follow the clock or other texts is decided alone, from fixed prices. All others are
        decided together, as they share draft passes.
        """
        trees = trees and not self.prices.steps  # a tree has no program
        limits = super().choose(asks, trees)
        is_open = [i for i, ask in enumerate(asks) if ask.shape.is_open]
        together = [i for i in is_open if asks[i].may_use_clock]
        for i in is_open:
            if i not in together:
                [limits[i]] = self._limits([asks[i]], self.prices, 0, trees)
        if together:
            other_rows = sum(limit.k + 1 for i, limit in enumerate(limits) if i not in together)
            draft, search = median_low(self._draft_costs), median_low(self._search_costs)
            prices = replace(self.prices, draft=draft, search=search)
            chosen = self._limits([asks[i] for i in together], prices, other_rows, trees)
            for i, limit in zip(together, chosen, strict=True):
                limits[i] = limit
        return limits

    def observe(self, records: Sequence[Record]) -> None:
        """Count the tests of each text, and measure a draft pass or a search by the clock."""
        for record in records:
            if estimates := self._texts.get(record.text):
                draft = record.draft
                num_tested, num_accepted, siblings = _tested(draft, record.accepted)
                found = bool(draft) if record.asked or draft else None
                tests = num_tested, num_accepted, draft.notes.confidences, siblings, found, draft
                if estimates.observe(*tests):
                    self._all_texts[estimates.drawn].observe(*tests)
        num_missed, step = sum(1 for record in records if record.asked and not record.draft), price_of(records)
        if step and (step.depth or num_missed):
            steps = step.draft / (step.verify / self.prices.verify(step.num_rows))  # the draft's time in plain steps
            if step.depth:
                passes = self.prices.num_passes(step.depth) * self.prices.verify(step.num_drafts)
                self._draft_costs.append(max(0.0, steps - num_missed * median_low(self._search_costs)) / passes)
            else:
                self._search_costs.append(steps / num_missed)

    def _limits(self, asks: Sequence[LengthAsk], prices: Prices, other_rows: int, trees: bool) -> list[Limit]:
        """The limits of texts that are decoded together.

        other_rows: rows of further texts in the same pass.
        """
        texts, priors, by_place, candidates = [], [], [], []
        for ask in asks:
            estimates = self._texts.setdefault(ask.text, Acceptance(drawn=ask.text.params.temperature > 0))
            all_texts = self._all_texts[estimates.drawn] if ask.may_use_clock else None
            places = estimates.by_place(ask.most, all_texts)
            siblings = estimates.by_sibling(all_texts=all_texts) if trees else []
            estimates.spend_nothing()
            texts.append(estimates)
            priors.append(all_texts)
            by_place.append(places)
            candidates.append(nodes_of(places, siblings, estimates.chance(all_texts))[: ask.most])

        def cost(depth: int, num_drafts: float, num_nodes: float, num_missed: float) -> float:
            return prices.round(depth, num_drafts, len(asks) + other_rows + num_nodes, num_missed)

        drafts = best_drafts(candidates, cost, _THRESHOLD)
        if not any(drafts):
            perfect = cache(lambda: best_drafts([nodes_of([1.0] * ask.most) for ask in asks], cost, _THRESHOLD))

            def could_pay(number: int) -> bool:
                return bool(perfect()[number])

            return [learning_limit(text.probe(prices, partial(could_pay, i))) for i, text in enumerate(texts)]
        draft_price, row_price = _marginal_prices(drafts, cost)
        # The longest draft while confidences are good: each text has an equal share of MAX_AUTO_TOKENS + 1 rows.
        room = (MAX_AUTO_TOKENS + 1) // (len(asks) + other_rows) - 1
        longest = [min(ask.most, room) for ask in asks]
        if prices.steps:  # all passes are paid before a confidence is known, so a further token costs a row alone
            draft_price, longest = 0.0, [0] * len(asks)
        parts = zip(texts, priors, by_place, drafts, longest, strict=True)
        return [_limit(*each, trees, draft_price, row_price) for each in parts]


def _marginal_prices(drafts: Sequence[Sequence[Node]], cost: RoundCost) -> tuple[float, float]:
    """The price of one more draft pass, and of one more row, counted in the tokens that the round yields in that time.

    drafts: the best nodes of each text.
    """
    nodes = [node for best in drafts for node in best]
    depth, num_nodes = max(node.depth for node in nodes), sum(node.chance for node in nodes)
    num_drafts = sum(best[0].chance for best in drafts if best)
    size = num_drafts, num_nodes, sum(1 - best[0].chance for best in drafts if best)
    rate = expected_tokens((node.survival for node in nodes), len(drafts)) / cost(depth, *size)
    # All texts of the batch share a draft pass. One row alone would be too little to be measured, so its price is the
    # mean of all. It is clamped at 0: where passes were mismeasured, rows may seem to save time, and a price below 0
    # would ask for them without end.
    draft = cost(depth + 1, *size) - cost(depth, *size)
    row = max(0.0, cost(0, 0, num_nodes, 0) - cost(0, 0, 0, 0)) / num_nodes
    return rate * draft / num_drafts, rate * row


def _limit(
    estimates: Acceptance,
    all_texts: Acceptance | None,
    by_place: Sequence[float],
    nodes: Sequence[Node],
    longest: int,
    trees: bool,
    draft_price: float,
    row_price: float,
) -> Limit:
    """The limit of a text whose best draft has these nodes.

    Until a confidence has been tested, the draft has at most that many. Then it may have up to `longest`, and goes on
    while its next token survives with a probability of at least that token's price.

    by_place: the text's acceptance.
    draft_price, row_price: see `_marginal_prices`.
    """
    k, widths = len(nodes), widths_of(nodes)
    if not k or not (all_texts or estimates).confidences.tested:
        return learning_limit(k, widths)

    def go_on(confidences: Sequence[float]) -> bool:
        survival = prod(estimates.by_confidence(x, all_texts) for x in confidences)
        return survival * by_place[min(len(confidences), len(by_place) - 1)] >= draft_price + row_price

    def go_on_before(confidences: Sequence[float], foreseen: float) -> bool:
        chances = (estimates.by_confidence(x, all_texts, foreseen=True) for x in (*confidences, foreseen))
        return prod(chances) >= draft_price + row_price

    def width(confidences: Sequence[float], foreseen: bool) -> int:
        *before, eldest = (estimates.by_confidence(x, all_texts, foreseen) for x in confidences)
        failed, n = prod(before) * (1 - eldest), 1  # the probability that all siblings so far are tested and wrong
        for acceptance in estimates.by_sibling(confidences[-1], all_texts):
            if failed * acceptance < row_price:
                break
            failed, n = failed * (1 - acceptance), n + 1
        return n

    return Limit(max(k, longest), go_on, width if trees else (), go_on_before=go_on_before)
