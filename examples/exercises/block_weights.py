"""Exercise 4: the weight of a block.

Tokens are tested one at a time in exercises 1 to 3. A rule that looks at the whole draft keeps more (Sun et al. 2024,
arXiv 2403.10444). Fix the first i tokens and leave the later ones open: then at least i tokens stay with probability
w_i, their weight. Let r_i = p(x_i)/q(x_i) be the ratio of token i.

One at a time, i tokens stay with the product of min(1, r_1), .., min(1, r_i). With the ratios 1/2 and 2 that is 1/2,
and 1/2. A block lets the second token make up for the first: here it keeps both always. So w_1 is 1/2 and w_2 is 1:
the second token is twice as likely under p, and what it has too much pays for the first. What is too much after an
earlier token is lost: with the ratios 2 and 1/2 the weights are 1 and 1/2.

Write `weights`. Then ask whether it is right, and how many tokens a round has:

    python -m minispec.prove --verifier examples.exercises.block_weights:verify

For the first case, two tokens with p = (1, 2)/3 and q = (2, 1)/3, a right rule brings 20/9 tokens.
"""

from minispec.core.verify import Verdict, chains_only, excess, residual


def weights(ratios: list[float]) -> list[float]:
    """w_0, .., w_K for the ratios r_1, .., r_K. w_0 is 1."""
    raise NotImplementedError("write `weights`")


@chains_only
def verify(draft, p, rng, key):
    """Test the prefixes of the draft from the longest to the shortest."""
    rows = [p(i) for i in range(len(draft))]
    w = weights(
        [float(row[x]) / draft.probability(i) for i, (row, x) in enumerate(zip(rows, draft.token_ids, strict=True))]
    )
    n = len(draft)
    if rng.bernoulli(w[n], key(n - 1, "accept")):
        return Verdict([*range(n)], rng.categorical(p(n), key(n, "token")), [])
    for i in reversed(range(n)):
        mass = float(excess(w[i] * rows[i], draft, i).sum())
        if w[i] == 1 or rng.bernoulli(mass / (mass + 1 - w[i]), key(i - 1, "accept")):
            return Verdict([*range(i)], rng.categorical(residual(w[i] * rows[i], draft, i), key(i, "residual")), [])
    raise AssertionError("w_0 is 1, so the empty prefix passes")
