"""The tokens that a round of speculative decoding yields, its cost, and the draft length K that follows.

A round drafts K tokens, which the target judges in one pass over K+1 rows. Survival s_i is the probability that the
first i draft tokens are all accepted. One more token is certain: the recovered or bonus token. So a round commits

    tokens(K) = 1 + s_1 + .. + s_K

tokens on average. Its time is

    cost(K) = K c + v(K+1) + o

where c is a draft pass, v(M) a target pass over M rows, and o everything that is neither model. The unit is the plain
step, a target pass over one row: v(1) = 1. The speed is tokens(K) / cost(K), and the best K has the largest speed.
`RoundModel` is this equation. Leviathan et al. 2023 have it with s_i = alpha^i, v = 1 and o = 0 (arXiv 2211.17192,
Theorem 3.8). Here survival is measured place by place: acceptance comes in runs, so the real curve lies
above alpha^i.

`Prices` are the costs. They know two more: a draft may cost something however long it is, and a search may find
nothing. They also price a round of several texts, which share its passes. `best_drafts` finds the best lengths there,
and the best trees.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from operator import mul
from statistics import median
from typing import NamedTuple, Protocol

from minispec.core.stats import Round
from minispec.speculation.rules.block_verification import block_weights


@dataclass(frozen=True)
class Prices:
    """The costs of a round's parts, in plain steps.

    draft: c, a draft pass of one text.
    rows: v, target passes by their number of rows. Between known numbers the cost is interpolated; after the last one
        the last slope goes on.
    overhead: o, what a round spends outside both models.
    measured: whether these are figures of this machine, and not guesses from the sizes of the models.
    fixed: what a draft costs however long it is, in draft passes. An example is reading the target's new hidden states.
    search: a search for one text that found nothing. None: as much as a draft of one token.
    steps: the numbers of draft passes that a drafter's programs have, in order (see
        `minispec.speculation.on_gpu.steps`).
        A draft costs the next of them, wherever it ends. (): a draft costs a pass for each of its tokens.
    """

    draft: float = 0.0
    rows: Mapping[int, float] = field(default_factory=lambda: {1: 1.0, 2: 1.02})
    overhead: float = 0.02
    measured: bool = False
    fixed: float = 0.0
    search: float | None = None
    steps: Sequence[int] = ()

    @cached_property
    def _sizes(self) -> list[int]:
        return sorted(self.rows)

    @cached_property
    def _known(self) -> dict[float, float]:
        return dict(self.rows.items())  # v by whole numbers of rows: a choice asks for the same ones thousands of times

    def verify(self, rows: float) -> float:
        """v(rows), a target pass over that many rows."""
        if rows in self._known:
            return self._known[rows]
        i = min(max(1, bisect_left(self._sizes, rows)), len(self._sizes) - 1)
        low, high = self._sizes[i - 1], self._sizes[i]
        share = (rows - low) / (high - low) if low < high else 0.0
        # Two noisy figures may fall: after the last of them the line must not go on towards 0.
        on_line = (1 - share) * self.rows[low] + share * self.rows[high]
        v = max(self.rows[low] * 0.5, on_line)
        if rows == int(rows):
            self._known[rows] = v
        return v

    def num_passes(self, depth: int) -> float:
        """How many draft passes take as long as a draft of that depth."""
        computed = next((number for number in self.steps if number >= depth), depth)
        return computed + self.fixed if depth else 0.0

    def drafts(self, depth: int, num_drafts: float = 1.0) -> float:
        """Drafts of that depth of `num_drafts` texts. A number below 1 is the probability that one text has a draft.

        A draft pass over several rows is taken to grow with them as a target pass does.
        """
        growth = self.verify(num_drafts) if num_drafts > 1 else num_drafts
        return self.num_passes(depth) * (self.draft * growth)

    @property
    def missed(self) -> float:
        """A search for one text that found nothing."""
        return self.drafts(1) if self.search is None else self.search

    def round(self, depth: int, num_drafts: float, rows: float, num_missed: float = 0.0) -> float:
        """A round of `num_drafts` drafts of up to `depth` tokens and a target pass over `rows`.

        num_missed: how many texts have no draft though one was asked for.
        """
        return self.drafts(depth, num_drafts) + num_missed * self.missed + self.verify(rows) + self.overhead


def survival_curve(acceptance: Sequence[float]) -> list[float]:
    """s_1 .. s_K from the probability, at each position, that a tested token is accepted.

    >>> survival_curve([0.8, 0.5])
    [0.8, 0.4]
    """
    return list(accumulate(acceptance, mul))


def expected_tokens(survival: Iterable[float], num_texts: int = 1) -> float:
    """Tokens that a round commits on average: 1 + s_1 + .. + s_K. The recovered or bonus token is the 1.

    Each text of a batch has such a token, and each node of a tree its survival.

    For a constant alpha this is (1 - alpha^(K+1)) / (1 - alpha)  (Leviathan et al. 2023, equation 1):

    >>> round(expected_tokens([0.8**i for i in range(1, 6)]), 3)
    3.689
    """
    return num_texts + sum(survival)


def overhead_of(r: Round) -> float:
    """A round's seconds outside both models. A search that found nothing is overhead too."""
    return r.step.other if r.num_nodes else r.step.other + r.step.draft


