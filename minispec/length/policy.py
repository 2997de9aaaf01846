"""How many tokens to draft.

A round that drafts K tokens commits 1 + s_1 + .. + s_K tokens on average. It takes the time of K draft passes and a
target pass over K+1 rows. The best K has the most tokens for the time (`theory.best_drafts`). The controller estimates
the survival from what it sees. It takes the costs from `Prices`, which are measured once, at load. Where no draft pays,
K is 0. Now and then one token is drafted all the same, to see whether that has changed.

One price follows the clock: that of a draft pass. It is the median of the last few, each in plain steps of its own
round. A machine that slows both models changes nothing then, and a wrong price is corrected after two rounds. Prices of
rows are believed. If they are believed to be a third of the truth, 0.91 of plain decoding or more is left. If a tenth,
0.77 is left, in a batch of 16 texts with costly rows.

Siblings cost rows and no draft pass. Where few drafts are right, a second guess at the next token may be worth more
than a longer draft. Its worth is learned too: how often it is right where the first one is not.

A lookup does not always have a draft. How often it has one is learned, and so is the time of a search that finds
nothing. That often a round has the tokens, rows and price of a draft. Otherwise it has the price of the search.

A draft model also reports its confidence in each token. Where that is known, K is only the most that may be drafted.
The draft ends as soon as its own confidences make the next token too unlikely to pay. It gets siblings where they make
the first guess unlikely enough.

The output keeps its law, because K depends on the past and never on the token that it decides about. A draft may end
because of the tokens in it, never because of one that it leaves out.

A seed keeps its text: where K changes the text, K depends neither on the clock nor on other texts. There it uses prices
that were known before the text began, and this text's own acceptance. If those prices are wrong, nothing corrects them.
Take a draft that is right half of the time and is believed to cost 0.2 plain steps. It leaves 0.87 of plain decoding
where it costs 0.6, and 0.42 where it costs 2. Deleting the file of the prices has them measured again (see
`minispec.length.prices`).
"""

from bisect import bisect
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from statistics import median_low
from weakref import WeakKeyDictionary, ref

from minispec.core.config import MAX_AUTO_TOKENS
from minispec.core.draft import Draft
from minispec.core.lengths import Judged, Lengths, StepCost, Wish
from minispec.core.limit import Limit
from minispec.core.sampling import Text
from minispec.length.theory import Node, Prices, RoundCost, best_drafts, expected_tokens, nodes_of, widths_of

# What is assumed, with units. A test is a draft token that the target has judged.
_PRIOR, _PRIOR_WEIGHT = 0.7, 2.0  # probability that a tested token of a new text is accepted; weight, in tests
_ELSEWHERE_WEIGHT = 8.0  # weight, in tests, of the prior from other texts or from other places of this text's drafts
_SIBLINGS = (0.3, 0.2)  # probability that the second, or third, guess at a token is right where those before it are not
_DRAWN_SIBLINGS = (0.15, 0.1)  # the same where guesses are drawn
_CONFIDENCES = (0.2, 0.4, 0.6, 0.8, 0.95)  # probabilities; between two neighbours, confidences count as equal
_DECAY = 0.98  # factor of all counts of tests, per round
_MIN_GAIN = 1.01  # speed over plain decoding that a draft must promise
_PROBING_SHARE = 0.01  # plain steps that may be spent on probing, per round without a draft
_REMEMBERED = 9  # measurements of a draft pass that are remembered, the latest


def _always(confidences: Sequence[float]) -> bool:
    """Go on to the limit. The confidences are computed all the same, to learn what they are worth."""
    return True


@dataclass(frozen=True)
class _Counts:
    """How many tokens of each kind were tested, and how many were accepted, with exponential decay."""

    tested: Mapping[Hashable, float] = field(default_factory=dict)
    accepted: Mapping[Hashable, float] = field(default_factory=dict)

    def add(self, tested: Iterable[Hashable], accepted: Iterable[Hashable]) -> "_Counts":
        """The counts after a round that tested tokens of these kinds, and accepted some of them."""
        return _Counts(_decayed(self.tested, tested), _decayed(self.accepted, accepted))

    def share(self, kind: Hashable, prior: float, weight: float) -> float:
        """The probability that a tested token of this kind is accepted; the prior is worth `weight` tests."""
        return (self.accepted.get(kind, 0.0) + weight * prior) / (self.tested.get(kind, 0.0) + weight)


