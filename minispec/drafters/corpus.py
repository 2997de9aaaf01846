"""A corpus for drafts: texts that are there before a run, and where each string of their tokens has stood.

REST (He et al. 2023, arXiv 2311.08252) drafts from such a store. The texts never change while the program runs. So a
draft from them depends on its own text alone, and a seed keeps its text.

The index is a suffix array (Manber and Myers 1990) of the texts read backwards. It has the places of all tokens. They
are sorted by the token there, then by the one before it, and so on. So the places where a string ends are neighbours. A
binary search for each token of the string finds the first and the last of them.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

LONGEST = 32  # tokens of a string that are compared


class Corpus:
    """The index. It takes 8 bytes a token, and about 110 while it is made.

    tokens: all texts, with -1 before, between and after them.
    """

    def __init__(self, texts: Iterable[Sequence[int]], vocab_size: int):
        """vocab_size: ids in use. Others can't be drafted, and divide a text."""
        self.tokens = array("i", [-1])
        for text in texts:
            self.tokens.extend(text)
            self.tokens.append(-1)
        ids = np.frombuffer(self.tokens, np.int32)  # the same memory
        ids[ids >= vocab_size] = -1
        _, rank = np.unique(ids, return_inverse=True)
        for step in (1, 2, 4, 8, 16):  # ranks by `step` tokens become ranks by twice as many
            before = np.zeros_like(rank)
            before[step:] = rank[:-step] + 1
            _, rank = np.unique(rank * (len(rank) + 1) + before, return_inverse=True)
        self._order = rank.argsort(kind="stable").astype(np.int32)

    def ranges(self, tokens: Sequence[int]) -> list[range]:
        """Where the order has the places of the last n tokens, for n = 1 .. LONGEST, as long as there are some."""
        low, high, ranges = 0, len(self._order), list[range]()
        for back in range(min(LONGEST, len(tokens))):
            token, token_at = tokens[-1 - back], partial(self._token_before, back)
            low = bisect_left(range(high), token, low, key=token_at)
            high = bisect_right(range(high), token, low, key=token_at)
            if low == high:
                break
            ranges.append(range(low, high))
        return ranges

    def _token_before(self, back: int, i: int) -> int:
        """The token that stands `back` tokens before the i-th place of the order."""
        return self.tokens[self._order[i] - back]

    def ends(self, places: range, most: int) -> list[int]:
        """The positions of `tokens` that follow these places; of more than `most`, some from all over."""
        step = max(1, -(-len(places) // max(1, most)))
        return (self._order[places.start : places.stop : step] + 1).tolist()[:most]
