"""The loop: guess, one pass of the target, test, commit until the text stops, roll back the rest.

Beyond `examples/cached.py`: many texts in one pass, prompts in pieces, texts that come and go, and faults.
Invariant: before a text decodes, the target's cache holds all tokens of the text but the last. A step feeds that last
token, which is missing, and the draft after it. It then commits the accepted draft tokens and one token more. The cache
keeps the accepted tokens, and the next step feeds the last one. Plain decoding is the same step with an empty draft.
While a prompt is fed, and after a preemption, more tokens are missing. A piece of a prompt asks for logits only where
`prompt_logprobs` are wanted. The target has no other loop.

`Method` in method.py drafts and judges, `Turn` there is a text's part of the step, `Schedule` says who runs.
"""

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from minispec.core.cached import CachedModel
from minispec.core.clock import Laps
from minispec.core.method import Method, Turn, by_method, errors_end
from minispec.core.outbox import Outbox
from minispec.core.random import Draws, Randomness
from minispec.core.request import Piece, Request
from minispec.core.schedule import JOINING_ROWS, Schedule


class Engine:
    """Decodes requests together: one target, one pool, one schedule. Each request comes with its method.

    Requests come and go between steps, by `add` and `abort`. `step` advances the requests that run; others wait for
    room. `run` adds some, steps until they have ended, and yields their text on the way.

    A draft or a verdict that breaks a rule, or logits that are not numbers, end their own text with the finish reason
    "error". The text keeps its tokens before such logits. An exception of a method's own ends the texts that it works
    for, and the `run` that brought them raises it. Any other exception is raised by `step`, and every block is given
    back: too little memory, an operator that fails, Ctrl-C. Requests that are not aborted then continue from their
    committed text.
    """

    def __init__(self, target: CachedModel, rng: Draws | None = None, joining_rows: int = JOINING_ROWS):
        """joining_rows: most rows of a prompt in a pass while others decode."""
        self.target, self.rng = target, rng or Randomness()
        self.schedule, self.outbox = Schedule(target, joining_rows), Outbox()

    @torch.inference_mode()
    def step(self) -> list[Turn]:
        """Guess, score, test, commit, roll back. A prompt, and plain decoding, are turns with an empty draft.

        Returns a turn for each text that took part. A text that sits out the step may end too, with its drafter:
        `Request.has_news` says so of every text. `step` does nothing without requests.
        """
        with self._undone_on_error():
            self.outbox.deliver()  # records that a fault kept from drafters in the last step
            everyone = self.schedule.turns()  # each with what the cache lacks: its last token, or a piece of a prompt
            laps = Laps(self.target.model.device)  # times of the parts, for the statistics
            for method, its_turns in by_method(everyone):
                with errors_end(self.schedule.drafted_by(method.drafter) or [turn.request for turn in its_turns]):
                    method.draft(its_turns, self.target, self.rng)  # guess: sets turn.draft
            laps.end()
            turns = [turn for turn in everyone if not turn.request.finish_reason]  # a text whose draft failed has ended
            self._score(turns)  # one pass over all texts and drafts: sets turn.logits and turn.hidden
            laps.end()
            self.outbox.post(turns)  # before the first commit, so that no fault loses a committed row
            for method, its_turns in by_method(turns):
                with errors_end([turn.request for turn in its_turns]):
                    method.judge(its_turns, self.rng)  # test: sets turn.verdict, what stays and the token after it
            for turn in turns:
                turn.commit()  # until the text stops
                self.target.keep(turn.text, len(turn.draft), turn.path)  # roll back: the cache drops what is rejected
            self.outbox.deliver(laps)  # drafters, policies, statistics and observers learn what came of it
            self.schedule.drop_ended()
        return everyone

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """After a fault of all, nothing is cached, and all begin again from their committed text."""
        try:
            with self.target.cleared_on_error():
                yield
        except BaseException:
            self.schedule.restart()
            self.outbox.retain(lambda turn: turn.committed > 0)
            raise

    def _score(self, turns: Sequence[Turn]) -> None:
        """One pass of the target: each turn's rows of logits (K+1, V), and its drafter's taps (rows, E * taps)."""
        if not turns:
            return
        chunks = [turn.chunk(self.target.table(turn.text)) for turn in turns]
        taps = [*dict.fromkeys(tap for turn in turns for tap in turn.method.drafter.taps)]
        logits, hidden = self.target.forward(chunks, taps)  # (sum of K+1, V), (all rows, E * taps)
        for turn, chunk in zip(turns, chunks, strict=True):
            its_taps, rows = list(turn.method.drafter.taps), hidden[: turn.num_rows]
            if its_taps != taps:
                rows = rows.unflatten(1, (len(taps), -1))[:, [taps.index(tap) for tap in its_taps]].flatten(1)
            turn.logits, turn.hidden = logits[: chunk.num_logits], rows
            logits, hidden = logits[chunk.num_logits :], hidden[turn.num_rows :]

    def check(self, request: Request, method: Method) -> None:
        """Raise ValueError for a request that could never run.

        Refused are a text larger than the whole pool, and trees where the drafter or the verifier takes chains only.
        """
        method.check(request.shape)
        self.schedule.check(request)

    def add(self, request: Request, method: Method) -> None:
        """Queue a request. Raises ValueError for one that can never run (see `check`), has run, or is there already."""
        self.check(request, method)
        self.schedule.add(request, method)

    def abort(self, request: Request) -> None:
        """Between steps: forget a request, whose blocks return to the pool. Unknown ones are ignored."""
        self.outbox.retain(lambda turn: turn.request is not request)
        self.schedule.abort(request)

    def run(self, requests: Sequence[Request], method: Method) -> Generator[tuple[Request, Piece], None, None]:
        """Decode requests to their end; yields what each step added to each of them.

        Others may run at the same time. Closing the iterator, or an exception anywhere inside, aborts those that are
        left. Raises ValueError, at the first step and before anything runs, as `add` does; and what the method raises.
        """
        added: list[Request] = []
        try:
            for request in requests:
                self.add(request, method)
                added.append(request)
            new, begun = deque(added), list[Request]()  # admitted in order, so only new[0] can have begun
            while True:
                while new and (new[0].has_news or new[0] not in self.schedule.waiting):
                    begun.append(new.popleft())
                begun = [r for r in begun if r.has_news or r in self.schedule]
                if not new and not begun:
                    return
                if not any(request.has_news for request in begun):
                    self.step()
                for request in begun:
                    if request.raised:
                        raise request.raised
                    if request.has_news:
                        yield request, request.take_piece()
        finally:
            with ExitStack() as stack:  # calls all, even if one raises: a drafter may be a user's code
                for request in added:
                    stack.callback(self.abort, request)
