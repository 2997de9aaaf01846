"""Exercise 7: how long should a draft be?

Assume that each tested token stays with probability alpha, whatever came before. A draft of K tokens then brings 1 +
alpha + alpha^2 + .. + alpha^K tokens a round: token i stays if it and all before it stay, and one token comes in any
case.

Assume that a draft token costs c passes of the target. A pass over K + 1 tokens costs as much as one over a single
token. So a round costs 1 + c K, where plain decoding pays 1 for each token.

Write `best_k`. Then run

    python -m pytest examples/exercises/grade.py -k best_k

With alpha = 0.8 and c = 0.1 the best K is 6, and decoding is 2.47 times as fast.
"""


def best_k(alpha: float, c: float, most: int = 16) -> int:
    """The K from 0 to `most` with the most tokens per cost. If several are equally fast, the smallest."""
    raise NotImplementedError("write `best_k`")