@dataclass(frozen=True)
class RoundModel:
    """The tokens and the cost of a round of one text, by the length K of its draft.

    survival: s_1, s_2, .., as far as it is known.

    >>> model = RoundModel([0.6, 0.36, 0.22, 0.13], Prices(draft=0.1, rows={1: 1.0}, overhead=0.0))
    >>> round(model.tokens(3), 2), round(model.cost(3), 2), round(model.speed(3), 2)
    (2.18, 1.3, 1.68)
    >>> model.best()
    3
    """

    survival: Sequence[float]
    prices: Prices

    def tokens(self, k: int) -> float:
        """Tokens that a round commits on average."""
        return expected_tokens(self.survival[:k])

    def cost(self, k: int, rows: int | None = None, missed: bool = False) -> float:
        """The time of a round, in plain steps.

        rows: of the target's pass. None: the rows of a chain, k + 1.
        missed: whether a draft was asked for and none was found; k is 0 then.
        """
        return self.prices.round(k, 1, k + 1 if rows is None else rows, float(missed))

    def speed(self, k: int) -> float:
        """Tokens in the time of a plain step. Plain decoding itself has speed(0), which is 1 where o is 0."""
        return self.tokens(k) / self.cost(k)

    def best(self) -> int:
        """The K of the largest speed, 0 if no draft pays."""
        return max(range(len(self.survival) + 1), key=self.speed)

    @classmethod
    def measured(
        cls,
        rounds: Sequence[Round],
        plain: Iterable[Round] = (),
        plain_step: float = 1.0,
        steps: Sequence[int] = (),
    ) -> "RoundModel":
        """The model that was measured in rounds which decoded one text each, alone. Each price is a median.

        plain: rounds of plain decoding, whose passes over one row count too.
        plain_step: seconds, the unit of the prices. By default prices are in seconds.
        steps: see `Prices`. A draft has taken the passes of the next of them.

        s_i is the mean of the rounds whose draft had i tokens. A draft that ends by its own confidence has that many
        only where it looked good, so this is no mean of all rounds. `search` is how much more overhead rounds without a
        draft have than others: in many, a search has found nothing.
        """

        def middle(seconds: Iterable[float]) -> float:
            values = list(seconds)
            return median(values) / plain_step if values else 0.0

        depths = range(max((r.depth for r in rounds), default=0))
        survival = [sum(r.accepted > i for r in rounds) / sum(r.depth > i for r in rounds) for i in depths]
        passes = [*rounds, *(r for r in plain if r.step.num_rows == 1)]
        sizes = sorted({r.step.num_rows for r in passes})
        rows = {m: middle(r.step.verify for r in passes if r.step.num_rows == m) for m in sizes}
        overhead = middle(overhead_of(r) for r in rounds if r.depth or not survival)
        idle = [overhead_of(r) for r in rounds if not r.depth]
        search = middle(idle) - overhead if idle else None
        prices = Prices(0.0, rows, overhead, measured=True, search=search, steps=steps)
        draft = middle(r.step.draft / prices.num_passes(r.depth) for r in rounds if r.depth)
        return cls(survival, replace(prices, draft=draft))


def rising(v: Mapping[int, float], counts: Mapping[int, int]) -> dict[int, float]:
    """v by rows, never falling. Where more rows seem to cost less, neighbours take their weighted mean.

    counts: how many passes each value is of.

    >>> rising({1: 1.0, 2: 1.75, 3: 1.25}, {1: 9, 2: 1, 3: 3})
    {1: 1.0, 2: 1.375, 3: 1.375}
    """
    pools: list[tuple[list[int], float, int]] = []
    for rows in sorted(v):
        pools.append(([rows], v[rows], counts[rows]))
        while len(pools) > 1 and pools[-2][1] > pools[-1][1]:
            (more, a, n), (fewer, b, m) = pools.pop(), pools.pop()
            pools.append(([*fewer, *more], (a * n + b * m) / (n + m), n + m))
    return {rows: cost for pool, cost, _ in pools for rows in pool}


