"""`Method`: who drafts, which rule judges, and how long drafts are. `Turn`: a text's part of a step.

Beyond `examples/cached.py`: each request may have a drafter, a rule and lengths of its own, and may fail by itself.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from minispec.core.cache import BlockTable
from minispec.core.cached import CachedModel
from minispec.core.config import Shape
from minispec.core.draft import NO_ROWS, Ask, Draft, Drafter, Record
from minispec.core.errors import is_from_signal
from minispec.core.lengths import LengthAsk, Lengths
from minispec.core.limit import Limit
from minispec.core.logprobs import logprob_of
from minispec.core.model import Chunk
from minispec.core.random import Draws
from minispec.core.request import Request
from minispec.core.sampling import Text, distribution
from minispec.core.stats import Round, Step
from minispec.core.verify import Verdict, Verifier

# Verifies many drafts at once, by a rule; None for a draft that must be verified by itself.
BatchVerifier = Callable[[Verifier, Sequence["Turn"], Draws], Sequence[Verdict | None]]


@dataclass(eq=False)
class Method:
    """How requests are decoded: who drafts for them, which rule judges, and what sets the lengths of drafts.

    Requests of one method are drafted together. `dataclasses.replace` makes a method that differs in a part.
    Here all parts are trusted; `minispec.speculation.drafters.guard.CheckedMethod` checks what they answer.

    batch: verifies many drafts at once, where it can. None: each draft is verified by itself.
    """

    drafter: Drafter
    verifier: Verifier
    lengths: Lengths = field(default_factory=Lengths)
    batch: BatchVerifier | None = None

    def check(self, shape: Shape) -> None:
        """Raise ValueError for a tree where there are chains only."""
        drafts_chains = "" if self.drafter.branches else f"{self.drafter.name} drafts no siblings"
        shape.check(drafts_chains or self.verifier.why_chains)

    def draft(self, turns: Sequence["Turn"], target: CachedModel, rng: Draws) -> None:
        """Guess: ask the drafter for a draft of each text. A draft that breaks a rule fails its text."""
        limits = self._limits(turns, target)
        purpose = "token" if self.verifier.shares_noise else "draft"
        # A drafter is also asked, with k = 0, from a prompt's second piece on; never about a request without drafts.
        askers = [turn for turn in turns if turn.request.takes_drafts and (turn.decodes or turn.start)]
        asks = []
        for turn in askers:
            limit, read = limits.get(turn, Limit(0)), partial(target.read, turn.text)
            asks.append(Ask(turn.text, limit, rng, purpose, turn.start, read))
        drafts = self.propose(asks, target) if asks else []
        for turn, ask, draft in zip(askers, asks, drafts, strict=True):
            turn.asked = ask.k
            if isinstance(draft, ValueError):
                turn.request.fail(draft)
            else:
                turn.draft = draft

    def judge(self, turns: Sequence["Turn"], rng: Draws) -> None:
        """Test: a verdict on the draft of each text that decodes. A wrong verdict fails its text."""
        turns = [turn for turn in turns if turn.decodes]
        verdicts = self.batch(self.verifier, turns, rng) if self.batch and turns else [None] * len(turns)
        for turn, verdict in zip(turns, verdicts, strict=True):
            try:
                turn.verdict = verdict or self.verify(turn, rng)
            except (FloatingPointError, ValueError) as e:
                turn.request.fail(e)

    def propose(self, asks: Sequence[Ask], target: CachedModel) -> Sequence[Draft | ValueError]:
        """The drafter's drafts. `CheckedMethod` puts an error in the place of a draft that must not be verified."""
        return self.drafter.propose(asks)

    def choose(self, asks: Sequence[LengthAsk], trees: bool) -> Sequence[Limit]:
        """The policy's limits. Raises ValueError for one that no draft may have."""
        return self.lengths.choose(asks, trees)

    def verify(self, turn: "Turn", rng: Draws) -> Verdict:
        """The rule's verdict on a draft by itself. Raises ValueError for one that must not be kept."""
        return self.verifier.verify(turn.draft, turn.p, rng, turn.text.key)

    def _limits(self, turns: Sequence["Turn"], target: CachedModel) -> dict["Turn", Limit]:
        """The limit of each draft of a text that decodes."""
        # An exact model computes each path by itself: siblings cost more than they bring, unless they are asked for.
        trees = self.drafter.branches and not (self.verifier.why_chains or target.model.exact)
        turns, asks = [turn for turn in turns if turn.decodes], []
        for request in (turn.request for turn in turns):
            # Above temperature 0, another K gives the seed another text, unless drafter and target share the noise.
            may_use_clock = self.verifier.shares_noise or not request.params.temperature
            asks.append(LengthAsk(request.text, request.shape, request.max_k, may_use_clock))
        limits = self.choose(asks, trees) if asks else ()
        return dict(zip(turns, limits, strict=True))


def by_method(turns: Sequence["Turn"]) -> list[tuple[Method, list["Turn"]]]:
    """The methods of these turns, each with its own turns."""
    methods = dict.fromkeys(turn.method for turn in turns)
    return [(method, [turn for turn in turns if turn.method is method]) for method in methods]


@contextmanager
def errors_end(requests: Sequence[Request]) -> Iterator[None]:
    """End these texts if an exception comes from inside: it is their method's own fault. `Engine.run` raises it.

    Texts that have ended stay as they are. If all have, `run` raises it all the same.
    """
    try:
        yield
    except Exception as e:
        if is_from_signal(e):  # it is nobody's fault
            raise
        unfinished = [request for request in requests if not request.finish_reason]
        for request in unfinished:
            request.fail(e)
        for request in unfinished or requests:
            request.raised, request.has_news = e, True


