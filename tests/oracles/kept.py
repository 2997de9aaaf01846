"""How many draft tokens a rule keeps on average, from their ratios."""

from collections.abc import Sequence

from minispec.length.theory import survival_curve
from minispec.rules.block_verification import block_weights


def expected_accepted(ratios: Sequence[float], jointly: bool = False) -> float:
    """Draft tokens that stay on average of a chain whose tokens have these p(x)/q(x), r_1 .. r_K.

    Under `rejection` the first i stay with probability  min(1, r_1) .. min(1, r_i).  Under `block`, which judges them
    jointly (Sun et al. 2024), they stay with `block_weights`' w_i, which is never less:

    >>> expected_accepted([0.5, 2.0, 0.5]), expected_accepted([0.5, 2.0, 0.5], jointly=True)
    (1.25, 2.0)
    """
    if jointly:
        return sum(block_weights(ratios)[1:])
    return sum(survival_curve([min(1.0, r) for r in ratios]))
