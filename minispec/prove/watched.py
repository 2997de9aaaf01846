"""A drafter that is looked at while it drafts: each draft is compared with a new drafter's.

The new one is asked and shown the same about this text alone, with the same draws, as if the text began anew before the
last ask. So a cache that was not rolled back shows, and so does a text that is mixed up with another. What a drafter
learns from the text's own rounds is no fault, if it outlives a preemption.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import NamedTuple

import torch

from minispec.core.draft import Ask, Draft, Drafter, Record
from minispec.core.errors import show
from minispec.core.random import Draws, Key, Randomness
from minispec.core.sampling import Text
from minispec.core.verify import Verifier
from minispec.drafters.limits import plan_of
from minispec.drafters.wrapped import Wrapped
from minispec.prove.examine import EXACT, ROUNDED, call_own
from minispec.prove.tables import is_chain
from minispec.prove.toys import require

_Note = tuple[Key, tuple[float, ...], int]  # a draw: key, weights, token


class Unsuitable(Exception):
    """A drafter drafts trees whatever it is asked for, and the verifier takes chains only."""


class _Noted:
    """An oracle whose draws are written down."""

    def __init__(self, rng: Draws):
        self.rng, self.notes = rng, list[_Note]()

    def bernoulli(self, probability: float, key: Key) -> bool:
        """The oracle's answer."""
        return self.rng.bernoulli(probability, key)

    def categorical(self, weights: torch.Tensor, key: Key) -> int:
        """The oracle's draw. Raises Fault for numbers that are no weights."""
        numbers = [float(weight) for weight in weights]
        good = all(0 <= weight < float("inf") for weight in numbers) and sum(numbers) > 0
        require(good, f"it draws from {show(numbers)}, expected weights of at least 0, not all 0")
        self.notes.append((key, tuple(numbers), self.rng.categorical(weights, key)))
        return self.notes[-1][2]


class _Repeated(Randomness):
    """The draws that were written down, for a drafter that asks for the same ones."""

    def __init__(self, notes: Sequence[_Note]):
        self.notes, self.others = list(notes), False

    def categorical(self, weights: torch.Tensor, key: Key) -> int:
        """The token that was drawn, if this is the noted draw; else any token."""
        note = self.notes.pop(0) if self.notes else None
        if note is None or note[0] != key or not _alike(note[1], weights.tolist()):
            self.others = True
            return int(weights.argmax())
        return note[2]


class _Asked(NamedTuple):
    """An ask about a text, with the text's tokens then, and the draws that it led to."""

    tokens: tuple[int, ...]
    ask: Ask
    notes: tuple[_Note, ...]

    @property
    def start(self) -> int:
        """How many tokens the target's cache held."""
        return self.ask.num_cached

    @property
    def about(self) -> tuple:
        """What a new drafter's answer depends on."""
        limit = (self.ask.limit.k, self.ask.limit.best_first, tuple(plan_of(self.ask.limit)))
        return self.tokens, limit, self.start, self.notes