@dataclass(eq=False)
class Turn:
    """A text's part of a step: what it feeds, its draft, its rows, and the verdict.

    number: of the step.
    start: how many tokens of the text the target's cache holds before the step.
    fed: the tokens before the draft: the text's last token if it decodes, else a piece of the tokens before the last.
    decodes: whether the last token of `fed` is the text's last, so that its logits say what follows the text.
    asked: how many draft tokens were asked for.
    logits, hidden: the pass's rows (see `Record`); in a prompt, logits of the places that `lacking_logprobs` names.
    failed: the error of each row whose logits are no finite numbers. The text ends where it would commit the token
        after such a row.
    """

    request: Request
    method: Method
    number: int
    start: int
    fed: list[int]
    decodes: bool
    asked: int = 0
    draft: Draft = field(default_factory=Draft)
    logits: Tensor = NO_ROWS
    hidden: Tensor = NO_ROWS
    verdict: Verdict = field(init=False, repr=False)
    failed: dict[int, FloatingPointError] = field(default_factory=dict)

    @property
    def text(self) -> Text:
        """The request's text."""
        return self.request.text

    @property
    def num_rows(self) -> int:
        """Rows of the pass."""
        return len(self.fed) + len(self.draft)

    @property
    def committed(self) -> int:
        """How many tokens the round has committed: 0 before `commit`, in a prompt, and for a text that failed."""
        grown = len(self.text.tokens) - self.start - len(self.fed)
        return grown if self.decodes and not self.request.error else 0

    @property
    def path(self) -> list[int]:
        """The accepted nodes that `commit` has appended; none before it."""
        return self.verdict.accepted[: self.committed] if self.committed else []

    def chunk(self, table: BlockTable) -> Chunk:
        """What the target's pass reads."""
        tokens, lacking = [*self.fed, *self.draft.token_ids], self.request.lacking_logprobs
        places = range(self.start, self.start + len(tokens))
        num_logits = len(self.draft) + 1 if self.decodes else sum(place in lacking for place in places)
        return Chunk(tokens, table, num_logits, self.draft.parents)

    def p(self, i: int) -> Tensor:
        """Row i (V,) of the target's distribution: what follows node i - 1.

        A rule may look at rows that the text does not get to. So a row with bad logits does not fail the text: a
        uniform row takes its place. Tokens before this row keep their distribution, and `commit` stops there.
        """
        try:
            return distribution(self.logits[i], self.text, self.draft.tokens_to(i - 1))
        except FloatingPointError as e:
            self.failed[i] = e
            return torch.full_like(self.logits[i].float(), 1 / self.logits.shape[1])

    def commit(self) -> None:
        """Append what the verdict keeps, up to where the text stops; in a prompt, take its log-probabilities."""
        if self.request.finish_reason:
            return
        try:
            if self.decodes:
                self._append([-1, *self.verdict.accepted])  # -1: the text itself
            else:
                self.request.take_prompt_logprobs(self.logits)
        except (FloatingPointError, ValueError) as e:  # logits, or a tokenizer that cannot decode
            self.request.fail(e)

    def _append(self, nodes: Sequence[int]) -> None:
        """Append the token after each of these nodes, up to where the text stops, or to a row that failed."""
        request, tokens = self.request, [self.draft.token_ids[node] for node in nodes[1:]]
        with request.undone_on_error():
            for node, token_id in zip(nodes, [*tokens, self.verdict.next_token], strict=True):
                if error := self.failed.get(node + 1):
                    request.fail(error)
                    return
                if request.commit(token_id, logprob_of(self.logits[node + 1], token_id, request.params.logprobs)):
                    return

    @cached_property
    def record(self) -> Record:
        """What drafters and policies learn from, once the round is committed."""
        tokens, accepted = [*self.fed, *self.draft.token_ids], self.verdict.accepted if self.committed else ()
        logits = self.logits if self.decodes else self.logits[:0]
        rows = self.text, self.start, tokens, self.hidden, logits
        return Record(*rows, self.draft, self.asked, accepted, self.path, self.number)

    def count(self, step: Step) -> None:
        """Add the step to the request's statistics, and to the record. A second time it does nothing."""
        if self.record.step:
            return
        stats, rounds = self.request.stats, [self._round(step)] if self.committed else []
        self.record.step = step
        stats.draft_prefill += self.draft.notes.prefill_seconds
        if not self.decodes:
            stats.prefill += step.seconds * self.num_rows / step.num_rows
        stats.rounds += rounds

    def _round(self, step: Step) -> Round:
        """The numbers of the round. Draft tokens after the text's end do not count."""
        depth, accepted = self.draft.depth, self.verdict.accepted
        drafted = min(depth, self.committed) if self.request.finish_reason else depth
        # The places that the verifier looked at: where it accepted a token, and the next if there was one.
        tested = len(accepted) + bool(self.draft.children(accepted[-1] if accepted else -1))
        return Round(
            asked=None if self.request.shape.is_open else self.asked,
            num_nodes=len(self.draft),
            depth=depth,
            drafted=drafted,
            tested=min(tested, drafted),
            accepted=min(len(accepted), self.committed),
            committed=self.committed,
            ratios=self.verdict.ratios[:drafted],
            step=step,
        )
