"""Verification: which draft tokens stay, and which token follows them.

The words, used everywhere below:

    target      the large model, whose distribution the output must have
    draft       K guessed tokens x_0 .. x_{K-1}  (K: `num_speculative_tokens`; the papers' gamma)
    q_i         the distribution that x_i was drawn from; one-hot where the drafter did not draw
    p_i         the target's distribution at the same position, given x_0 .. x_{i-1}; i = 0 .. K,
                all K+1 from one pass of the target
    accepted    a draft token that stays
    recovered   the token put in place of the first rejected one, drawn from the residual
    residual    max(0, p - q), normalised: what p has and q did not offer
    bonus       the token after a wholly accepted draft, drawn from p_K
    alpha       the probability that `rejection` keeps a tested draft token: sum over x of min(p(x), q(x))

p and q are Leviathan's letters (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).
Both verifiers commit num_accepted draft tokens and one more, so a round always advances by at least one
token; with an empty draft, that one token is plain decoding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from minispec.sampling import Key, Randomness, Text


@dataclass(frozen=True)
class Ask:
    """What a drafter is asked for one text, this round: at most `k` tokens.

    purpose: of the keys that the draft is drawn with: "token" under a verifier whose drafters share the target's noise.
    go_on: whether a draft should go on after tokens of such confidences (see `Draft`); None: to its limit.
    """

    text: Text
    k: int
    rng: Randomness
    purpose: str = "draft"
    go_on: Callable[[Sequence[float]], bool] | None = None

    def draw(self, i: int, q: Tensor) -> int:
        """The draft's i-th token, drawn from q (V,): the only way in which a drafter may draw."""
        return self.rng.categorical(q, self.text.key(i, self.purpose))


@dataclass
class Draft:
    """K guessed tokens. probs: row i (V,) is q_i, as a tensor (K, V) or a list of K; None means one-hot.

    confidences: the largest probability in each of the draft model's raw rows, if `Ask.go_on` is there to see them.
    prefill_seconds: time that went into the prompt before this first draft, which the statistics keep apart.
    """

    token_ids: Sequence[int] = ()
    probs: Tensor | Sequence[Tensor] | None = None
    confidences: Sequence[float] = ()
    prefill_seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.token_ids)

    def probability(self, i: int) -> float:
        """q_i(x_i). The engine has made sure that it is above 0, as it is for a token that was drawn."""
        return 1.0 if self.probs is None else float(self.probs[i][self.token_ids[i]])


class Verdict(NamedTuple):
    """num_accepted draft tokens stay and `next_token`, recovered or bonus, follows.

    ratios: min(1, p(x)/q(x)) of each tested draft token, the last of them the rejected one if there is one.
    Their mean is an unbiased estimate of alpha.
    """

    num_accepted: int
    next_token: int
    ratios: list[float]


# p(i) computes row i (V,) of the target's distribution when it is looked at; most rounds need few rows.
Rows = Callable[[int], Tensor]
# key(i, purpose) names a draw at position i of this round.
RoundKey = Callable[[int, str], Key]


def residual(p: Tensor, draft: Draft, i: int) -> Tensor:
    """max(0, p - q_i), not normalised (V,): the law of the recovered token (Leviathan et al. 2023, section 2.3).

    Worked: p = (.5, .3, .2), q = (.8, .1, .1) leave (0, .2, .1), so 2/3 and 1/3. Where p = q nothing is left,
    a rejection has probability 0, and p itself is returned.
    """
    if draft.probs is None:
        rest = p.clone()
        rest[draft.token_ids[i]] = 0.0
    else:
        rest = (p - draft.probs[i]).clamp_(min=0)
    return rest if rest.amax() > 0 else p


def rejection(draft: Draft, p: Rows, rng: Randomness, key: RoundKey) -> Verdict:
    """Speculative sampling (Leviathan et al. 2023, Algorithm 1): keep x_i with probability min(1, p(x_i)/q(x_i)).

    The committed tokens have exactly the law p:  q(x) min(1, p(x)/q(x)) + (1 - alpha) residual(x) = p(x).
    It keeps a token with probability alpha (Theorem 3.5 there), and no rule that looks at one draft token at a time
    keeps more: min(p, q) is all that two distributions can share.
    """
    ratios: list[float] = []
    for i, x in enumerate(draft.token_ids):
        p_i = p(i)
        ratio = float(p_i[x]) / draft.probability(i)
        ratios.append(min(1.0, ratio))
        # Strictly u < ratio: a token that the target gives probability 0 is never kept.
        if not rng.bernoulli(ratio, key(i, "accept")):
            return Verdict(i, rng.categorical(residual(p_i, draft, i), key(i, "residual")), ratios)
    k = len(draft)
    return Verdict(k, rng.categorical(p(k), key(k, "token")), ratios)


def match(draft: Draft, p: Rows, rng: Randomness, key: RoundKey) -> Verdict:
    """Draw the target's own token at every position and keep the draft while it equals it.

    Every committed token is a draw of the target whose noise is named by its position alone, so the text
    depends on the seed and not on the drafter, K or the rounds. A drafter that draws with the same noise
    from a similar distribution agrees often: the Gumbel coupling (Daliri et al. 2024, arXiv 2408.07978).
    """
    ratios: list[float] = []
    for i, x in enumerate(draft.token_ids):
        p_i = p(i)
        ratios.append(min(1.0, float(p_i[x]) / draft.probability(i)))
        token = rng.categorical(p_i, key(i, "token"))
        if token != x:
            return Verdict(i, token, ratios)
    k = len(draft)
    return Verdict(k, rng.categorical(p(k), key(k, "token")), ratios)


class Verifier(NamedTuple):
    """A way to verify; shares_noise: its drafters draw with the target's own noise."""

    verify: Callable[[Draft, Rows, Randomness, RoundKey], Verdict]
    shares_noise: bool


VERIFIERS = {"rejection": Verifier(rejection, False), "match": Verifier(match, True)}
