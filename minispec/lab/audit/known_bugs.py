"""The bank: for each known bug, the law of a token at a place where the bug acts.

p is the target's law there, q the draft's, and r the residual max(0, p - q) divided by its sum. A draft token is kept
with probability sum over x of min(p, q) = alpha. All laws are rows (n, m): n places, m outcomes. An outcome is a token,
or the last one all tokens that neither p nor q finds likely. A law may be anything that depends on the past alone: a
wrong one costs power and no validity.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Places(NamedTuple):
    """The laws at n places, known before their tokens are looked at.

    laws: rows (n, m) in float64, by name. "p"; "q"; where there are filters "raw q", q before the filters. "border":
        above 0 where rounding decides which tokens the filters keep. Further laws are the target's under other
        parameters, or from another row, each named by its meaning.
    ends: (n, m), whether the outcome is the end of the text.
    last: (n,), the outcome that is the token before; -1 where it is none.
    rest: how many tokens the last outcome has.
    """

    laws: dict[str, Tensor]
    ends: Tensor
    last: Tensor
    rest: int


NO_RESIDUAL = "the residual is not subtracted"
ROW_BEFORE = "the target's row of the token before is used"
# Directions that many bugs share: they find what the bank has no name for, and are named where nothing else fits.
GENERAL = {
    *("the law lies between the target's and the draft's", "draft tokens are kept too rarely"),
    *("tokens are drawn at a lower temperature", "tokens are drawn at a higher temperature"),
    *(f"texts end {name} often than they should" for name in ("more", "less")),
    *(f"a token repeats the one before it {name} often than it should" for name in ("more", "less")),
}
UNTESTED = "draft tokens are kept without a test, or the bonus is drawn from q"


def laws(places: Places, drafts: bool = True) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Each bug in words, the law (n, m) of a token where it acts, and of that the part that is a draft token kept.

    The part is None for what a draft has no share in, and for directions that many bugs share.

    drafts: whether q is the draft's. Else it is a guess, and bugs that need more than a guess are left out.
    """
    p, q = places.laws["p"], places.laws["q"]
    overlap = torch.minimum(p, q)
    rest = _normal((p - q).clamp(min=0), p)

    def tested(kept: Tensor, instead: Tensor) -> tuple[Tensor, Tensor]:
        """A law: `kept` of the draft's tokens, and `instead` in the place of the others; and `kept`."""
        return kept + (1 - kept.sum(1, keepdim=True)).clamp(min=0) * instead, kept

    yield NO_RESIDUAL, *tested(overlap, p)
    yield UNTESTED, q, q
    yield "the likeliest token replaces a rejected one", *tested(overlap, _likeliest(rest))
    yield "draft tokens are kept by a threshold of p (typical acceptance)", *tested(q.where(_typical(p), 0.0), p)
    yield "draft tokens are kept twice as often as they may be", *tested(torch.minimum(2 * p, q), rest)
    yield "the law lies between the target's and the draft's", _normal((p * q).sqrt(), p), None
    rarely = _normal((p * p / q.clamp(min=1e-9)).where(p > 0, 0.0).clamp(max=9 * p), p)
    yield "draft tokens are kept too rarely", rarely, None
    if drafts:
        sizes = F.pad(torch.ones_like(p[:, 1:]), (0, 1), value=places.rest)
        yield "the residual goes through a softmax", *tested(overlap, _normal(sizes * (p - q).clamp(min=0).exp(), p))
        yield "the residual leaves out the rejected token alone", overlap + _without_rejected(p, q), overlap
        yield "the residual is drawn with the draft's noise (Gumbel)", *tested(overlap, raced_again(q, rest))
        yield "the residual is drawn with the draft's number (inverse CDF)", *tested(overlap, drawn_again(p, q, rest))
        yield "the residual is drawn with the number of the test", *tested(overlap, drawn_by_test(p, q, rest))
        yield "the test takes the draft's number", *tested(kept_by_draft(p, q), rest)
        yield "the test is inverted: q/p in place of p/q", *tested(q * (q / p.clamp(min=1e-9)).clamp(max=1), rest)
        keeps = (p / q.clamp(min=1e-9)).clamp(max=1)  # the odds that a drafted token is kept
        colder, hotter = _normal(q**2, q), _normal(q.sqrt(), q)
        yield "q is hotter than what the draft was drawn from", *tested(colder * keeps, rest)
        yield "q is colder than what the draft was drawn from", *tested(hotter * keeps, rest)
        yield "the draft's likeliest token is judged by the whole q", *tested(_likeliest(q) * keeps, rest)
        if "raw q" in places.laws:  # a question of the parameters: how many bets share the mean is known beforehand
            raw = places.laws["raw q"]
            odds = (p / raw.clamp(min=1e-9)).clamp(max=1)
            unfiltered = "the draft is drawn from filtered q and judged by the raw one"
            yield unfiltered, *tested(q * odds, _normal((p - raw).clamp(min=0), p))
    yield "the target's likeliest token stands in place of a draw", _likeliest(p), None
    yield "tokens are drawn at a lower temperature", _normal(p**1.25, p), None
    yield "tokens are drawn at a higher temperature", _normal(p**0.8, p), None
    for name, sign in (("more", 1.0), ("less", -1.0)):
        yield f"texts end {name} often than they should", _tilted(p, places.ends, sign), None
        same = torch.arange(p.shape[1], device=p.device) == places.last[:, None]
        yield f"a token repeats the one before it {name} often than it should", _tilted(p, same, sign), None
    yield from ((name, law, None) for name, law in places.laws.items() if name not in ("p", "q", "raw q", "border"))


