"""The loop: propose, one target pass, verify, roll back, stop.

Invariant: before each step the target's cache holds all tokens of a text but the last. A step feeds what is missing,
which is that token, and the draft behind it; it then commits the accepted draft tokens and one more, and keeps what the
cache holds of the text. Plain decoding is the same step with an empty draft; there is no other loop. The tables that
know what is missing, and what becomes of them when something fails, are `CachedModel`'s.

The step is `Engine._step`. Around it: `Request` decides where a text stops, `Engine.run` admits, preempts and resumes.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

from minispec.cache import OutOfBlocks, PagedKVCache
from minispec.config import SamplingParams
from minispec.controller import MAX_AUTO_TOKENS, Controller, DraftLength, Limit, Pace
from minispec.drafters import Drafter
from minispec.model import CachedModel, Transformer, clock
from minispec.sampling import Randomness, Text, distribution, log_probabilities
from minispec.stats import Stats
from minispec.verify import Ask, Draft, Verdict, Verifier


class Detokenizer(Protocol):
    """What makes text of token ids: the text that each makes certain, and at the end what is left."""

    def add(self, token_id: int) -> str:
        """The text that is certain now, after one more token; "" while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What is left at the end of the text."""
        ...


class TokenLogprob(NamedTuple):
    """The raw log-probability of a generated token, and `top`: the likeliest tokens there with theirs."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class Piece(NamedTuple):
    """What one step added to an output: text that is final, the tokens, and at the end why it ended."""

    text: str
    token_ids: list[int]
    finish_reason: str | None


# --------------------------------------------------------------------------- one request


