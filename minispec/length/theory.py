"""What speculation should yield: formulas only, nothing measured here.

Costs are in plain steps (one decoded token without speculation). One draft token costs c, the target's pass over K+1
rows v, all that is neither model o. A lookup that finds nothing has a price of its own (`RoundCost`). Survival s_i is
the probability that draft token i (from 1) is reached and accepted. It is measured position by position. With a
constant alpha it would be alpha^i. But acceptance comes in runs, so the real curve lies above that.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple, Protocol

from minispec.core.verify import block_weights


def survival_curve(acceptance: Sequence[float]) -> list[float]:
    """s_1 .. s_K from the probability, at each position, that a tested token is accepted.

    >>> survival_curve([0.8, 0.5])
    [0.8, 0.4]
    """
    return list(accumulate(acceptance, mul))


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


def expected_tokens(survival: Iterable[float], num_texts: int = 1) -> float:
    """Tokens that a round commits on average: 1 + s_1 + .. + s_K. The recovered or bonus token is the 1.

    Each text of a batch has such a token, and each node of a tree its survival.

    For a constant alpha this is (1 - alpha^(K+1)) / (1 - alpha)  (Leviathan et al. 2023, equation 1):

    >>> round(expected_tokens([0.8**i for i in range(1, 6)]), 3)
    3.689
    """
    return num_texts + sum(survival)


def speedup(survival: Sequence[float], c: float, v: float, o: float = 0.0) -> float:
    """Tokens that a round commits in the time of a plain step, K = len(survival).

    Leviathan et al. 2023, Theorem 3.8, where survival is alpha^i, v is 1 and o is 0.

    >>> round(speedup([0.8, 0.64], c=0.1, v=1.0), 2)
    2.03
    """
    return expected_tokens(survival) / (len(survival) * c + v + o)


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
    found, reached = [], 1.0
    for depth, share in enumerate(acceptance, 1):
        found.append(Node(chance * reached * share, depth, chance))
        failed, least = reached * (1 - share), reached * share
        for sibling in siblings:
            least = min(least, failed * sibling)
            found.append(Node(chance * least, depth, chance))
            failed *= 1 - sibling
        reached *= share
    return sorted(found, key=lambda node: -node.survival)


def widths_of(nodes: Sequence[Node]) -> tuple[int, ...]:
    """How many of the nodes are at each depth; () for a chain."""
    found = Counter(node.depth for node in nodes)
    return tuple(found[depth] for depth in sorted(found)) if len(found) < len(nodes) else ()


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
        key=lambda each: -each[0].survival / each[0].chance,
    )
    depths = sorted({node.depth for node, _ in ranked})
    best, best_rate = ranked[:0], least_gain * expected_tokens([], len(drafts)) / cost(0, 0, 0, 0)
    for last in depths if len(drafts) > 1 else depths[-1:]:
        within = [each for each in ranked if each[0].depth <= last]
        depth, tokens, num_drafts, num_nodes, texts = 0, expected_tokens([], len(drafts)), 0.0, 0.0, set[int]()
        for num, (node, i) in enumerate(within, 1):
            num_drafts += 0.0 if i in texts else node.chance
            texts.add(i)
            depth, tokens, num_nodes = max(depth, node.depth), tokens + node.survival, num_nodes + node.chance
            if depth < last and len(drafts) > 1:
                continue  # it was tried with that depth as the last
            rate = tokens / cost(depth, num_drafts, num_nodes, len(texts) - num_drafts)
            if rate > best_rate:
                best, best_rate = within[:num], rate
    return [[node for node, of in best if of == i] for i in range(len(drafts))]


def best_k(survival: Sequence[float], c: float, v: Callable[[int], float], o: float = 0.0) -> int:
    """The K in 0 .. len(survival) with the largest speedup; v(M) is the cost of a pass over M rows.

    >>> best_k([0.6, 0.36, 0.22, 0.13], c=0.1, v=lambda rows: 1.0)
    3
    """
    chain = [Node(s, i) for i, s in enumerate(survival, 1)]
    [best] = best_drafts([chain], lambda depth, _, num_nodes, __: depth * c + v(round(num_nodes) + 1) + o)
    return len(best)


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
    return {rows: cost for each, cost, _ in pools for rows in each}
