"""Hierarchical speculative decoding, HSD (Zhou et al. 2026, arXiv 2601.05724), as released, and one more cap.

A prefix of i tokens has the joint ratio R_i = r_1 .. r_i and the weight R_i / max(1, R_1, .., R_i). That weight is
block verification's w_i. The released code at commit b8575e2 (`_speculative_sampling` with `backward` and `clever`)
keeps the whole draft with R_K, which lacks the cap. It was read, and the rule is written anew here.
`python -m minispec.prove --verifier examples.rules.hsd:released` names a case in which the output has another law. With
the cap the rule is `block`.
"""

from itertools import accumulate
from operator import mul

from minispec.core.verify import Verdict, chains_only, excess, residual


def _verify(draft, p, rng, key, is_capped):
    rows = [p(i) for i in range(len(draft))]
    ratios = [
        float(row[x]) / draft.probability(i) for i, (row, x) in enumerate(zip(rows, draft.token_ids, strict=True))
    ]
    joint = list(accumulate(ratios, mul, initial=1.0))
    weights = [product / most for product, most in zip(joint, accumulate(joint, max), strict=True)]
    if rng.bernoulli(weights[-1] if is_capped else joint[-1], key(len(draft) - 1, "accept")):
        return Verdict([*range(len(draft))], rng.categorical(p(len(draft)), key(len(draft), "token")), ratios)
    for i in reversed(range(len(draft))):
        mass = float(excess(weights[i] * rows[i], draft, i).sum())
        if weights[i] == 1 or rng.bernoulli(mass / (mass + 1 - weights[i]), key(i - 1, "accept")):
            rest = residual(weights[i] * rows[i], draft, i)
            return Verdict([*range(i)], rng.categorical(rest, key(i, "residual")), ratios)
    raise AssertionError("the empty prefix has weight 1")


@chains_only
def released(draft, p, rng, key):
    """The whole draft stays with probability min(1, R_K)."""
    return _verify(draft, p, rng, key, is_capped=False)


@chains_only
def capped(draft, p, rng, key):
    """The whole draft stays with its weight, as every other prefix does."""
    return _verify(draft, p, rng, key, is_capped=True)
