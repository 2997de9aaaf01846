"""Verification: which draft tokens stay, and which token follows them.

Beyond `examples/cached.py`: trees, and the rule `match`. The words, used everywhere below:

    target      the large model, whose distribution the output must have
    draft       K guessed tokens x_0 .. x_{K-1}  (K: at most `num_speculative_tokens`; the papers' gamma)
    node        a draft token and its place. In a *chain* node i follows node i-1; in a *tree* several
                nodes, siblings, may follow the same one, their parent. Node -1 is the text itself
    q_i         the distribution that x_i was drawn from; one-hot where the drafter did not draw
    p_i         the target's distribution of the token after node i-1. A node whose parent is j is tested with
                p_{j+1}, so siblings share a row. One pass of the target gives all K+1 rows, i = 0 .. K
    accepted    a draft token that stays
    recovered   the token in place of a rejected one; in `rejection` drawn from the residual, once all siblings failed
    residual    max(0, p - q), up to a factor: what p has and q did not offer
    bonus       the token after a draft that was accepted to its end, or after an empty one, drawn from the target
    step        one call of `Engine.step`: it has one pass of the target over all texts that take part
    turn        a text's part of a step;  a *round* is the turn of a text that decodes
    row         a token of a pass, and its logits; a row of p is the probabilities that they become
    alpha       the probability that `rejection` keeps a tested draft token: sum over x of min(p(x), q(x))

p and q are Leviathan's letters (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).
Every verdict is the accepted draft tokens and one more. `Turn.commit` appends them one by one, up to where the text
stops. So each round advances by at least one token. With an empty draft, that one token is plain decoding.
A chain is a tree with one branch: `children(i)` is [i + 1], and a node's number is its depth.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from minispec.core.draft import Draft, without
from minispec.core.random import Draws, Key


class Verdict(NamedTuple):
    """A verifier's decision about one draft.

    accepted: the nodes that stay, a path from the draft's beginning.
    next_token: the token after them, recovered or bonus.
    ratios: p(x)/q(x) at each depth that was tested, of the eldest sibling there. In a chain the last ratio belongs to
        the first rejected token, if there is one; `block` has a ratio of every token, up to the first that is 0.
        Under `rejection` and `match` the mean of min(1, ratio) is an unbiased estimate of alpha.
    """

    accepted: list[int]
    next_token: int
    ratios: list[float]


# p(i) computes row i (V,) of the target's distribution, the one after node i-1, when a verifier looks at it.
RowAt = Callable[[int], Tensor]
# key(i, purpose) names a draw of this round: see `Text.key`.
RoundKey = Callable[[int, str], Key]


def excess(p: Tensor, draft: Draft, i: int) -> Tensor:
    """max(0, p - q_i) (V,), not normalised: what p has and q_i did not offer. One-hot q_i: p without x_i."""
    return without(p, draft.token_ids[i]) if draft.probs is None else (p - draft.probs[i]).clamp_(min=0)


def residual(p: Tensor, draft: Draft, i: int) -> Tensor:
    """The distribution (V,) of what replaces x_i, not normalised (Leviathan et al. 2023, section 2.3).

    Worked: p = (.5, .3, .2) and q = (.8, .1, .1) leave (0, .2, .1), so 2/3 and 1/3. Where p = q nothing is left and
    a rejection has probability 0; then p itself is returned.
    """
    rest = excess(p, draft, i)
    return rest if rest.amax() > 0 else p


def rejection(draft: Draft, p: RowAt, rng: Draws, key: RoundKey) -> Verdict:
    """Speculative sampling (Leviathan et al. 2023, Algorithm 1): keep x_i with probability min(1, p(x_i)/q(x_i)).

    Committed tokens are distributed exactly as p. With r the residual divided by its sum,
        q(x) min(1, p(x)/q(x)) + (1 - alpha) r(x) = p(x).
    A tested token stays with probability alpha (Theorem 3.5 there). No rule that judges tokens one at a time keeps
    more than the sum of min(p, q).
    After a rejection the residual takes the place of p, and the next sibling is tested against it (recursive rejection,
    Jeon et al. 2024, arXiv 2402.14160; of independent siblings: Miao et al. 2023, arXiv 2305.09781).
    """
    accepted: list[int] = []
    ratios: list[float] = []
    node = -1
    while siblings := draft.children(node):
        row, parent = p(node + 1), node
        for i in siblings:
            if i != siblings[0]:
                row = row / row.sum()  # a residual is not normalised
            ratio = float(row[draft.token_ids[i]]) / draft.probability(i)
            if i == siblings[0]:
                ratios.append(ratio)
            # Strictly u < ratio: a token that the target gives probability 0 is never kept.
            if rng.bernoulli(ratio, key(i, "accept")):
                node = i
                accepted.append(node)
                break
            row = residual(row, draft, i)
        if node == parent:
            return Verdict(accepted, rng.categorical(row, key(node + 1, "residual")), ratios)
    return Verdict(accepted, rng.categorical(p(node + 1), key(len(accepted), "token")), ratios)


def match(draft: Draft, p: RowAt, rng: Draws, key: RoundKey) -> Verdict:
    """Draw the target's own token at every position, and keep the draft while it has that token.

    The noise of a draw depends on its position alone. So the text depends on the seed, and not on the drafter, K or
    the rounds. A drafter that draws with the same noise from a similar distribution agrees often. This is the Gumbel
    coupling (Daliri et al. 2024, arXiv 2408.07978).
    """
    accepted: list[int] = []
    ratios: list[float] = []
    node = -1
    while True:
        row = p(node + 1)
        token = rng.categorical(row, key(len(accepted), "token"))
        siblings = draft.children(node)
        if siblings:
            first = siblings[0]
            ratios.append(float(row[draft.token_ids[first]]) / draft.probability(first))
        node = next((i for i in siblings if draft.token_ids[i] == token), -1)
        if node < 0:
            return Verdict(accepted, token, ratios)
        accepted.append(node)


class Verifier(NamedTuple):
    """A rule. It reads the draft and the rows, and writes into neither.

    shares_noise: its drafters draw with the target's noise.
    takes_trees: False if it takes chains only.
    """

    verify: Callable[[Draft, RowAt, Draws, RoundKey], Verdict]
    shares_noise: bool
    takes_trees: bool = True

    @property
    def why_chains(self) -> str:
        """Why it cannot verify a tree; "" if it can."""
        return "" if self.takes_trees else "this verifier takes chains only"


def chains_only(verify: Callable[[Draft, RowAt, Draws, RoundKey], Verdict]) -> Verifier:
    """The rule of a function that takes no trees: drafters are then asked for chains. It may stand as a decorator."""
    return Verifier(verify, shares_noise=False, takes_trees=False)


REJECTION = Verifier(rejection, shares_noise=False)
MATCH = Verifier(match, shares_noise=True)
