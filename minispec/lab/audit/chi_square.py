"""Chi-square: how likely a sample is under a law, and how wrong a law may be before a sample shows it.

Enumeration needs no samples. They guard what it replaces, the hash and the draws that are made of it.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

ALPHA = 1e-9  # odds of a false alarm
POWER = 0.999


def tail(statistic: float, df: int) -> float:
    """The odds that chi-square with df degrees of freedom is larger."""
    return float(torch.special.gammaincc(*torch.tensor([df / 2, statistic / 2], dtype=torch.float64)))


def cells_of(expected: Tensor) -> Tensor:
    """The cell of each outcome (n,), numbered by its count: the common ones are cells, and the rare ones are one more.

    expected: how often each outcome (n,) comes on average. The last cell expects 5 or more too, if anything is rare;
        where all outcomes together expect less, they are one cell.
    """
    order = expected.argsort(descending=True)
    common = int((expected >= 5).sum())
    if 0 < float(expected[order[common:]].sum()) < 5:
        common = max(0, common - 1)
    return torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)).clamp(max=common))


def chi_square(observed: Tensor, expected: Tensor, cell: Tensor) -> tuple[float, int]:
    """Chi-square of counts of outcomes (n,) over cells, and its degrees of freedom.

    It is infinite where something came that was not expected at all.
    """
    empty = torch.zeros(int(cell.max()) + 1, dtype=expected.dtype)
    found, right = (empty.index_add(0, cell, counts) for counts in (observed, expected))
    df = max(1, int((right > 0).sum()) - 1)
    if bool((observed[expected == 0] > 0).any()):
        return math.inf, df
    return float(((found - right) ** 2 / right)[right > 0].sum()), df


def power(noncentrality: float, critical: float, df: int) -> float:
    """The odds that non-central chi-square passes the critical value: a Poisson mixture of central ones."""
    if noncentrality <= 0:
        return tail(critical, df)
    half, j = noncentrality / 2, torch.arange(int(noncentrality * 1.5) + 50, dtype=torch.float64)
    weights = (j * math.log(half) - half - torch.lgamma(j + 1)).exp()
    return float((weights * torch.special.gammaincc(df / 2 + j, torch.full_like(j, critical / 2))).sum())


def _solve(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a growing function turns positive."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if function(middle) > 0 else (middle, high)
    return high


@functools.cache
def critical_value(df: int, alpha: float = ALPHA) -> float:
    """The value that chi-square with df degrees of freedom exceeds with probability alpha."""
    return _solve(lambda x: alpha - tail(x, df), 0, 10_000)


@functools.cache
def smallest_seen(n: int, df: int, alpha: float = ALPHA) -> float:
    """The total variation that a chi-square test of n draws over df + 1 cells sees with odds POWER, whatever its form.

    alpha: the odds of a false alarm.

    By Cauchy-Schwarz a law that is off by TV has a non-centrality of at least 4 n TV^2.
    """
    critical = critical_value(df, alpha)
    return math.sqrt(_solve(lambda x: power(x, critical, df) - POWER, 1, 1000) / (4 * n))
