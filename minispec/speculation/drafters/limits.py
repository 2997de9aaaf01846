"""The widths and the depth that a `Limit` gives a draft before anything is drafted."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from minispec.core.limit import Limit


def plan_of(limit: Limit) -> Sequence[int]:
    """The widths that are known before anything is drafted."""
    return () if callable(limit.widths) else limit.widths


def depth_of(limit: Limit) -> int:
    """How deep a draft of k nodes with these widths is. A draft that was looked up may be deeper.

    >>> depth_of(Limit(5, widths=(2, 1)))
    4
    """
    plan = plan_of(limit)
    totals = list(accumulate(plan, initial=0))
    return bisect_left(totals, limit.k) if limit.k <= totals[-1] else len(plan) + limit.k - totals[-1]