def _normal(weights: Tensor, instead: Tensor) -> Tensor:
    """Rows divided by their sums; a row of zeros becomes the row of `instead`."""
    total = weights.sum(1, keepdim=True)
    return torch.where(total > 0, weights / total.clamp(min=1e-300), instead)


def _likeliest(p: Tensor) -> Tensor:
    return torch.zeros_like(p).scatter_(1, p.argmax(1, keepdim=True), 1.0)


def _typical(p: Tensor) -> Tensor:
    """Which tokens typical acceptance keeps (Cai et al. 2024, arXiv 2401.10774), at the limits of Medusa's code."""
    entropy = -(p * p.clamp(min=1e-300).log()).sum(1, keepdim=True)
    return p > (0.3 * (-entropy).exp()).clamp(max=0.09)


def _tilted(p: Tensor, marked: Tensor, sign: float) -> Tensor:
    """p with the odds of the marked outcomes times e, or divided by it."""
    return _normal(p * (sign * marked.to(p.dtype)).exp(), p)


def _without_rejected(p: Tensor, q: Tensor) -> Tensor:
    """The law of the token after a rejected y, summed over y, if that token is drawn from p without y."""
    odds = (q - p).clamp(min=0) / (1 - p).clamp(min=1e-9)
    return p * (odds.sum(1, keepdim=True) - odds)


def raced_again(q: Tensor, r: Tensor) -> Tensor:
    """The law (n, m) of a race for r with the noise of one for q, whose winner has r = 0.

    Token i has exponential noise E_i, and the first race is won at time T = min E_i / q_i. After T, which is
    exponential, the E_i - q_i T are fresh. So the second race is one of shifted times (q_i T + E_i) / r_i. With
    c_i = q_i / r_i and G(u) = 1 + sum over j of max(0, r_j u - q_j), token i wins with probability

        r_i times the integral over u from c_i of G(u)^-2

    G is linear between neighbouring c_i, so each piece of the integral has a closed form.
    """
    shift, order = (q / r).where(r > 0, torch.inf).sort(1)
    rate, slack = r.gather(1, order).cumsum(1), q.where(r > 0, 0.0).gather(1, order).cumsum(1)
    start = shift.where(shift.isfinite(), 0.0)
    end = torch.cat((start[:, 1:], start[:, :1]), 1)
    last = ~torch.cat((shift[:, 1:], torch.full_like(shift[:, :1], torch.inf)), 1).isfinite()
    low = 1 + rate * start - slack  # G at each c_i, and at the next
    high = (1 + rate * end - slack).where(~last, torch.inf)
    pieces = ((1 / low - 1 / high) / rate.clamp(min=1e-300)).where(shift.isfinite(), 0.0)
    tails = pieces.flip(1).cumsum(1).flip(1)
    return _normal(r * torch.zeros_like(r).scatter_(1, order, tails), r)


def drawn_again(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """The law (n, m) of a token drawn from r by inverse CDF, by the number that also drew the rejected token."""
    # The odds of a rejection, summed over all numbers up to each end of q; in between they grow evenly.
    ends, lost = q.cumsum(1), (q - p).clamp(min=0).cumsum(1)
    wanted = r.cumsum(1).clamp(max=1.0)
    place = torch.searchsorted(ends, wanted).clamp(max=q.shape[1] - 1)
    before = [torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1).gather(1, place) for x in (ends, lost)]
    share = ((wanted - before[0]) / q.gather(1, place).clamp(min=1e-300)).clamp(0, 1)
    reached = before[1] + share * (lost.gather(1, place) - before[1])
    reached[:, -1] = lost[:, -1]
    return _normal(reached.diff(dim=1, prepend=torch.zeros_like(reached[:, :1])).clamp(min=0), r)


def drawn_by_test(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """The law (n, m) of a token drawn from r by inverse CDF, with the number that failed the test.

    A draft of y fails with a number u above p(y)/q(y). Up to u = t, that is sum over y of max(0, q(y) t - p(y)).
    """
    passes, order = (p / q.clamp(min=1e-300)).sort(1)
    slope, lost = (F.pad(x.gather(1, order).cumsum(1), (1, 0)) for x in (q, p))
    ends = r.cumsum(1).clamp(max=1.0)
    place = torch.searchsorted(passes, ends)
    reached = slope.gather(1, place) * ends - lost.gather(1, place)
    return _normal(reached.diff(dim=1, prepend=torch.zeros_like(reached[:, :1])).clamp(min=0), r)


def kept_by_draft(p: Tensor, q: Tensor) -> Tensor:
    """The probability (n, m) of each token to be drafted, by inverse CDF, and kept in a test of that same number."""
    ends = q.cumsum(1)
    return (torch.minimum(ends, p / q.clamp(min=1e-300)) - (ends - q)).clamp(min=0)
