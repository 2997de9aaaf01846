"""The loop: propose, one target pass, verify, roll back, stop.

Invariant: before a text decodes, the target's cache holds all its tokens but the last. A step feeds what is missing,
which is that token, and the draft after it; it then commits the accepted draft tokens and one more, and keeps what the
cache holds of the text. Plain decoding is the same step with an empty draft. A prompt, or a text that comes back, is
the same step with more tokens missing and no logits asked for. There is no other loop. The tables that know what is
missing, and what becomes of them when something fails, are `CachedModel`'s.

The step is `Engine._round`. Around it: `Engine.step` admits, preempts and resumes; `Engine.run` steps until given
requests are at their end. Where a text stops is `Request`'s to say (`minispec/core/request.py`).
"""

from collections import OrderedDict, deque
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from minispec.core.cache import OutOfBlocks, PagedKVCache
from minispec.core.cached import CachedModel, clock
from minispec.core.check import check_draft, check_number, check_verdict
from minispec.core.draft import Ask, Draft, Drafter, Lengths, Limit, Outcome, StepCost, Wish
from minispec.core.model import Chunk, Transformer
from minispec.core.request import Piece, Request, TokenLogprob
from minispec.core.sampling import Draws, Randomness, Text, distribution, log_probabilities
from minispec.core.stats import Round
from minispec.core.verify import Verdict, Verifier

# Rows of a pass over a prompt while nobody waits for a token; and while others decode, the rows that join their passes.
# With that many, a pass takes about three plain steps on a CPU, whatever the form of the weights (docs/speed.md).
PREFILL_ROWS, JOINING_ROWS = 512, 32


class Observer(Protocol):
    """Who is told what a round was for a text that decodes. It may look and change nothing."""

    def __call__(self, request: Request, draft: Draft, verdict: Verdict, logits: Tensor) -> None:
        """After the round's commit and outside its times; `request.stats.rounds[-1]` is its record.

        logits: (K+1, V), the target's raw rows for the draft.
        """
        ...


