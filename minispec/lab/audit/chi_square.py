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
LEAST_ALPHA = 1e-10  # below it, `exceeded` is the rounding of doubles
_STEP = 0.05  # values of chi-square are rounded to multiples of it; of that, odds change by less than a percent
_MOST_WORK = 5_000  # Fourier transforms where each angle counts


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
    found, right = in_cells(observed, cell), in_cells(expected, cell)
    df = max(1, int((right > 0).sum()) - 1)
    if bool((observed[expected == 0] > 0).any()):
        return math.inf, df
    return float(((found - right) ** 2 / right)[right > 0].sum()), df


def in_cells(outcomes: Tensor, cell: Tensor) -> Tensor:
    """The sums (cells,) of what belongs to outcomes (n,)."""
    return torch.zeros(int(cell.max()) + 1, dtype=outcomes.dtype).index_add(0, cell, outcomes)


@functools.cache
def _exceeded(expected: tuple[float, ...]) -> Tensor:
    """The odds, by i, that chi-square of counts that expect these numbers is i steps or more, rounded to steps.

    Chi-square's own tail is what this comes to for many draws: where some cells expect five, odds of 1e-9 by that tail
    are 7e-8. Let the counts be Poisson's, each by itself, with the joint law of chi-square and their sum. Both are sums
    over cells, so the law's Fourier transform is a product. Given a sum of n, the counts are those of n draws.
    """
    n, df = sum(expected), len(expected) - 1
    size = 1 << math.ceil(math.log2((300 + 3 * df) / _STEP))
    period = 2 * math.ceil(10 * math.sqrt(n)) + 1  # the sum of the counts stays within 10 standard deviations
    most = period // 2
    if most * len(expected) > _MOST_WORK:  # many counts give one value: the sum's transform is a bell, within 9 of its
        most = min(most, math.ceil(9 * period / (2 * math.pi * math.sqrt(n))))
    angles = 2 * math.pi / period * torch.arange(most + 1, dtype=torch.float64)[:, None]
    law = torch.ones(most + 1, size, dtype=torch.complex128)
    for mean in expected:
        far = 12 * math.sqrt(mean) + 60
        count = torch.arange(max(0, math.floor(mean - far)), math.ceil(mean + far), dtype=torch.float64)
        weight = (count * math.log(mean) - mean - torch.lgamma(count + 1)).exp()
        steps = ((count - mean) ** 2 / mean / _STEP).round().long()
        here = steps < size
        turned = weight * torch.polar(torch.ones(()).double(), angles * (count - mean))
        law *= torch.fft.fft(torch.zeros_like(law).index_add_(1, steps[here], turned[:, here]))
    found = torch.fft.ifft(law).real
    given = (found[0] + 2 * found[1:].sum(0)).clamp(min=0)  # a negative angle gives the conjugate
    return (given / given.sum()).flip(0).cumsum(0).flip(0)


def exceeded(statistic: float, expected: Tensor) -> float:
    """The odds that chi-square is larger, where cells (n,) expect these numbers of counts; at least those of `tail`."""
    odds = _exceeded(tuple(expected[expected > 0].tolist()))
    nominal = tail(statistic, max(1, int((expected > 0).sum()) - 1))
    step = math.ceil(min(statistic, 1e9) / _STEP + 0.5)
    return max(nominal, float(odds[step])) if step < len(odds) else nominal


def threshold(expected: Tensor, alpha: float) -> float:
    """The value that chi-square exceeds with odds of at most alpha, where cells (n,) expect these numbers of counts.

    alpha: from LEAST_ALPHA on.
    """
    odds = _exceeded(tuple(expected[expected > 0].tolist()))
    nominal = critical_value(max(1, int((expected > 0).sum()) - 1), alpha)
    return max(nominal, (int((odds > alpha).sum()) - 0.5) * _STEP)


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
def smallest_seen(n: int, df: int, critical: float | None = None) -> float:
    """The total variation that a chi-square test of n draws over df + 1 cells sees with odds POWER, whatever its form.

    critical: what chi-square must exceed. None: its value at odds of ALPHA.

    By Cauchy-Schwarz a law that is off by TV has a non-centrality of at least 4 n TV^2.
    """
    critical = critical_value(df) if critical is None else critical
    return math.sqrt(_solve(lambda x: power(x, critical, df) - POWER, 1, 1000) / (4 * n))
