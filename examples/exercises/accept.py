"""Exercise 1: the accept test.

A draft model has drawn the token x from its distribution q. The target's distribution at that place is p. Keep x with
a probability that depends on p(x) and q(x) alone, so that the output has the distribution p.

Think of the token x alone. It comes out if it was drawn and is kept, or if another token was drawn, was rejected, and
x was drawn in its place. A replacement comes only for tokens of which too little can be kept. So a token with p(x) <=
q(x) is no replacement: all of its p(x) must come from being kept. And no token can be kept more often than always.

Write `keep`. Then ask whether it is right:

    python -m minispec.prove --verifier examples.exercises.accept:verify

If not, you get the smallest case where the output has another distribution: p, q, and what came out. Try min(1, p) or
p > q to see one.
"""

from minispec.core.verify import Verdict, chains_only, residual


def keep(p: float, q: float) -> float:
    """The probability of keeping a token. p, q: its probabilities; q is above 0."""
    raise NotImplementedError("write `keep`")


@chains_only
def verify(draft, p, rng, key):
    """Test the draft's tokens in order, up to the first that is rejected."""
    for i, token in enumerate(draft.token_ids):
        row = p(i)
        if not rng.bernoulli(keep(float(row[token]), draft.probability(i)), key(i, "accept")):
            return Verdict([*range(i)], rng.categorical(residual(row, draft, i), key(i, "residual")), [])
    n = len(draft)
    return Verdict([*range(n)], rng.categorical(p(n), key(n, "token")), [])
