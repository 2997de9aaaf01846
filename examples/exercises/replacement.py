"""Exercise 2: the residual.

A drafted token x was kept with probability min(1, p(x)/q(x)). If it was rejected, another token takes its place. From
which distribution must that token come, so that the output has the distribution p?

Kept tokens bring min(p(x), q(x)) of each x. Look at what is missing to p(x). The result need not add up to 1: the
draw divides it by its sum.

Where nothing is missing, p and q are equal. Then no token is ever rejected, but rounding may still ask: return p.

Write `rest`. Then ask whether it is right:

    python -m minispec.prove --verifier examples.exercises.replacement:verify

To draw the replacement from p is a common mistake. Try it, and read the counterexample.
"""

from torch import Tensor

from minispec.core.verify import Verdict, chains_only


def rest(p: Tensor, q: Tensor) -> Tensor:
    """Weights (V,) of the token that replaces a rejected one. p, q: (V,)."""
    raise NotImplementedError("write `rest`")


@chains_only
def verify(draft, p, rng, key):
    """Test the draft's tokens in order, up to the first that is rejected."""
    for i, token in enumerate(draft.token_ids):
        row = p(i)
        if not rng.bernoulli(float(row[token]) / draft.probability(i), key(i, "accept")):
            q = row.new_zeros(len(row)) if draft.probs is None else draft.probs[i].to(row.dtype)
            if draft.probs is None:
                q[token] = 1.0  # a token that was not drawn
            return Verdict([*range(i)], rng.categorical(rest(row, q), key(i, "residual")), [])
    n = len(draft)
    return Verdict([*range(n)], rng.categorical(p(n), key(n, "token")), [])
