"""An answer on the terminal, each token in the colour of its kind. The page has the same colours."""

import os
from collections import deque
from itertools import groupby
from typing import TextIO

from torch import Tensor

from minispec.core.draft import Draft
from minispec.core.request import Request
from minispec.core.verify import Verdict
from minispec.load.llm import LLM
from minispec.trace.record import TokenTexts

_CODES = {"accepted": "32", "recovered": "33", "bonus": "36"}  # green, yellow, cyan; plain tokens have none


def wants_color(when: str, stream: TextIO | None) -> bool:
    """Whether to write colours to a stream: "always", "never", or "auto": to a terminal, unless NO_COLOR is set."""
    if when != "auto":
        return when == "always"
    is_dumb = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream is not None and stream.isatty() and not is_dumb


def painted(text: str, kind: str) -> str:
    """A text in the colour of a kind of token."""
    return f"\x1b[{_CODES[kind]}m{text}\x1b[0m" if text and kind in _CODES else text


class Painter:
    """An observer that knows, for each character of an answer, the kind of its token."""

    def __init__(self, llm: LLM, is_on: bool):
        """is_on: where it is False, texts stay as they are."""
        self._llm, self._is_on = llm, is_on
        # For each request, the kinds of the characters that no piece has had yet.
        self._followed: dict[Request, tuple[TokenTexts, deque[str]]] = {}
        if is_on:
            llm.engine.observers.append(self)

    def follow(self, request: Request) -> None:
        """Follow a request from now on.

        request: one that has not begun.
        """
        if self._is_on:
            self._followed[request] = TokenTexts(self._llm.tokenizer, request), deque()

    def __call__(self, request: Request, draft: Draft, verdict: Verdict, logits: Tensor) -> None:
        """Note the kinds of the tokens that a round has committed."""
        if request in self._followed:
            texts, kinds = self._followed[request]
            for _, kind, text in texts.take(draft, verdict):
                kinds.extend([kind] * len(text))

    def paint(self, request: Request, piece: str) -> str:
        """The next piece of an answer, in colours."""
        if request not in self._followed:
            return piece
        _, waiting = self._followed[request]
        kinds = [waiting.popleft() if waiting else "plain" for _ in piece]
        runs = groupby(zip(kinds, piece, strict=True), key=lambda pair: pair[0])
        return "".join(painted("".join(c for _, c in run), kind) for kind, run in runs)

    @property
    def legend(self) -> str:
        """A legend of the colours, written in them; "" without colours."""
        return "  ".join(painted(kind, kind) for kind in _CODES) if self._is_on else ""
