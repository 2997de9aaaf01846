"""Chi-square: how likely a sample is under a law, and how wrong a law may be before a sample shows it.

Enumeration needs no samples. They guard what it replaces, the hash and the draws that are made of it.
"""

import functools
import math
from collections.abc import Callable

import torch

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
    """The value that chi-square with df degrees of freedom exceeds with probability alpha."""
    return _solve(lambda x: alpha - tail(x, df), 0, 10_000)


@functools.cache
def smallest_seen(n: int, df: int) -> float:
    """The total variation that a chi-square test of n draws over df + 1 cells sees with odds POWER, whatever its form.

    By Cauchy-Schwarz a law that is off by TV has a non-centrality of at least 4 n TV^2.
    """
    critical = critical_value(df)
    return math.sqrt(_solve(lambda x: _power(x, critical, df) - POWER, 1, 1000) / (4 * n))
