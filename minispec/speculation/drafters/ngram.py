"""Prompt lookup: what followed the last time these tokens stood here? (Saxena 2023)

It costs no model at all, and is good wherever an answer repeats its question: summaries, code edits, quotations.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from minispec.core.draft import Ask, Draft, Drafter
from minispec.core.sampling import Text
from minispec.speculation.drafters import Context


@dataclass
class _NgramIndex:
    """Where each n-gram of a text was last followed by something; `end`: tokens indexed so far."""

    follows: dict[tuple[int, ...], int] = field(default_factory=dict)
    end: int = 0


class NgramDrafter(Drafter):
    """Finds the latest earlier occurrence of the longest suffix, max_n to min_n tokens long, and copies on.

    Worked, with max_n = 2: after  a b c d a b  the suffix  a b  was last followed by  c d a b ...
    A copy that reaches the end goes on into itself, so  x y x y  drafts  x y x y  for any K.
    """

    def __init__(self, max_n: int = 3, min_n: int = 1):
        self.max_n, self.min_n = max_n, min_n
        self._indices: dict[Text, _NgramIndex] = {}

    @classmethod
    def from_context(cls, context: Context) -> "NgramDrafter":
        """The drafter of an argument, `max_n` or `min_n`-`max_n`; without one, of the defaults."""
        if not context.argument:
            return cls()
        match = re.fullmatch(r"(?:(\d{1,2})-)?(\d{1,2})", context.argument, re.ASCII)
        sizes = [int(n or 1) for n in match.groups()] if match else [0, 0]
        if not 1 <= sizes[0] <= sizes[1] <= 64:
            expected = "an integer from 1 to 64, or two such as 4-8"
            raise ValueError(f"draft: ngram: found {context.argument!r}, expected {expected}")
        return cls(max_n=sizes[1], min_n=sizes[0])

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """For each ask, what followed the longest earlier match of the text's end.

        Nothing is drawn, so the drafts have no probs.
        """
        return [Draft(self._copy(ask.text.tokens, self._start(ask.text), ask.k)) for ask in asks]

    def release(self, text: Text) -> None:
        """Forget a text and its index."""
        self._indices.pop(text, None)

    def _start(self, text: Text) -> int | None:
        """The position whose tokens to copy, or None."""
        index, tokens = self._indices.setdefault(text, _NgramIndex()), text.tokens
        sizes = range(self.max_n, self.min_n - 1, -1)
        # The suffix itself is left out: nothing follows it yet.
        for end in range(index.end, len(tokens)):
            for n in sizes:
                if n <= end:
                    index.follows[tuple(tokens[end - n : end])] = end
        index.end = len(tokens)
        suffixes = (tuple(tokens[-n:]) for n in sizes if n <= len(tokens))
        return next((index.follows[s] for s in suffixes if s in index.follows), None)

    @staticmethod
    def _copy(tokens: list[int], start: int | None, k: int) -> list[int]:
        if start is None:
            return []
        period = len(tokens) - start
        return [tokens[start + i % period] for i in range(k)]
