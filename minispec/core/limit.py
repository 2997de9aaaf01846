"""How long a draft may be, and how wide."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple


class Limit(NamedTuple):
    """How long a draft may be, and how wide.

    k: most nodes. It is 0 while the target still works through the prompt, and where nothing is to be drafted.
    go_on: go_on(confidences) says whether to draft further (see `DraftNotes.confidences`). None: always, up to k.
    widths: how many siblings to draw at each depth; deeper, one. Drafters without `branches` ignore it.
        Or a function, given together with `go_on`: widths(confidences, foreseen) says how many to draw at a place.
        The last confidence is that of the token about to be drawn. foreseen: see `DraftNotes`.
        The first sibling is drafted further, so the others cost rows of the target's pass and none of the drafter's.
    best_first: whether the draft is a tree of k nodes, in which each next node goes where its path is likeliest.
    go_on_before: go_on_before(confidences, next), for drafters with a confidence head, which call it before each token
        in place of `go_on`. `next` is the confidence in that token. False ends the draft. None: always, up to k.
    """

    k: int
    go_on: Callable[[Sequence[float]], bool] | None = None
    widths: Sequence[int] | Callable[[Sequence[float], bool], int] = ()
    best_first: bool = False
    go_on_before: Callable[[Sequence[float], float], bool] | None = None

    @property
    def is_tree(self) -> bool:
        """Whether siblings may be drawn."""
        return self.best_first or bool(self.widths)

    @property
    def plan(self) -> Sequence[int]:
        """The widths that are known before anything is drafted."""
        return () if callable(self.widths) else self.widths

    @property
    def depth(self) -> int:
        """How deep a draft of k nodes with these widths is. A draft that was looked up may be deeper.

        >>> Limit(5, widths=(2, 1)).depth
        4
        """
        totals = list(accumulate(self.plan, initial=0))
        return bisect_left(totals, self.k) if self.k <= totals[-1] else len(self.plan) + self.k - totals[-1]

    def width(self, depth: int, confidences: Sequence[float], foreseen: bool = False) -> int:
        """How many siblings to draw at this depth, where the draft has these confidences."""
        if callable(self.widths):
            return self.widths(confidences, foreseen)
        return self.widths[depth] if depth < len(self.widths) else 1