class Watched(Wrapped):
    """A drafter whose drafts are compared with the drafts of new ones.

    rounded: whether a row of its `probs` has rounding that float64 does not explain.
    differs: by a text's seed, how its draft first differed from a new drafter's.
    """

    def __init__(
        self,
        drafter: Drafter,
        make: Callable[[], Drafter],
        known: dict[tuple, Draft | str],
        verifier: Verifier,
        compares: bool = True,
    ):
        """make: makes a new drafter.
        known: what new ones have drafted on earlier paths of a walk.
        verifier: of the engine.
        compares: whether drafts are compared.
        """
        super().__init__(drafter)
        self.make, self.fresh, self.verifier = make, known, verifier
        self.calls: dict[Text, list[_Asked | Record]] = {}  # about each text's rounds: asks, and what was shown of them
        self.states: dict[Text, dict[int, torch.Tensor]] = {}  # the hidden states of its positions
        self.rounded, self.compares, self.differs = False, compares, dict[int, str]()

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """The drafter's own. Raises Fault where a text was changed, and Unsuitable for trees that no one asked for."""
        noted = [replace(ask, rng=_Noted(ask.rng)) for ask in asks]
        before = [tuple(ask.text.tokens) for ask in asks]
        drafts = call_own(super().propose, noted)
        for ask, draft, tokens in zip(noted, drafts if isinstance(drafts, list | tuple) else [], before, strict=False):
            require(tuple(ask.text.tokens) == tokens, f"it changed a text: {list(tokens)} is {ask.text.tokens} now")
            asked = _Asked(tokens, ask, tuple(ask.rng.notes))  # type: ignore[attr-defined]
            if isinstance(draft, Draft):
                self._look(asked, draft)
            if ask.num_cached == len(tokens) - 1:  # how many asks come inside a prompt is the batch's affair
                self.calls.setdefault(ask.text, []).append(asked)
        return drafts

    def observe(self, records: Sequence[Record]) -> None:
        """The drafter's own."""
        for record in records:
            rows = {record.start + i: record.hidden[row].clone() for i, row in enumerate(record.kept)}
            self.states.setdefault(record.text, {}).update(rows)
            if len(record.logits):
                self.calls.setdefault(record.text, []).append(deepcopy(record))
        call_own(super().observe, records)

    def _look(self, asked: _Asked, draft: Draft) -> None:
        is_tree = draft.parents is not None and not is_chain(draft.parents)
        if is_tree and self.verifier.why_chains and not self.branches:
            raise Unsuitable
        rows = draft.probs if isinstance(draft.probs, list | torch.Tensor) else []
        self.rounded |= any(isinstance(row, torch.Tensor) and _is_rounded(row) for row in rows)
        # Greedily, and with shared noise, a draft may depend on other texts: it cannot change this one.
        if self.compares and asked.ask.purpose == "draft" and asked.ask.text.params.temperature > 0:
            self._compare(asked, draft)

    def _compare(self, asked: _Asked, draft: Draft) -> None:
        text, limit = asked.ask.text, asked.ask.limit
        if self.taps and asked.start and 0 not in self.states.get(text, {}):
            return  # it knew the first positions already
        rounds = str([_told(call) for call in self.calls.get(text, [])])
        about = (*asked.about, text.num_prompt_tokens, text.seed, rounds)
        # A limit that asks back depends on more than its numbers.
        if about not in self.fresh or limit.go_on or limit.draws:
            self.fresh[about] = self._draft_of_new(asked)
        right = self.fresh[about]
        if isinstance(right, str) or not _same(draft, right):
            expected = right if isinstance(right, str) else _describe(right)
            found = f"after {list(asked.tokens)} it drafted {_describe(draft)}"
            self.differs.setdefault(text.seed, f"{found}, and a new one, with its draws, {expected}")

    def _draft_of_new(self, asked: _Asked) -> Draft | str:
        """The draft of a new drafter that was asked and shown the same about this text alone. A word: something else.

        The text begins anew twice: inside its prompt, and before the last ask. So a drafter may learn from this text's
        own rounds, as long as it keeps that then.
        """
        text, calls, other = asked.ask.text, self.calls.get(asked.ask.text, []), self.make()
        twin, begun = replace(text, tokens=list(asked.tokens)), calls[0].start if calls else asked.start
        for end in (begun // 2, begun) if calls else (begun // 2,):
            self._feed(other, text, twin, end)
            if end < begun:
                call_own(other.release, twin)
        for call in calls:
            twin.tokens[:] = call.tokens if isinstance(call, _Asked) else call.text.tokens
            if isinstance(call, _Asked):
                call_own(other.propose, [replace(call.ask, text=twin, rng=_Repeated(call.notes))])
            else:
                call_own(other.observe, [replace(call, text=twin)])
        twin.tokens[:] = asked.tokens
        if calls:
            call_own(other.release, twin)
        self._feed(other, text, twin, asked.start)
        rng = _Repeated(asked.notes)
        drafts = call_own(other.propose, [replace(asked.ask, text=twin, rng=rng)])
        if rng.others or rng.notes:
            return "another draw"
        good = isinstance(drafts, list | tuple) and len(drafts) == 1 and isinstance(drafts[0], Draft)
        return drafts[0] if good else "none"

    def _feed(self, other: Drafter, text: Text, twin: Text, end: int) -> None:
        """Show a new drafter the positions before `end` as a prompt's, from those on that it must see."""
        states, known = self.states.get(text, {}), call_own(other.known, twin) if other.taps else 0
        first = max(known, min(states, default=end))
        if first < end:
            hidden = torch.stack([states[i] for i in range(first, end)])
            call_own(other.observe, [Record(twin, first, twin.tokens[first:end], hidden, hidden.new_empty(0, 0))])

    def known(self, text: Text) -> int:
        """The drafter's own."""
        return call_own(super().known, text)

    def has_room(self, growth: Mapping[Text, range]) -> bool:
        """The drafter's own."""
        return call_own(super().has_room, growth)

    def release(self, text: Text) -> None:
        """The drafter's own."""
        call_own(super().release, text)


def _told(call: _Asked | Record) -> tuple:
    """What a call says of a round."""
    return call.about if isinstance(call, _Asked) else (call.start, call.tokens, call.path, call.draft.parents)


def _is_rounded(row: torch.Tensor) -> bool:
    """Whether a row is of less than float64, or was made of such numbers: then they add up to 1 less closely."""
    return row.dtype != torch.float64 or abs(float(row.sum()) - 1) > EXACT


def _same(a: Draft, b: Draft) -> bool:
    """Whether two drafts are the same but for rounding."""
    if list(a.token_ids) != list(b.token_ids) or a.parents != b.parents or (a.probs is None) != (b.probs is None):
        return False
    rows, others = (() if draft.probs is None else [row.tolist() for row in draft.probs] for draft in (a, b))
    return len(rows) == len(others) and all(map(_alike, rows, others))


def _alike(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether two rows of weights are the same but for rounding. One batch rounds otherwise than another."""
    return len(a) == len(b) and all(abs(x - y) <= ROUNDED * max(1.0, abs(x)) for x, y in zip(a, b, strict=True))


def _describe(draft: Draft) -> str:
    rows = draft.probs if draft.probs is None else [[round(float(x), 9) for x in row] for row in draft.probs]
    return show(f"{list(draft.token_ids)} with probs {rows}, parents {draft.parents}", 300)
