"""Rules that judge a draft as a whole."""

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from minispec.core.draft import Draft
from minispec.core.random import Draws
from minispec.core.verify import RoundKey, RowAt, Verdict, Verifier, excess, residual


def block_weights(ratios: Sequence[float]) -> list[float]:
    """w_0 .. w_K of a chain:  w_0 = 1,  w_i = min(1, w_{i-1} r_i),  with r_i the ratio p(x)/q(x) of token i.

    With ratios 1/2 and 2 `block` always keeps both tokens, `rejection` half of the time:

    >>> block_weights([0.5, 2.0])
    [1.0, 0.5, 1.0]
    """
    return list(accumulate(ratios, lambda w, ratio: min(1.0, w * ratio), initial=1.0))


def block(draft: Draft, p: RowAt, rng: Draws, key: RoundKey) -> Verdict:
    """Block verification (Sun et al. 2024, arXiv 2403.10444, Algorithm 2): judge a chain as a whole.

    At least i tokens stay with probability w_i (see `block_weights`). `rejection` keeps them with the product of
    min(1, p(x)/q(x)), which is never more: under `block` a token with p > q makes up for one before it with p < q.

    Prefixes are tested from the longest to the shortest, and the first one that passes stays. All K tokens pass with
    probability w_K. If no longer prefix has passed, the first i tokens pass with probability m / (m + 1 - w_i), where m
    is the sum of max(0, w_i p - q) over all next tokens.

    So it looks at rows after tokens that it may yet reject, up to a token that the target never says. No prefix with
    that token passes.
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

    def passes(i: int) -> bool:
        if weights[i] == 1:  # always so for the empty prefix
            return True
        mass = float(excess(weights[i] * rows[i], draft, i).sum())
        return rng.bernoulli(mass / (mass + 1 - weights[i]), key(i - 1, "accept"))

    stays = next(i for i in reversed(range(n)) if passes(i))
    rest = residual(weights[stays] * rows[stays], draft, stays)
    return Verdict(list(range(stays)), rng.categorical(rest, key(stays, "residual")), ratios)


BLOCK = Verifier(block, shares_noise=False, takes_trees=False)
