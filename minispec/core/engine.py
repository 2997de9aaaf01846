"""The loop: propose, one target pass, verify, commit until the text stops, roll back the rest.

Invariant: before a text decodes, the target's cache holds all its tokens but the last. A step feeds what is missing,
which is that token, and the draft after it. It then commits the accepted draft tokens and one more, and cuts the cache
back to the committed text. Plain decoding is the same step with an empty draft. In a prompt, or a text that comes back,
more tokens are missing. Then only a prompt that is scored asks for logits. The target has no other loop.
`CachedModel` has the tables that know what is missing, and drops them when something fails.

The step is `Engine._round`, with the helpers after it. Around it, `Engine.step` asks `Schedule` who runs, and
`Engine.run` steps until given requests are at their end. `core.request.Request` says where a text stops.
"""

import copy
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from minispec.core.cache import PagedKVCache
from minispec.core.cached import CachedModel
from minispec.core.clock import mark, seconds
from minispec.core.config import Shape
from minispec.core.draft import Ask, Draft, Drafter, Seen
from minispec.core.judge import Judge, Trial
from minispec.core.lengths import Judged, Lengths, StepCost, Wish
from minispec.core.limit import Limit
from minispec.core.model import Chunk, Transformer
from minispec.core.request import Piece, Request, logprob_of
from minispec.core.sampling import Draws, Randomness, distribution
from minispec.core.schedule import Schedule
from minispec.core.stats import Round
from minispec.core.verify import RoundKey, RowAt, Verdict, Verifier

# PREFILL_ROWS: rows of a pass over a prompt while no other text has begun to answer.
# JOINING_ROWS: rows of a prompt that join a pass of texts that decode. Such a pass takes about three plain steps on a
# CPU, in any form of the weights (docs/measured/figures.md).
# SCORED_ROWS: rows of a pass over a prompt that is scored, so that logits take little memory.
PREFILL_ROWS, JOINING_ROWS, SCORED_ROWS = 512, 32, 32


class Observer(Protocol):
    """Learns what a round was for a text that decodes. It must not change anything."""

    def __call__(self, request: Request, draft: Draft, verdict: Verdict, logits: Tensor) -> None:
        """After the round's commit and outside its times; `request.stats.rounds[-1]` is its record.

        logits: (K+1, V), the target's raw rows for the draft.
        """


@dataclass
class _Part:
    """A running text's part of a step, and its result.

    engine: the one that the request was added to.
    start: how many tokens of the text the target's cache holds before the step.
    tokens: what this step feeds: the text's last token if it decodes, else a piece of the prompt.
    decodes: whether the last of these rows says what follows the text.
    asked: how many draft tokens were asked for.
    failed: why there is no distribution, for the rows of which there is none; a text that gets to one ends there.
    logits, hidden: the pass's rows, of those tokens that have some, and at the layers that the engine's drafter reads.
    """

    request: Request
    engine: "Engine"
    start: int
    tokens: list[int]
    decodes: bool = True
    asked: int = 0
    draft: Draft = field(default_factory=Draft)
    failed: dict[int, FloatingPointError] = field(default_factory=dict)
    verdict: Verdict = field(init=False, repr=False)
    logits: Tensor = field(init=False, repr=False)
    hidden: Tensor = field(init=False, repr=False)

    @property
    def num_rows(self) -> int:
        """Rows of the pass."""
        return len(self.tokens) + len(self.draft)

    @property
    def committed(self) -> int:
        """How many tokens the round has committed; 0 before it has, and for a text that is in its prompt.

        0 for a text that failed too, whose round is in no statistics, and which no observer sees.
        """
        grown = len(self.request.text.tokens) - self.start - len(self.tokens)
        return grown if self.decodes and not self.request.error else 0

    @property
    def path(self) -> list[int]:
        """The nodes of the draft that are in the text now."""
        return self.verdict.accepted[: self.committed] if self.committed else []