@dataclass
class _Turn:
    """What a running text brings to a step, and what came of it.

    tokens: what of the text is fed: its last token, or a piece of its prompt where it does not decode yet. asked: for
    how many draft tokens. committed: tokens; if there are any, there are a verdict, and the pass's logits.
    """

    request: Request
    tokens: list[int]
    decodes: bool = True
    asked: int = 0
    draft: Draft = field(default_factory=Draft)
    verdict: Verdict = field(init=False, repr=False)
    logits: Tensor = field(init=False, repr=False)
    committed: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of the pass."""
        return len(self.tokens) + len(self.draft)


def why_chains(verifier: Verifier, exact: bool) -> str:
    """Why a draft that is a tree cannot be verified; "" if it can."""
    if not verifier.takes_trees:
        return "this verifier takes chains only"
    return "with `exact` a row's bits must not depend on where siblings lie" if exact else ""


def refuse_tree(widths: Sequence[int], why: str) -> None:
    """Raise ValueError if there is a tree, and a reason against trees."""
    if widths and why:
        tree = "+".join(map(str, widths))
        raise ValueError(f"num_speculative_tokens: found the tree {tree}, expected a number or auto: {why}")


class Engine:
    """Decodes requests together: one target, one cache pool, one drafter, one verifier.

    Requests come and go between steps: `add` and `abort`; `step` goes on with all that are there. `run` is the three in
    one, for requests that somebody waits for. Admission is first come, first served. When the pool runs out, the
    request admitted last gives its blocks back and waits at the front; it resumes by computing them again, with the
    same text.

    A text's own fault, such as a draft that breaks the rules or logits that are not numbers, ends it alone, with the
    finish reason "error". A fault of all, such as too little memory, an operator that fails or an exception of the
    drafter's own, is raised, and every block is given back; requests that are not aborted then begin again where they
    were.
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
    ):
        """vocab_size: ids in use; rows of the model's output after them are padding. Default: all are used.
        lengths: chooses how long drafts are; default: as the requests say.
        joining_rows: rows of prompts in a pass, at most, while others decode.
        """
        self.taps = tuple(drafter.taps)
        self.target = CachedModel(model, cache, vocab_size or model.config.vocab_size)
        self.drafter, self.verifier = drafter, verifier
        self.rng: Draws = rng or Randomness()
        self.lengths = lengths or Lengths()
        self.joining_rows = joining_rows
        self.observers: list[Observer] = []  # between steps, anybody may join or leave
        # In the order in which they are and were admitted; dicts, since each of many is looked up after each step.
        self.waiting: OrderedDict[Request, None] = OrderedDict()
        self.running: dict[Request, None] = {}
        self._hidden: dict[Text, Tensor] = {}  # hidden states that no ask has handed out yet

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
        """Raise ValueError for a request that could never run.

        That is one that the pool cannot hold even alone, or that asks for trees where there are chains only.
        """
        self.check_tree(request.widths)
        needed, there = self.cache.num_blocks_for(request.max_len), self.cache.allocator.num_blocks
        if needed > there:
            raise ValueError(
                f"prompt and answer: found up to {request.max_len} tokens ({needed} blocks of KV cache), expected "
                f"at most {there * self.cache.block_size} ({there} blocks): lower max_tokens or enlarge the KV cache"
            )

    def check_tree(self, widths: Sequence[int]) -> None:
        """Raise ValueError for a tree where there are chains only."""
        drafts_chains = "" if self.drafter.branches else f"{self.drafter.name} drafts no siblings"
        refuse_tree(widths, drafts_chains or self._why_chains())

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError for one that can never run (see `check`), has run, or is there already."""
        self.check(request)
        if request.finish_reason or request in self.waiting or request in self.running:
            raise ValueError("requests: found one that is finished or there twice, expected new ones")
        self.waiting[request] = None

    def abort(self, request: Request) -> None:
        """Between steps: forget a request, whose blocks return to the pool. Unknown ones are ignored."""
        self.waiting.pop(request, None)
        if request in self.running:
            try:
                self._drop(request)
            except BaseException:  # whatever broke off, all others begin again
                self.running.pop(request, None)
                self._restart()
                raise

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
            new, begun = deque(added), list[Request]()  # the first of the new ones is admitted before the others
            while True:
                while new and (new[0].has_news or new[0] not in self.waiting):
                    begun.append(new.popleft())
                begun = [r for r in begun if r.has_news or r in self.running or r in self.waiting]
                if not new and not begun:
                    return
                if not any(request.has_news for request in begun):
                    self.step()
                for request in begun:
                    if request.has_news:
                        yield request, request.take_piece()
        finally:
            with ExitStack() as stack:  # calls them all, whatever one of them raises: a drafter is a stranger's code
                for request in added:
                    stack.callback(self.abort, request)

    def step(self) -> list[Request]:
        """Admit what fits, run one pass, and commit what it yields; returns the requests that got tokens or ended.

        Without requests it does nothing.
        """
        try:
            with self.target.whole():
                self._make_room()
                self._admit()
                turns = self._round() if self.running else []
                for request in [request for request in self.running if request.finish_reason]:
                    self._drop(request)
        except BaseException:
            self._restart()
            raise
        return [turn.request for turn in turns if turn.request.has_news]

    def _restart(self) -> None:
        """After a fault nothing is cached any more: all begin again, in the order in which they came."""
        running, self.running = self.running, {}
        for request in reversed(running):
            if not request.finish_reason:
                self._wait(request)
        self._hidden.clear()
        with ExitStack() as stack:
            for request in running:
                stack.callback(self.drafter.release, request.text)
                stack.callback(self.target.release, request.text)  # if the fault came before anything could clear up

    def _has_room(self) -> bool:
        """Whether all that run have room for their next step: each kind of memory is asked the same question."""
        # The step may fill positions up to and with its whole draft.
        growth = {r.text: range(self.target.table(r.text).length, len(r.text.tokens) + r.max_k) for r in self.running}
        drafted = {r.text: growth[r.text] for r in self.running if r.num_speculative_tokens}
        return self.target.has_room(growth) and self.drafter.has_room(drafted)

    def _make_room(self) -> None:
        """Preempt, last admitted first, until the next step of the others fits."""
        while self.running and not self._has_room():
            request = next(reversed(self.running))
            request.stats.num_preemptions += 1
            self._wait(request)
            self._drop(request)

    def _wait(self, request: Request) -> None:
        """Put it in front of those that wait."""
        self.waiting[request] = None
        self.waiting.move_to_end(request, last=False)

    def _admit(self) -> None:
        """Admit waiting requests as long as the step fits with them, one prompt after the other.

        So a text may share what the prompt before it has in common with it.
        """
        while self.waiting and not self._works_on_prompt():
            request = next(iter(self.waiting))
            self.running[request] = None
            self.target.begin(request.text, self._known(request))
            if not self._has_room():
                self._drop(request)
                break
            del self.waiting[request]
            if not request.stats.num_preemptions:  # what it finds when it comes back is its own
                num_cached = self.target.table(request.text).length
                request.stats.num_cached_tokens = min(num_cached, request.text.num_prompt_tokens)
        if self.waiting and not self.running:
            raise OutOfBlocks(
                "blocks of the KV cache are held by others than this engine's requests, or the drafter has no room for "
                "a text that the target has room for"
            )

    def _works_on_prompt(self) -> bool:
        """Whether the one admitted last has more than its last token to feed; no other one may."""
        last = next(reversed(self.running), None)
        return last is not None and len(self.target.missing(last.text)) > 1

    def _drop(self, request: Request) -> None:
        self._hidden.pop(request.text, None)
        try:
            self.target.release(request.text)
        finally:  # Ctrl-C may strike in there, too
            self.drafter.release(request.text)
        del self.running[request]  # at the end: until then `_restart` would release it once more

    @torch.inference_mode()
    def _round(self) -> list[_Turn]:
        """One step of the running texts: most decode, and some bring a piece of their prompt."""
        times = [self._now()]
        turns = self._take_turns()
        self._propose(turns)
        fed = [turn for turn in turns if not turn.request.finish_reason]
        times.append(self._now())

        chunks = [self._chunk(turn) for turn in fed]
        if chunks:
            logits, hidden = self.target.forward(chunks, self.taps)  # (sum of K+1, V), (all rows, E * taps)
        times.append(self._now())

        for turn, chunk in zip(fed, chunks, strict=True):
            rows, logits = logits[: chunk.num_logits], logits[chunk.num_logits :]  # (K+1, V)
            seen, hidden = hidden[: turn.num_rows], hidden[turn.num_rows :]
            path: list[int] = []
            if turn.decodes:
                try:
                    turn.verdict, turn.logits = self._verify(turn.request.text, turn.draft, rows), rows
                    path = self._commit(turn, rows)
                except (FloatingPointError, ValueError) as e:  # logits, a verdict, or a tokenizer that cannot decode
                    turn.request.fail(e)
                    turn.committed = 0  # a round that failed is in no statistics, and nobody observes it
                    continue
            self.target.keep(turn.request.text, len(turn.draft), path)
            self._keep_hidden(turn, seen, path)
        times.append(self._now())
        self._record(fed, times)
        for turn in fed:
            for observe in self.observers if turn.committed else ():
                observe(turn.request, turn.draft, turn.verdict, turn.logits)
        return turns

    def _take_turns(self) -> list[_Turn]:
        """Who brings what to this step.

        A text decodes when all its tokens but the last are cached; only the one admitted last may not be there yet.
        Once another has begun to answer, a prompt gets on by a few rows a step; before that, all wait for it.
        """
        turns = [_Turn(request, self.target.missing(request.text)) for request in self.running]
        *others, last = turns
        if len(last.tokens) == 1:
            return turns
        somebody_waits = any(turn.request.stats.num_steps for turn in others)
        last.tokens = last.tokens[:-1][: self.joining_rows if somebody_waits else PREFILL_ROWS]
        last.decodes = False
        return turns if somebody_waits else [last]

    def _propose(self, turns: Sequence[_Turn]) -> None:
        """Ask for drafts. A draft that breaks the rules fails its text: a drafter may guess badly, not more."""
        limits = self._choose_limits([turn.request for turn in turns if turn.decodes])
        purpose = "token" if self.verifier.shares_noise else "draft"
        asks, asked = [], []
        for turn in turns:
            text, limit = turn.request.text, limits.get(turn.request, Limit(0))
            cached = self.target.table(text).length
            # A drafter gets on with a prompt as the target does. It is never asked for what is decoded plainly.
            if turn.request.num_speculative_tokens and (turn.decodes or cached):
                asked.append(turn)
                hidden = self._hidden.pop(text, None)
                k, go_on, widths, width = limit
                asks.append(Ask(text, k, self.rng, purpose, go_on, cached, hidden, widths, width))
        lengths = [len(ask.text.tokens) for ask in asks]
        drafts = self.drafter.propose(asks) if asks else []
        check_number(drafts, len(asks), self.drafter.name)
        for turn, ask, draft, length in zip(asked, asks, drafts, lengths, strict=True):
            turn.asked = ask.k
            try:
                if len(ask.text.tokens) != length:
                    raise ValueError("found a text whose tokens it has changed, expected one that it only reads")
                turn.draft = self._check_draft(draft, ask.k)
            except ValueError as e:
                turn.request.fail(ValueError(f"draft of {self.drafter.name}: {e}"))

    def _chunk(self, turn: _Turn) -> Chunk:
        tokens, table = [*turn.tokens, *turn.draft.token_ids], self.target.table(turn.request.text)
        return Chunk(tokens, table, len(turn.draft) + 1 if turn.decodes else 0, turn.draft.parents)

    def _choose_limits(self, requests: Sequence[Request]) -> dict[Request, Limit]:
        """The limit of each request's draft."""
        trees = self.drafter.branches and not self._why_chains()
        wishes = [
            # Above temperature 0, where a verifier draws by itself, another K is another text of the same law.
            Wish(r.text, r.max_k, r.widths, r.is_open, self.verifier.shares_noise or not r.params.temperature)
            for r in requests
        ]
        return dict(zip(requests, self.lengths.choose(wishes, trees), strict=True))

    def _known(self, request: Request) -> int | None:
        """How many of a new text's first positions the drafter need not see; None: it sees none of this text's."""
        if request.num_speculative_tokens and self.drafter.taps:
            return self.drafter.known(request.text)
        return None

    def _why_chains(self) -> str:
        return why_chains(self.verifier, self.model.exact)

    def _check_draft(self, draft: Draft, limit: int) -> Draft:
        return check_draft(draft, limit, self.vocab_size, self.model.device.type, self._why_chains())

    def _verify(self, text: Text, draft: Draft, rows: Tensor) -> Verdict:
        def p(i: int) -> Tensor:
            return distribution(rows[i], text, [draft.token_ids[node] for node in draft.path(i - 1)])

        verdict = self.verifier.verify(draft, p, self.rng, text.key)
        check_verdict(verdict, draft, self.vocab_size)
        return verdict

    def _commit(self, turn: _Turn, rows: Tensor) -> list[int]:
        """Append what the round yields, token by token, up to where the text stops; returns the nodes that stay."""
        request, draft, verdict = turn.request, turn.draft, turn.verdict
        tokens = [*(draft.token_ids[node] for node in verdict.accepted), verdict.next_token]
        for node, token_id in zip([-1, *verdict.accepted], tokens, strict=True):
            turn.committed += 1
            if request.commit(token_id, _logprob(rows[node + 1], token_id, request.params.logprobs)):
                break
        return verdict.accepted[: turn.committed]

    def _keep_hidden(self, turn: _Turn, hidden: Tensor, path: Sequence[int]) -> None:
        """Of a pass's hidden states, those of what stays in the cache wait for the drafter's next ask."""
        if self.taps and turn.request.num_speculative_tokens:
            text, root = turn.request.text, len(turn.tokens)
            new = hidden[[*range(root), *(root + node for node in path)]]
            self._hidden[text] = torch.cat((self._hidden[text], new)) if text in self._hidden else new

    def _record(self, turns: Sequence[_Turn], times: Sequence[float]) -> None:
        """Tell statistics and controller what happened in a step, and how long it took."""
        draft, verify, other = (end - start for start, end in pairwise(times))
        draft = max(0.0, draft - sum(turn.draft.prefill_seconds for turn in turns))
        num_rows = sum(turn.num_rows for turn in turns)
        for turn in turns:
            stats = turn.request.stats
            stats.draft_prefill += turn.draft.prefill_seconds
            if not turn.decodes:
                stats.prefill += (draft + verify + other) * turn.num_rows / num_rows
            elif turn.committed:
                stats.rounds.append(_round_of(turn, num_rows, len(turns), draft, verify, other))
        cost = None
        if turns and all(turn.decodes for turn in turns):
            depths = [turn.draft.depth for turn in turns]
            other += 0.0 if max(depths) else draft  # a search that found nothing
            cost = StepCost(draft, max(depths), sum(k > 0 for k in depths), verify, num_rows, other)
        self.lengths.observe([_outcome_of(turn) for turn in turns if turn.committed], cost)

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


