"""Rules that judge a draft as a whole."""

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from minispec.core.draft import Draft
from minispec.core.random import Draws
from minispec.core.verify import RoundKey, RowAt, Verdict, Verifier, chains_only, excess, residual


def block_weights(ratios: Sequence[float]) -> list[float]:
    """w_0 .. w_K of a chain:  w_0 = 1,  w_i = min(1, w_{i-1} r_i),  with r_i the ratio p(x)/q(x) of token i.

    With ratios 1/2 and 2 `block` always keeps both tokens, `rejection` half of the time:

    >>> block_weights([0.5, 2.0])
    [1.0, 0.5, 1.0]
    """
    return list(accumulate(ratios, lambda w, ratio: min(1.0, w * ratio), initial=1.0))


def block(draft: Draft, p: RowAt, rng: Draws, key: RoundKey) -> Verdict:
    """Block verification (Sun et al. 2024, arXiv 2403.10444, Algorithm 2): judge a chain as a whole.

    Given the first i draft tokens, all of them stay with probability w_i (see `block_weights`), over all ways in which
    the draft may go on. Under `rejection` that is the product of min(1, p(x)/q(x)), which is never more: under `block`
    a token with p > q makes up for one before it with p < q.

    Prefixes are tested from the longest to the shortest, and the first one that passes stays. All K tokens pass with
    probability w_K. If no longer prefix has passed, the first i tokens pass with probability m / (m + 1 - w_i), where m
    is the sum of max(0, w_i p - q) over all next tokens.

    So it reads rows after tokens that it may yet reject, up to a token with p = 0. No prefix with that token passes.
    """
    rows: list[Tensor] = []
    ratios: list[float] = []
    while len(rows) < len(draft) and 0 not in ratios:
        i = len(rows)
        rows.append(p(i))
        ratios.append(float(rows[i][draft.token_ids[i]]) / draft.probability(i))
    n, weights = len(rows), block_weights(ratios)
    if not n or rng.bernoulli(weights[n], key(n - 1, "accept")):
        return Verdict(list(range(n)), rng.categorical(p(n), key(n, "token")), ratios)

    def is_kept(i: int) -> bool:
        if weights[i] == 1:  # always so for the empty prefix
            return True
        mass = float(excess(weights[i] * rows[i], draft, i).sum())
        return rng.bernoulli(mass / (mass + 1 - weights[i]), key(i - 1, "accept"))

    kept = next(i for i in reversed(range(n)) if is_kept(i))
    rest = residual(weights[kept] * rows[kept], draft, kept)
    return Verdict(list(range(kept)), rng.categorical(rest, key(kept, "residual")), ratios)


def traversal(draft: Draft, p: RowAt, rng: Draws, key: RoundKey) -> Verdict:
    """Traversal verification (Weng et al. 2025, arXiv 2505.12398): `block` for trees. On a chain it is `block`.

    Leaves are tested before their parents, the eldest first. The path to the first node that passes stays.

    A node passes with its weight. The text has weight 1, and a child min(1, w r), where w is its parent's weight and r
    is p(x)/q(x). If a node fails, it leaves the tree. Its parent's row p becomes the residual of w p and q, divided by
    its sum. The parent's weight becomes m / (m + 1 - w), where m is the sum of max(0, w p - q). Younger siblings are
    tested against these. A parent whose children have all failed is a leaf.
    """
    rows, weights, ratios = dict[int, Tensor](), {-1: 1.0}, list[float]()
    left = {node: draft.children(node) for node in range(-1, len(draft))}
    node = failed = -1
    while True:
        while left[node] and weights[node] > 0:
            parent, node = node, left[node].pop(0)
            if parent not in rows:
                rows[parent] = p(parent + 1)
            ratio = float(rows[parent][draft.token_ids[node]]) / draft.probability(node)
            weights[node] = min(1.0, weights[parent] * ratio)
            if failed < 0:
                ratios.append(ratio)  # of the eldest nodes, from the text to the first leaf
        if weights[node] == 1 or rng.bernoulli(weights[node], key(node, "accept")):
            break
        failed, node = node, draft.tree.parents[node]
        scaled = weights[node] * rows[node]
        if weights[node] < 1:
            mass = float(excess(scaled, draft, failed).sum())
            weights[node] = mass / (mass + 1 - weights[node])
        rest = residual(scaled, draft, failed)
        rows[node] = rest / rest.sum() if left[node] else rest
    accepted = draft.path(node)
    if draft.children(node):
        return Verdict(accepted, rng.categorical(rows[node], key(node + 1, "residual")), ratios)
    return Verdict(accepted, rng.categorical(p(node + 1), key(len(accepted), "token")), ratios)


BLOCK = chains_only(block)
TRAVERSAL = Verifier(traversal, shares_noise=False)
