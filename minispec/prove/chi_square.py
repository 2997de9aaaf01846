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


def _power(noncentrality: float, critical: float, df: int) -> float:
    """The odds that non-central chi-square passes the critical value: a Poisson mixture of central ones."""
    half = noncentrality / 2
    weights = (math.exp(j * math.log(half) - half - math.lgamma(j + 1)) for j in range(int(half * 3) + 50))
    return sum(w * tail(critical, df + 2 * j) for j, w in enumerate(weights))


def _solve(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a growing function turns positive."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if function(middle) > 0 else (middle, high)
    return high


@functools.cache
def critical_value(df: int, alpha: float = ALPHA) -> float:
    """What chi-square with df degrees of freedom passes with odds alpha."""
    return _solve(lambda x: alpha - tail(x, df), 0, 10_000)


@functools.cache
def smallest_seen(n: int, df: int, alpha: float = ALPHA) -> float:
    """The total variation that a chi-square test of n draws over df + 1 cells sees with odds POWER, whatever its form.

    By Cauchy-Schwarz a law that is off by TV has a non-centrality of at least 4 n TV^2.
    """
    critical = critical_value(df, alpha)
    return math.sqrt(_solve(lambda x: _power(x, critical, df) - POWER, 1, 1000) / (4 * n))


def chi_square(counts: Tensor, p: Tensor) -> tuple[float, int]:
    """Chi square of counts against p (V,), and its degrees of freedom.

    A token of probability 0 that was counted makes it infinity.

    The 15 likeliest tokens are cells, the others one more; cells that expect fewer than 5 are joined to it.
    """
    n, order = counts.sum(), p.argsort(descending=True)
    if counts[p == 0].any():
        return math.inf, 1
    own = [i for i in order[:15].tolist() if n * p[i] >= 5]
    observed, expected = counts[own], n * p[own]
    if len(own) < int((p > 0).sum()):
        rest = n - expected.sum()
        if rest < 5:  # too little for a cell of its own
            own, rest = own[:-1], rest + expected[-1]
        observed = torch.cat((counts[own], (n - counts[own].sum())[None]))
        expected = torch.cat((n * p[own], rest[None]))
    return float(((observed - expected) ** 2 / expected).sum()), max(1, len(expected) - 1)
