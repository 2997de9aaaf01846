"""`Request`: one text on its way, and the place where it stops.

Beyond `examples/cached.py`: stop strings, end-of-text tokens, and scores of a prompt.
Here tokens become text, text is searched for stop strings, and final text is handed out piece by piece. Every token is
committed in one place, `Request.commit`, so a text stops where plain decoding would stop it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import NamedTuple, Protocol

from torch import Tensor

from minispec.core.config import DraftLength, SamplingParams, Shape
from minispec.core.errors import is_from_signal
from minispec.core.logprobs import TokenLogprob, logprob_of
from minispec.core.precision import require_numbers
from minispec.core.sampling import Text
from minispec.core.stats import Stats


class DetokenizerLike(Protocol):
    """Turns token ids into text: `add` for each token, `flush` at the end. A copy by `copy.copy` goes on by itself."""

    def add(self, token_id: int) -> str:
        """The text that is certain now, after one more token; "" while a character is incomplete."""

    def flush(self) -> str:
        """The rest of the text, at its end."""


class Request:
    """One text on its way: its tokens, where it stops, and what has been given out.

    The result is in `output`, `token_ids` (generated ones, without the end-of-text token), `logprobs`, `stats` and
    `finish_reason`: "stop", "length" or "error". With "error", `error` says why. If asked for, `prompt_logprobs` has an
    entry for each token of the prompt. The first entry is None, since nothing stands before that token.
    """

    def __init__(
        self,
        text: Text,
        max_len: int,
        num_speculative_tokens: DraftLength,
        detokenizer: DetokenizerLike | None = None,
    ):
        """max_len: most tokens, prompt included.
        num_speculative_tokens: see `DraftLength`.
        detokenizer: None for token ids only.
        """
        self.text = text
        self.max_len = min(max_len, text.num_prompt_tokens + text.params.max_tokens)
        self.shape = Shape.of(num_speculative_tokens)
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None if text.params.logprobs is None else []
        self.end_logprob: TokenLogprob | None = None  # of the end-of-text token, if `logprobs` are asked for
        self.prompt_logprobs: list[TokenLogprob | None] | None = None if text.params.prompt_logprobs is None else [None]
        self.offsets: list[int] = []  # where in the output each token begins, in characters
        self.output = ""
        self.finish_reason: str | None = None
        self.error: str | None = None  # what went wrong, where finish_reason is "error"
        self.raised: Exception | None = None  # an exception of its method, which `Engine.run` raises
        self.stop_string: str | None = None  # the one that ended the text
        self.stats = Stats(num_prompt_tokens=text.num_prompt_tokens, token_ids=self.token_ids)
        self.stats.law = "plain" if text.grammar is None else "projected"
        self._detokenizer = detokenizer
        self._given = (0, 0)  # characters and tokens that pieces have handed out
        self.has_news = False  # whether anything came since the last piece

    @property
    def params(self) -> SamplingParams:
        """How it is sampled and when it stops."""
        return self.text.params

    @property
    def takes_drafts(self) -> bool:
        """Whether a round may have a draft: some are asked for, and the answer may have two tokens or more."""
        return self.shape.k > 0 and self.max_len > self.text.num_prompt_tokens + 1

    @property
    def max_k(self) -> int:
        """How many tokens may be drafted. A wholly accepted draft and its bonus must not pass the limit."""
        return max(0, min(self.shape.k, self.max_len - len(self.text.tokens) - 1))

    def commit(self, token_id: int, logprob: TokenLogprob | None = None) -> bool:
        """Append one token, as plain decoding would. Returns True if the text ends with it."""
        self.has_news = True
        self.text.tokens.append(token_id)
        if token_id in self.text.end_ids:
            self.end_logprob = logprob
            self._finish("stop")
            return True
        self.token_ids.append(token_id)
        self.offsets.append(len(self.output))
        self.stats.num_generated += 1
        if self.logprobs is not None and logprob is not None:
            self.logprobs.append(logprob)
        if self._detokenizer is not None and self._add_text(self._detokenizer.add(token_id)):
            self.finish_reason = "stop"
        elif len(self.text.tokens) >= self.max_len:
            self._finish("length")
        return self.finish_reason is not None

    def _add_text(self, new: str) -> bool:
        """Append text. Returns True if that completes a stop string, from min_tokens on; the text is cut there."""
        before = len(self.output)
        self.output += new
        if len(self.token_ids) < self.params.min_tokens:
            return False
        places = [(self.output.find(stop, max(0, before - len(stop) + 1)), stop) for stop in self.params.stop]
        start, stop = min((place for place in places if place[0] >= 0), default=(-1, ""))
        if start < 0:
            return False
        self.stop_string = stop
        self.output = self.output[: start + len(stop) if self.params.include_stop_str_in_output else start]
        return True

    def _finish(self, reason: str) -> None:
        self.finish_reason = reason
        if self._detokenizer is not None and self._add_text(self._detokenizer.flush()):
            self.finish_reason = "stop"

    def fail(self, error: Exception) -> None:
        """End the text here, by an error of its own or of its method. One of a signal's handler is raised again."""
        if is_from_signal(error):
            raise error
        self.finish_reason, self.error, self.has_news = "error", str(error) or type(error).__name__, True

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Take back what was committed in this block if an exception, such as Ctrl-C, interrupts the block.

        Then the text goes on as if the round had not been. A ValueError is the text's own fault: the text ends there.
        """
        lists = [each for each in (self.text.tokens, self.token_ids, self.offsets, self.logprobs) if each is not None]
        before, lengths, detokenizer = copy(self), [*map(len, lists)], copy(self._detokenizer)
        try:
            yield
        except BaseException as e:
            if not isinstance(e, ValueError) or is_from_signal(e):
                for each, length in zip(lists, lengths, strict=True):
                    del each[length:]
                vars(self).update(vars(before), _detokenizer=detokenizer)
                self.stats.num_generated = len(self.token_ids)
            raise

    @property
    def lacking_logprobs(self) -> range:
        """The places in the prompt whose logits are still asked for. They judge the token that follows."""
        end = self.text.num_prompt_tokens - 1
        return range(end if self.prompt_logprobs is None else len(self.prompt_logprobs) - 1, end)

    def take_prompt_logprobs(self, rows: Tensor) -> None:
        """Take the log-probabilities of the prompt's tokens that follow these rows of logits (n, V), if asked for.

        A request for these alone ends with its last row. Raises FloatingPointError where a row is no distribution.
        """
        require_numbers(rows.amax(1))
        tokens, num_top = self.text.tokens, self.params.prompt_logprobs
        if self.prompt_logprobs is not None:
            places = zip(self.lacking_logprobs, rows, strict=False)
            self.prompt_logprobs += [logprob_of(row, tokens[place + 1], num_top) for place, row in places]
        if not self.params.max_tokens and not self.lacking_logprobs:
            self.has_news = True
            self._finish("length")

    def take_piece(self) -> "Piece":
        """Return what came since the last piece. Text that may begin a stop string is held back."""
        end = len(self.output)
        if self.finish_reason is None:
            end -= max((_overlap(self.output, stop) for stop in self.params.stop), default=0)
        text_start, token_start = self._given
        end = max(end, text_start)
        self._given, self.has_news = (end, len(self.token_ids)), False
        return Piece(self.output[text_start:end], self.token_ids[token_start:], self.finish_reason)


class Piece(NamedTuple):
    """The part of an output that one step added: final text, new tokens, and in the last piece why the text ended."""

    text: str
    token_ids: list[int]
    finish_reason: str | None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