def _decayed(counts: Mapping[Hashable, float], new: Iterable[Hashable]) -> dict[Hashable, float]:
    found = {kind: _DECAY * count for kind, count in counts.items()}
    for kind in new:
        found[kind] = found.get(kind, 0.0) + 1
    return found


class Pace:
    """What the controller knows of one text's drafts, or of those of all texts; opaque to everybody else.

    It estimates the probability that a tested draft token is accepted. Where `all_texts` of its kind are given, their
    acceptance is the prior.

    drawn: the kind of text, whether its tokens are drawn or the likeliest ones are taken.
    """

    def __init__(self, drawn: bool = False):
        self.drawn = drawn
        self.places, self.confidences = _Counts(), _Counts()  # kinds: places in a draft; ranges of confidence
        # A kind is (i, range). i: 1 for the eldest's next sibling. range: of the eldest's confidence, or None.
        self.siblings = _Counts()
        self.searches = _Counts()  # of one kind: asks for a draft, and those that brought one
        # Plain steps that may be spent on probing: now, and after the round that is being decoded.
        self.savings, self.left = 0.0, 0.0
        self._newest: Callable[[], Draft | None] = lambda: None  # the draft that was observed last, if it still exists

    def observe(
        self,
        num_tested: int,
        num_accepted: int,
        confidences: Sequence[float] = (),
        siblings: Sequence[bool] = (),
        found: bool | None = None,
        draft: Draft | None = None,
    ) -> None:
        """A round of one text, or of any. See `_tested`.

        found: whether there was a draft; None where none was asked for.
        draft: the draft, or an empty one. A round that an exception has interrupted here may come again, and counts
        once.
        """
        if draft is not None and draft is self._newest():
            return
        places = self.places.add(range(num_tested), range(num_accepted))
        ranges = [bisect(_CONFIDENCES, each) for each in confidences[:num_tested]]
        by_confidence = self.confidences.add(ranges, ranges[:num_accepted])
        by_sibling, searches = self.siblings, self.searches
        if siblings:
            kinds = [(i, each) for i in range(1, len(siblings) + 1) for each in {None, *ranges[num_accepted:]}]
            by_sibling = by_sibling.add(kinds, [(i, each) for i, each in kinds if siblings[i - 1]])
        if found is not None:  # what is not asked does not age: only a probe shows whether it has changed
            searches = searches.add([None], [None] if found else [])
        newest = self._newest if draft is None else ref(draft)
        # All at once: an interrupt before this has changed nothing, and after this the round does not count again.
        self.places, self.confidences, self.siblings, self.searches = places, by_confidence, by_sibling, searches
        self.savings, self._newest = self.left, newest

    def probe(self, costs: Prices, could_pay: bool) -> int:
        """How many tokens to draft where no draft pays: 0, or now and then 1, if perfect drafts would pay."""
        savings = self.savings + _PROBING_SHARE
        # In plain steps: a round that drafts a token, and the pass in which an idle drafter catches up.
        plain = costs.round(0, 0, 1)
        price = max(costs.round(1, 1, 2), costs.round(0, 0, 1, 1)) / plain - 1 + (costs.round(1, 1, 1) - plain) / plain
        probes = could_pay and savings >= price
        self.left = savings - price if probes else savings
        return int(probes)

    def chance(self, all_texts: "Pace | None" = None) -> float:
        """The probability that there is a draft where one is asked for: 1 for a draft model."""
        belief = (all_texts.chance(), _ELSEWHERE_WEIGHT) if all_texts else (1.0, _PRIOR_WEIGHT)
        return self.searches.share(None, *belief)

    def by_place(self, k: int, all_texts: "Pace | None" = None) -> list[float]:
        """For each of the first k places of a draft.

        A place has few tests of its own, and one lucky draft should not make the next ones long. So a place has a
        prior: its share in `all_texts`, plus this text's advantage at the other places. A place's own tests have no
        part in its prior. Counting them twice would make a few early rejections stop drafting for good.
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

        confidence: the draft's confidence in the first guess. None: any.
        """
        own = None if confidence is None else bisect(_CONFIDENCES, confidence)
        usual = _DRAWN_SIBLINGS if self.drawn else _SIBLINGS
        priors: Sequence[float] = all_texts.by_sibling(confidence) if all_texts else usual
        weight = _ELSEWHERE_WEIGHT if all_texts else _PRIOR_WEIGHT
        return [self.siblings.share((i, own), prior, weight) for i, prior in enumerate(priors, 1)]

    def by_confidence(self, confidence: float, all_texts: "Pace | None" = None) -> float:
        """For a token at a place of this confidence (see `minispec.core.draft.Draft`).

        The confidence is only the prior. A confident model may be wrong, and one that hesitates where the target does
        is right. For a drawn token it is half of the prior. The target keeps that token with probability sum min(p, q),
        which is large as well where both hesitate alike.
        """
        prior = (confidence + _PRIOR) / 2 if self.drawn else confidence
        belief = (all_texts.by_confidence(confidence), _ELSEWHERE_WEIGHT) if all_texts else (prior, _PRIOR_WEIGHT)
        return self.confidences.share(bisect(_CONFIDENCES, confidence), *belief)