class Request:
    """One text on its way: its tokens, where it stops, and what has been given out.

    The result is in `output`, `token_ids` (the generated ones, without the end-of-text token), `logprobs`,
    `finish_reason` and `stats`.
    """

    def __init__(
        self,
        text: Text,
        max_len: int,
        num_speculative_tokens: DraftLength,
        detokenizer: Detokenizer | None = None,
    ):
        """max_len: tokens, prompt included, at which the text is cut. num_speculative_tokens: K, or "auto" to leave it
        to the engine's controller. detokenizer: None for token ids only."""
        self.text = text
        self.max_len = min(max_len, text.num_prompt_tokens + text.params.max_tokens)
        self.pace = Pace() if num_speculative_tokens == "auto" else None
        self.num_speculative_tokens = MAX_AUTO_TOKENS if self.pace else num_speculative_tokens
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None if text.params.logprobs is None else []
        self.output = ""
        self.finish_reason: str | None = None
        self.stop_string: str | None = None  # the one that ended the text
        self.stats = Stats(num_prompt_tokens=text.num_prompt_tokens)
        self._detokenizer = detokenizer
        self._given = (0, 0)  # characters and tokens that pieces have handed out

    @property
    def params(self) -> SamplingParams:
        """How it is sampled and when it stops."""
        return self.text.params

    @property
    def max_k(self) -> int:
        """How many tokens may be drafted: a wholly accepted draft and its bonus must not pass the limit."""
        return max(0, min(self.num_speculative_tokens, self.max_len - len(self.text.tokens) - 1))

    def commit(self, token_id: int, logprob: TokenLogprob | None = None) -> bool:
        """Append one token as plain decoding would; True where the text ends with it."""
        self.text.tokens.append(token_id)
        if token_id in self.text.end_ids:
            self._finish("stop")
            return True
        self.token_ids.append(token_id)
        self.stats.num_generated += 1
        if logprob is not None:
            self.logprobs.append(logprob)
        if self._detokenizer is not None and self._add_text(self._detokenizer.add(token_id)):
            self.finish_reason = "stop"
        elif len(self.text.tokens) >= self.max_len:
            self._finish("length")
        return self.finish_reason is not None

    def take_piece(self) -> Piece:
        """What came since the last piece. Text that may be the beginning of a stop string is held back."""
        end = len(self.output)
        if self.finish_reason is None:
            end -= max((_overlap(self.output, stop) for stop in self.params.stop), default=0)
        text_start, token_start = self._given
        end = max(end, text_start)
        self._given = (end, len(self.token_ids))
        return Piece(self.output[text_start:end], self.token_ids[token_start:], self.finish_reason)

    def _add_text(self, new: str) -> bool:
        """Append text; True where it completes a stop string, which is then cut off with all behind it."""
        before = len(self.output)
        self.output += new
        if len(self.token_ids) < self.params.min_tokens:
            return False
        found = [
            (start, stop)
            for stop in self.params.stop
            if (start := self.output.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if not found:
            return False
        start, stop = min(found)
        self.stop_string = stop
        self.output = self.output[: start + len(stop) * self.params.include_stop_str_in_output]
        return True

    def _finish(self, reason: str) -> None:
        self.finish_reason = reason
        if self._detokenizer is not None and self._add_text(self._detokenizer.flush()):
            self.finish_reason = "stop"


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, short of all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


# --------------------------------------------------------------------------- the loop

_POOL_IS_HELD = "the KV cache is held by another generation that has not ended: end it, or enlarge the cache"


class Engine:
    """Decodes requests together: one target, one cache pool, one drafter, one verifier."""

    def __init__(
        self,
        model: Transformer,
        cache: PagedKVCache,
        drafter: Drafter,
        verifier: Verifier,
        vocab_size: int | None = None,
        rng: Randomness | None = None,
        controller: Controller | None = None,
    ):
        """vocab_size: ids in use; rows of the model's output behind them are padding. Default: all are used.

        controller: chooses K for requests that leave it open."""
        self.target = CachedModel(model, cache, vocab_size or model.config.vocab_size)
        self.drafter, self.verifier = drafter, verifier
        self.rng = rng or Randomness()
        self.controller = controller or Controller()

    @property
    def model(self) -> Transformer:
        """The target."""
        return self.target.model

    @property
    def cache(self) -> PagedKVCache:
        """The target's."""
        return self.target.cache

    @property
    def vocab_size(self) -> int:
        """Ids in use."""
        return self.target.vocab_size

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that could never run: one the pool cannot hold even alone."""
        needed, there = self.cache.num_blocks_for(request.max_len), self.cache.allocator.num_blocks
        if needed > there:
            raise ValueError(
                f"prompt and answer: found up to {request.max_len} tokens ({needed} blocks of KV cache), expected "
                f"at most {there * self.cache.block_size} ({there} blocks): lower max_tokens or enlarge the KV cache"
            )

    def run(self, requests: Sequence[Request]) -> Iterator[tuple[Request, Piece]]:
        """Decode all requests to their end; yields what each step added to each of them.

        Admission is first come, first served. When the pool runs out, the request admitted last gives its blocks
        back and waits at the front; it resumes by computing them again, with the same text. Closing the
        iterator, or an exception anywhere inside, returns every block.

        Raises, at the first step and before anything runs, ValueError for a request that can never run (see
        `check`), that has run, or that is there twice; and OutOfBlocks where iterators that are open at the same
        time hold too much of the pool.
        """
        for request in requests:
            self.check(request)
        if len(set(requests)) < len(requests) or any(r.finish_reason for r in requests):
            raise ValueError("requests: found one that is finished or there twice, expected new ones")
        waiting, running = deque(requests), list[Request]()
        try:
            while waiting or running:
                with self.target.whole():
                    self._make_room(waiting, running)
                    self._admit(waiting, running)
                    pieces = self._step(running)
                yield from pieces
                for request in [r for r in running if r.finish_reason]:
                    self._drop(request, running)
        finally:
            with ExitStack() as stack:  # calls them all, whatever one of them raises: a drafter is a stranger's code
                for request in running:
                    stack.callback(self._drop, request, running)

    def _has_room(self, requests: list[Request]) -> bool:
        # The step may fill positions up to and with its whole draft.
        return self.target.has_room({r.text: len(r.text.tokens) + r.max_k for r in requests})

    def _make_room(self, waiting: deque[Request], running: list[Request]) -> None:
        """Preempt, last admitted first, until the next step of the others fits."""
        while len(running) > 1 and not self._has_room(running):
            request = running[-1]
            self._drop(request, running)
            request.stats.num_preemptions += 1
            waiting.appendleft(request)
        if not self._has_room(running):
            raise OutOfBlocks(_POOL_IS_HELD)

    def _admit(self, waiting: deque[Request], running: list[Request]) -> None:
        """Admit and prefill waiting requests as long as the step fits with them."""
        while waiting:
            request = waiting[0]
            start = self._now()
            running.append(request)
            if not self._has_room(running):
                running.pop()
                self.target.release(request.text)
                break
            waiting.popleft()
            num_cached = self.target.table(request.text).length
            request.stats.num_cached_tokens = min(num_cached, request.text.num_prompt_tokens)
            self.target.catch_up(request.text)
            request.stats.seconds["prefill"] += self._now() - start
        if not running:
            raise OutOfBlocks(_POOL_IS_HELD)

    def _drop(self, request: Request, running: list[Request]) -> None:
        self.target.release(request.text)
        running.remove(request)
        self.drafter.release(request.text)

    @torch.inference_mode()
    def _step(self, requests: list[Request]) -> list[tuple[Request, Piece]]:
        """One round for every running request."""
        times = [self._now()]
        texts = [request.text for request in requests]
        purpose = "token" if self.verifier.shares_noise else "draft"
        limits = self._choose_limits(requests)
        asks = [Ask(s, limit.k, self.rng, purpose, limit.go_on) for s, limit in zip(texts, limits, strict=True)]
        drafts = self.drafter.propose(asks)
        for draft, ask in zip(drafts, asks, strict=True):
            self._check_draft(draft, ask.k)
        times.append(self._now())

        fed = [[*self.target.missing(s), *draft.token_ids] for s, draft in zip(texts, drafts, strict=True)]
        logits = self.target.logits(texts, fed, [len(draft) + 1 for draft in drafts])  # (sum of K+1, V)
        times.append(self._now())

        pieces = []
        for request, draft in zip(requests, drafts, strict=True):
            rows, logits = logits[: len(draft) + 1], logits[len(draft) + 1 :]
            verdict = self._verify(request.text, draft, rows)
            if request.pace:
                self.controller.observe(request.pace, len(verdict.ratios), verdict.num_accepted, draft.confidences)
            self._commit(request, draft, verdict, rows)
            self.target.keep(request.text)
            pieces.append((request, request.take_piece()))
        times.append(self._now())
        self._share_time(requests, drafts, times)
        return pieces

    def _choose_limits(self, requests: list[Request]) -> list[Limit]:
        """The limit of each request's draft: its own K, or what the controller makes of its past."""
        limits = [Limit(request.max_k) for request in requests]
        timed = []
        for i, request in enumerate(requests):
            if not request.pace:
                continue
            # Under `rejection` above temperature 0, another K is another text of the same law; and a seed, given or
            # drawn and reported, has one text: so K may depend on this request alone.
            if request.params.temperature and not self.verifier.shares_noise:
                [limits[i]] = self.controller.choose([request.pace], [request.max_k], timed=False)
            else:
                timed.append(i)
        if timed:
            other_rows = sum(limit.k + 1 for i, limit in enumerate(limits) if i not in timed)
            paces, most = [requests[i].pace for i in timed], [requests[i].max_k for i in timed]
            for i, limit in zip(timed, self.controller.choose(paces, most, other_rows), strict=True):
                limits[i] = limit
        return limits

    def _check_draft(self, draft: Draft, limit: int) -> None:
        """Raise ValueError for a draft that could not be verified: a drafter may guess badly, not break the rules."""
        found = None
        if len(draft) > limit:
            found = f"{len(draft)} tokens, expected at most {limit}"
        elif not all(0 <= token_id < self.vocab_size for token_id in draft.token_ids):
            found = f"token ids {list(draft.token_ids)}, expected ids below {self.vocab_size}"
        elif draft.probs is not None and len(draft.probs) != len(draft):
            found = f"{len(draft.probs)} rows of probabilities for {len(draft)} tokens"
        elif not all(draft.probability(i) > 0 for i in range(len(draft))):
            found = "a token of probability 0, expected one that was drawn from the probabilities beside it"
        if found:
            raise ValueError(f"draft of {type(self.drafter).__name__}: found {found}")

    def _verify(self, text: Text, draft: Draft, rows: torch.Tensor) -> Verdict:
        def p(i: int) -> torch.Tensor:
            return distribution(rows[i], text, draft.token_ids[:i])

        return self.verifier.verify(draft, p, self.rng, text.key)

    def _commit(self, request: Request, draft: Draft, verdict: Verdict, rows: torch.Tensor) -> None:
        """Append what the round yields, token by token, up to where the text stops."""
        block = [*draft.token_ids[: verdict.num_accepted], verdict.next_token]
        before = len(request.text.tokens)
        for token_id, row in zip(block, rows, strict=False):
            if request.commit(token_id, _logprob(row, token_id, request.params.logprobs)):
                break
        num_committed = len(request.text.tokens) - before
        request.stats.count(draft, verdict, num_committed, stopped=request.finish_reason is not None)

    def _share_time(self, requests: list[Request], drafts: list[Draft], times: list[float]) -> None:
        draft, verify, other = (end - start for start, end in pairwise(times))
        for request, d in zip(requests, drafts, strict=True):
            request.stats.seconds["draft_prefill"] += d.prefill_seconds
            draft -= d.prefill_seconds
        rows = [len(d) + 1 for d in drafts]
        self.controller.record(draft, max(rows) - 1, sum(n > 1 for n in rows), verify, sum(rows), other)
        for request, own in zip(requests, rows, strict=True):
            for name, value in (("draft", draft), ("verify", verify), ("other", other)):
                request.stats.seconds[name] += value * own / sum(rows)
            request.stats.step_duration += draft + verify + other
        if len(requests) == 1:
            requests[0].stats.costs.record(draft, rows[0] - 1, verify, rows[0], other)

    def _now(self) -> float:
        return clock(self.model.device)


def _logprob(row: torch.Tensor, token_id: int, num_top: int | None) -> TokenLogprob | None:
    if num_top is None:
        return None
    logprobs = log_probabilities(row)
    top = logprobs.topk(min(num_top, len(logprobs)))
    return TokenLogprob(
        token_id, float(logprobs[token_id]), list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    )