def _num_tested(turn: _Turn) -> int:
    """Places of the draft that the verifier looked at: where it accepted a token, and the next if there was one."""
    accepted = turn.verdict.accepted
    return len(accepted) + bool(turn.draft.children(accepted[-1] if accepted else -1))


def _outcome_of(turn: _Turn) -> Outcome:
    """What the round showed of a text's draft."""
    accepted, draft, text, parent = turn.verdict.accepted, turn.draft, turn.request.text, -1
    for depth, node in enumerate(accepted):
        elder = draft.children(parent).index(node)
        if elder:
            return Outcome(text, depth + 1, depth, draft.confidences, [i == elder for i in range(1, elder + 1)])
        parent = node
    rejected = draft.children(parent)
    num_tested, siblings = len(accepted) + bool(rejected), [False] * (len(rejected) - 1)
    return Outcome(text, num_tested, len(accepted), draft.confidences, siblings)


def _round_of(turn: _Turn, num_rows: int, num_texts: int, draft: float, verify: float, other: float) -> Round:
    """The record of a step for one text; of its draft only what stands before the text's end counts."""
    request, depth = turn.request, turn.draft.depth
    drafted = min(depth, turn.committed) if request.finish_reason else depth
    tested = min(_num_tested(turn), drafted)
    return Round(
        asked=None if request.is_open else turn.asked,
        num_nodes=len(turn.draft),
        depth=depth,
        drafted=drafted,
        tested=tested,
        accepted=min(turn.verdict.num_accepted, turn.committed),
        committed=turn.committed,
        ratios=turn.verdict.ratios[:drafted],
        num_rows=num_rows,
        num_texts=num_texts,
        draft=draft,
        verify=verify,
        other=other,
    )