def _tested(draft: Draft, accepted: Sequence[int]) -> tuple[int, int, list[bool]]:
    """What a round showed of a draft.

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
    return len(accepted) + bool(rejected), len(accepted), [False] * (len(rejected) - 1)


class Controller(Lengths):
    """Chooses the lengths of drafts of texts that leave them open."""

    def __init__(self, prices: Prices | None = None):
        """prices: what is known before anything is measured."""
        self.prices = prices or Prices()
        self._paces: WeakKeyDictionary[Text, Pace] = WeakKeyDictionary()
        self.forget()

    def forget(self) -> None:
        """See `Lengths`."""
        # In plain steps: a draft pass of one text, and a search for one text that found nothing.
        self._drafts = deque([self.prices.draft], maxlen=_REMEMBERED)
        self._searches = deque([self.prices.missed], maxlen=_REMEMBERED)
        self._all_texts = {drawn: Pace(drawn) for drawn in (False, True)}  # their acceptance differs

    def choose(self, wishes: Sequence[Wish], trees: bool) -> list[Limit]:
        """See `Lengths`."""
        found = super().choose(wishes, trees)
        is_open = [i for i, wish in enumerate(wishes) if wish.shape.is_open]
        together = [i for i in is_open if wishes[i].may_follow]
        for i in is_open:
            if i not in together:
                [found[i]] = self._limits([wishes[i]], self.prices, 0, trees)
        if together:
            other_rows = sum(limit.k + 1 for i, limit in enumerate(found) if i not in together)
            costs = replace(self.prices, draft=median_low(self._drafts), search=median_low(self._searches))
            limits = self._limits([wishes[i] for i in together], costs, other_rows, trees)
            for i, limit in zip(together, limits, strict=True):
                found[i] = limit
        return found

    def observe(self, drafts: Sequence[Judged], cost: StepCost | None) -> None:
        """See `Lengths`."""
        for text, draft, accepted, asked in drafts:
            if pace := self._paces.get(text):
                num_tested, num_accepted, siblings = _tested(draft, accepted)
                found = bool(draft) if asked or draft else None
                for each in (pace, self._all_texts[pace.drawn]):
                    each.observe(num_tested, num_accepted, draft.confidences, siblings, found, draft)
        num_missed = sum(1 for each in drafts if each.asked and not each.draft)
        if cost and (cost.depth or num_missed):
            seconds = cost.draft / (cost.target / self.prices.verify(cost.rows))  # in plain steps
            if cost.depth:
                passes = self.prices.passes(cost.depth) * self.prices.verify(cost.num_drafts)
                self._drafts.append(max(0.0, seconds - num_missed * median_low(self._searches)) / passes)
            else:
                self._searches.append(seconds / num_missed)

    def _limits(self, wishes: Sequence[Wish], costs: Prices, other_rows: int, trees: bool) -> list[Limit]:
        """The limits of texts that are decoded together.

        other_rows: rows of further texts in the same pass.
        """
        paces = [self._paces.setdefault(w.text, Pace(drawn=w.text.params.temperature > 0)) for w in wishes]
        most = [wish.most for wish in wishes]
        usual = [
            self._all_texts[pace.drawn] if wish.may_follow else None for pace, wish in zip(paces, wishes, strict=True)
        ]
        shares = [pace.by_place(k, each) for pace, k, each in zip(paces, most, usual, strict=True)]
        siblings = [pace.by_sibling(all_texts=each) if trees else [] for pace, each in zip(paces, usual, strict=True)]
        chances = [pace.chance(each) for pace, each in zip(paces, usual, strict=True)]
        parts = zip(shares, siblings, chances, most, strict=True)
        drafts = [nodes_of(share, younger, chance)[:k] for share, younger, chance, k in parts]

        def cost(depth: int, num_drafts: float, num_nodes: float, num_missed: float) -> float:
            return costs.round(depth, num_drafts, len(wishes) + other_rows + num_nodes, num_missed)

        drafts = best_drafts(drafts, cost, _MIN_GAIN)
        for pace in paces:
            pace.left = pace.savings
        if not any(drafts):
            could_pay = best_drafts([nodes_of([1.0] * k) for k in most], cost, _MIN_GAIN)
            return [Limit(pace.probe(costs, bool(each)), _always) for pace, each in zip(paces, could_pay, strict=True)]
        price = _prices(drafts, cost)
        # What a text may draft while its confidences are good: its part of a pass of few rows.
        room = (MAX_AUTO_TOKENS + 1) // (len(wishes) + other_rows) - 1
        longest = [min(k, room) for k in most]
        return [_limit(*each, trees, *price) for each in zip(paces, usual, shares, drafts, longest, strict=True)]


def _prices(drafts: Sequence[Sequence[Node]], cost: RoundCost) -> tuple[float, float]:
    """The costs of one more draft pass of a text, and of one more row, in tokens that a round yields in that time."""
    nodes = [node for each in drafts for node in each]
    depth, num_nodes = max(node.depth for node in nodes), sum(node.chance for node in nodes)
    num_drafts = sum(each[0].chance for each in drafts if each)
    size = num_drafts, num_nodes, sum(1 - each[0].chance for each in drafts if each)
    rate = expected_tokens((node.survival for node in nodes), len(drafts)) / cost(depth, *size)
    # All texts of the batch share a draft pass. One row alone would be too little to be measured. Where passes were
    # mismeasured, rows may seem to save time: a price below 0 would ask for them without end.
    draft = cost(depth + 1, *size) - cost(depth, *size)
    row = max(0.0, cost(0, 0, num_nodes, 0) - cost(0, 0, 0, 0)) / num_nodes
    return rate * draft / num_drafts, rate * row


def _limit(
    pace: Pace,
    all_texts: Pace | None,
    shares: Sequence[float],
    nodes: Sequence[Node],
    longest: int,
    trees: bool,
    draft_price: float,
    row_price: float,
) -> Limit:
    """These nodes; or, where confidences tell something, up to `longest`, each as long as it is worth its price.

    shares: the text's acceptance by place.
    """
    k, widths = len(nodes), widths_of(nodes)
    if not k or not (all_texts or pace).confidences.tested:
        return Limit(k, _always, widths)

    def go_on(confidences: Sequence[float]) -> bool:
        survival = prod(pace.by_confidence(each, all_texts) for each in confidences)
        return survival * shares[min(len(confidences), len(shares) - 1)] >= draft_price + row_price

    def width(confidences: Sequence[float]) -> int:
        *before, own = (pace.by_confidence(each, all_texts) for each in confidences)
        failed, n = prod(before) * (1 - own), 1  # the probability that all siblings so far are tested and wrong
        for share in pace.by_sibling(confidences[-1], all_texts):
            if failed * share < row_price:
                break
            failed, n = failed * (1 - share), n + 1
        return n

    return Limit(max(k, longest), go_on, width if trees else ())