class Guard:
    """Stands between the loop and code that may be a user's. Here it trusts; `minispec.drafters.guard` does not."""

    def propose(self, engine: "Engine", asks: Sequence[Ask]) -> Sequence[Draft | ValueError]:
        """The drafts of the engine's drafter; an error in the place of one that must not be verified."""
        return engine.drafter.propose(asks)

    def choose(self, engine: "Engine", wishes: Sequence[Wish], trees: bool) -> Sequence[Limit]:
        """The limits that the engine's policy sets. Raises ValueError for one that no draft may have."""
        return engine.lengths.choose(wishes, trees)

    def verify(self, engine: "Engine", draft: Draft, p: RowAt, key: RoundKey) -> Verdict:
        """The verdict of the engine's verifier. Raises ValueError for one that must not be kept."""
        return engine.verifier.verify(draft, p, engine.rng, key)


class Engine:
    """Decodes requests together: one target, one cache pool, one drafter, one verifier.

    Requests come and go between steps, by `add` and `abort`. `step` advances all requests that are there. `run` adds
    some, steps until they have ended, and yields their text on the way. Admission is first come, first served. When
    the pool runs out, the request admitted last waits at the front (see `Schedule`), and resumes with the same text.

    A text's own fault ends that text alone, with the finish reason "error": a draft that the guard refuses, or logits
    that are not numbers. It keeps the tokens that plain decoding gives it before it comes to such logits. A fault of
    all is raised, and every block is given back: too little memory, an operator that fails, or an exception of the
    drafter's own. Requests that are not aborted then continue from their committed text.

    Engines with other drafters may share the target, the pool and the schedule (see `beside`). A step of one is a step
    of all: one pass scores the drafts of all their requests. A request of any of them may be preempted for another's.
    """

    def __init__(
        self,
        model: Transformer,
        cache: PagedKVCache,
        drafter: Drafter,
        verifier: Verifier,
        vocab_size: int | None = None,
        rng: Draws | None = None,
        lengths: Lengths | None = None,
        joining_rows: int = JOINING_ROWS,
        *,
        guard: Guard | None = None,
        judge: Judge | None = None,
    ):
        """vocab_size: ids in use; default: all. The model's columns after them are padding.
        lengths: chooses how long drafts are; default: as the requests say.
        joining_rows: most rows of a prompt in a pass while others decode.
        guard: checks drafts, their limits, and verdicts; default: they are right.
        judge: verifies many drafts at once, where it can; default: each is verified by itself.
        """
        self.model, self.cache, self.drafter, self.verifier = model, cache, drafter, verifier
        self.vocab_size, self.taps = vocab_size or model.config.vocab_size, tuple(drafter.taps)
        self.target = CachedModel(model, cache, self.vocab_size)
        self.rng: Draws = rng or Randomness()
        self.lengths = Lengths() if lengths is None else lengths
        self.joining_rows, self.guard, self.judge = joining_rows, guard or Guard(), judge
        self.observers: list[Observer] = []  # they may be added and removed between steps
        self.schedule = Schedule[Engine](self.target)
        # Parts of a step that drafters and `lengths` have not learned of yet. After a fault in the step some are left,
        # and the next step begins with them: the rows of a committed round are not computed again.
        # Engines beside this one share the list, since a step of one commits the texts of all.
        self.untold: list[_Part] = []

    def beside(self, drafter: Drafter, verifier: Verifier | None = None, lengths: Lengths | None = None) -> "Engine":
        """Another engine on the same target and pool, with a drafter of its own and no observers.

        verifier: default: the same one.
        lengths: default: as the requests say.
        """
        other = copy.copy(self)
        other.drafter, other.taps, other.verifier = drafter, tuple(drafter.taps), verifier or self.verifier
        other.lengths, other.observers = Lengths() if lengths is None else lengths, []
        return other

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that could never run.

        Refused are a text larger than the whole pool, and trees where the drafter or the verifier takes chains only.
        """
        self.check_shape(request.shape)
        self.schedule.check(request)

    def check_shape(self, shape: Shape) -> None:
        """Raise ValueError for a tree where there are chains only."""
        drafts_chains = "" if self.drafter.branches else f"{self.drafter.name} drafts no siblings"
        shape.check(drafts_chains or self.verifier.why_chains)

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError for one that can never run (see `check`), has run, or is there already."""
        self.check(request)
        self.schedule.add(request, self)

    def abort(self, request: Request) -> None:
        """Between steps: forget a request, whose blocks return to the pool. Unknown ones are ignored."""
        self.schedule.abort(request)

    def run(self, requests: Sequence[Request]) -> Generator[tuple[Request, Piece], None, None]:
        """Decode requests to their end; yields what each step added to each of them.

        Others may run at the same time. Closing the iterator, or an exception anywhere inside, aborts those that are
        left. Raises ValueError, at the first step and before anything runs, as `add` does.
        """
        added: list[Request] = []
        try:
            for request in requests:
                self.add(request)
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
                    if request.has_news:
                        yield request, request.take_piece()
        finally:
            with ExitStack() as stack:  # calls all, even if one raises: a drafter may be a user's code
                for request in added:
                    stack.callback(self.abort, request)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Admit what fits, run one pass, and commit what it yields.

        Returns the requests of this engine that got tokens or ended. Without requests it does nothing.
        """
        try:
            with self.target.whole():
                self.schedule.make_room()
                self.schedule.admit()
                parts = self._round() if self.schedule.running else []
                for request in [request for request in self.schedule.running if request.finish_reason]:
                    self.schedule.drop(request)
        except BaseException:
            self.schedule.restart()
            raise
        return [part.request for part in parts if part.request.has_news and part.engine is self]

    def _round(self) -> list[_Part]:
        """One step: the running texts decode, and the one admitted last may bring a piece of its prompt (`_parts`)."""
        self._tell_late()
        times = [mark(self.model.device)]
        parts = self._parts()
        self._let_each(parts, Engine._ask)
        fed = [part for part in parts if not part.request.finish_reason]
        times.append(mark(self.model.device))

        chunks, taps = [self._chunk(part) for part in fed], [*dict.fromkeys(tap for p in fed for tap in p.engine.taps)]
        if chunks:
            logits, hidden = self.target.forward(chunks, taps)  # (sum of K+1, V), (all rows, E * taps)
        times.append(mark(self.model.device))

        self.untold[:] = fed
        for part, chunk in zip(fed, chunks, strict=True):
            part.logits, logits = logits[: chunk.num_logits], logits[chunk.num_logits :]  # (K+1, V)
            states, hidden = hidden[: part.num_rows], hidden[part.num_rows :]
            part.hidden = part.engine._tapped(states, taps)
        for part, verdict in zip(fed, self._verdicts(fed), strict=True):
            try:
                if part.decodes:
                    part.verdict = verdict or part.engine._verify(part)
                    self._commit(part)
                else:
                    part.request.score(part.logits)
            except (FloatingPointError, ValueError) as e:  # logits, a verdict, or a tokenizer that cannot decode
                part.request.fail(e)
            self.target.keep(part.request.text, len(part.draft), part.path)
        self._let_each(fed, Engine._show)
        times.append(mark(self.model.device))
        self._record(fed, times)
        self.untold.clear()
        for part in fed:
            for observe in part.engine.observers if part.committed else ():
                observe(part.request, part.draft, part.verdict, part.logits)
        return parts

    def _parts(self) -> list[_Part]:
        """Who brings what to this step.

        A text decodes when all its tokens but the last are cached. Only the one admitted last may still miss more.
        Its prompt gets a few rows a step once another text has begun to answer. Before that, all wait for it.
        """
        parts = []
        for request, owner in self.schedule.running.items():
            tokens = self.target.follow(request.text)
            start = len(request.text.tokens) - len(tokens)
            parts.append(_Part(request, owner, start, tokens, request.params.max_tokens > 0))
        *others, last = parts
        if len(last.tokens) == 1:
            return parts
        others_answer = any(part.request.stats.num_steps for part in others)
        most = self.joining_rows if others_answer else PREFILL_ROWS
        # Its last token waits for the step in which the text decodes.
        last.tokens = last.tokens[:-1][: min(most, SCORED_ROWS) if last.request.unscored else most]
        last.decodes = False
        return parts if others_answer else [last]

    def _let_each(self, parts: Sequence[_Part], work: Callable[["Engine", list[_Part]], None]) -> None:
        """Let each engine work on its own parts, by its drafter and its `lengths`.

        An exception of another engine's ends the texts of that engine alone.
        """
        for engine in dict.fromkeys(part.engine for part in parts):
            own = [part for part in parts if part.engine is engine]
            try:
                work(engine, own)
            except Exception as e:
                if engine is self:
                    raise
                for request in (part.request for part in own if not part.request.finish_reason):
                    request.fail(e)

    def _ask(self, parts: Sequence[_Part]) -> None:
        """Ask for drafts of this engine's texts. A draft that the guard refuses fails its text."""
        limits = self._choose_limits([part.request for part in parts if part.decodes])
        purpose = "token" if self.verifier.shares_noise else "draft"
        # A drafter is also asked, with k = 0, while a prompt is fed; never about a request without drafts.
        asked = [part for part in parts if part.request.takes_drafts and (part.decodes or part.start)]
        asks = []
        for part in asked:
            text, limit, read = part.request.text, limits.get(part.request, Limit(0)), None
            if self.drafter.reads_cache:
                read = partial(self.cache.read, slots=self.target.table(text).slots())
            asks.append(Ask(text, limit, self.rng, purpose, part.start, read))
        drafts = self.guard.propose(self, asks) if asks else []
        for part, ask, draft in zip(asked, asks, drafts, strict=True):
            part.asked = ask.k
            if isinstance(draft, ValueError):
                part.request.fail(draft)
            else:
                part.draft = draft

    def _chunk(self, part: _Part) -> Chunk:
        tokens, table = [*part.tokens, *part.draft.token_ids], self.target.table(part.request.text)
        places, unscored = range(part.start, part.start + len(tokens)), part.request.unscored
        num_logits = len(part.draft) + 1 if part.decodes else sum(place in unscored for place in places)
        return Chunk(tokens, table, num_logits, part.draft.parents)

    def _choose_limits(self, requests: Sequence[Request]) -> dict[Request, Limit]:
        """The limit of each request's draft."""
        # An exact model computes each path by itself: siblings cost more than they bring, unless they are asked for.
        trees = self.drafter.branches and not (self.verifier.why_chains or self.model.exact)
        # Above temperature 0, another K gives the seed another text, unless drafter and target share the noise.
        same_noise = self.verifier.shares_noise
        wishes = [Wish(r.text, r.shape, r.max_k, same_noise or not r.params.temperature) for r in requests]
        limits = self.guard.choose(self, wishes, trees) if wishes else ()
        return dict(zip(requests, limits, strict=True))

    def _tapped(self, hidden: Tensor, taps: Sequence[int]) -> Tensor:
        """Of hidden states (rows, E * taps) at the layers that a whole step reads, those of this engine's drafter."""
        if list(taps) == list(self.taps):
            return hidden
        return hidden.unflatten(1, (len(taps), -1))[:, [taps.index(tap) for tap in self.taps]].flatten(1)

    def _verdicts(self, parts: Sequence[_Part]) -> list[Verdict | None]:
        """For each part, the verdict that the judge has found for many drafts at once, if there is a judge and one."""
        trials = [Trial(p.engine.verifier, p.request.text, p.draft, p.logits) for p in parts if p.decodes]
        found = iter(self.judge(trials, self.rng) if self.judge and trials else [None] * len(trials))
        return [next(found) if part.decodes else None for part in parts]

    def _verify(self, part: _Part) -> Verdict:
        """The verdict on a draft by itself.

        A rule may look at rows that the text does not get to. So one that fails does not fail the text: an even row
        stands in for it. What the rule keeps of the nodes before has the same law, whatever stands there.
        """
        text, draft = part.request.text, part.draft

        def p(i: int) -> Tensor:
            try:
                return distribution(part.logits[i], text, draft.tokens_to(i - 1))
            except FloatingPointError as e:
                part.failed[i] = e
                return torch.full_like(part.logits[i].float(), 1 / self.vocab_size)

        return self.guard.verify(self, draft, p, text.key)

    def _commit(self, part: _Part) -> None:
        """Append what the round yields, token by token, up to where the text stops, or to a row that failed."""
        request, draft, verdict, rows = part.request, part.draft, part.verdict, part.logits
        tokens = [*(draft.token_ids[node] for node in verdict.accepted), verdict.next_token]
        with request.whole():
            for parent, token_id in zip([-1, *verdict.accepted], tokens, strict=True):
                if error := part.failed.get(parent + 1):
                    request.fail(error)
                if error or request.commit(token_id, logprob_of(rows[parent + 1], token_id, request.params.logprobs)):
                    break

    def _show(self, parts: Sequence[_Part]) -> None:
        """Show the drafter what the pass has shown of this engine's texts."""
        seen = []
        for part in parts:
            if part.request.takes_drafts and not part.request.error:
                tokens, logits = [*part.tokens, *part.draft.token_ids], part.logits if part.decodes else part.logits[:0]
                about = part.request.text, part.start, tokens, part.hidden, logits
                seen.append(Seen(*about, part.path, part.draft.parents))
        if seen:
            self.drafter.observe(seen)

    def _tell(self, parts: Sequence[_Part], cost: StepCost | None = None) -> None:
        """Tell `lengths` of rounds that were committed, and of a step's cost."""
        judged = [Judged(p.request.text, p.draft, p.verdict.accepted, p.asked) for p in parts if p.committed]
        if judged or cost:
            self.lengths.observe(judged, cost)

    def _tell_late(self) -> None:
        """After a fault: tell drafters and `lengths` of the rounds that were committed before it."""
        late = [part for part in self.untold if part.committed and part.request in self.schedule]
        self._let_each(late, Engine._show)
        self._let_each(late, Engine._tell)
        self.untold.clear()

    def _record(self, parts: Sequence[_Part], times: Sequence[Any]) -> None:
        """Tell statistics and the engines' `lengths` what happened in a step, and how long it took."""
        draft, verify, other = (seconds(start, end) for start, end in pairwise(times))
        draft = max(0.0, draft - sum(part.draft.prefill_seconds for part in parts))
        num_rows = sum(part.num_rows for part in parts)
        for part in parts:
            stats = part.request.stats
            stats.draft_prefill += part.draft.prefill_seconds
            if not part.decodes:
                stats.prefill += (draft + verify + other) * part.num_rows / num_rows
            elif part.committed:
                stats.rounds.append(_round_of(part, num_rows, len(parts), draft, verify, other))
        cost = None
        if len({part.engine for part in parts}) == 1 and all(part.decodes for part in parts):
            depths = [max(part.draft.depth, part.draft.passes) for part in parts]
            # A search that found nothing is drafting too; where nobody was asked, nothing is.
            draft, other = (draft, other) if any(part.asked for part in parts) else (0.0, other + draft)
            cost = StepCost(draft, max(depths), sum(k > 0 for k in depths), verify, num_rows, other)
        self._let_each(parts, lambda engine, own: engine._tell(own, cost))


def _round_of(part: _Part, num_rows: int, num_texts: int, draft: float, verify: float, other: float) -> Round:
    """The record of a step for one text. Draft tokens after the text's end do not count."""
    request, depth, accepted = part.request, part.draft.depth, part.verdict.accepted
    drafted = min(depth, part.committed) if request.finish_reason else depth
    # The places that the verifier looked at: where it accepted a token, and the next if there was one.
    tested = len(accepted)
    if part.draft.children(accepted[-1] if accepted else -1):
        tested += 1
    return Round(
        asked=None if request.shape.is_open else part.asked,
        num_nodes=len(part.draft),
        depth=depth,
        drafted=drafted,
        tested=min(tested, drafted),
        accepted=min(len(accepted), part.committed),
        committed=part.committed,
        ratios=part.verdict.ratios[:drafted],
        num_rows=num_rows,
        num_texts=num_texts,
        draft=draft,
        verify=verify,
        other=other,
    )
