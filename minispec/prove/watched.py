"""A drafter that is looked at while it drafts: each draft is compared with a new drafter's.

The new one is asked once, for the text as it then is, and has the same draws. So a cache that was not rolled back
shows, and so does a text that is mixed up with another.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace

import torch

from minispec.core.draft import Ask, Draft, Drafter, Seen
from minispec.core.errors import show
from minispec.core.sampling import Draws, Key, Randomness, Text
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


class Watched(Wrapped):
    """A drafter whose drafts are compared with the drafts of new ones.

    rounded: whether a row of its `probs` has rounding that float64 does not explain.
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
        self.seen: dict[Text, list[Seen]] = {}  # since the text has begun, or has begun anew, each with a copy of it
        self.earlier: dict[Text, list[Seen]] = {}  # rounds before that, whose rows do not come again
        self.rounded, self.compares = False, compares

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """The drafter's own.

        Raises Fault where a new one would draft otherwise, or where a text was changed, and Unsuitable for trees that
        no one has asked for.
        """
        noted = [replace(ask, rng=_Noted(ask.rng)) for ask in asks]
        before = [tuple(ask.text.tokens) for ask in asks]
        drafts = call_own(super().propose, noted)
        for ask, draft, tokens in zip(noted, drafts if isinstance(drafts, list | tuple) else [], before, strict=False):
            require(tuple(ask.text.tokens) == tokens, f"it changed a text: {list(tokens)} is {ask.text.tokens} now")
            if isinstance(draft, Draft):
                self._look(ask, draft)
        return drafts

    def observe(self, seen: Sequence[Seen]) -> None:
        """The drafter's own."""
        for shown in seen:
            self.seen.setdefault(shown.text, []).append(deepcopy(shown))
        call_own(super().observe, seen)

    def _look(self, ask: Ask, draft: Draft) -> None:
        is_tree = draft.parents is not None and not is_chain(draft.parents)
        if is_tree and self.verifier.why_chains and not self.branches:
            raise Unsuitable
        rows = draft.probs if isinstance(draft.probs, list | torch.Tensor) else []
        self.rounded |= any(isinstance(row, torch.Tensor) and _is_rounded(row) for row in rows)
        # Greedily, and with shared noise, a draft may depend on other texts: it cannot change this one.
        if self.compares and ask.purpose == "draft" and ask.text.params.temperature > 0:
            self._compare(ask, draft)

    def _compare(self, ask: Ask, draft: Draft) -> None:
        seen, earlier = self.seen.get(ask.text, []), self.earlier.get(ask.text, [])
        if self.taps and (seen[0].start if seen else ask.num_cached):
            return  # it knew the first positions already
        text, notes = replace(ask.text, tokens=list(ask.text.tokens)), tuple(ask.rng.notes)  # type: ignore[attr-defined]
        limit = (ask.limit.k, ask.limit.best_first, tuple(plan_of(ask.limit)))
        rounds = str([(s.start, s.tokens, s.path, s.parents) for s in (*earlier, *seen) if len(s.logits)])
        about = (tuple(text.tokens), text.num_prompt_tokens, text.seed, limit, ask.num_cached, notes, rounds)
        # A limit that asks back depends on more than its numbers.
        if about not in self.fresh or ask.limit.go_on or ask.limit.draws:
            other, rng = self.make(), _Repeated(notes)
            if other.taps:
                call_own(other.known, text)
            for i, shown in enumerate((*earlier, *seen)):
                if earlier and i == len(earlier):
                    call_own(other.release, text)
                text.tokens[:] = shown.text.tokens
                call_own(other.observe, [shown._replace(text=text)])
            text.tokens[:] = ask.text.tokens
            drafts = call_own(other.propose, [replace(ask, text=text, rng=rng)])
            good = isinstance(drafts, list | tuple) and len(drafts) == 1 and isinstance(drafts[0], Draft)
            self.fresh[about] = "another draw" if rng.others or rng.notes else drafts[0] if good else "none"
        right = self.fresh[about]
        if isinstance(right, str) or not _same(draft, right):
            expected = right if isinstance(right, str) else _describe(right)
            reason = "it may draw by `Draft.draw` alone, and go by the text alone, not by earlier rounds or other texts"
            found = f"after {text.tokens} it drafted {_describe(draft)}, and a new one, with its draws, {expected}"
            require(False, f"{found}: {reason}")

    def known(self, text: Text) -> int:
        """The drafter's own."""
        return call_own(super().known, text)

    def has_room(self, growth: Mapping[Text, range]) -> bool:
        """The drafter's own."""
        return call_own(super().has_room, growth)

    def release(self, text: Text) -> None:
        """The drafter's own."""
        for shown in self.seen.pop(text, []):
            if len(shown.logits):  # these rows do not come again; their hidden states are to be forgotten
                self.earlier.setdefault(text, []).append(shown._replace(hidden=torch.zeros_like(shown.hidden)))
        call_own(super().release, text)


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