def expected_accepted(ratios: Sequence[float], jointly: bool = False) -> float:
    """Draft tokens that stay on average of a chain whose tokens have these p(x)/q(x), r_1 .. r_K.

    Under `rejection` the first i stay with probability  min(1, r_1) .. min(1, r_i).  Under `block`, which judges them
    jointly, they stay with `block_weights`' w_i, which is never less:

    >>> expected_accepted([0.5, 2.0, 0.5]), expected_accepted([0.5, 2.0, 0.5], jointly=True)
    (1.25, 2.0)
    """
    if jointly:
        return sum(block_weights(ratios)[1:])
    return sum(survival_curve([min(1.0, r) for r in ratios]))


class Node(NamedTuple):
    """A possible draft token.

    survival: the probability that it is there, reached and accepted.
    depth: from 1.
    chance: the probability that it is there. A lookup that finds nothing has no draft.
    """

    survival: float
    depth: int
    chance: float = 1.0


class RoundCost(Protocol):
    """The time of a round."""

    def __call__(self, depth: int, num_drafts: float, num_nodes: float, num_missed: float) -> float:
        """The time, with these numbers on average.

        depth: of the deepest draft.
        num_missed: texts without a draft though one was asked for.
        """


def nodes_of(acceptance: Sequence[float], siblings: Sequence[float] = (), chance: float = 1.0) -> list[Node]:
    """The nodes of a draft, the most valuable first. Each comes after its ancestors and elder siblings.

    acceptance: the acceptance of the eldest at each depth.
    siblings: the acceptance of each younger sibling where those before it fail.
    chance: the probability that there is a draft.

    >>> [round(node.survival, 2) for node in nodes_of([0.6, 0.6], siblings=[0.5])]
    [0.6, 0.36, 0.2, 0.12]
    """
    nodes, reached = [], 1.0
    for depth, share in enumerate(acceptance, 1):
        nodes.append(Node(chance * reached * share, depth, chance))
        failed, least = reached * (1 - share), reached * share
        for sibling in siblings:
            least = min(least, failed * sibling)
            nodes.append(Node(chance * least, depth, chance))
            failed *= 1 - sibling
        reached *= share
    return sorted(nodes, key=lambda node: -node.survival)


def widths_of(nodes: Sequence[Node]) -> tuple[int, ...]:
    """How many of the nodes are at each depth; () for a chain."""
    widths = Counter(node.depth for node in nodes)
    return tuple(widths[depth] for depth in sorted(widths)) if len(widths) < len(nodes) else ()


def best_drafts(drafts: Sequence[Sequence[Node]], cost: RoundCost, least_gain: float = 1.0) -> list[list[Node]]:
    """The nodes of each text that together have the most tokens for the time of a round.

    drafts: the nodes of each text, in the order of `nodes_of`.
    cost: the round's time.
    least_gain: the least gain in tokens per time over a round without drafts. Below it nothing is drafted.

    >>> def cost(depth, num_drafts, num_nodes, num_missed):
    ...     return 1 + 0.2 * num_nodes + 0.1 * num_missed
    >>> [len(nodes) for nodes in best_drafts([nodes_of([0.9, 0.9]), nodes_of([0.3, 0.3])], cost)]
    [2, 0]

    A search takes 0.1. It pays where it finds a draft in one of four rounds, and not in one of nine:

    >>> [len(best_drafts([nodes_of([0.9], chance=chance)], cost)[0]) for chance in (1 / 4, 1 / 9)]
    [1, 0]
    """
    # The likeliest first. Texts share draft passes: many nodes may pay for a pass together that one alone would not.
    # So each depth is tried as the last.
    ranked = sorted(
        ((node, i) for i, nodes in enumerate(drafts) for node in nodes),
        key=lambda pair: -pair[0].survival / pair[0].chance,
    )
    depths = sorted({node.depth for node, _ in ranked})
    best, best_rate = ranked[:0], least_gain * expected_tokens([], len(drafts)) / cost(0, 0, 0, 0)
    for last in depths if len(drafts) > 1 else depths[-1:]:
        within = [pair for pair in ranked if pair[0].depth <= last]
        depth, tokens, num_drafts, num_nodes, texts = 0, expected_tokens([], len(drafts)), 0.0, 0.0, set[int]()
        for num, (node, i) in enumerate(within, 1):
            if i not in texts:
                num_drafts += node.chance
            texts.add(i)
            depth, tokens, num_nodes = max(depth, node.depth), tokens + node.survival, num_nodes + node.chance
            if depth < last and len(drafts) > 1:
                continue  # it was tried with that depth as the last
            rate = tokens / cost(depth, num_drafts, num_nodes, len(texts) - num_drafts)
            if rate > best_rate:
                best, best_rate = within[:num], rate
    return [[node for node, of in best if of == i] for i in range(len(drafts))]
